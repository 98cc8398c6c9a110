"""Arithmetic of one fragment at one learner: encode contributions and adopt published versions.

The learner's process and the replay of a tape use the same class, so both compute the same bits. The class takes no
locks and owns no values: the caller passes flat f32 tensors, as `ModelView.buffer` returns them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.types import AdoptMode, FragmentId, RoundId
from atoll.tensors.codecs import Codec, ErrorFeedback, ProgressCallback, get_codec
from atoll.tensors.model_view import ModelView


class LearnerFragment:
    """Fragment at one learner.

    Call `adopt` in the training thread, and `encode`, `encoded_contribution` and `settle` in the encoder thread.
    """

    def __init__(self, view: ModelView, p: FragmentId, codec_name: str) -> None:
        self.id = p
        self.view = view
        self.holds_buffers = view.plan.holds_buffers(p)
        self.is_f32_exact = view.is_f32_exact(p)
        self.upload_codec = get_codec(*self.allowed_codecs((codec_name,)))
        self._feedback: ErrorFeedback | None = None  # None before the first contribution
        self._encoded: tuple[RoundId, Tensor] | None = None

    def allowed_codecs(self, chosen: tuple[str, ...]) -> tuple[str, ...]:
        """Return the codecs of the run that this fragment may use."""
        return self.view.plan.allowed_codecs(self.id, chosen)

    def select_codec(self, chosen: str | None) -> Codec:
        """Return the codec of a contribution; `chosen` None for the codec of the run."""
        return get_codec(*self.allowed_codecs((chosen,))) if chosen is not None else self.upload_codec

    @property
    def host_bytes(self) -> int:
        """Host memory of the residuals and of the newest contribution, in bytes."""
        residuals = 2 * self._feedback.residual.nbytes if self._feedback is not None else 0
        return residuals + (self._encoded[1].nbytes if self._encoded is not None else 0)

    def encoded_contribution(self, round_id: RoundId) -> Tensor | None:
        """Return the contribution to this round if it was encoded before: a repeated pull gets the same bytes."""
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
        """Encode A_p - theta_p, or the values of buffers.

        Args:
            anchor: A_p, the published value that the learner last adopted.
            copy: theta_p, the learner's values at the step boundary.
            scratch: Memory for the difference, as large as `copy`.
            out: Memory for the bytes.
            on_progress: Called after each chunk with the range of values whose bytes are final.
        """
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
        """Record whether the adopted version includes the last contribution."""
        assert self._feedback is not None or not merged, f"fragment {self.id}: merged before anything was encoded"
        if self._feedback is not None:
            self._feedback.settle(merged)
        self._encoded = None

    def adopt(
        self, method: AdoptMode, value: Tensor, reference: Tensor | None, alpha: float, scratch: Tensor | None = None
    ) -> None:
        """Adopt a version. `scratch` is needed to carry parameters whose dtype rounds f32 values."""
        if method == "carry" and reference is not None and not self.is_f32_exact:
            assert scratch is not None, f"fragment {self.id} cannot be carried without scratch memory"
            self.view.round_to_dtype(self.id, reference, scratch)
            reference = scratch
        self.view.adopt(self.id, method, value, reference, alpha)
