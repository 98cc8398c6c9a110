"""The numeric settings of a run: what syncer and learners must agree on for their values to be the same bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal, get_args

from atoll.core import policy

PlanHow = Literal["balanced", "layers", "rows"]
MergeHow = Literal["average", "radial", "trimmed"]
CodecWish = Literal["auto", "f32", "bf16", "int8", "int4"]

RAMPED = ("nesterov", "sgd")
"""Outer optimizers that are the plain average at eta = 1 and mu = 0."""

MOST_RAMP = 1_000_000

MOST_PATTERNS = 100
"""Of embedding names. Each is matched against every parameter."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """How fragments are cut, merged, stepped and encoded (symbols as in docs/protocol.md).

    >>> Numerics(outer_lr=0.5).to_json()["outer_lr"]
    0.5
    >>> Numerics.from_json(Numerics().to_json()) == Numerics()
    True
    """

    plan: PlanHow = "balanced"
    merge: MergeHow = "average"  # radial is for weights: embeddings are averaged then; buffers have a rule of their own
    outer: str = "nesterov"  # nesterov, sgd, adam, or the name of a class of torch.optim
    outer_lr: float = 1.0  # eta
    outer_momentum: float = 0.0  # mu; of Adam the first beta
    outer_ramp: int = 0  # outer steps in which eta goes from 1 and mu from 0 to their values; 0: they are there at once
    outer_breadth: bool = True  # a merge from which learners are missing is a smaller step, in proportion
    up: CodecWish = "auto"  # deltas, from learner to syncer; auto: what the learner's link carries (`policy.codec_for`)
    down: CodecWish = "auto"  # updates, from syncer to learner; auto: what the link in the middle carries
    embeddings: tuple[str, ...] = ()  # patterns of names that count as embeddings beside the weights of nn.Embedding
    norm_clip: float = 0.0  # a contribution is scaled down to so many times the usual size; 0: as it comes

    def __post_init__(self) -> None:
        for name, choices in (("plan", PlanHow), ("merge", MergeHow), ("up", CodecWish), ("down", CodecWish)):
            _check_choice(name, getattr(self, name), get_args(choices))
        if not (isinstance(self.outer, str) and self.outer.isidentifier() and len(self.outer) <= 100):
            raise ValueError(
                f"outer is {self.outer!r}; give nesterov, sgd, adam or a class of torch.optim, such as 'AdamW'"
            )
        if not (_is_number(self.outer_lr) and math.isfinite(self.outer_lr) and self.outer_lr > 0.0):
            raise ValueError(f"outer_lr is {self.outer_lr!r}; give a number above 0, such as 0.4")
        if not (_is_number(self.outer_momentum) and 0.0 <= self.outer_momentum < 1.0):
            raise ValueError(f"outer_momentum is {self.outer_momentum!r}; give a number from 0 up to, not with, 1")
        if not (type(self.outer_ramp) is int and 0 <= self.outer_ramp <= MOST_RAMP):
            raise ValueError(f"outer_ramp is {self.outer_ramp!r}; give a number of merges, such as 20, or 0 for none")
        if self.outer_ramp and self.outer not in RAMPED:
            raise ValueError(
                f"outer_ramp begins with plain averaging, which {self.outer} is not; give {' or '.join(RAMPED)}"
            )
        if type(self.outer_breadth) is not bool:
            raise ValueError(f"outer_breadth is {self.outer_breadth!r}; give true or false")
        if not (_is_number(self.norm_clip) and (self.norm_clip == 0.0 or 1.0 <= self.norm_clip < math.inf)):
            raise ValueError(f"norm_clip is {self.norm_clip!r}; give a number from 1 on, such as 3, or 0 for none")
        if not isinstance(self.embeddings, tuple) or len(self.embeddings) > MOST_PATTERNS:
            raise ValueError(f"embeddings must be a tuple of at most {MOST_PATTERNS} patterns, such as ('wte*',)")
        for pattern in self.embeddings:
            if not (isinstance(pattern, str) and 0 < len(pattern) <= 1000):
                raise ValueError(f"embeddings holds {pattern!r}; give patterns of parameter names, such as 'wte*'")

    @property
    def ups(self) -> tuple[str, ...]:
        """The codecs that a contribution may have, the one that it has unless something else is said first."""
        return policy.CODECS if self.up == "auto" else (self.up,)

    @property
    def downs(self) -> tuple[str, ...]:
        """The same of an update."""
        return policy.CODECS if self.down == "auto" else (self.down,)

    def to_json(self) -> dict[str, object]:
        """All fields as JSON knows them."""
        return {**asdict(self), "embeddings": list(self.embeddings)}

    @classmethod
    def from_json(cls, raw: object) -> Numerics:
        """What `to_json` made. Trusts nothing: a field that is missing or unknown is an error, not a default.

        Two sides that fill in different defaults would compute different values from the same bytes.
        """
        if not isinstance(raw, Mapping):
            raise ValueError("the numeric settings are not a JSON object; is the syncer of another version?")
        known = [field.name for field in fields(cls)]
        for name in known:
            if name not in raw:
                raise ValueError(f"the numeric settings lack {name!r}; run the same version of Atoll everywhere")
        for name in raw:
            if name not in known:
                raise ValueError(f"the numeric settings have an unknown {name!r}; run the same version everywhere")
        embeddings = raw["embeddings"]
        if not isinstance(embeddings, list):
            raise ValueError("embeddings of the numeric settings is not a list of patterns")
        return cls(**{**raw, "embeddings": tuple(embeddings)})


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; give one of {', '.join(choices)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
