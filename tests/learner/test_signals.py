"""Interrupts reach the program's own handlers, at once or after the block that holds them back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from functools import partial
from types import FrameType

import pytest

from atoll.learner.preemption import DeferredSignals


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What the program's handler of SIGTERM has heard."""
    came: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = signal.signal(signal.SIGTERM, hear)
    yield came
    signal.signal(signal.SIGTERM, before)


def test_held_back_inside_of_the_block_and_in_no_other_place(heard):
    program = signal.getsignal(signal.SIGTERM)
    interrupts = DeferredSignals()
    interrupts.install()
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM], "outside of the block it is heard at once"
    with interrupts:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert len(heard) == 1
    assert len(heard) == 3
    interrupts.uninstall()
    assert signal.getsignal(signal.SIGTERM) is program
    signal.raise_signal(signal.SIGTERM)
    assert len(heard) == 4


def test_a_block_of_another_thread_holds_nothing_back(heard):
    """The background handles events too, while the main thread may be anywhere."""
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
        assert heard == [signal.SIGTERM]
    finally:
        done.set()
        thread.join()
        interrupts.uninstall()


def test_a_handler_that_the_program_sets_meanwhile_stays(heard):
    interrupts = DeferredSignals()
    interrupts.install()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    interrupts.uninstall()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert heard == []


def test_two_learners_in_one_process_leave_in_any_order(heard):
    first, second = DeferredSignals(), DeferredSignals()
    first.install()
    second.install()
    first.uninstall()
    with second:
        signal.raise_signal(signal.SIGTERM)
        assert heard == []
    assert heard == [signal.SIGTERM]
    second.uninstall()
    signal.raise_signal(signal.SIGTERM)
    assert len(heard) == 2, "one that has left passes on what it hears"


def test_a_notice_is_heard_with_and_without_a_handler_of_the_program(heard):
    for program in (signal.getsignal(signal.SIGTERM), signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(signal.SIGTERM, program)
        heard.clear()
        notices: list[str] = []
        interrupts = DeferredSignals()
        interrupts.install()
        assert interrupts.handle_sigterm(partial(notices.append, "notice"))
        signal.raise_signal(signal.SIGTERM)
        assert notices == ["notice"]
        assert heard == ([signal.SIGTERM] if callable(program) else [])
        with interrupts:
            signal.raise_signal(signal.SIGTERM)
            assert len(notices) == 1
        assert len(notices) == 2
        interrupts.uninstall()
        assert signal.getsignal(signal.SIGTERM) is program


def test_another_thread_heeds_nothing():
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(DeferredSignals().handle_sigterm(lambda: None)))
    thread.start()
    thread.join(300)
    assert found == [False]
