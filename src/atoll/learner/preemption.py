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
from atoll.core.protocol import LeaveRequested
from atoll.core.states import LearnerMode
from atoll.learner.arguments import check_seconds

HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MAIN = threading.main_thread().ident


class DeferredSignals:
    """Between `install` and `uninstall` SIGINT and SIGTERM reach the program's handlers by way of this: at once, or after
    the block `with signals:` in which they came.

    A handler that is changed at each event would cost more than the event. One that the program sets in between is not
    held back, and is left alone.
    """

    def __init__(self) -> None:
        self._program_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._program_sigterm: Any = None  # at SIGTERM, where that is a notice
        self._on_preemption: Callable[[], None] | None = None
        self._deferred: list[tuple[int, FrameType | None]] = []
        self._is_deferring = False

    def install(self) -> None:
        """Only the main thread hears signals, and only a handler of Python can raise in the middle of something."""
        if threading.get_ident() == _MAIN:
            self._program_handlers = {
                number: handler for number in HANDLED_SIGNALS if callable(handler := signal.getsignal(number))
            }
            for number in self._program_handlers:
                signal.signal(number, self._on_signal)

    def handle_sigterm(self, on_preemption: Callable[[], None]) -> bool:
        """From now on SIGTERM calls `on_preemption`, and then the program's handler, if it has one; it ends nothing by itself.
        False: nobody here can hear it."""
        number = signal.SIGTERM
        found = signal.getsignal(number)
        if threading.get_ident() != _MAIN or found is None:
            return False
        self._on_preemption, self._program_sigterm = (
            on_preemption,
            self._program_handlers.get(number, found) if found == self._on_signal else found,
        )
        self._program_handlers[number] = self._on_sigterm
        signal.signal(number, self._on_signal)
        return True

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        assert self._on_preemption is not None
        self._on_preemption()
        if callable(self._program_sigterm):
            self._program_sigterm(number, frame)

    def uninstall(self) -> None:
        if threading.get_ident() == _MAIN:
            for number, handler in self._program_handlers.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, self._program_sigterm if handler == self._on_sigterm else handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_deferring:
            self._deferred.append((number, frame))
        else:
            self._program_handlers[number](number, frame)

    def __enter__(self) -> None:
        if threading.get_ident() == _MAIN:
            self._is_deferring = True

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == _MAIN:
            self._is_deferring = False
            deferred, self._deferred = self._deferred, []
            for number, frame in deferred:
                self._program_handlers[number](number, frame)


GOODBYE_TIMEOUT_S = 3.0

DUPLICATE_SIGNAL_S = 5.0
"""An engine may tell every process of an island, and torchrun passes on what it is told: one notice comes often."""


def check_notice_s(seconds: float | None) -> float | None:
    """Raise ValueError where this is not a time."""
    return check_seconds("notice_s", "the time from SIGTERM to the end", seconds) if seconds is not None else None


class Preemption:
    def __init__(self, seconds: float | None, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = check_notice_s(seconds)
        self._log = log
        self._clock = clock
        self._received_at: float | None = None  # on the monotonic clock
        self._is_repeated = False
        self._ranks_polled_at: float | None = None  # when other ranks were asked last
        self._is_reported = False  # to the core
        self._unmerged = 0  # tokens, when the core was told

    def listen(self, signals: DeferredSignals) -> None:
        """From now on SIGTERM is a notice. Without one it is left alone."""
        if self.seconds is not None and not signals.handle_sigterm(self.on_signal):
            self._log.info("SIGTERM is not heard here, because this is not the main thread, or it is not Python's")

    def on_signal(self) -> None:
        """In the middle of anything: a signal has come. A second one means that there is no time after all."""
        now = self._clock()
        if self._received_at is None:
            self._received_at = now
        elif now - self._received_at > DUPLICATE_SIGNAL_S:
            self._is_repeated = True

    @property
    def is_received(self) -> bool:
        return self._received_at is not None

    @property
    def level(self) -> int:
        """0: none came, 1: one did, 2: there is no time after all."""
        return int(self.is_received) + self._is_repeated

    def merge_rank_level(self, level: int) -> None:
        """At a step boundary: the highest of the other ranks. It may have come right after the boundary before."""
        before, self._ranks_polled_at = self._ranks_polled_at, self._clock()
        if not level or self.seconds is None:
            return
        if self._received_at is None:
            self._received_at = before if before is not None else self._ranks_polled_at
        self._is_repeated = self._is_repeated or level > 1

    def leave_requests(self, core: LearnerCore) -> list[LeaveRequested]:
        """At a step boundary: what the core has to be told now."""
        if self._received_at is None or self.seconds is None or core.state.mode is LearnerMode.STOPPED:
            return []
        requests = []
        if not self._is_reported:
            self._is_reported = True
            self._unmerged = core.leaving.unmerged_tokens()
            requests.append(LeaveRequested("its machine is taken away", drain=True))
        if self.has_expired():
            requests.append(LeaveRequested("the notice is over"))
        return requests

    def has_expired(self) -> bool:
        """It has to go now, whatever is merged."""
        if self._received_at is None or self.seconds is None:
            return False
        return self._is_repeated or self._clock() >= self._received_at + self.seconds - self._goodbye_s(self.seconds)

    def goodbye_timeout_s(self) -> float:
        """How long it may take until what was said is with the syncer."""
        if self._received_at is None or self.seconds is None:
            return GOODBYE_TIMEOUT_S
        left_s = self._received_at + self.seconds - self._clock()
        return min(GOODBYE_TIMEOUT_S, max(left_s, self._goodbye_s(self.seconds) / 2))

    def _goodbye_s(self, seconds: float) -> float:
        return min(GOODBYE_TIMEOUT_S, seconds / 4)

    def log_unmerged(self, core: LearnerCore) -> None:
        if self._is_reported:
            before, now = self._unmerged, core.leaving.unmerged_tokens()
            self._log.info(
                "This island was asked to leave; the run goes on. Tokens not merged: %d then, %d now", before, now
            )
