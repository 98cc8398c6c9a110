"""How good a model is on text that nobody trained on: one number, from a fixed set of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from atoll.reference.data import Text

_BATCH = 32


class Evaluation(NamedTuple):
    loss: float  # mean per token, in nats
    tokens: int


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Text, context: int, tokens: int) -> Evaluation:
    """Mean loss on about `tokens` held-out tokens: whole windows, spread evenly over all that is held out.

    The windows depend on the corpus, `context` and `tokens` alone, so two models are asked the very same questions.
    """
    was_training = model.training
    model.eval()
    try:
        total, count = 0.0, 0
        for x, y in corpus.held_out_batches(context, _BATCH, max(1, tokens // context)):
            total += float(model(x, y)) * y.numel()
            count += y.numel()
    finally:
        model.train(was_training)
    return Evaluation(total / count, count)
