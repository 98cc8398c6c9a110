"""State of a learner process, from its own tape or from the tape of the syncer.

Entries are handled in the order of their tape, which may still grow. Times are on the clock of the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median

from atoll.core.protocol import (
    ConnectionClosed,
    Contribution,
    MessageArrived,
    Report,
    Send,
    StartTraining,
    StepTaken,
    Welcome,
)
from atoll.tape.bounded_logs import EXACT_ROWS, TYPICAL_STEP_WINDOW, Span, StepLog
from atoll.tape.format import Entry

STALL_FACTOR = 3.0
MIN_STALL_S = 1.0
"""A step includes a stall if it takes more than three times, and one second more, than the typical step."""

MIN_TYPICAL_STEPS = 8
"""Number of steps before a process has a typical step time."""

MAX_STEPPING_SPANS = 4096
"""Limit on separate spans of steps. Beyond it the oldest spans are joined."""


class LearnerProcess:
    """Steps, disconnections and clock offset of one learner process."""

    def __init__(
        self,
        incarnation: int,
        first: float,
        last: float,
        started_at: float | None = None,
        keep: int | None = EXACT_ROWS,
    ) -> None:
        self.incarnation = incarnation
        self.first_entry_at = first
        self.last_entry_at = last
        self.training_started_at = started_at
        self.log = StepLog(keep)
        self.optimizer_state_source = ""  # sentence about the source of its optimizer state
        self.contributions = 0
        self.disconnected: list[Span] = []  # spans without a connection
        self.disconnected_since: float | None = None  # start of the current span without a connection
        self.stepping_spans: list[list[float]] = []  # spans of steps without longer breaks, as [begin, end]
        self.presumed_until: float | None = None  # time until which it was probably present after its last entry
        self.stepping_until: float | None = None  # time until which it was probably in an unreported step
        self.clock_offset_s = 0.0  # offset from the syncer's clock (positive: ahead), already subtracted
        self.is_clock_known = False  # the clock was compared with the syncer's
        self._step_started_at: float | None = None  # start of the current step
        self._recent: deque[float] = deque(maxlen=TYPICAL_STEP_WINDOW)
        self._typical_s: float | None = None

    # ---------------------------------------------------------------------------------------------------- input

    def handle_entry(self, entry: Entry) -> None:
        """Handle an entry of the process's own tape."""
        at = self.last_entry_at = max(self.last_entry_at, entry.at - self.clock_offset_s)
        event = entry.event
        if type(event) is StepTaken:
            if event.steps:
                self.add_step(at, event.step_time_s * event.steps, event.steps, event.tokens)
            self._step_started_at = at
        elif type(event) is ConnectionClosed:
            self.handle_disconnect(at)
        elif (
            type(event) is MessageArrived
            and self.disconnected_since is not None
            and type(event.envelope.body) is Welcome
        ):
            self._handle_reconnect(at)
        for effect in entry.effects:
            if type(effect) is Send:
                if type(effect.envelope.body) is Contribution:
                    self.contributions += 1
            elif type(effect) is StartTraining:
                self.training_started_at = self._step_started_at = at
                self.optimizer_state_source = str(effect.state_source)

    def handle_message(self, at: float, report: Report | None, is_live: bool) -> None:
        """Handle a message that a syncer received from the process. The new steps of a report count as equally long."""
        self.last_entry_at = max(self.last_entry_at, at)
        if self.disconnected_since is not None:
            self._handle_reconnect(at)
        if is_live and self.training_started_at is None:
            self.training_started_at = self._step_started_at = at
        if report is None:
            return
        steps = report.step - self.steps
        if steps > 0:
            since = self.log.ends[-1] if self.log.ends else self.first_entry_at
            duration_s = min(steps * report.step_time_s, max(0.0, at - since))
            self.training_started_at = min(
                at - duration_s, at if self.training_started_at is None else self.training_started_at
            )
            self.add_step(at, duration_s, steps, report.trained - self.tokens)
            self._step_started_at = at

    def handle_disconnect(self, at: float) -> None:
        """Handle a lost connection. The process may still run."""
        if self.disconnected_since is None:
            self.disconnected_since = at

    def _handle_reconnect(self, at: float) -> None:
        assert self.disconnected_since is not None
        self.disconnected.append((self.disconnected_since, at))
        self.disconnected_since = None

    def add_step(self, at: float, duration_s: float, steps: int, tokens: float) -> None:
        typical_s = self._typical_s
        stalled_s = 0.0
        if typical_s is not None:
            expected_s = typical_s * steps
            if duration_s > STALL_FACTOR * expected_s and duration_s > expected_s + MIN_STALL_S:
                stalled_s = duration_s - expected_s
        begin = at - duration_s
        self.log.add(begin, at, stalled_s, steps, tokens)
        self._recent.append(duration_s / steps)
        if len(self._recent) >= MIN_TYPICAL_STEPS and (
            self._typical_s is None or len(self.log) % MIN_TYPICAL_STEPS == 0
        ):
            self._typical_s = median(self._recent)
        if self.stepping_spans and begin - self.stepping_spans[-1][1] <= max(MIN_STALL_S, typical_s or 0.0):
            self.stepping_spans[-1][1] = at - stalled_s
        else:
            self.stepping_spans.append([begin, at - stalled_s])
            if len(self.stepping_spans) > MAX_STEPPING_SPANS:
                self.stepping_spans[0][1] = self.stepping_spans.pop(1)[1]

    def set_clock_offset(self, offset_s: float) -> None:
        """Set the offset of the process's clock from the syncer's (positive: ahead), and shift all recorded times."""
        shift_s = self.clock_offset_s - offset_s
        self.clock_offset_s = offset_s
        self.first_entry_at, self.last_entry_at = self.first_entry_at + shift_s, self.last_entry_at + shift_s
        self.training_started_at = self.training_started_at + shift_s if self.training_started_at is not None else None
        self._step_started_at = self._step_started_at + shift_s if self._step_started_at is not None else None
        self.disconnected_since = self.disconnected_since + shift_s if self.disconnected_since is not None else None
        self.disconnected = [(begin + shift_s, end + shift_s) for begin, end in self.disconnected]
        self.stepping_spans = [[begin + shift_s, end + shift_s] for begin, end in self.stepping_spans]
        self.log.shift(shift_s)

    # ---------------------------------------------------------------------------------------------------- queries

    @property
    def present_until(self) -> float:
        """Time until which the process was present: its last entry, or later if it probably continued."""
        return self.last_entry_at if self.presumed_until is None else max(self.last_entry_at, self.presumed_until)

    @property
    def joined_at(self) -> float:
        """Time at which the process had downloaded the model and started to train."""
        return self.training_started_at if self.training_started_at is not None else self.present_until

    @property
    def tokens(self) -> int:
        return int(self.log.tokens[-1]) if self.log.tokens else 0

    @property
    def steps(self) -> int:
        return self.log.steps[-1] if self.log.steps else 0

    @property
    def present_s(self) -> float:
        """Time from the start of training to the last step of the process."""
        return (
            self.log.ends[-1] - self.training_started_at if self.training_started_at is not None and self.steps else 0.0
        )

    def step_spans(self) -> Iterator[Span]:
        return zip(self.log.begins, self.log.ends, strict=True)

    def in_steps_s(self, begin: float, end: float) -> float:
        """Return the time in steps within a span, including the current step, without stalls."""
        return max(0.0, self._stepped_until(end) - self._stepped_until(begin))

    def stalled_s(self, begin: float, end: float) -> float:
        """Return the time of stalls within steps, for example while stopped or without a processor core."""
        return max(0.0, self._stalled_until(end) - self._stalled_until(begin))

    def current_step(self, at: float) -> tuple[float, float] | None:
        """Return the work and the stall of the current unreported step up to this time, in seconds."""
        if self.stepping_until is None or self._step_started_at is None:
            return None
        elapsed_s = min(at, self.stepping_until) - self._step_started_at
        if elapsed_s <= 0.0:
            return None
        typical_s = self._typical_s
        if typical_s is not None and elapsed_s > max(STALL_FACTOR * typical_s, typical_s + MIN_STALL_S):
            return typical_s, elapsed_s - typical_s
        return elapsed_s, 0.0

    def _stepped_until(self, at: float) -> float:
        current = self.current_step(at)
        return self.log.stepped_until(at) + (current[0] if current is not None else 0.0)

    def _stalled_until(self, at: float) -> float:
        current = self.current_step(at)
        return self.log.stalled_until(at) + (current[1] if current is not None else 0.0)

    def all_stepping_spans(self, until: float) -> Iterator[Span]:
        yield from ((begin, end) for begin, end in self.stepping_spans)
        current = self.current_step(until)
        if current is not None and self._step_started_at is not None:
            yield self._step_started_at, self._step_started_at + current[0]

    def all_disconnected(self) -> list[Span]:
        return (
            self.disconnected
            if self.disconnected_since is None
            else [*self.disconnected, (self.disconnected_since, self.last_entry_at)]
        )


def median_step_s(processes: Sequence[LearnerProcess], within: Span = (float("-inf"), float("inf"))) -> float | None:
    """Return the median step time of the steps that lie completely in a span."""
    times = sorted(each for process in processes for each in process.log.durations(*within))
    rest = sum(count for _, count in times) / 2
    for step_s, count in times:
        rest -= count
        if rest <= 0:
            return step_s
    return None
