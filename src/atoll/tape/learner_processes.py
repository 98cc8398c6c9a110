"""One process of a learner, from its own tape, or from what the syncer's tape says of it.

It takes entries in the order of their tape, which may still grow. Times are those of the run's clock.
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
"""A step that takes more than three times, and a second more, than the steps before it: something else went on."""

MIN_TYPICAL_STEPS = 8
"""Of a process, before one can say what is usual."""

MAX_STEPPING_SPANS = 4096
"""Spells of steps that are kept apart; beyond, the oldest are joined."""


class LearnerProcess:
    """One process of a learner."""

    def __init__(
        self, incarnation: int, first: float, last: float, began: float | None = None, keep: int | None = EXACT_ROWS
    ) -> None:
        self.incarnation = incarnation
        self.first_entry_at = first  # entry on its tape
        self.last_entry_at = last
        self.training_started_at = began  # it may train
        self.log = StepLog(keep)
        self.optimizer_state_source = ""  # where its inner state came from, in words
        self.contributions = 0
        self.disconnected: list[Span] = []  # spans in which it had no link
        self.disconnected_since: float | None = None  # the one that is open
        self.stepping_spans: list[list[float]] = []  # in steps, without longer breaks: begin and end of each
        self.presumed_until: float | None = None  # it is there, as far as anybody knows, although its tape ends before
        self.stepping_until: float | None = None  # of that: in the step that it has not told of
        self.clock_offset_s = 0.0  # by which its clock is ahead of the syncer's; taken off already
        self.is_clock_known = False  # it was compared with the syncer's
        self._step_started_at: float | None = None  # where the step under way began
        self._recent: deque[float] = deque(maxlen=TYPICAL_STEP_WINDOW)
        self._typical_s: float | None = None

    # ---------------------------------------------------------------------------------------------------- taking

    def handle_entry(self, entry: Entry) -> None:
        """An entry of its own tape."""
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
            self._reconnected(at)
        for effect in entry.effects:
            if type(effect) is Send:
                if type(effect.envelope.body) is Contribution:
                    self.contributions += 1
            elif type(effect) is StartTraining:
                self.training_started_at = self._step_started_at = at
                self.optimizer_state_source = str(effect.state_source)

    def handle_message(self, at: float, report: Report | None, is_live: bool) -> None:
        """A message that a syncer has got from it: steps since the report before took as long as the newest of them."""
        self.last_entry_at = max(self.last_entry_at, at)
        if self.disconnected_since is not None:
            self._reconnected(at)
        if is_live and self.training_started_at is None:
            self.training_started_at = self._step_started_at = at
        if report is None:
            return
        steps = report.step - self.steps
        if steps > 0:
            since = self.log.ends[-1] if self.log.ends else self.first_entry_at
            took_s = min(steps * report.step_time_s, max(0.0, at - since))
            self.training_started_at = min(
                at - took_s, at if self.training_started_at is None else self.training_started_at
            )
            self.add_step(at, took_s, steps, report.trained - self.tokens)
            self._step_started_at = at

    def handle_disconnect(self, at: float) -> None:
        """Its link is cut; it may be there all the same."""
        if self.disconnected_since is None:
            self.disconnected_since = at

    def _reconnected(self, at: float) -> None:
        assert self.disconnected_since is not None
        self.disconnected.append((self.disconnected_since, at))
        self.disconnected_since = None

    def add_step(self, at: float, took_s: float, steps: int, tokens: float) -> None:
        usual_s = self._typical_s
        stood_s = 0.0
        if usual_s is not None and took_s > STALL_FACTOR * usual_s * steps and took_s > usual_s * steps + MIN_STALL_S:
            stood_s = took_s - usual_s * steps
        begin = at - took_s
        self.log.add(begin, at, stood_s, steps, tokens)
        self._recent.append(took_s / steps)
        if len(self._recent) >= MIN_TYPICAL_STEPS and (
            self._typical_s is None or len(self.log) % MIN_TYPICAL_STEPS == 0
        ):
            self._typical_s = median(self._recent)
        if self.stepping_spans and begin - self.stepping_spans[-1][1] <= max(MIN_STALL_S, usual_s or 0.0):
            self.stepping_spans[-1][1] = at - stood_s
        else:
            self.stepping_spans.append([begin, at - stood_s])
            if len(self.stepping_spans) > MAX_STEPPING_SPANS:
                self.stepping_spans[0][1] = self.stepping_spans.pop(1)[1]

    def set_clock_offset(self, lead_s: float) -> None:
        """Its clock is ahead by so much; what was taken by now is moved."""
        by_s = self.clock_offset_s - lead_s
        self.clock_offset_s = lead_s
        self.first_entry_at, self.last_entry_at = self.first_entry_at + by_s, self.last_entry_at + by_s
        self.training_started_at = self.training_started_at + by_s if self.training_started_at is not None else None
        self._step_started_at = self._step_started_at + by_s if self._step_started_at is not None else None
        self.disconnected_since = self.disconnected_since + by_s if self.disconnected_since is not None else None
        self.disconnected = [(begin + by_s, end + by_s) for begin, end in self.disconnected]
        self.stepping_spans = [[begin + by_s, end + by_s] for begin, end in self.stepping_spans]
        self.log.shift(by_s)

    # ---------------------------------------------------------------------------------------------------- asking

    @property
    def present_until(self) -> float:
        """To which it was there."""
        return self.last_entry_at if self.presumed_until is None else max(self.last_entry_at, self.presumed_until)

    @property
    def joined_at(self) -> float:
        """Until then it was only starting and fetching."""
        return self.training_started_at if self.training_started_at is not None else self.present_until

    @property
    def tokens(self) -> int:
        return int(self.log.tokens[-1]) if self.log.tokens else 0

    @property
    def steps(self) -> int:
        return self.log.steps[-1] if self.log.steps else 0

    @property
    def present_s(self) -> float:
        """From the moment at which it might train to its last step."""
        return (
            self.log.ends[-1] - self.training_started_at if self.training_started_at is not None and self.steps else 0.0
        )

    def step_spans(self) -> Iterator[Span]:
        return zip(self.log.begins, self.log.ends, strict=True)

    def in_steps_s(self, begin: float, end: float) -> float:
        """Seconds of this span that were spent in steps, the one under way too; not what was beyond the usual."""
        return max(0.0, self._stepped_until(end) - self._stepped_until(begin))

    def stalled_s(self, begin: float, end: float) -> float:
        """Seconds within steps that were beyond the usual: stopped, or without a core."""
        return max(0.0, self._stalled_until(end) - self._stalled_until(begin))

    def step_under_way(self, at: float) -> tuple[float, float] | None:
        """Of the step that it has not told of, by then: seconds of work, and what is beyond the usual."""
        if self.stepping_until is None or self._step_started_at is None:
            return None
        took_s = min(at, self.stepping_until) - self._step_started_at
        if took_s <= 0.0:
            return None
        usual_s = self._typical_s
        if usual_s is not None and took_s > max(STALL_FACTOR * usual_s, usual_s + MIN_STALL_S):
            return usual_s, took_s - usual_s
        return took_s, 0.0

    def _stepped_until(self, at: float) -> float:
        found = self.step_under_way(at)
        return self.log.stepped_until(at) + (found[0] if found is not None else 0.0)

    def _stalled_until(self, at: float) -> float:
        found = self.step_under_way(at)
        return self.log.stalled_until(at) + (found[1] if found is not None else 0.0)

    def all_stepping_spans(self, until: float) -> Iterator[Span]:
        yield from ((begin, end) for begin, end in self.stepping_spans)
        found = self.step_under_way(until)
        if found is not None and self._step_started_at is not None:
            yield self._step_started_at, self._step_started_at + found[0]

    def all_disconnected(self) -> list[Span]:
        return (
            self.disconnected
            if self.disconnected_since is None
            else [*self.disconnected, (self.disconnected_since, self.last_entry_at)]
        )


def median_step_s(processes: Sequence[LearnerProcess], within: Span = (float("-inf"), float("inf"))) -> float | None:
    """Return the median step time, of steps that lie wholly in a span of time."""
    times = sorted(each for process in processes for each in process.log.durations(*within))
    rest = sum(count for _, count in times) / 2
    for step_s, count in times:
        rest -= count
        if rest <= 0:
            return step_s
    return None
