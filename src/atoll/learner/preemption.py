"""Signals: deferral of interrupts, and SIGTERM as a preemption notice.

Ctrl-C may be raised between any two lines of the training thread. In the middle of an event it would leave the core
ahead of its tape. Such a learner cannot send its leave message, and the syncer would wait for it to reconnect.

After a preemption notice (SIGTERM) the learner has some seconds to leave. At its next step boundary it stops training
and drains: its unmerged work is merged before it leaves. When the time is over it leaves anyway, and logs what is lost.
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
    """Handler of SIGINT and SIGTERM that defers them in a block `with signals:`.

    Between `install` and `uninstall` the signals reach the program's handlers through this object: at once, or at the
    end of the block in which they arrived. Installing a handler for each event would cost more than the event. A
    handler that the program installs in between is not deferred, and is not replaced.
    """

    def __init__(self) -> None:
        self._program_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._program_sigterm: Any = None  # the program's SIGTERM handler, if SIGTERM is a preemption notice
        self._on_preemption: Callable[[], None] | None = None
        self._deferred: list[tuple[int, FrameType | None]] = []
        self._is_deferring = False

    def install(self) -> None:
        """Install the handlers. Only the main thread receives signals, and only Python handlers can raise."""
        if threading.get_ident() == _MAIN:
            self._program_handlers = {
                number: handler for number in HANDLED_SIGNALS if callable(handler := signal.getsignal(number))
            }
            for number in self._program_handlers:
                signal.signal(number, self._on_signal)

    def handle_sigterm(self, on_preemption: Callable[[], None]) -> bool:
        """Treat SIGTERM as a preemption notice: call `on_preemption`, and then the program's handler if it has one.

        Return False if SIGTERM cannot be handled here.
        """
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
"""Signals within this time count as one: a launcher may signal every process of an island, and torchrun forwards it."""


def check_notice_s(seconds: float | None) -> float | None:
    """Raise ValueError unless this is None or a positive number of seconds."""
    return check_seconds("notice_s", "the time from SIGTERM to the end", seconds) if seconds is not None else None


class Preemption:
    def __init__(self, seconds: float | None, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = check_notice_s(seconds)
        self._log = log
        self._clock = clock
        self._received_at: float | None = None  # on the monotonic clock
        self._is_repeated = False
        self._ranks_polled_at: float | None = None  # time of the newest poll of the other ranks
        self._is_reported = False  # the core has received it
        self._unmerged = 0  # unmerged tokens when it was reported

    def listen(self, signals: DeferredSignals) -> None:
        """Treat SIGTERM as a notice from now on. Without `seconds` SIGTERM is not handled."""
        if self.seconds is not None and not signals.handle_sigterm(self.on_signal):
            self._log.info("SIGTERM is not handled: not the main thread, or a handler that is not Python's")

    def on_signal(self) -> None:
        """Record a signal, at any point of the program. A second one means that no time is left."""
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
        """0: no notice, 1: a notice, 2: no time is left."""
        return int(self.is_received) + self._is_repeated

    def merge_rank_level(self, level: int) -> None:
        """Merge the highest level of the other ranks, at a step boundary.

        Their notice may have arrived right after the previous boundary, so the time is counted from there.
        """
        before, self._ranks_polled_at = self._ranks_polled_at, self._clock()
        if not level or self.seconds is None:
            return
        if self._received_at is None:
            self._received_at = before if before is not None else self._ranks_polled_at
        self._is_repeated = self._is_repeated or level > 1

    def leave_requests(self, core: LearnerCore) -> list[LeaveRequested]:
        """Return the events for the core at a step boundary."""
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
        """Return whether the learner must leave now, even with unmerged work."""
        if self._received_at is None or self.seconds is None:
            return False
        return self._is_repeated or self._clock() >= self._received_at + self.seconds - self._goodbye_s(self.seconds)

    def goodbye_timeout_s(self) -> float:
        """Return the seconds for sending the last messages to the syncer."""
        if self._received_at is None or self.seconds is None:
            return GOODBYE_TIMEOUT_S
        left_s = self._received_at + self.seconds - self._clock()
        return min(GOODBYE_TIMEOUT_S, max(left_s, self._goodbye_s(self.seconds) / 2))

    def _goodbye_s(self, seconds: float) -> float:
        return min(GOODBYE_TIMEOUT_S, seconds / 4)

    def log_unmerged(self, core: LearnerCore) -> None:
        if self._is_reported:
            before, now = self._unmerged, core.leaving.unmerged_tokens()
            self._log.info("This learner was drained; the run continues. Unmerged tokens: %d then, %d now", before, now)
