"""An interrupt that comes at a bad moment is raised a moment later.

Ctrl-C may be raised between any two lines of the training thread. In the middle of an event it would leave the core
ahead of its tape, and such a learner cannot say goodbye any more: it would be waited for as one that comes back.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDS = (signal.SIGINT, signal.SIGTERM)
_MAIN = threading.main_thread().ident


@contextmanager
def interrupts_after() -> Iterator[None]:
    """SIGINT and SIGTERM reach the handlers of the program after this block, in the order in which they came.

    Only the main thread hears signals, and only a handler of Python can raise in the middle of something.
    """
    if threading.get_ident() != _MAIN:
        yield
        return
    came: list[tuple[Callable[[int, FrameType | None], Any], int, FrameType | None]] = []
    before = {number: handler for number in ENDS if callable(handler := signal.getsignal(number))}

    def note(number: int, frame: FrameType | None) -> None:
        came.append((before[signal.Signals(number)], number, frame))

    try:
        for number in before:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for handler, each, frame in came:
            handler(each, frame)


__all__ = ["interrupts_after"]
