"""Everything that a training job needs to know, as one frozen value.

The same value is the configuration of a run directory (`config.json`), what `atoll train` hands to its processes, and
what a syncer gives to every learner that asks (`extra` of the run), so that a learner on another machine needs no
options of its own to train the same model on the samples that are leased to it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from atoll.core.types import AdoptHow, RunConfig
from atoll.files import write_text
from atoll.tensors.settings import Numerics
from atoll.transport.pacing import check_streams, rate_of

Method = Literal["decoupled", "ddp", "diloco", "streaming", "single"]
METHODS: tuple[str, ...] = get_args(Method)

FORMAT = 1
"""Of the JSON. It rises when an older Atoll would misread the newer one."""

LEASE_ROUNDS = 4
"""A lease is as long as a learner trains during so many rounds of one fragment."""

MOST_LEARNERS = 256
"""On one machine: each is a process."""

AWAY_S = 4.0
"""How long a learner that was killed on purpose stays away: long enough to be seen."""

SNAPSHOT_PASSES = 10
"""Merges of each fragment between two snapshots: about 10 H inner steps."""

ADAMW_LR, ADAMW_BETA2 = 0.004, 0.99
FOR_ADAMW = Numerics(merge="radial", outer_lr=0.4, outer_momentum=0.85, outer_ramp=20)
"""For AdamW inside: its learning rate and second beta, and the outer step that suits it. With Muon the defaults below
do; what was tried is in benchmarks/README.md. An island sees a share of the tokens only, so its second moments are
averaged over more steps than in data-parallel training (0.95): over as many tokens they are as quiet."""

_KILL = re.compile(r"(\d+)@([\d.]+%?)(?:\+([\d.]+)s?)?")


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to one learner when the run has come so far; it is started again after `away_s`.

    >>> Kill.parse("3@0.4+10")
    Kill(learner=3, progress=0.4, away_s=10.0)
    """

    learner: int
    progress: float  # of the budget, 0..1
    away_s: float = AWAY_S

    def __post_init__(self) -> None:
        if self.learner < 1:
            raise ValueError(f"learners are numbered from 1, and --kill names {self.learner}")
        if not 0.0 <= self.progress < 1.0:
            raise ValueError(f"--kill at {self.progress:g} of the run: give a share from 0 up to 1, as in 3@0.4")
        if not 0.0 <= self.away_s < math.inf:
            raise ValueError(f"--kill keeps the learner away for {self.away_s:g} s; give seconds, 0 or more")

    @classmethod
    def parse(cls, text: str) -> Kill:
        found = _KILL.fullmatch(text.strip())
        try:
            if found is None:
                raise ValueError
            learner, share, away_s = found.groups()
            progress = float(share[:-1]) / 100.0 if share.endswith("%") else float(share)
            return cls(int(learner), progress, AWAY_S if away_s is None else float(away_s))
        except ValueError as wrong:
            if str(wrong).startswith(("learners", "--kill")):
                raise
            raise ValueError(
                f"--kill {text!r} is not understood; 3@0.4 kills learner 3 at 40 % of the run,"
                " 3@0.4+10 also keeps it away for 10 s"
            ) from None


