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
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from msgspec import ValidationError, convert

from atoll.core.settings import check_settings, same_setting, setting
from atoll.core.types import AdoptMode, RunConfig
from atoll.files import write_text
from atoll.tensors.settings import Numerics
from atoll.transport.pacing import check_streams, parse_rate

Method = Literal["decoupled", "ddp", "diloco", "streaming", "single"]
METHODS: tuple[str, ...] = get_args(Method)

FORMAT = 1
"""Of the JSON. It rises when an older Atoll would misread the newer one."""

LEASE_ROUNDS = 4
"""A lease is as long as a learner trains during so many rounds of one fragment."""

MAX_LEARNERS = 256
"""On one machine: each is a process."""

RESTART_DELAY_S = 4.0
"""How long a learner that was killed on purpose stays away: long enough to be seen."""

SNAPSHOT_MERGES_PER_FRAGMENT = 10
"""Merges of each fragment between two snapshots: about 10 H inner steps."""

ADAMW_LR, ADAMW_BETA2 = 0.004, 0.99
ADAMW_NUMERICS = Numerics(merge="radial", outer_lr=0.4, outer_momentum=0.85, outer_ramp=20)
"""For AdamW inside: its learning rate and second beta, and the outer step that suits it. With Muon the defaults below
do; what was tried is in benchmarks/README.md. An island sees a share of the tokens only, so its second moments are
averaged over more steps than in data-parallel training (0.95): over as many tokens they are as quiet."""

_KILL = re.compile(r"(\d+)@([\d.]+%?)(?:\+([\d.]+)s?)?")


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """SIGKILL to one learner when the run has come so far; it is started again after `away_s`.

    >>> Kill.parse("3@0.4+10")
    Kill(learner=3, progress=0.4, away_s=10.0)
    """

    learner: int
    progress: float  # of the budget, 0..1
    restart_delay_s: float = RESTART_DELAY_S

    def __post_init__(self) -> None:
        if self.learner < 1:
            raise ValueError(f"learners are numbered from 1, and --kill names {self.learner}")
        if not 0.0 <= self.progress < 1.0:
            raise ValueError(f"--kill at {self.progress:g} of the run: give a share from 0 up to 1, as in 3@0.4")
        if not 0.0 <= self.restart_delay_s < math.inf:
            raise ValueError(f"--kill keeps the learner away for {self.restart_delay_s:g} s; give seconds, 0 or more")

    @classmethod
    def parse(cls, text: str) -> PlannedKill:
        found = _KILL.fullmatch(text.strip())
        try:
            if found is None:
                raise ValueError
            learner, share, away_s = found.groups()
            progress = float(share[:-1]) / 100.0 if share.endswith("%") else float(share)
            return cls(int(learner), progress, RESTART_DELAY_S if away_s is None else float(away_s))
        except ValueError as wrong:
            if str(wrong).startswith(("learners", "--kill")):
                raise
            raise ValueError(
                f"--kill {text!r} is not understood; 3@0.4 kills learner 3 at 40 % of the run,"
                " 3@0.4+10 also keeps it away for 10 s"
            ) from None


def parse_count(option: str, text: str) -> int:
    """
    >>> read_count("--tokens", "1.5M"), read_count("--tokens", "1_000")
    (1500000, 1000)
    """
    found = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)\s*([kKmMgG]?)", text.strip())
    if found is None:
        raise ValueError(f"{option} {text!r} is not a count; give one such as 2000000, 500k or 20M")
    factor = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[found[2].lower()]
    return round(float(found[1].replace("_", "")) * factor)


