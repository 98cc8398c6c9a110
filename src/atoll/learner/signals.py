"""An interrupt that comes at a bad moment is raised a moment later.

Ctrl-C may be raised between any two lines of the training thread. In the middle of an event it would leave the core
ahead of its tape, and such a learner cannot say goodbye any more: it would be waited for as one that comes back.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

ENDS = (signal.SIGINT, signal.SIGTERM)
_MAIN = threading.main_thread().ident


class Interrupts:
    """Between `listen` and `forget` SIGINT and SIGTERM reach the program's handlers by way of this: at once, or after
    the block `with interrupts:` in which they came.

    A handler that is changed at each event would cost more than the event. One that the program sets in between is not
    held back, and is left alone.
    """

    def __init__(self) -> None:
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._found: Any = None  # at SIGTERM, where that is a notice
        self._notice: Callable[[], None] | None = None
        self._came: list[tuple[int, FrameType | None]] = []
        self._is_held = False

    def listen(self) -> None:
        """Only the main thread hears signals, and only a handler of Python can raise in the middle of something."""
        if threading.get_ident() == _MAIN:
            self._before = {number: handler for number in ENDS if callable(handler := signal.getsignal(number))}
            for number in self._before:
                signal.signal(number, self._note)

    def heed(self, notice: Callable[[], None]) -> bool:
        """From now on SIGTERM calls `notice`, and then the program's handler, if it has one; it ends nothing by itself.
        False: nobody here can hear it."""
        number = signal.SIGTERM
        found = signal.getsignal(number)
        if threading.get_ident() != _MAIN or found is None:
            return False
        self._notice, self._found = notice, self._before.get(number, found) if found == self._note else found
        self._before[number] = self._heeded
        signal.signal(number, self._note)
        return True

    def _heeded(self, number: int, frame: FrameType | None) -> None:
        assert self._notice is not None
        self._notice()
        if callable(self._found):
            self._found(number, frame)

    def forget(self) -> None:
        if threading.get_ident() == _MAIN:
            for number, handler in self._before.items():
                if signal.getsignal(number) == self._note:
                    signal.signal(number, self._found if handler == self._heeded else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_held:
            self._came.append((number, frame))
        else:
            self._before[number](number, frame)

    def __enter__(self) -> None:
        if threading.get_ident() == _MAIN:
            self._is_held = True

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == _MAIN:
            self._is_held = False
            came, self._came = self._came, []
            for number, frame in came:
                self._before[number](number, frame)


__all__ = ["Interrupts"]