@dataclass(frozen=True, slots=True)
class JobSettings:
    """One training job. Learners differ only in their number, and by it in their data and their speed."""

    method: Method = "decoupled"
    learners: int = 4  # M; `single` has one
    seed: int = 0  # of the initial model and of the order of the data
    tokens: int = 800_000  # of all learners together
    # the model and its data
    model: str = "1m"  # a name of `models.SIZES`
    experts: int = 0  # above 0: a mixture of so many experts
    context: int | None = None  # tokens of one sequence; None: what the model's size has
    vocabulary: int = 256  # bytes; more where the data is a file of other tokens
    data: str | None = None  # a folder of text or a file of tokens; None: the standard library's sources
    batch: int = 8  # sequences of one step of one learner
    eval_tokens: int = 65_536  # held-out tokens on which the final model is judged
    evaluations: int = 10  # of the published model while the run goes, evenly spread, on fewer tokens
    # inner steps
    inner: str = "muon"
    lr: float = 0.012
    beta2: float = 0.95  # of AdamW, also of the part that Muon leaves to it
    warmup: float = 0.05  # share of the run in which the learning rate rises
    weight_decay: float = 0.1
    clip: float = 1.0  # largest norm of a gradient; 0: not clipped
    threads: int = 1  # of torch in each learner; more threads than cores in all make everything slower
    # pace
    max_rate: str | None = None  # of the values on a learner's link, each way, as 2gbit
    streams: int | None = None  # connections that carry a large value; None: the default of a learner
    step_time_s: float = 0.0  # a step takes at least this long at speed 1
    speeds: tuple[float, ...] = ()  # one per learner; empty: all 1
    kills: tuple[Kill, ...] = ()
    # the protocol
    shards: int = 0  # processes that hold the fragments beside the syncer; 0: it holds them itself
    fragments: int = 24  # P
    every_steps: int = 24  # H
    overlap_steps: int = 4  # tau; with 2 the grace is so short that a merge has 2.7 of 4 contributions
    quorum: int = 1  # K
    grace_margin: float = 0.9  # gamma
    snapshot_every: int | None = None  # merges; 0: only on request; None: SNAPSHOT_PASSES of each fragment
    adopt: AdoptHow = "carry"
    blend_alpha: float = 0.5
    numerics: Numerics = field(default_factory=lambda: Numerics(outer_lr=0.7, outer_momentum=0.6))

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"there is no method {self.method!r}; give one of {', '.join(METHODS)}")
        for name in ("learners", "tokens", "batch", "eval_tokens", "threads", "fragments", "every_steps"):
            _at_least(name, getattr(self, name), 1)
        for name in ("overlap_steps", "quorum"):
            _at_least(name, getattr(self, name), 1)
        _at_least("experts", self.experts, 0)
        _at_least("shards", self.shards, 0)
        _at_least("vocabulary", self.vocabulary, 2)
        _at_least("seed", self.seed, 0)
        _at_least("evaluations", self.evaluations, 0)
        if self.context is not None:
            _at_least("context", self.context, 1)
        if self.snapshot_every is not None:
            _at_least("snapshot_every", self.snapshot_every, 0)
        if self.learners > MOST_LEARNERS:
            raise ValueError(f"{self.learners} learners on one machine; give at most {MOST_LEARNERS}")
        for name in ("lr", "step_time_s", "weight_decay", "clip"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name):g}; give a number of 0 or more")
        if not 0.0 <= self.beta2 < 1.0:
            raise ValueError(f"beta2 is {self.beta2:g}; give a number from 0 up to 1")
        if not 0.0 <= self.warmup < 1.0:
            raise ValueError(f"warmup is {self.warmup:g}; give a share of the run from 0 up to 1")
        if self.max_rate is not None:
            rate_of(self.max_rate)
        check_streams(self.streams)
        self._check_learners()
        self.run_config("any")  # it refuses what the protocol cannot do

    def _check_learners(self) -> None:
        if self.method == "single" and self.learners != 1:
            raise ValueError(f"single trains on one learner, not on {self.learners}; leave --learners out")
        if self.method == "streaming" and self.overlap_steps >= self.every_steps:
            raise ValueError(
                f"streaming adopts a fragment {self.overlap_steps} steps after its round began, and begins the next"
                f" after {self.every_steps}; give a --tau below --every"
            )
        if self.shards > self.fragments:
            raise ValueError(f"{self.shards} shards for {self.fragments} fragments; give at most one each")
        if self.shards and self.method != "decoupled":
            raise ValueError(f"--shards means nothing to {self.method}: it has no syncer")
        if self.method == "decoupled" and self.quorum > self.learners:
            raise ValueError(
                f"quorum {self.quorum} with {self.learners} learners never merges; give a smaller --quorum"
            )
        if self.speeds and len(self.speeds) != self.learners:
            raise ValueError(
                f"{len(self.speeds)} speeds for {self.learners} learners; give one each, as in 1,1,0.5,0.8"
            )
        for speed in self.speeds:
            if not 0.0 < speed < math.inf:
                raise ValueError(f"a learner of speed {speed:g} never ends a step; give speeds above 0")
        if self.speeds and not self.step_time_s:
            raise ValueError(
                "--speeds slow learners down relative to a step; say how long one takes, as --step-time 50ms"
            )
        for kill in self.kills:
            if kill.learner > self.learners:
                raise ValueError(f"--kill names learner {kill.learner} of {self.learners}; give one that exists")
            if self.method != "decoupled":
                raise ValueError(f"--kill means nothing to {self.method}: without one of its processes it ends")

    # ------------------------------------------------------------------------------------------------ what follows

    @property
    def paced(self) -> bool:
        return self.step_time_s > 0.0

    def least_step_s(self, learner: int) -> float:
        """How long a step of this learner takes at least. Learners beyond the planned ones have speed 1."""
        speed = self.speeds[learner - 1] if learner <= len(self.speeds) else 1.0
        return self.step_time_s / speed

    def tokens_per_step(self, context: int) -> int:
        return self.batch * context

    def share_of_a_step(self, context: int) -> float:
        """Of the run, what all learners train in one step each."""
        return self.learners * self.tokens_per_step(context) / self.tokens

    def lockstep_steps(self, context: int) -> int:
        """Inner steps of each learner of a method in which all take the same number: the budget, rounded up."""
        return -(-self.tokens // (self.learners * self.tokens_per_step(context)))

    def run_config(self, run_id: str) -> RunConfig:
        return RunConfig(
            run_id=run_id,
            fragments=self.fragments,
            every_steps=self.every_steps,
            overlap_steps=self.overlap_steps,
            quorum=self.quorum,
            grace_margin=self.grace_margin,
            adopt=self.adopt,
            blend_alpha=self.blend_alpha,
            budget_tokens=self.tokens,
            lease_samples=LEASE_ROUNDS * self.every_steps * self.batch,
            snapshot_every_merges=self._snapshot_every(),
        )

    def _snapshot_every(self) -> int:
        """Merges."""
        return SNAPSHOT_PASSES * self.fragments if self.snapshot_every is None else self.snapshot_every

    # ------------------------------------------------------------------------------------------------ as JSON

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {"format": FORMAT}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "numerics":
                value = value.to_json()
            elif each.name == "kills":
                value = [[kill.learner, kill.progress, kill.away_s] for kill in value]
            elif each.name == "speeds":
                value = list(value)
            told[each.name] = value
        return told

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> JobSettings:
        """Strict: a setting that is not understood would otherwise train something else without a word."""
        if told.get("format") != FORMAT:
            raise ValueError(
                f"the job's settings are of format {told.get('format')!r}, this Atoll reads {FORMAT}:"
                " use the version that wrote them"
            )
        known = {each.name for each in fields(cls)}
        given = set(told) - {"format"}
        if given != known:
            odd = sorted(given ^ known)[0]
            raise ValueError(f"the job's settings {'lack' if odd in known else 'have an unknown'} field {odd!r}")
        values = {name: told[name] for name in known}
        for name, value in values.items():
            if not _fits(name, value):
                raise ValueError(f"the job's settings have {value!r} as {name}")
        values["numerics"] = Numerics.from_json(values["numerics"])
        values["kills"] = tuple(Kill(*kill) for kill in values["kills"])
        values["speeds"] = tuple(float(speed) for speed in values["speeds"])
        return cls(**values)

    def save(self, path: Path) -> None:
        """Write the file that makes a directory a run."""
        write_text(path, json.dumps(self.to_json(), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> JobSettings:
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(told, dict):
                raise ValueError("not an object")
            return cls.from_json(told)
        except ValueError as wrong:
            raise ValueError(f"{path}: {wrong}") from None


_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "float": (int, float),
    "int": (int,),
    "int | None": (int, type(None)),
    "str": (str,),
    "str | None": (str, type(None)),
    "Method": (str,),
    "AdoptHow": (str,),
    "Numerics": (dict,),
}


def _fits(name: str, value: object) -> bool:
    """The JSON may come over the network: types are checked before anything is computed with the values."""
    kind = next(str(each.type) for each in fields(JobSettings) if each.name == name)
    if name == "kills":
        return isinstance(value, list) and all(isinstance(k, list) and len(k) == 3 and _are_numbers(k) for k in value)
    if name == "speeds":
        return isinstance(value, list) and _are_numbers(value)
    return isinstance(value, _KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))


def _are_numbers(values: list[object]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
