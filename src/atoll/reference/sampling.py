"""Text from a model, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from atoll.reference.models import GPT

END_OF_DOCUMENT = 0
"""The token after each document of the training text."""


def sample(model: GPT, start: list[int], tokens: int, temperature: float, seed: int) -> Iterator[int]:
    """At most `tokens` further tokens; fewer where the model ends the document.

    The same model, start, temperature and seed give the same tokens: the generator is this call's own. Temperature 0
    takes the most likely token each time.
    """
    if not start:
        raise ValueError("a model continues a text: give at least one letter")
    if tokens < 1:
        raise ValueError(f"{tokens} tokens are no text; give at least 1")
    if not 0.0 <= temperature <= 100.0:
        raise ValueError(f"temperature is {temperature:g}; give 0 (the most likely token) to 100, usually near 1")
    return _sampled(model, start, tokens, temperature, seed)


@torch.no_grad()
def _sampled(model: GPT, start: list[int], tokens: int, temperature: float, seed: int) -> Iterator[int]:
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    context = model.config.context
    seen = list(start[-context:])
    for _ in range(tokens):
        logits = model(torch.tensor([seen[-context:]]))[0, -1].double()
        if temperature == 0.0:
            token = int(logits.argmax())
        else:
            odds = torch.softmax(logits / temperature, dim=-1)
            token = int(torch.multinomial(odds, 1, generator=generator))
        if token == END_OF_DOCUMENT:
            return
        seen.append(token)
        del seen[:-context]
        yield token
