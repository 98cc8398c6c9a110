"""Settings of a training job, as one frozen dataclass.

The same value is stored in the run directory (`config.json`), passed by `atoll train` to its processes, and sent by the
syncer to every learner (`extra` of the run settings). A learner on another machine therefore needs no options to train
the same model on the samples that are leased to it.
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
"""Version of the JSON format. It increases when an older Atoll could misread a newer file."""

LEASE_ROUNDS = 4
"""Length of a lease: the samples that a learner trains during this many rounds of one fragment."""

MAX_LEARNERS = 256
"""Maximum number of learners of one job. Each is a process on this machine."""

RESTART_DELAY_S = 4.0
"""Delay before a learner that was killed on purpose is restarted: long enough to be visible."""

SNAPSHOT_MERGES_PER_FRAGMENT = 10
"""Default number of merges of each fragment between two snapshots, about 10 H inner steps."""

ADAMW_LR, ADAMW_BETA2 = 0.004, 0.99
ADAMW_NUMERICS = Numerics(merge="radial", outer_lr=0.4, outer_momentum=0.85, outer_ramp=20)
"""Defaults with AdamW as the inner optimizer: learning rate, second beta and outer step. The defaults of `JobSettings`
are those for Muon. The measurements are in benchmarks/README.md.

A learner trains on a share of the tokens. Its second moments are therefore averaged over more steps than the usual 0.95
of data-parallel training gives, so that they cover as many tokens and have as little noise."""

_KILL = re.compile(r"(\d+)@([\d.]+%?)(?:\+([\d.]+)s?)?")


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """SIGKILL of one learner at a given progress of the run. The learner is restarted after `restart_delay_s`.

    >>> PlannedKill.parse("3@0.4+10")
    PlannedKill(learner=3, progress=0.4, restart_delay_s=10.0)
    """

    learner: int
    progress: float  # share of the token budget, 0..1
    restart_delay_s: float = RESTART_DELAY_S

    def __post_init__(self) -> None:
        if self.learner < 1:
            raise ValueError(f"--kill names learner {self.learner}; give a number from 1 up")
        if not 0.0 <= self.progress < 1.0:
            raise ValueError(f"--kill at progress {self.progress:g}; give a share of at least 0 and below 1: 3@0.4")
        if not 0.0 <= self.restart_delay_s < math.inf:
            raise ValueError(f"--kill with a restart delay of {self.restart_delay_s:g} s; give 0 or more seconds")

    @classmethod
    def parse(cls, text: str) -> PlannedKill:
        """Parse the value of --kill: LEARNER@PROGRESS[+SECONDS]."""
        found = _KILL.fullmatch(text.strip())
        try:
            if found is None:
                raise ValueError
            learner, share, delay_s = found.groups()
            progress = float(share[:-1]) / 100.0 if share.endswith("%") else float(share)
            return cls(int(learner), progress, RESTART_DELAY_S if delay_s is None else float(delay_s))
        except ValueError as error:
            if str(error).startswith("--kill"):
                raise
            raise ValueError(
                f"--kill {text!r} is not valid; 3@0.4 kills learner 3 at 40 % of the run,"
                " 3@0.4+10 restarts it after 10 s"
            ) from None


def parse_count(option: str, text: str) -> int:
    """Parse a count with an optional suffix k, M or G. `option` is named in the error.

    >>> parse_count("--tokens", "1.5M"), parse_count("--tokens", "1_000")
    (1500000, 1000)
    """
    found = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)\s*([kKmMgG]?)", text.strip())
    if found is None:
        raise ValueError(f"{option} {text!r} is not a count; give a number such as 2000000, 500k or 20M")
    factor = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[found[2].lower()]
    return round(float(found[1].replace("_", "")) * factor)


def parse_seconds(option: str, text: str) -> float:
    """Parse a duration with an optional unit ms or s into seconds. `option` is named in the error.

    >>> parse_seconds("--step-time", "50ms"), parse_seconds("--step-time", "0.2")
    (0.05, 0.2)
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s)?", text.strip())
    if found is None:
        raise ValueError(f"{option} {text!r} is not a duration; give a value such as 50ms or 0.05s")
    return float(found[1]) / (1000.0 if found[2] == "ms" else 1.0)


