"""Where the time of an island went, from its tapes: every second of it is in exactly one part.

`shares_of` splits a span of time by the lives of one learner (`facts.Life`, fed with its tapes); `RunPicture.shares`
does it for a run's directory. The chaos verdict, the page, `atoll watch` and `atoll report` all show this split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from atoll.dash.facts import Life, Span

State = Literal["training", "alone", "stopped", "joining", "away", "gone"]


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the time of one island went, in seconds; the parts add up to `allocated_s`."""

    learner: int
    allocated_s: float
    stepping_s: float
    stopped_s: float  # of SIGSTOP
    away_s: float  # no process, or one that is only starting
    joining_s: float  # fetching the model and a peer's inner state
    between_s: float  # the rest: between steps, for instance waiting for a core
    paused_s: float = 0.0  # somebody asked the run to stand still
    waiting_s: float = 0.0  # within steps, for data, where the island told of it
    copying_s: float = 0.0  # within steps, for Atoll at their ends, where the island told of it

    @property
    def goodput(self) -> float:
        """In steps, whatever went on within them: what the tapes say, as in report.json."""
        in_steps_s = self.stepping_s + self.waiting_s + self.copying_s
        return in_steps_s / self.allocated_s if self.allocated_s > 0.0 else 0.0

    @property
    def up_s(self) -> float:
        """There was a process that could do something."""
        return self.allocated_s - self.away_s - self.stopped_s


def shares_of(
    learner: int,
    lives: Sequence[Life],
    span: Span,
    stops: Sequence[Span] = (),
    pauses: Sequence[Span] = (),
    waited_s: float = 0.0,
    copied_s: float = 0.0,
) -> Shares:
    """`span`: in which the learner should have trained. `stops`: in which its process stood by SIGSTOP. `pauses`: in
    which the run was paused. `waited_s`, `copied_s`: of its steps, for data and for Atoll."""
    allocated_s = max(0.0, span[1] - span[0])
    stood = [clipped for clipped in (clip(stop, span) for stop in stops) if clipped is not None]
    stepping_s = joining_s = present_s = paused_s = 0.0
    for life in lives:
        here = clip((life.first, life.last), span)
        if here is None:
            continue
        present_s += here[1] - here[0]
        began = life.began if life.began is not None else life.last
        joining_s += overlap_s((life.first, began), span)
        stepping_s += life.in_steps_s(*span) - sum(life.in_steps_s(*each) for each in stood)
        for each in filter(None, (clip(pause, here) for pause in pauses)):
            paused_s += each[1] - each[0] - life.in_steps_s(*each)
    stopped_s = sum(end - begin for begin, end in stood)
    in_steps_s = max(0.0, stepping_s)
    waiting_s = min(waited_s, in_steps_s)
    copying_s = min(copied_s, in_steps_s - waiting_s)
    away_s = max(0.0, allocated_s - present_s)
    rest_s = max(0.0, allocated_s - in_steps_s - stopped_s - away_s - joining_s)
    paused_s = min(max(0.0, paused_s), rest_s)
    return Shares(
        learner,
        allocated_s,
        in_steps_s - waiting_s - copying_s,
        stopped_s,
        away_s,
        joining_s,
        rest_s - paused_s,
        paused_s,
        waiting_s,
        copying_s,
    )


def states_of(
    lives: Sequence[Life], span: Span, stops: Sequence[Span], left_at: float | None
) -> list[tuple[Span, State]]:
    """The band of one island: what it did when, without gaps."""
    bands: list[tuple[Span, State]] = []

    def add(begin: float, end: float, state: State) -> None:
        found = clip((begin, end), span)
        if found is not None:
            bands.append((found, state))

    at = span[0]
    for life in lives:
        add(at, life.first, "away")
        began = life.began if life.began is not None else life.last
        add(life.first, began, "joining")
        add(began, life.last, "training")
        at = max(at, life.last)
    if left_at is not None:
        add(at, span[1], "gone")
    else:
        add(at, span[1], "away")
    covers = [(stop, "stopped") for stop in stops] + [(alone, "alone") for life in lives for alone in life.all_alone()]
    return _covered(bands, covers)


def _covered(bands: list[tuple[Span, State]], covers: Sequence[tuple[Span, str]]) -> list[tuple[Span, State]]:
    """Training gives way to what lies over it."""
    for cover, state in covers:
        cut: list[tuple[Span, State]] = []
        for band, was in bands:
            over = clip(cover, band) if was == "training" else None
            if over is None:
                cut.append((band, was))
                continue
            if band[0] < over[0]:
                cut.append(((band[0], over[0]), was))
            cut.append((over, "stopped" if state == "stopped" else "alone"))
            if over[1] < band[1]:
                cut.append(((over[1], band[1]), was))
        bands = cut
    return bands


def overlap_s(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def clip(span: Span, within: Span) -> Span | None:
    begin, end = max(span[0], within[0]), min(span[1], within[1])
    return (begin, end) if end > begin else None
