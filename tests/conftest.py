"""Shared settings of the tests.

Hypothesis draws the same examples on every run, so that a red build is red again when it is repeated. To look for new
examples: `pytest --hypothesis-profile=explore`.

`pytest --rewrite-scenarios` writes what the cores do into tests/scenarios. Read the difference before you commit it.
`pytest --rewrite-vectors` does the same for the golden bytes in tests/net/vectors: a difference there means that other
programs no longer understand us, and that the wire version has to rise.
"""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=2_000, print_blob=True)
settings.load_profile("repeatable")


def pytest_configure() -> None:
    """A shell that starts us in the background has us ignore interrupts, and whatever we start would inherit that: a
    test that sends one would wait for ever."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-scenarios", action="store_true", help="write down what the cores do in tests/scenarios/*.scenario"
    )
    parser.addoption(
        "--rewrite-vectors", action="store_true", help="write down what travels in tests/net/vectors/*.json"
    )


@contextmanager
def _network(how: int) -> Iterator[IO[str]]:
    with open(Path(tempfile.gettempdir()) / f"atoll-tests-network-{os.getuid()}.lock", "a+") as file:
        fcntl.flock(file, how)
        file.seek(0)
        yield file


@pytest.fixture
def still_network() -> Iterator[int]:
    """No other test, of whichever process, adds or removes network interfaces: a browser drops its requests then.

    How often they have changed so far. A browser hears of it seconds later: one that was there before is not used.
    """
    with _network(fcntl.LOCK_SH) as file:
        yield len(file.read())


@pytest.fixture
def moving_network() -> Iterator[None]:
    """For a test that adds network interfaces: it waits for those that need a still network."""
    with _network(fcntl.LOCK_EX) as file:
        file.write("x")
        file.flush()
        before = _interfaces()
        yield
        # The kernel takes down what was in a namespace some time after it is gone, and browsers hear of that too.
        end, pause = time.monotonic() + 10.0, threading.Event()
        while _interfaces() != before and time.monotonic() < end:
            pause.wait(0.05)


def _interfaces() -> set[str]:
    return set(os.listdir("/sys/class/net"))
