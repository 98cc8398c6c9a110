"""Division of the time of a learner into parts, without overlap. docs/accounting.md defines the parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.tape.bounded_logs import Span
from atoll.tape.learner_processes import LearnerProcess


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Parts of the time of one learner, in seconds. They add up to `allocated_s`."""

    learner: int
    allocated_s: float
    stepping_s: float
    stopped_s: float  # stalls within steps, and time stopped by SIGSTOP if known
    away_s: float  # no process, or a starting process
    joining_s: float  # download of the model and the optimizer state
    between_s: float  # the rest: between steps, for example waiting for a processor core
    paused_s: float = 0.0  # pause of the run by an operator
    waiting_s: float = 0.0  # part of steps, waiting for data, if reported
    copying_s: float = 0.0  # part of steps, in Atoll at step boundaries, if reported

    @property
    def in_steps_s(self) -> float:
        """Total time in steps, in seconds."""
        return self.stepping_s + self.waiting_s + self.copying_s

    @property
    def goodput(self) -> float:
        return self.in_steps_s / self.allocated_s if self.allocated_s > 0.0 else 0.0

    @property
    def up_s(self) -> float:
        """Time with a process that was not stopped."""
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
    """Divide the allocated time of a learner into parts.

    Args:
        span: span in which the learner should train.
        stops: spans in which its process was stopped by SIGSTOP.
        pauses: spans in which the run was paused.
        waited_s: part of its steps that waited for data.
        copied_s: part of its steps in Atoll.
        allocated_s: time of the span that counts; None: all of it.
    """
    allocated_s = max(0.0, span[1] - span[0]) if allocated_s is None else allocated_s
    in_steps_s = stepping_s(processes, span, allocated_s)
    rest_s = allocated_s - in_steps_s

    def part(seconds: float) -> float:
        """Take a part of the remaining time, so that the parts add up even if clocks disagree."""
        nonlocal rest_s
        part_s = min(max(0.0, seconds), rest_s)
        rest_s -= part_s
        return part_s

    present = [
        each
        for each in (clip((process.first_entry_at, process.present_until), span) for process in processes)
        if each is not None
    ]
    away_s = part(allocated_s - union_length_s(present))
    joining_s = part(union_length_s([(process.first_entry_at, process.joined_at) for process in processes], span))
    stopped_s = part(
        sum(process.stalled_s(*span) for process in processes) + sum(_idle_s(processes, stop, span) for stop in stops)
    )
    paused_s = part(sum(_idle_s(processes, pause, span) for pause in pauses))
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


def _idle_s(processes: Sequence[LearnerProcess], within: Span, span: Span) -> float:
    """Return the time within a stop or pause in which the processes were present but not in steps."""
    total_s = 0.0
    for process in processes:
        part = clip(within, (max(span[0], process.joined_at), min(span[1], process.present_until)))
        if part is not None:
            total_s += max(0.0, part[1] - part[0] - process.in_steps_s(*part) - process.stalled_s(*part))
    return total_s


def union_length_s(spans: Iterable[Span], within: Span = (float("-inf"), float("inf"))) -> float:
    """Return the length of the union of spans.

    >>> union_length_s([(0.0, 2.0), (1.0, 3.0), (10.0, 11.0)])
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
    """Return the spans in order, with overlapping and adjacent spans merged.

    >>> merge_spans([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)])
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
