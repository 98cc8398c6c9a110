"""Settings of a run, as the syncer stores them and sends them to learners: config, numerics, and the trainer's own."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atoll.core.types import RunConfig
from atoll.tape.format import TapeError, decode, encode
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.settings import Numerics

RUN_FORMAT = 3
"""Format of run directories and of the HTTP API, `protocol` in JSON. Versions of Atoll with different numbers cannot
read each other's records."""

MAX_SHARDS = 256


class RunFormatError(ValueError):
    """The run directory has the format of another version of Atoll."""

    def __init__(self, directory: Path, run_format: object) -> None:
        super().__init__(
            f"{directory} holds a run of format {run_format!r:.20}, this Atoll reads format {RUN_FORMAT}: finish the"
            " run with the version of Atoll that made it, or export its model with that version (atoll export) and"
            " start a new run from it (--init)"
        )


def check_run_format(settings: Mapping[str, Any], directory: Path) -> None:
    """Raise RunFormatError unless this version of Atoll can read the run that has these stored settings."""
    if settings.get("protocol", RUN_FORMAT) != RUN_FORMAT:
        raise RunFormatError(directory, settings["protocol"])


def new_run_advice(directory: str) -> str:
    """Return the advice for a learner whose model differs from that of the run in this directory of the syncer."""
    return (
        f"the model of the run is in {directory} at the syncer: build the same model, or stop that syncer and start a"
        " new run in another directory: atoll syncer --out DIR"
    )


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of a run. `plan` is None until a learner uploads the model. `extra` is sent to learners unchanged."""

    config: RunConfig = field(default_factory=RunConfig)
    numerics: Numerics = field(default_factory=Numerics)
    extra: Mapping[str, Any] = field(default_factory=dict)
    plan: FragmentPlan | None = None
    founded_at: float = field(default_factory=time.time)  # Unix time at which the run's clock starts
    shards: int = 0  # number of shard processes, fragment p is in shard p % shards; 0: all fragments are in the syncer

    def with_stored(self, stored: RunSettings) -> RunSettings:
        """Return the stored settings, with the budget of these settings if they have one."""
        tokens = self.config.budget_tokens if self.config.budget_tokens is not None else stored.config.budget_tokens
        merges = self.config.budget_merges if self.config.budget_merges is not None else stored.config.budget_merges
        return replace(stored, config=replace(stored.config, budget_tokens=tokens, budget_merges=merges))

    def to_json(self) -> dict[str, Any]:
        return self.to_learner_json() | {"plan": self.plan.to_json() if self.plan is not None else None}

    def to_learner_json(self) -> dict[str, Any]:
        """Return the settings that learners receive. They exclude the plan: a learner makes it from its own model."""
        return {
            "protocol": RUN_FORMAT,
            "config": json.loads(encode(self.config)),
            "numerics": self.numerics.to_json(),
            "extra": dict(self.extra),
            "founded": self.plan is not None,
            "founded_at": self.founded_at,
            "shards": self.shards,
        }

    @classmethod
    def from_json(cls, raw: object) -> RunSettings:
        if not isinstance(raw, Mapping):
            raise ValueError("the settings of a run are a JSON object")
        if raw.get("protocol") != RUN_FORMAT:
            raise ValueError(
                f"the run has format {raw.get('protocol')!r:.20}, this Atoll uses format {RUN_FORMAT}:"
                " install the same version of Atoll everywhere"
            )
        try:
            config = decode(json.dumps(raw.get("config")))
        except TapeError as error:
            raise ValueError(f"the settings of the run were written by another Atoll: {error}") from None
        if type(config) is not RunConfig:
            raise ValueError("the settings of the run contain no RunConfig")
        founded_at, extra, plan = raw.get("founded_at"), raw.get("extra"), raw.get("plan")
        if type(founded_at) not in (int, float) or not isinstance(extra, Mapping):
            raise ValueError("the settings of the run lack founded_at or extra")
        assert isinstance(founded_at, int | float)
        shards = raw.get("shards")
        if type(shards) is not int or not 0 <= shards <= MAX_SHARDS:
            raise ValueError(f"the settings of the run have {shards!r} shards; use 0 to {MAX_SHARDS}")
        return cls(
            config,
            Numerics.from_json(raw.get("numerics")),
            extra,
            FragmentPlan.from_json(plan) if plan is not None else None,
            float(founded_at),
            shards,
        )


CONFIG_FILE = "config.json"
"""File with the job settings. A directory that has it is a run directory."""


def check_is_new_run(run: Path) -> None:
    """Raise ValueError if the path exists and is not an empty directory: a run is never overwritten."""
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise ValueError(
            f"{run} is there already: choose another --out, go on with --resume, or remove it and start again"
        )


class RunClock:
    """Seconds since the run was created, equal on all hosts up to the error of their clocks.

    Wall time sets the start of the clock. The monotonic clock advances it, so it never goes back.
    """

    def __init__(self, founded_at: float) -> None:
        self._offset = time.time() - founded_at - time.monotonic()

    def now(self) -> float:
        return self.from_monotonic(time.monotonic())

    def from_monotonic(self, monotonic_s: float) -> float:
        """Convert a time of the monotonic clock to the run's clock."""
        return monotonic_s + self._offset
