"""Numeric settings of a run, on which syncer and learners must agree to compute the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal

from atoll.core import policy
from atoll.core.settings import check_settings, setting

PlanMethod = Literal["balanced", "layers", "rows"]
MergeMethod = Literal["average", "radial", "trimmed"]
CodecOption = Literal["auto", "f32", "bf16", "int8", "int4"]

RAMP_OPTIMIZERS = ("nesterov", "sgd")
"""Outer optimizers that are the plain average at eta = 1 and mu = 0."""

MAX_RAMP = 1_000_000

MAX_EMBEDDING_PATTERNS = 100
"""Each pattern is matched against every parameter."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """Settings of the fragment plan, the merge, the outer optimizer and the codecs (symbols as in docs/protocol.md).

    >>> Numerics(outer_lr=0.5).to_json()["outer_lr"]
    0.5
    >>> Numerics.from_json(Numerics().to_json()) == Numerics()
    True
    """

    plan: PlanMethod = setting(
        "balanced",
        "Cut into fragments: balanced (whole tensors, by size), layers (layer i into fragment i mod P) or rows (as "
        "balanced, with large tensors cut by rows).",
        metavar="HOW",
    )
    # radial applies to weights; embeddings are averaged and buffers have their own rule
    merge: MergeMethod = setting(
        "average",
        "average; radial: mean direction times mean length; trimmed: mean per value without the smallest and the "
        "largest, which protects against a diverged learner.",
        metavar="HOW",
    )
    outer: str = setting("nesterov", "Outer optimizer: nesterov, sgd, adam or torch's name.", metavar="NAME")
    outer_lr: float = setting(1.0, "Its learning rate.", metavar="RATE", above=0, advice="for example 0.4")  # eta
    outer_momentum: float = setting(0.0, "Its momentum; of adam the first beta.", metavar="MU", min=0, below=1)  # mu
    # outer steps over which eta changes from 1, and mu from 0, to their values
    outer_ramp: int = setting(
        0,
        "Merges of a fragment over which both change from plain averaging to their values.",
        metavar="MERGES",
        min=0,
        max=MAX_RAMP,
    )
    outer_breadth: bool = setting(True, "Take a smaller step if learners are missing from a merge.")
    up: CodecOption = setting(  # auto: `policy.choose_contribution_codec`
        "auto",
        "Codec of deltas to the syncer: f32, bf16, int8 or int4; auto: bf16, and int8 or int4 while a learner's link "
        "does not carry that.",
        metavar="CODEC",
    )
    down: CodecOption = setting(
        "auto", "Codec of updates to learners, the same; auto: by the link of the median learner.", metavar="CODEC"
    )
    embeddings: tuple[str, ...] = ()  # name patterns of embeddings, in addition to the weights of nn.Embedding
    norm_clip: float = setting(
        0.0, "Scale contributions down to C times their typical norm, C at least 1; 0: never.", metavar="C", min=0
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if not (self.outer.isidentifier() and len(self.outer) <= 100):
            raise ValueError(
                f"outer is {self.outer!r}; give nesterov, sgd, adam or a class of torch.optim, such as 'AdamW'"
            )
        if self.outer_ramp and self.outer not in RAMP_OPTIMIZERS:
            raise ValueError(
                f"outer_ramp begins with plain averaging, which {self.outer} is not; "
                f"give {' or '.join(RAMP_OPTIMIZERS)}"
            )
        if 0.0 < self.norm_clip < 1.0:
            raise ValueError(f"norm_clip is {self.norm_clip!r}; give a number from 1 on, such as 3, or 0 for none")
        if not isinstance(self.embeddings, tuple) or len(self.embeddings) > MAX_EMBEDDING_PATTERNS:
            raise ValueError(
                f"embeddings must be a tuple of at most {MAX_EMBEDDING_PATTERNS} patterns, such as ('wte*',)"
            )
        for pattern in self.embeddings:
            if not (isinstance(pattern, str) and 0 < len(pattern) <= 1000):
                raise ValueError(f"embeddings contains {pattern!r}; give patterns of parameter names, such as 'wte*'")

    @property
    def upload_codecs(self) -> tuple[str, ...]:
        """Codecs that a contribution may use; the first one is the default."""
        return policy.CODECS if self.up == "auto" else (self.up,)

    @property
    def download_codecs(self) -> tuple[str, ...]:
        """Codecs that an update may use; the first one is the default."""
        return policy.CODECS if self.down == "auto" else (self.down,)

    def to_json(self) -> dict[str, object]:
        """Return all fields as JSON values."""
        return {**asdict(self), "embeddings": list(self.embeddings)}

    @classmethod
    def from_json(cls, raw: object) -> Numerics:
        """Read the result of `to_json`. Raise ValueError if a field is missing or unknown.

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
