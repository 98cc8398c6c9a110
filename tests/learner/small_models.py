"""Tiny models and data for runs of real processes. They depend only on a name, a seed and a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH = 16
WORDS = 16


class Plain(nn.Module):
    """Two layers. `flip` registers them in reverse order under the same names."""

    first: nn.Linear
    last: nn.Linear

    def __init__(self, flip: bool = False, width: int = 24) -> None:
        super().__init__()
        layers: list[tuple[str, Callable[[], nn.Module]]] = [
            ("first", lambda: nn.Linear(8, width)),
            ("last", lambda: nn.Linear(width, 4)),
        ]
        for name, make in reversed(layers) if flip else layers:
            setattr(self, name, make())

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)
        out: Tensor = self.last(torch.tanh(hidden))
        return out


class Mixed(nn.Module):
    """A head that is tied to the embedding, a frozen layer, and BatchNorm, whose counter is not merged."""

    embedding: nn.Embedding
    frozen: nn.Linear
    norm: nn.BatchNorm1d
    head: nn.Linear

    def __init__(self, flip: bool = False) -> None:
        super().__init__()
        parts: list[tuple[str, Callable[[], nn.Module]]] = [
            ("embedding", lambda: nn.Embedding(WORDS, 12)),
            ("frozen", lambda: nn.Linear(12, 12)),
            ("norm", lambda: nn.BatchNorm1d(12)),
            ("head", lambda: nn.Linear(12, WORDS, bias=False)),
        ]
        for name, make in reversed(parts) if flip else parts:
            setattr(self, name, make())
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            self.frozen.weight.copy_(torch.eye(12))
            self.frozen.bias.fill_(0.125)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.frozen(self.embedding(x))
        out: Tensor = self.head(self.norm(hidden))
        return out


class Normed(nn.Module):
    """BatchNorm over inputs whose scale differs by learner, so that the running variances are far apart."""

    norm: nn.BatchNorm1d
    last: nn.Linear

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.norm = nn.BatchNorm1d(8, momentum=0.5)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(x * self.scale))
        return out


class Work(NamedTuple):
    """A model, its optimizer, and batches by step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    seed: int

    def step(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        if isinstance(self.model, Mixed):
            x = torch.randint(WORDS, (BATCH,), generator=generator)
            loss = functional.cross_entropy(self.model(x).float(), (x + 1) % WORDS)
        else:
            dtype = next(self.model.parameters()).dtype
            x = torch.randn(BATCH, 8, generator=generator).to(dtype)
            loss = (self.model(x) - x[:, :4].sin()).float().square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def work(name: str = "plain", seed: int = 0, dtype: str = "float32", flip: bool = False) -> Work:
    """Return the model of this name with an optimizer.

    Names are plain, mixed, normed, tall (0.2 MB in f32) and wide (2 MB). A run of one of them refuses the models
    other and taller.
    """
    torch.manual_seed(seed)
    models = {
        "plain": lambda: Plain(flip),
        "mixed": lambda: Mixed(flip),
        "normed": lambda: Normed(100.0 if seed % 2 else 0.01),
        "wide": lambda: Plain(flip, width=38_000),
        "tall": lambda: Plain(flip, width=4_000),
        "other": lambda: nn.Sequential(nn.Linear(8, 4)),
        "taller": lambda: Plain(flip, width=25),
    }
    model: nn.Module = models[name]().to(getattr(torch, dtype))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Work(model, torch.optim.AdamW(trained, lr=1e-2), seed)


def values(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that are equal at all learners: parameters and averaged buffers, tied ones by every name."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    found |= {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    return found