def parse_speeds(text: str) -> tuple[float, ...]:
    """Parse the value of --speeds, one speed per learner.

    >>> parse_speeds("1,1,0.5x2")
    (1.0, 1.0, 0.5, 0.5)
    """
    speeds: list[float] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:x\s*(\d{1,4}))?\s*", part)
        if found is None:
            raise ValueError(
                f"--speeds {text!r} is not valid; give one speed per learner, such as 1,1,0.5,0.8 or 1x4,0.5x4"
            )
        speeds += [float(found[1])] * int(found[2] or 1)
    return tuple(speeds)


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Settings of one training job. They are the same for all learners, which differ in their data and speed."""

    method: Method = "decoupled"
    learners: int = setting(4, min=1)  # M; 1 for `single`
    seed: int = setting(0, "Seed of the initial model and of the order of the data.", metavar="S", min=0)
    tokens: int = setting(
        600_000,
        "Tokens to train on, by all learners together, such as 500k or 20M.",
        metavar="N",
        min=1,
        parse=partial(parse_count, "--tokens"),
        show=lambda tokens: f"{tokens / 1e6:g}M",
    )
    # model and data
    # a key of `models.SIZES`
    model: str = setting("1m", "Size of the byte-level GPT: 100k, 360k, 1m, 5m, 10m or moe.", metavar="SIZE")
    experts: int = setting(0, "Use a mixture of N experts, two per token.", metavar="N", min=0)
    context: int | None = setting(None, "Tokens of one sequence.", metavar="N", min=1, default_text="by the model")
    vocabulary: int = setting(256, min=2)  # 256 for bytes; larger for a file of other tokens
    data: str | None = setting(
        None,
        "Train on a folder of text, a text file or a token file (.bin, .npy).",
        metavar="PATH",
        parse=lambda path: str(Path(path).absolute()),
        default_text="the sources of Python's standard library",
    )
    batch: int = setting(8, "Sequences per step of one learner.", metavar="B", min=1)
    eval_tokens: int = setting(65_536, "Evaluate the final model on N held-out tokens.", metavar="N", min=1)
    evaluations: int = setting(10, min=0)  # of the published model during the run, on fewer tokens
    # inner steps
    inner: str = setting(
        "muon", "Optimizer of the inner steps: muon, adamw or sgd.", metavar="NAME", default_text="muon"
    )
    lr: float = setting(0.012, "Peak learning rate of the inner steps.", metavar="RATE", min=0)
    # with --inner muon, AdamW trains the embeddings
    beta2: float = setting(0.95, "Second beta of the inner AdamW.", metavar="BETA", min=0, below=1)
    warmup: float = setting(0.05, min=0, below=1)  # share of the run in which the learning rate rises
    weight_decay: float = setting(0.1, min=0)
    clip: float = setting(1.0, min=0)  # maximum gradient norm; 0 turns clipping off
    threads: int = setting(1, min=1)  # torch threads per learner; more threads than cores are slower
    # pace
    max_rate: str | None = setting(
        None,
        "Limit a learner's bandwidth for tensors, per direction: 2gbit, 500mbit, 10MB/s.",
        metavar="RATE",
        default_text="no limit",
    )
    # None: the default of a learner
    streams: int | None = setting(
        None, "Split large tensors over N connections, 1 to 16.", metavar="N", default_text="4"
    )
    step_time_s: float = setting(
        0.0,
        "Minimum time of a step, 50ms or 0.05s. Emulates accelerators on a few cores.",
        metavar="TIME",
        flag="step_time",
        min=0,
        parse=partial(parse_seconds, "--step-time"),
        default_text="",
    )
    # empty: all 1
    speeds: tuple[float, ...] = setting(
        (),
        "Relative speed of each learner with --step-time, such as 1,1,0.5,0.8.",
        metavar="LIST",
        parse=parse_speeds,
        default_text="",
    )
    kills: tuple[PlannedKill, ...] = ()
    # protocol
    shards: int = setting(
        0, "Distribute the fragments over N shard processes, which merge and serve them.", metavar="N", min=0
    )
    fragments: int = same_setting(RunConfig, "fragments")
    every_steps: int = same_setting(RunConfig, "every_steps")
    # with 2 the grace window is so short that a merge has 2.7 of 4 contributions on average
    overlap_steps: int = same_setting(RunConfig, "overlap_steps", 4)
    quorum: int = same_setting(RunConfig, "quorum")
    grace_margin: float = same_setting(RunConfig, "grace_margin", 0.9)
    snapshot_every: int | None = setting(
        None,
        "Merges between two snapshots of the run. 0: only on request.",
        metavar="N",
        min=0,
        default_text=f"{SNAPSHOT_MERGES_PER_FRAGMENT} of each fragment",
    )
    adopt: AdoptMode = same_setting(RunConfig, "adopt")
    blend_alpha: float = same_setting(RunConfig, "blend_alpha")
    numerics: Numerics = field(default_factory=lambda: Numerics(outer_lr=0.7, outer_momentum=0.6))

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"--method {self.method!r} is unknown; give one of {', '.join(METHODS)}")
        check_settings(self)
        if self.learners > MAX_LEARNERS:
            raise ValueError(f"{self.learners} learners are too many for one machine; give at most {MAX_LEARNERS}")
        if self.max_rate is not None:
            parse_rate(self.max_rate)
        check_streams(self.streams)
        self._check_learners()
        self.run_config("any")  # checks the settings of the protocol

    def _check_learners(self) -> None:
        if self.method == "single" and self.learners != 1:
            raise ValueError(f"--method single has one learner, not {self.learners}; omit --learners")
        if self.method == "streaming" and self.overlap_steps >= self.every_steps:
            raise ValueError(
                f"with --tau {self.overlap_steps} a round of streaming would end after the next round starts, which is"
                f" {self.every_steps} steps later; give a --tau below --every"
            )
        if self.shards > self.fragments:
            raise ValueError(f"{self.shards} shards for {self.fragments} fragments; give at most one per fragment")
        if self.shards and self.method != "decoupled":
            raise ValueError(f"--shards has no effect with --method {self.method}, which has no syncer; omit it")
        if self.method == "decoupled" and self.quorum > self.learners:
            raise ValueError(f"quorum {self.quorum} with {self.learners} learners never merges; use a smaller --quorum")
        if self.speeds and len(self.speeds) != self.learners:
            raise ValueError(
                f"{len(self.speeds)} speeds for {self.learners} learners; give one per learner, such as 1,1,0.5,0.8"
            )
        for speed in self.speeds:
            if not 0.0 < speed < math.inf:
                raise ValueError(f"a learner of speed {speed:g} never ends a step; give --speeds above 0")
        if self.speeds and not self.step_time_s:
            raise ValueError(
                "--speeds are relative to the time of a step, which is not set; add it, such as --step-time 50ms"
            )
        for kill in self.kills:
            if kill.learner > self.learners:
                raise ValueError(f"--kill names learner {kill.learner} of {self.learners}; give one that exists")
            if self.method != "decoupled":
                raise ValueError(f"--kill would end a run of --method {self.method}; use it with decoupled only")

    # ------------------------------------------------------------------------------------------------ derived values

    @property
    def is_paced(self) -> bool:
        return self.step_time_s > 0.0

    def min_step_s(self, learner: int) -> float:
        """Return the minimum time of a step of this learner. Learners beyond the planned ones have speed 1."""
        speed = self.speeds[learner - 1] if learner <= len(self.speeds) else 1.0
        return self.step_time_s / speed

    def tokens_per_step(self, context: int) -> int:
        return self.batch * context

    def step_share(self, context: int) -> float:
        """Return the progress of the run, as a share, when every learner takes one step."""
        return self.learners * self.tokens_per_step(context) / self.tokens

    def lockstep_steps(self, context: int) -> int:
        """Return the inner steps of each learner in a lockstep method: the token budget, rounded up."""
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
        return SNAPSHOT_MERGES_PER_FRAGMENT * self.fragments if self.snapshot_every is None else self.snapshot_every

    # ------------------------------------------------------------------------------------------------ JSON

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"format": FORMAT}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "numerics":
                value = value.to_json()
            elif each.name == "kills":
                value = [[kill.learner, kill.progress, kill.restart_delay_s] for kill in value]
            elif each.name == "speeds":
                value = list(value)
            data[each.name] = value
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobSettings:
        """Parse the settings. Missing and unknown fields are errors: ignored, they would silently change the job."""
        if data.get("format") != FORMAT:
            raise ValueError(
                f"the job's settings are of format {data.get('format')!r}, this Atoll reads {FORMAT};"
                " use the version that wrote them"
            )
        known = {each.name for each in fields(cls)}
        names = set(data) - {"format"}
        if names != known:
            name = sorted(names ^ known)[0]
            raise ValueError(f"the job's settings {'lack' if name in known else 'have an unknown'} field {name!r}")
        # The JSON may come over the network: check types before anything is computed with the values.
        types = get_type_hints(cls) | {"numerics": dict[str, Any], "kills": tuple[tuple[int, float, float], ...]}
        values: dict[str, Any] = {}
        for name in known:
            try:
                values[name] = convert(data[name], types[name])
            except ValidationError as error:
                raise ValueError(f"the job's settings have {data[name]!r} as {name}: {error}") from None
        values["numerics"] = Numerics.from_json(values["numerics"])
        values["kills"] = tuple(PlannedKill(*kill) for kill in values["kills"])
        return cls(**values)

    def save(self, path: Path) -> None:
        """Write `config.json`, the file that makes a directory a run directory."""
        write_text(path, json.dumps(self.to_json(), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> JobSettings:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(data, dict):
                raise ValueError("not a JSON object")
            return cls.from_json(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