def parse_seconds(option: str, text: str) -> float:
    """
    >>> read_seconds("--step-time", "50ms"), read_seconds("--step-time", "0.2")
    (0.05, 0.2)
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s)?", text.strip())
    if found is None:
        raise ValueError(f"{option} {text!r} is not a time; give one such as 50ms or 0.05s")
    return float(found[1]) / (1000.0 if found[2] == "ms" else 1.0)


def parse_speeds(text: str) -> tuple[float, ...]:
    """
    >>> read_speeds("1,1,0.5x2")
    (1.0, 1.0, 0.5, 0.5)
    """
    speeds: list[float] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:x\s*(\d{1,4}))?\s*", part)
        if found is None:
            raise ValueError(
                f"--speeds {text!r} is not understood; give a speed per learner, as in 1,1,0.5,0.8 or 1x4,0.5x4"
            )
        speeds += [float(found[1])] * int(found[2] or 1)
    return tuple(speeds)


@dataclass(frozen=True, slots=True)
class JobSettings:
    """One training job. Learners differ only in their number, and by it in their data and their speed."""

    method: Method = "decoupled"
    learners: int = setting(4, min=1)  # M; `single` has one
    seed: int = setting(0, "Fixes the initial model and the order of the data.", metavar="S", min=0)
    tokens: int = setting(
        600_000,
        "To train on, all learners together: 500k or 20M.",
        metavar="N",
        min=1,
        parse=partial(parse_count, "--tokens"),
        show=lambda tokens: f"{tokens / 1e6:g}M",
    )
    # the model and its data
    # a name of `models.SIZES`
    model: str = setting("1m", "Parameters of the byte-level GPT: 100k, 360k, 1m, 5m, 10m; or moe.", metavar="SIZE")
    experts: int = setting(0, "Make it a mixture of so many experts, two per token.", metavar="N", min=0)
    context: int | None = setting(None, "Tokens of one sequence.", metavar="N", min=1, default_text="by the model")
    vocabulary: int = setting(256, min=2)  # bytes; more where the data is a file of other tokens
    data: str | None = setting(
        None,
        "A folder of text, a text file or a token file (.bin, .npy).",
        metavar="PATH",
        parse=lambda path: str(Path(path).absolute()),
        default_text="the sources of Python's standard library",
    )
    batch: int = setting(8, "Sequences in one step of one learner.", metavar="B", min=1)
    eval_tokens: int = setting(65_536, "Held-out tokens that judge the final model.", metavar="N", min=1)
    evaluations: int = setting(10, min=0)  # of the published model while the run goes, on fewer tokens
    # inner steps
    inner: str = setting(
        "muon", "Optimizer of the inner steps: muon, adamw or sgd.", metavar="NAME", default_text="muon"
    )
    lr: float = setting(0.012, "Highest learning rate of the inner steps.", metavar="RATE", min=0)
    beta2: float = setting(0.95, "Second beta of AdamW inside.", metavar="BETA", min=0, below=1)  # also with Muon
    warmup: float = setting(0.05, min=0, below=1)  # share of the run in which the learning rate rises
    weight_decay: float = setting(0.1, min=0)
    clip: float = setting(1.0, min=0)  # largest norm of a gradient; 0: not clipped
    threads: int = setting(1, min=1)  # of torch in each learner; more threads than cores make everything slower
    # pace
    max_rate: str | None = setting(
        None,
        "Largest rate of values on a learner's link, each way: 2gbit, 500mbit, 10MB/s.",
        metavar="RATE",
        default_text="no bound",
    )
    # None: the default of a learner
    streams: int | None = setting(
        None, "Connections over which a large value goes, from 1 to 16.", metavar="N", default_text="4"
    )
    step_time_s: float = setting(
        0.0,
        "A step takes at least this long, 50ms or 0.05s: unequal accelerators on a few cores.",
        metavar="TIME",
        flag="step_time",
        min=0,
        parse=partial(parse_seconds, "--step-time"),
        default_text="",
    )
    # empty: all 1
    speeds: tuple[float, ...] = setting(
        (),
        "Speed of each learner beside --step-time, as in 1,1,0.5,0.8.",
        metavar="LIST",
        parse=parse_speeds,
        default_text="",
    )
    kills: tuple[PlannedKill, ...] = ()
    # the protocol
    shards: int = setting(
        0, "Processes that hold the fragments, merge and serve them beside the syncer.", metavar="N", min=0
    )
    fragments: int = same_setting(RunConfig, "fragments")
    every_steps: int = same_setting(RunConfig, "every_steps")
    # with 2 the grace is so short that a merge has 2.7 of 4 contributions
    overlap_steps: int = same_setting(RunConfig, "overlap_steps", 4)
    quorum: int = same_setting(RunConfig, "quorum")
    grace_margin: float = same_setting(RunConfig, "grace_margin", 0.9)
    snapshot_every: int | None = setting(
        None,
        "Merges between two snapshots of the whole run; 0: only on request.",
        metavar="N",
        min=0,
        default_text=f"{SNAPSHOT_MERGES_PER_FRAGMENT} of each fragment",
    )
    adopt: AdoptMode = same_setting(RunConfig, "adopt")
    blend_alpha: float = same_setting(RunConfig, "blend_alpha")
    numerics: Numerics = field(default_factory=lambda: Numerics(outer_lr=0.7, outer_momentum=0.6))

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"there is no method {self.method!r}; give one of {', '.join(METHODS)}")
        check_settings(self)
        if self.learners > MAX_LEARNERS:
            raise ValueError(f"{self.learners} learners on one machine; give at most {MAX_LEARNERS}")
        if self.max_rate is not None:
            parse_rate(self.max_rate)
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
    def is_paced(self) -> bool:
        return self.step_time_s > 0.0

    def min_step_s(self, learner: int) -> float:
        """How long a step of this learner takes at least. Learners beyond the planned ones have speed 1."""
        speed = self.speeds[learner - 1] if learner <= len(self.speeds) else 1.0
        return self.step_time_s / speed

    def tokens_per_step(self, context: int) -> int:
        return self.batch * context

    def step_share(self, context: int) -> float:
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
        return SNAPSHOT_MERGES_PER_FRAGMENT * self.fragments if self.snapshot_every is None else self.snapshot_every

    # ------------------------------------------------------------------------------------------------ as JSON

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {"format": FORMAT}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "numerics":
                value = value.to_json()
            elif each.name == "kills":
                value = [[kill.learner, kill.progress, kill.restart_delay_s] for kill in value]
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
        # The JSON may come over the network: types are checked before anything is computed with the values.
        types = get_type_hints(cls) | {"numerics": dict[str, Any], "kills": tuple[tuple[int, float, float], ...]}
        values: dict[str, Any] = {}
        for name in known:
            try:
                values[name] = convert(told[name], types[name])
            except ValidationError as error:
                raise ValueError(f"the job's settings have {told[name]!r} as {name}: {error}") from None
        values["numerics"] = Numerics.from_json(values["numerics"])
        values["kills"] = tuple(PlannedKill(*kill) for kill in values["kills"])
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
