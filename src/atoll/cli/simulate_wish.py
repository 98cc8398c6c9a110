"""What the user of `atoll simulate` asked for, checked before anything is simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from atoll.cli.processes import usable_cores
from atoll.sim.decoupled import DecoupledConfig
from atoll.sim.fleet import ExtraLearners, FleetConfig, build_islands, parse_speed_classes
from atoll.sim.goodput import BarrierConfig
from atoll.sim.published import Method

ONE_JOB = ("data-parallel", "elastic")


@dataclass(frozen=True, slots=True)
class Wish:
    """One call of the command. Raises `ValueError` with the fix where it cannot be done."""

    method: Method
    learners: int
    chips: int
    days: float
    seed: int
    count: int  # of seeds
    jobs: int | None
    fleet: FleetConfig
    protocol: DecoupledConfig
    barrier: BarrierConfig | None = None
    speeds: tuple[float, ...] = ()
    extras: tuple[ExtraLearners, ...] = ()
    full: bool = False
    protocol_hours: float | None = None
    tape: Path | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.days < math.inf:
            raise ValueError(f"days is {self.days:g}; give a number above 0")
        if self.count < 1:
            raise ValueError(f"{self.count} seeds say nothing; give at least 1, and 2 for an interval")
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"{self.jobs} jobs do nothing; give at least 1")
        if self.tape is not None and self.count != 1:
            raise ValueError(f"a tape is of one run, and {self.count} seeds are {self.count} runs; give --seeds 1")
        build_islands(self.fleet, self.learners, self.chips, 0, speeds=self.speeds, extras=self.extras)
        if self.method == "decoupled":
            self.protocol.run_config()
            if self.protocol.quorum > self.learners:
                raise ValueError(
                    f"quorum {self.protocol.quorum} with {self.learners} learners never merges;"
                    f" give at most {self.learners}"
                )

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.seed, self.seed + self.count))

    @property
    def processes(self) -> int:
        return self.jobs or usable_cores()

    def learner_steps_per_s(self) -> float:
        """Steps that all learners take together in a second without trouble."""
        speeds = sum(self.speeds) if self.speeds else float(self.learners)
        horizon_s = self.days * 86_400.0
        for extra in self.extras:
            present_s = sum(max(0.0, min(leave, horizon_s) - join) for join, leave in extra.windows)
            speeds += extra.count * extra.speed * present_s / horizon_s
        return speeds / self.fleet.step_time_s

    def settings(self) -> dict[str, object]:
        """Everything that shaped the result, for the JSON."""
        fleet, protocol = self.fleet, self.protocol
        fields: dict[str, object] = {
            "step_time_s": fleet.step_time_s,
            "mtbi_days": _finite(fleet.mtbi_s / 86_400.0),
            "slice_chips": fleet.slice_chips,
            "repair_mean_s": fleet.repair.mean_s,
            "downscale_s": fleet.downscale_s,
            "upscale_s": fleet.upscale_s,
            "upscale_delay_s": fleet.upscale_delay_s,
            "restart_s": fleet.restart_s,
            "tokens_per_chip_step": fleet.tokens_per_chip_step,
            "chip_variance": fleet.chip_time_sigma,
            "slow_downs_per_hour": fleet.slowdowns_per_hour,
            "slow_down_factor": fleet.slowdown_factor if fleet.slowdowns_per_hour else None,
            "slow_down_mean_s": fleet.slowdown_mean_s if fleet.slowdowns_per_hour else None,
            "speeds": list(self.speeds) or None,
            "extra": [
                {
                    "count": extra.count,
                    "speed": extra.speed,
                    "windows_s": [[_finite(s) for s in window] for window in extra.windows],
                }
                for extra in self.extras
            ],
        }
        if self.method == "decoupled":
            fields |= {
                "quorum": protocol.quorum,
                "grace": protocol.grace_margin,
                "every_steps": protocol.every_steps,
                "fragments": protocol.fragments,
                "tau_steps": protocol.overlap_steps,
                "adopt": protocol.adopt,
                "delay_s": protocol.delay_s,
                "fragment_time_s": protocol.fragment_s,
                "merge_s": protocol.merge_s,
                "disk_s": protocol.disk_s,
                "jitter": protocol.jitter,
                "lockstep": protocol.lockstep,
            }
        elif self.barrier is not None:
            fields |= {
                "every_steps": self.barrier.h_steps,
                "fragments": self.barrier.fragments if self.method == "streaming" else 1,
                "tau_steps": self.barrier.tau_steps if self.method == "streaming" else 0,
                "exchange_time_s": self.barrier.comm_s,
            }
        return fields


def _finite(value: float) -> float | None:
    """For JSON, which has no infinity."""
    return value if math.isfinite(value) else None


def read_speeds(text: str | None) -> tuple[float, ...]:
    return () if text is None else parse_speed_classes(text)


def read_extras(texts: Sequence[str] | None) -> tuple[ExtraLearners, ...]:
    return tuple(ExtraLearners.parse(text) for text in texts or ())


class SlowDowns(NamedTuple):
    """As `FleetConfig` has them."""

    per_hour: float = 0.0
    factor: float = 0.5
    mean_s: float = 60.0


def read_slow_downs(text: str | None) -> SlowDowns:
    """
    >>> read_slow_downs("0.5:0.6:120")
    SlowDowns(per_hour=0.5, factor=0.6, mean_s=120.0)
    """
    if text is None:
        return SlowDowns()
    try:
        rate, factor, seconds = (float(part) for part in text.split(":"))
    except ValueError:
        raise ValueError(f"slow-downs {text!r} are not readable; write RATE:FACTOR:SECONDS, as 0.5:0.6:120") from None
    return SlowDowns(rate, factor, seconds)
