"""The settings of a run as the syncer keeps and tells them: protocol, numerics, and the trainer's own."""

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

PROTOCOL_VERSION = 2
"""Of the paths and what is said on them. Sides with different numbers do not understand each other."""


MAX_SHARDS = 256


def new_run_advice(directory: str) -> str:
    """Say what to do where the run in this directory of the syncer has another model than the learner."""
    return (
        f"the model of the run is in {directory} at the syncer: build the same model, or stop that syncer and start a"
        " new run in another directory: atoll syncer --out DIR"
    )


@dataclass(frozen=True, slots=True)
class RunSettings:
    """`plan` is None until a learner has brought the model; `extra` is handed to every learner as it is."""

    config: RunConfig = field(default_factory=RunConfig)
    numerics: Numerics = field(default_factory=Numerics)
    extra: Mapping[str, Any] = field(default_factory=dict)
    plan: FragmentPlan | None = None
    founded_at: float = field(default_factory=time.time)  # seconds of the Unix epoch; the run's clock starts there
    shards: int = 0  # processes that hold the fragments, p in p % shards; 0: the syncer itself does

    def with_stored(self, stored: RunSettings) -> RunSettings:
        """What the directory holds decides; only the budget may be another one than before."""
        tokens = self.config.budget_tokens if self.config.budget_tokens is not None else stored.config.budget_tokens
        merges = self.config.budget_merges if self.config.budget_merges is not None else stored.config.budget_merges
        return replace(stored, config=replace(stored.config, budget_tokens=tokens, budget_merges=merges))

    def to_json(self) -> dict[str, Any]:
        return self.to_learner_json() | {"plan": self.plan.to_json() if self.plan is not None else None}

    def to_learner_json(self) -> dict[str, Any]:
        """What a learner is told. It makes the plan from its own model, so the plan is not part of it."""
        return {
            "protocol": PROTOCOL_VERSION,
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
        if raw.get("protocol") != PROTOCOL_VERSION:
            raise ValueError(
                f"this run speaks protocol {raw.get('protocol')}, this Atoll {PROTOCOL_VERSION}: use one version"
            )
        try:
            config = decode(json.dumps(raw.get("config")))
        except TapeError as wrong:
            raise ValueError(f"the settings of the run were written by another Atoll: {wrong}") from None
        if type(config) is not RunConfig:
            raise ValueError("the settings of the run hold no RunConfig")
        founded_at, extra, plan = raw.get("founded_at"), raw.get("extra"), raw.get("plan")
        if type(founded_at) not in (int, float) or not isinstance(extra, Mapping):
            raise ValueError("the settings of the run lack founded_at or extra")
        assert isinstance(founded_at, int | float)
        shards = raw.get("shards")
        if type(shards) is not int or not 0 <= shards <= MAX_SHARDS:
            raise ValueError(f"the settings of the run say {shards!r} shards; 0 to {MAX_SHARDS} are possible")
        return cls(
            config,
            Numerics.from_json(raw.get("numerics")),
            extra,
            FragmentPlan.from_json(plan) if plan is not None else None,
            float(founded_at),
            shards,
        )


CONFIG_FILE = "config.json"
"""The settings of the job in a run's directory. A run is known by this file."""


def check_is_new_run(run: Path) -> None:
    """Refuse a directory that is not empty: a run is never written over."""
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise ValueError(
            f"{run} is there already: choose another --out, go on with --resume, or remove it and start again"
        )


class RunClock:
    """Seconds since the run was founded, the same on every host as far as their clocks agree.

    Wall time decides where the clock starts, the monotonic clock how it goes on: it never goes back.
    """

    def __init__(self, founded_at: float) -> None:
        self._offset = time.time() - founded_at - time.monotonic()

    def now(self) -> float:
        return self.from_monotonic(time.monotonic())

    def from_monotonic(self, monotonic_s: float) -> float:
        """A moment of the monotonic clock on the run's clock."""
        return monotonic_s + self._offset
