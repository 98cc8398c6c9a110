"""How closely a decoupled run is simulated, and for how long: all of a short one, the beginning of a long one.

The fleet model (`goodput.simulate`) is cheap and covers every day. The cores of the protocol are what costs time, and
what they show (contributions per merge, staleness, effective H) settles within hours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.sim.decoupled import DecoupledConfig, quick

FULL_EVENTS = 300_000
"""Two seconds or so: a run this short is simulated with every fragment and every step."""

MOST_EVENTS = 1_200_000
"""Eight seconds or so per seed."""

MOST_TAPE_EVENTS = 400_000
"""About 80 MB of tapes."""


def span(hours: float) -> str:
    """
    >>> span(720.0), span(36.0), span(1.0), span(0.5)
    ('30 days', '36 hours', '1 hour', '30 minutes')
    """
    size, unit = (24.0, "day") if hours >= 48.0 else (1.0, "hour") if hours >= 1.0 else (1.0 / 60.0, "minute")
    count = f"{hours / size:.3g}"
    return f"{count} {unit}" if count == "1" else f"{count} {unit}s"


@dataclass(frozen=True, slots=True)
class Detail:
    """What of the protocol is simulated."""

    protocol: DecoupledConfig
    hours: float  # of the run, from its beginning
    whole: bool  # the whole run
    full: bool  # every fragment and every step

    def sentence(self) -> str:
        """How the cores were driven, for people."""
        how = "with every fragment and every step"
        if not self.full:
            count = self.protocol.sampled_fragments or self.protocol.fragments
            stand = "stands" if count == 1 else "stand"
            how = f"coarsely: {count} of {self.protocol.fragments} fragments {stand} for all"
            if self.protocol.steps_per_event > 1:
                how += f", up to {self.protocol.steps_per_event} steps per event"
        which = "all" if self.whole else "the first"
        return f"the cores of the protocol ran {which} {span(self.hours)} {how}"


def events_per_step(protocol: DecoupledConfig) -> float:
    """Events that one step of one learner costs: its boundary and report, and its share of the rounds."""
    fragments = protocol.fragments if protocol.sampled_fragments is None else protocol.sampled_fragments
    return 2.0 / protocol.steps_per_event + 5.0 * fragments / protocol.every_steps


def choose_detail(
    protocol: DecoupledConfig,
    days: float,
    learner_steps_per_s: float,
    *,
    full: bool = False,
    hours: float | None = None,
    most_events: int = MOST_EVENTS,
) -> Detail:
    """All of the run, as far as `most_events` go. `full` asks for every fragment and step, `hours` limits them."""
    if hours is not None and not 0.0 < hours < math.inf:
        raise ValueError(f"protocol hours are {hours}; give a number above 0")
    all_hours = days * 24.0
    wanted_hours = all_hours if hours is None else min(hours, all_hours)
    steps = wanted_hours * 3_600.0 * learner_steps_per_s
    if not full and steps * events_per_step(protocol) > FULL_EVENTS:
        protocol = quick(protocol)
    if hours is None and not full:
        affordable = most_events / events_per_step(protocol) / learner_steps_per_s / 3_600.0
        if affordable < wanted_hours:
            wanted_hours = math.floor(affordable) if affordable >= 10.0 else affordable
    sampled = protocol.sampled_fragments is not None and protocol.sampled_fragments < protocol.fragments
    return Detail(
        protocol,
        wanted_hours,
        whole=wanted_hours >= all_hours,
        full=not sampled and protocol.steps_per_event == 1,
    )
