"""One run of the laboratory: its settings, and what they mean for the schedule."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from atoll.reference.models import SIZES

METHODS = ("data-parallel", "diloco", "streaming", "decoupled")

TOKENS_PER_PARAMETER = 20


@dataclass(frozen=True)
class Setting:
    """Every field is an option. A result is keyed by all fields."""

    method: str = "decoupled"
    size: str = "100k"
    text: str = "library"  # library: tuning; packages: reporting
    seeds: str = "0,1,2"  # executed together, each a row per learner
    learners: int = 4  # M
    tokens: int = 0  # of all learners together; 0: 20 per parameter
    batch: int = 0  # windows of one learner's step; 0: 8 / M, so the global batch is the same for every M
    mixed: bool = False  # matrix products in bf16
    # inner
    inner: str = "adamw"
    lr: float = 0.004
    adamw_ratio: float = 0.3  # of inner = muon: AdamW's learning rate for embeddings and gains by Muon's
    beta2: float = 0.99
    warmup: float = 0.05
    floor: float = 0.03
    weight_decay: float = 0.1
    clip: float = 1.0
    # protocol
    h: int = 24
    p: int = 24
    tau: int = 4
    k: int = 1
    grace: float = 0.9
    adopt: str = "carry"
    alpha: float = 0.5
    speeds: str = "1"  # per learner, separated by colons, repeated until there are enough
    delay: float = 0.02
    bulk: float = 0.5
    draw: int = 0  # seed of the schedule
    # merge and outer step
    merge: str = "radial"  # average, radial, iso
    outer_lr: float = 0.4
    outer_momentum: float = 0.85
    outer_ramp: int = 20
    breadth: bool = True
    up: str = "bf16"
    down: str = "bf16"
    # levers
    moments: str = "none"  # none, both, first, second
    moments_every: int = 1  # merges of a fragment
    moments_codec: str = "f32"
    moments_feedback: bool = True
    moments_adopt: str = "carry"  # carry: as if the average had been there at the copy; overwrite
    gain: float = 0.0  # target of the effective outer gain; 0: outer_lr is fixed
    rho_decay: float = 0.9  # of the running mean of the autocorrelation
    clock: bool = False  # a round is measured by its accumulated inner learning rate
    outer_clip: float = 0.0  # outer step at most this times its recent size
    outer_cap: float = 0.0  # outer step at most this times the mean norm of the contributions
    start: float = 0.0  # share of the tokens that is trained data-parallel first

    def __post_init__(self) -> None:
        if self.method not in METHODS or self.size not in SIZES:
            raise ValueError(f"methods are {', '.join(METHODS)}; sizes are {', '.join(SIZES)}")

    @property
    def seed_list(self) -> tuple[int, ...]:
        return tuple(int(seed) for seed in self.seeds.split(","))

    @property
    def windows(self) -> int:
        """Return the windows of one learner's step."""
        return self.batch or max(1, 8 // self.learners)


UNREAD = {
    "data-parallel": (
        "h p tau k grace adopt alpha speeds delay bulk draw merge outer_lr outer_momentum outer_ramp breadth up down"
        " moments moments_every moments_codec moments_feedback moments_adopt gain rho_decay clock outer_clip outer_cap"
        " start"
    ),
    "diloco": "tau k grace adopt alpha speeds delay bulk draw",
    "streaming": "k grace speeds delay bulk draw",
    "decoupled": "",
}
"""Fields that a method does not read: they keep the defaults, so that the same run has one key."""

PUBLISHED: dict[str, dict[str, Any]] = {
    "data-parallel": {"beta2": 0.99},
    "diloco": {
        "p": 1, "tau": 0, "adopt": "overwrite", "merge": "average", "up": "f32", "down": "f32",
        "outer_lr": 0.7, "outer_momentum": 0.9, "outer_ramp": 0,
    },
    "streaming": {
        "p": 4, "tau": 2, "adopt": "blend", "merge": "average", "up": "f32", "down": "f32",
        "outer_lr": 0.7, "outer_momentum": 0.9, "outer_ramp": 0,
    },
    "decoupled": {},
}  # fmt: skip
"""What defines a method, unless a suite says otherwise."""

PARAMETERS = {"100k": 119_104, "360k": 363_168, "1m": 1_025_408, "5m": 4_803_840, "10m": 10_744_704, "moe": 1_354_880}


def make(method: str = "decoupled", **given: Any) -> Setting:
    """Return a setting with the defaults of its method, and fields that it does not read at theirs."""
    base = Setting(method=method)
    chosen = dataclasses.replace(base, **{**PUBLISHED[method], **given})
    unread = {name: PUBLISHED[method].get(name, getattr(base, name)) for name in UNREAD[method].split()}
    # What a lever does not read where it is off.
    if chosen.moments == "none":
        unread |= {name: getattr(base, name) for name in chosen.__dict__ if name.startswith("moments")}
    if not chosen.gain:
        unread["rho_decay"] = base.rho_decay
    if chosen.inner != "muon":
        unread["adamw_ratio"] = base.adamw_ratio
    tokens = chosen.tokens or TOKENS_PER_PARAMETER * PARAMETERS[chosen.size]
    return dataclasses.replace(chosen, **unread, tokens=tokens, batch=chosen.windows)


def describe(setting: Setting) -> str:
    """Return what is not the default of the method, except size, text, tokens and seeds."""
    base = make(setting.method)
    skipped = ("method", "size", "text", "seeds", "tokens", "batch")
    return " ".join(
        f"{f.name}={getattr(setting, f.name)}"
        for f in dataclasses.fields(Setting)
        if f.name not in skipped and getattr(setting, f.name) != getattr(base, f.name)
    )
