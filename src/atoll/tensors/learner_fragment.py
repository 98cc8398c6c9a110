"""Arithmetic of one fragment at one learner: what a contribution holds, and how a published version is adopted.

The learner's process and the replay of a tape use the same class, so both compute the same bits. Nothing here locks or
keeps values: flat f32 tensors are the caller's, as `ModelView.buffer` returns them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.types import AdoptHow, FragmentId, RoundId
from atoll.tensors.codecs import Codec, Feedback, Told, codec
from atoll.tensors.model_view import ModelView


class LearnerFragment:
    """`adopt` is for the training thread; `encode`, `encoded` and `settle` are for the one thread that encodes."""

    def __init__(self, view: ModelView, p: FragmentId, up: str) -> None:
        self.id = p
        self.view = view
        self.holds_buffers = view.plan.holds_buffers(p)
        self.is_exact = view.is_exact(p)
        self.up = codec(*self.codecs((up,)))
        self._feedback: Feedback | None = None  # from the first contribution
        self._encoded: tuple[RoundId, Tensor] | None = None

    def codecs(self, chosen: tuple[str, ...]) -> tuple[str, ...]:
        """Return the codecs that it may travel in, of those that the run has chosen."""
        return self.view.plan.codecs(self.id, chosen)

    def codec_for(self, chosen: str | None) -> Codec:
        """Return the codec of a contribution. None: the one of the run."""
        return codec(*self.codecs((chosen,))) if chosen is not None else self.up

    @property
    def host_bytes(self) -> int:
        """Memory of residuals and of the newest contribution."""
        residuals = 2 * self._feedback.residual.nbytes if self._feedback is not None else 0
        return residuals + (self._encoded[1].nbytes if self._encoded is not None else 0)

    def encoded(self, round_id: RoundId) -> Tensor | None:
        """Return the contribution to this round, if it was encoded: a repeated request gets the same bytes."""
        return self._encoded[1] if self._encoded is not None and self._encoded[0] == round_id else None

    def encode(
        self,
        round_id: RoundId,
        by: Codec,
        anchor: Tensor,
        copy: Tensor,
        scratch: Tensor,
        out: Tensor | None = None,
        told: Told | None = None,
    ) -> Tensor:
        """Encode A_p - theta_p, or the values of buffers. `told` gets the range of values that was written to `out`."""
        if self.holds_buffers:
            scratch.copy_(copy)
        elif self.is_exact:
            torch.sub(anchor, copy, out=scratch)
        else:
            self.view.as_held(self.id, anchor, scratch)
            scratch.sub_(copy)
        if self._feedback is None:
            self._feedback = Feedback(self.up, scratch.numel())
        data = self._feedback.encode(scratch, out, by, told)
        self._encoded = (round_id, data)
        return data

    def settle(self, merged: bool) -> None:
        """Note whether the adopted version holds the contribution that was sent last."""
        assert self._feedback is not None or not merged, f"fragment {self.id}: merged before anything was encoded"
        if self._feedback is not None:
            self._feedback.settle(merged)
        self._encoded = None

    def adopt(
        self, how: AdoptHow, value: Tensor, reference: Tensor | None, alpha: float, scratch: Tensor | None = None
    ) -> None:
        """Take over a version. `scratch` is needed to carry parameters that round f32 values."""
        if how == "carry" and reference is not None and not self.is_exact:
            assert scratch is not None, f"fragment {self.id} cannot be carried without scratch memory"
            self.view.as_held(self.id, reference, scratch)
            reference = scratch
        self.view.adopt(self.id, how, value, reference, alpha)
