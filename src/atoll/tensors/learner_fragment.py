"""Arithmetic of one fragment at one learner: what a contribution holds, and how a published version is adopted.

The learner's process and the replay of a tape use the same class, so both compute the same bits. Nothing here locks or
keeps values: flat f32 tensors are the caller's, as `ModelView.buffer` returns them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.types import AdoptMode, FragmentId, RoundId
from atoll.tensors.codecs import Codec, ErrorFeedback, ProgressCallback, get_codec
from atoll.tensors.model_view import ModelView


class LearnerFragment:
    """`adopt` is for the training thread; `encode`, `encoded` and `settle` are for the one thread that encodes."""

    def __init__(self, view: ModelView, p: FragmentId, up: str) -> None:
        self.id = p
        self.view = view
        self.holds_buffers = view.plan.holds_buffers(p)
        self.is_f32_exact = view.is_f32_exact(p)
        self.upload_codec = get_codec(*self.allowed_codecs((up,)))
        self._feedback: ErrorFeedback | None = None  # from the first contribution
        self._encoded: tuple[RoundId, Tensor] | None = None

    def allowed_codecs(self, chosen: tuple[str, ...]) -> tuple[str, ...]:
        """Return the codecs that it may travel in, of those that the run has chosen."""
        return self.view.plan.allowed_codecs(self.id, chosen)

    def select_codec(self, chosen: str | None) -> Codec:
        """Return the codec of a contribution. None: the one of the run."""
        return get_codec(*self.allowed_codecs((chosen,))) if chosen is not None else self.upload_codec

    @property
    def host_bytes(self) -> int:
        """Memory of residuals and of the newest contribution."""
        residuals = 2 * self._feedback.residual.nbytes if self._feedback is not None else 0
        return residuals + (self._encoded[1].nbytes if self._encoded is not None else 0)

    def encoded_contribution(self, round_id: RoundId) -> Tensor | None:
        """Return the contribution to this round, if it was encoded: a repeated request gets the same bytes."""
        return self._encoded[1] if self._encoded is not None and self._encoded[0] == round_id else None

    def encode(
        self,
        round_id: RoundId,
        codec: Codec,
        anchor: Tensor,
        copy: Tensor,
        scratch: Tensor,
        out: Tensor | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> Tensor:
        """Encode A_p - theta_p, or the values of buffers. `told` gets the range of values that was written to `out`."""
        if self.holds_buffers:
            scratch.copy_(copy)
        elif self.is_f32_exact:
            torch.sub(anchor, copy, out=scratch)
        else:
            self.view.round_to_dtype(self.id, anchor, scratch)
            scratch.sub_(copy)
        if self._feedback is None:
            self._feedback = ErrorFeedback(self.upload_codec, scratch.numel())
        data = self._feedback.encode(scratch, out, codec, on_progress)
        self._encoded = (round_id, data)
        return data

    def settle(self, merged: bool) -> None:
        """Note whether the adopted version holds the contribution that was sent last."""
        assert self._feedback is not None or not merged, f"fragment {self.id}: merged before anything was encoded"
        if self._feedback is not None:
            self._feedback.settle(merged)
        self._encoded = None

    def adopt(
        self, method: AdoptMode, value: Tensor, reference: Tensor | None, alpha: float, scratch: Tensor | None = None
    ) -> None:
        """Take over a version. `scratch` is needed to carry parameters that round f32 values."""
        if method == "carry" and reference is not None and not self.is_f32_exact:
            assert scratch is not None, f"fragment {self.id} cannot be carried without scratch memory"
            self.view.round_to_dtype(self.id, reference, scratch)
            reference = scratch
        self.view.adopt(self.id, method, value, reference, alpha)
