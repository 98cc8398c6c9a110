"""Signals: an interrupt that comes at a bad moment is raised a moment later, and SIGTERM may be a preemption notice.

Ctrl-C may be raised between any two lines of the training thread. In the middle of an event it would leave the core
ahead of its tape, and such a learner cannot say goodbye any more: it would be waited for as one that comes back.

A preemption notice is SIGTERM, and some seconds in which the learner leaves well. At its next step boundary it takes no
more steps, and pushes: what it has trained and nobody has merged is merged before it goes. When the time is over it
goes anyway, and says what is lost.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from atoll.core.learner.core import LearnerCore
from atoll.core.protocol import LeaveWanted
from atoll.core.states import Mode
from atoll.learner.arguments import check_seconds

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


LAST_WORDS_S = 3.0

SAME_NOTICE_S = 5.0
"""An engine may tell every process of an island, and torchrun passes on what it is told: one notice comes often."""


def check_notice(seconds: float | None) -> float | None:
    """Raise ValueError where this is not a time."""
    return check_seconds("notice_s", "the time from SIGTERM to the end", seconds) if seconds is not None else None


class Notice:
    def __init__(self, seconds: float | None, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = check_notice(seconds)
        self._log = log
        self._clock = clock
        self._came_at: float | None = None  # on the monotonic clock
        self._came_again = False
        self._looked_at: float | None = None  # when other ranks were asked last
        self._is_told = False  # to the core
        self._unmerged = 0  # tokens, when the core was told

    def listen(self, interrupts: Interrupts) -> None:
        """From now on SIGTERM is a notice. Without one it is left alone."""
        if self.seconds is not None and not interrupts.heed(self.hear):
            self._log.info("SIGTERM is not heard here, because this is not the main thread, or it is not Python's")

    def hear(self) -> None:
        """In the middle of anything: a signal has come. A second one means that there is no time after all."""
        now = self._clock()
        if self._came_at is None:
            self._came_at = now
        elif now - self._came_at > SAME_NOTICE_S:
            self._came_again = True

    @property
    def came(self) -> bool:
        return self._came_at is not None

    @property
    def level(self) -> int:
        """0: none came, 1: one did, 2: there is no time after all."""
        return int(self.came) + self._came_again

    def hear_of(self, level: int) -> None:
        """At a step boundary: the highest of the other ranks. It may have come right after the boundary before."""
        before, self._looked_at = self._looked_at, self._clock()
        if not level or self.seconds is None:
            return
        if self._came_at is None:
            self._came_at = before if before is not None else self._looked_at
        self._came_again = self._came_again or level > 1

    def wishes(self, core: LearnerCore) -> list[LeaveWanted]:
        """At a step boundary: what the core has to be told now."""
        if self._came_at is None or self.seconds is None or core.state.mode is Mode.STOPPED:
            return []
        wishes = []
        if not self._is_told:
            self._is_told = True
            self._unmerged = core.leaving.unmerged_tokens()
            wishes.append(LeaveWanted("its machine is taken away", push=True))
        if self.is_over():
            wishes.append(LeaveWanted("the notice is over"))
        return wishes

    def is_over(self) -> bool:
        """It has to go now, whatever is merged."""
        if self._came_at is None or self.seconds is None:
            return False
        return self._came_again or self._clock() >= self._came_at + self.seconds - self._goodbye_s(self.seconds)

    def last_words_s(self) -> float:
        """How long it may take until what was said is with the syncer."""
        if self._came_at is None or self.seconds is None:
            return LAST_WORDS_S
        left_s = self._came_at + self.seconds - self._clock()
        return min(LAST_WORDS_S, max(left_s, self._goodbye_s(self.seconds) / 2))

    def _goodbye_s(self, seconds: float) -> float:
        return min(LAST_WORDS_S, seconds / 4)

    def say_left(self, core: LearnerCore) -> None:
        if self._is_told:
            before, now = self._unmerged, core.leaving.unmerged_tokens()
            self._log.info(
                "This island was asked to leave; the run goes on. Tokens not merged: %d then, %d now", before, now
            )
