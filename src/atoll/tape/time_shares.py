"""Where the time of a learner went: every second is in exactly one part. docs/accounting.md defines the parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.tape.bounded_logs import Span
from atoll.tape.learner_processes import LearnerProcess


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Where the time of one island went, in seconds; the parts add up to `allocated_s`."""

    learner: int
    allocated_s: float
    stepping_s: float
    stopped_s: float  # within steps, beyond what they usually take; and by SIGSTOP, where that is known
    away_s: float  # no process, or one that is only starting
    joining_s: float  # fetching the model and a peer's inner state
    between_s: float  # the rest: between steps, for instance waiting for a core
    paused_s: float = 0.0  # somebody asked the run to stand still
    waiting_s: float = 0.0  # within steps, for data, where the island told of it
    copying_s: float = 0.0  # within steps, for Atoll at their ends, where the island told of it

    @property
    def in_steps_s(self) -> float:
        """Whatever went on within them."""
        return self.stepping_s + self.waiting_s + self.copying_s

    @property
    def goodput(self) -> float:
        return self.in_steps_s / self.allocated_s if self.allocated_s > 0.0 else 0.0

    @property
    def up_s(self) -> float:
        """There was a process that could do something."""
        return self.allocated_s - self.away_s - self.stopped_s


def stepping_s(processes: Iterable[LearnerProcess], span: Span, allocated_s: float) -> float:
    """Return the time that a learner spent in steps: the numerator of goodput."""
    return min(allocated_s, sum(process.in_steps_s(*span) for process in processes))


def compute_time_shares(
    learner: int,
    processes: Sequence[LearnerProcess],
    span: Span,
    stops: Sequence[Span] = (),
    pauses: Sequence[Span] = (),
    waited_s: float = 0.0,
    copied_s: float = 0.0,
    allocated_s: float | None = None,
) -> TimeShares:
    """`span`: in which the learner should have trained. `stops`: in which its process stood by SIGSTOP. `pauses`: in
    which the run was paused. `waited_s`, `copied_s`: of its steps, for data and for Atoll. `allocated_s`: of the span,
    where some of it does not count."""
    allocated_s = max(0.0, span[1] - span[0]) if allocated_s is None else allocated_s
    in_steps_s = stepping_s(processes, span, allocated_s)
    rest_s = allocated_s - in_steps_s

    def part(seconds: float) -> float:
        """Of what is left; so that the parts add up, whatever clocks say."""
        nonlocal rest_s
        taken_s = min(max(0.0, seconds), rest_s)
        rest_s -= taken_s
        return taken_s

    there = [
        here
        for here in (clip((process.first_entry_at, process.present_until), span) for process in processes)
        if here is not None
    ]
    away_s = part(allocated_s - union_length_s(there))
    joining_s = part(union_length_s([(process.first_entry_at, process.joined_at) for process in processes], span))
    stopped_s = part(
        sum(process.stalled_s(*span) for process in processes)
        + sum(_standing_s(processes, stop, span) for stop in stops)
    )
    paused_s = part(sum(_standing_s(processes, pause, span) for pause in pauses))
    waiting_s = min(waited_s, in_steps_s)
    copying_s = min(copied_s, in_steps_s - waiting_s)
    return TimeShares(
        learner,
        allocated_s,
        in_steps_s - waiting_s - copying_s,
        stopped_s,
        away_s,
        joining_s,
        rest_s,
        paused_s,
        waiting_s,
        copying_s,
    )


def _standing_s(processes: Sequence[LearnerProcess], within: Span, span: Span) -> float:
    """Of a time in which processes were not to step: they were there, and were not in steps."""
    found = 0.0
    for process in processes:
        here = clip(within, (max(span[0], process.joined_at), min(span[1], process.present_until)))
        if here is not None:
            found += max(0.0, here[1] - here[0] - process.in_steps_s(*here) - process.stalled_s(*here))
    return found


def union_length_s(spans: Iterable[Span], within: Span = (float("-inf"), float("inf"))) -> float:
    """Length of the union of spans.

    >>> covered_s([(0.0, 2.0), (1.0, 3.0), (10.0, 11.0)])
    4.0
    """
    total, reached = 0.0, within[0]
    for begin, end in sorted(spans):
        begin, end = max(begin, reached), min(end, within[1])
        if end > begin:
            total += end - begin
            reached = end
    return total


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """In order, without those that touch.

    >>> union([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)])
    [(0.0, 3.0), (5.0, 6.0)]
    """
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def overlap_s(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def clip(span: Span, within: Span) -> Span | None:
    begin, end = max(span[0], within[0]), min(span[1], within[1])
    return (begin, end) if end > begin else None
