"""Signals reach the handlers of the program at once, or after the block that defers them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from functools import partial
from types import FrameType

import pytest

from atoll.learner.preemption import DeferredSignals


@pytest.fixture
def received() -> Iterator[list[int]]:
    """Signals that the SIGTERM handler of the program has received."""
    numbers: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        numbers.append(number)

    before = signal.signal(signal.SIGTERM, handle)
    yield numbers
    signal.signal(signal.SIGTERM, before)


def test_signals_are_deferred_only_inside_the_block(received):
    program = signal.getsignal(signal.SIGTERM)
    interrupts = DeferredSignals()
    interrupts.install()
    signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM], "outside of the block it is received at once"
    with interrupts:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert len(received) == 1
    assert len(received) == 3
    interrupts.uninstall()
    assert signal.getsignal(signal.SIGTERM) is program
    signal.raise_signal(signal.SIGTERM)
    assert len(received) == 4


def test_block_of_another_thread_defers_no_signal(received):
    """The background thread also handles events, while the main thread executes any code."""
    interrupts = DeferredSignals()
    interrupts.install()
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with interrupts:
            inside.set()
            done.wait(300)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert inside.wait(300)
        signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        done.set()
        thread.join()
        interrupts.uninstall()


def test_handler_that_the_program_sets_meanwhile_is_not_replaced(received):
    interrupts = DeferredSignals()
    interrupts.install()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    interrupts.uninstall()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert received == []


def test_two_learners_in_one_process_leave_in_any_order(received):
    first, second = DeferredSignals(), DeferredSignals()
    first.install()
    second.install()
    first.uninstall()
    with second:
        signal.raise_signal(signal.SIGTERM)
        assert received == []
    assert received == [signal.SIGTERM]
    second.uninstall()
    signal.raise_signal(signal.SIGTERM)
    assert len(received) == 2, "a learner that has left forwards its signals"


def test_notice_is_received_with_and_without_a_handler_of_the_program(received):
    for program in (signal.getsignal(signal.SIGTERM), signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(signal.SIGTERM, program)
        received.clear()
        notices: list[str] = []
        interrupts = DeferredSignals()
        interrupts.install()
        assert interrupts.handle_sigterm(partial(notices.append, "notice"))
        signal.raise_signal(signal.SIGTERM)
        assert notices == ["notice"]
        assert received == ([signal.SIGTERM] if callable(program) else [])
        with interrupts:
            signal.raise_signal(signal.SIGTERM)
            assert len(notices) == 1
        assert len(notices) == 2
        interrupts.uninstall()
        assert signal.getsignal(signal.SIGTERM) is program


def test_other_thread_handles_no_signal():
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(DeferredSignals().handle_sigterm(lambda: None)))
    thread.start()
    thread.join(300)
    assert found == [False]
