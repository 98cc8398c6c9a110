"""One process of a learner, from its own tape, or from what the syncer's tape says of it.

It takes entries in the order of their tape, which may still grow. Times are those of the run's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median

from atoll.core.protocol import (
    Contribution,
    LinkClosed,
    MessageArrived,
    Report,
    Send,
    StartTraining,
    StepTaken,
    Welcome,
)
from atoll.tape.bounded_logs import KEEP, USUAL_STEPS, Span, StepLog
from atoll.tape.format import Entry

LONG_TIMES = 3.0
LONG_S = 1.0
"""A step that takes more than three times, and a second more, than the steps before it: something else went on."""

MIN_STEPS = 8
"""Of a process, before one can say what is usual."""

MAX_SPELLS = 4096
"""Spells of steps that are kept apart; beyond, the oldest are joined."""


class LearnerProcess:
    """One process of a learner."""

    def __init__(
        self, incarnation: int, first: float, last: float, began: float | None = None, keep: int | None = KEEP
    ) -> None:
        self.incarnation = incarnation
        self.first = first  # entry on its tape
        self.last = last
        self.began = began  # it may train
        self.log = StepLog(keep)
        self.moments = ""  # where its inner state came from, in words
        self.contributions = 0
        self.alone: list[Span] = []  # spans in which it had no link
        self.alone_since: float | None = None  # the one that is open
        self.spells: list[list[float]] = []  # in steps, without longer breaks: begin and end of each
        self.open_until: float | None = None  # it is there, as far as anybody knows, although its tape ends before
        self.works_until: float | None = None  # of that: in the step that it has not told of
        self.lead_s = 0.0  # by which its clock is ahead of the syncer's; taken off already
        self.is_clock_known = False  # it was compared with the syncer's
        self._base: float | None = None  # where the step under way began
        self._recent: deque[float] = deque(maxlen=USUAL_STEPS)
        self._usual_s: float | None = None

    # ---------------------------------------------------------------------------------------------------- taking

    def take(self, entry: Entry) -> None:
        """An entry of its own tape."""
        at = self.last = max(self.last, entry.at - self.lead_s)
        event = entry.event
        if type(event) is StepTaken:
            if event.steps:
                self.add_step(at, event.step_time_s * event.steps, event.steps, event.tokens)
            self._base = at
        elif type(event) is LinkClosed:
            self.see_gone(at)
        elif type(event) is MessageArrived and self.alone_since is not None and type(event.envelope.body) is Welcome:
            self._is_back(at)
        for effect in entry.effects:
            if type(effect) is Send:
                if type(effect.envelope.body) is Contribution:
                    self.contributions += 1
            elif type(effect) is StartTraining:
                self.began = self._base = at
                self.moments = str(effect.moments)

    def see(self, at: float, report: Report | None, is_live: bool) -> None:
        """A message that a syncer has got from it: steps since the report before took as long as the newest of them."""
        self.last = max(self.last, at)
        if self.alone_since is not None:
            self._is_back(at)
        if is_live and self.began is None:
            self.began = self._base = at
        if report is None:
            return
        steps = report.step - self.steps
        if steps > 0:
            since = self.log.ends[-1] if self.log.ends else self.first
            took_s = min(steps * report.step_time_s, max(0.0, at - since))
            self.began = min(at - took_s, at if self.began is None else self.began)
            self.add_step(at, took_s, steps, report.trained - self.tokens)
            self._base = at

    def see_gone(self, at: float) -> None:
        """Its link is cut; it may be there all the same."""
        if self.alone_since is None:
            self.alone_since = at

    def _is_back(self, at: float) -> None:
        assert self.alone_since is not None
        self.alone.append((self.alone_since, at))
        self.alone_since = None

    def add_step(self, at: float, took_s: float, steps: int, tokens: float) -> None:
        usual_s = self._usual_s
        stood_s = 0.0
        if usual_s is not None and took_s > LONG_TIMES * usual_s * steps and took_s > usual_s * steps + LONG_S:
            stood_s = took_s - usual_s * steps
        begin = at - took_s
        self.log.add(begin, at, stood_s, steps, tokens)
        self._recent.append(took_s / steps)
        if len(self._recent) >= MIN_STEPS and (self._usual_s is None or len(self.log) % MIN_STEPS == 0):
            self._usual_s = median(self._recent)
        if self.spells and begin - self.spells[-1][1] <= max(LONG_S, usual_s or 0.0):
            self.spells[-1][1] = at - stood_s
        else:
            self.spells.append([begin, at - stood_s])
            if len(self.spells) > MAX_SPELLS:
                self.spells[0][1] = self.spells.pop(1)[1]

    def set_lead(self, lead_s: float) -> None:
        """Its clock is ahead by so much; what was taken by now is moved."""
        by_s = self.lead_s - lead_s
        self.lead_s = lead_s
        self.first, self.last = self.first + by_s, self.last + by_s
        self.began = self.began + by_s if self.began is not None else None
        self._base = self._base + by_s if self._base is not None else None
        self.alone_since = self.alone_since + by_s if self.alone_since is not None else None
        self.alone = [(begin + by_s, end + by_s) for begin, end in self.alone]
        self.spells = [[begin + by_s, end + by_s] for begin, end in self.spells]
        self.log.shift(by_s)

    # ---------------------------------------------------------------------------------------------------- asking

    @property
    def until(self) -> float:
        """To which it was there."""
        return self.last if self.open_until is None else max(self.last, self.open_until)

    @property
    def joined(self) -> float:
        """Until then it was only starting and fetching."""
        return self.began if self.began is not None else self.until

    @property
    def tokens(self) -> int:
        return int(self.log.tokens[-1]) if self.log.tokens else 0

    @property
    def steps(self) -> int:
        return self.log.steps[-1] if self.log.steps else 0

    @property
    def present_s(self) -> float:
        """From the moment at which it might train to its last step."""
        return self.log.ends[-1] - self.began if self.began is not None and self.steps else 0.0

    def step_spans(self) -> Iterator[Span]:
        return zip(self.log.begins, self.log.ends, strict=True)

    def in_steps_s(self, begin: float, end: float) -> float:
        """Seconds of this span that were spent in steps, the one under way too; not what was beyond the usual."""
        return max(0.0, self._stepped_until(end) - self._stepped_until(begin))

    def stood_s(self, begin: float, end: float) -> float:
        """Seconds within steps that were beyond the usual: stopped, or without a core."""
        return max(0.0, self._stood_until(end) - self._stood_until(begin))

    def under_way(self, at: float) -> tuple[float, float] | None:
        """Of the step that it has not told of, by then: seconds of work, and what is beyond the usual."""
        if self.works_until is None or self._base is None:
            return None
        took_s = min(at, self.works_until) - self._base
        if took_s <= 0.0:
            return None
        usual_s = self._usual_s
        if usual_s is not None and took_s > max(LONG_TIMES * usual_s, usual_s + LONG_S):
            return usual_s, took_s - usual_s
        return took_s, 0.0

    def _stepped_until(self, at: float) -> float:
        found = self.under_way(at)
        return self.log.stepped_until(at) + (found[0] if found is not None else 0.0)

    def _stood_until(self, at: float) -> float:
        found = self.under_way(at)
        return self.log.stood_until(at) + (found[1] if found is not None else 0.0)

    def all_spells(self, until: float) -> Iterator[Span]:
        yield from ((begin, end) for begin, end in self.spells)
        found = self.under_way(until)
        if found is not None and self._base is not None:
            yield self._base, self._base + found[0]

    def all_alone(self) -> list[Span]:
        return self.alone if self.alone_since is None else [*self.alone, (self.alone_since, self.last)]


def median_step_s(processes: Sequence[LearnerProcess], within: Span = (float("-inf"), float("inf"))) -> float | None:
    """Return the median step time, of steps that lie wholly in a span of time."""
    times = sorted(each for process in processes for each in process.log.durations(*within))
    rest = sum(count for _, count in times) / 2
    for step_s, count in times:
        rest -= count
        if rest <= 0:
            return step_s
    return None
