"""Reference models: a byte-level GPT, dense or with a mixture of experts, its inner optimizers, and text generation.

Random numbers come from a generator with an explicit seed, never from torch's global generator. Two processes that
build the same model have the same bits, whatever they have done before.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Shape of a model. `experts` is 0 for a dense model."""

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int = 256
    experts: int = 0
    experts_per_token: int = 2
    mlp_ratio: int = 4
    tie: bool = True  # head and embedding share their weight

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "context", "vocabulary", "experts_per_token", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of heads {self.heads}; all heads have the same size"
            )
        if self.experts < 0:
            raise ValueError(f"experts must be 0 (a dense model) or more, got {self.experts}")
        if self.experts and self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds experts {self.experts}")


SIZES: dict[str, GPTConfig] = {
    "100k": GPTConfig(layers=2, heads=2, width=64, context=64),
    "360k": GPTConfig(layers=3, heads=4, width=96, context=64),
    "1m": GPTConfig(layers=5, heads=4, width=128, context=64),
    "5m": GPTConfig(layers=6, heads=4, width=256, context=64),
    "10m": GPTConfig(layers=6, heads=6, width=384, context=64),
    "moe": GPTConfig(layers=4, heads=4, width=128, context=64, experts=4, mlp_ratio=2),
}
"""Shapes that run well on one CPU thread: few wide layers and short contexts. The name is the number of parameters."""

BALANCE_WEIGHT = 0.01
"""Weight of the auxiliary loss that balances tokens over the experts. Held-out losses do not contain it."""

_STD = 0.02

END_OF_DOCUMENT = 0
"""Token after each document of the training text."""

NEWTON_SCHULZ_STEPS = 5


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """Make a layer without random numbers from the global generator. `build_model` initializes it."""
    return nn.Linear(inputs, outputs, bias=False, device="meta").to_empty(device="cpu")


def _embedding(count: int, width: int) -> nn.Embedding:
    return nn.Embedding(count, width, device="meta").to_empty(device="cpu")


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = _linear(config.width, 3 * config.width)
        self.out = _linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, W] -> [B, T, W]
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, heads, T, W / heads]
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(b, t, w))
        return mixed


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = _linear(config.width, config.mlp_ratio * config.width)
        self.out = _linear(config.mlp_ratio * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(F.relu(self.up(x)).square())  # squared ReLU: on a CPU GELU takes many passes over x
        return y


class Experts(nn.Module):
    """Mixture of experts. Each token goes to the `experts_per_token` experts with the highest router scores."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.per_token = config.experts_per_token
        self.router = _linear(config.width, config.experts)
        self.experts = nn.ModuleList(MLP(config) for _ in range(config.experts))
        self.balance = torch.zeros(())  # balance loss of the last forward pass

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])  # [N, W]
        scores = self.router(flat).softmax(-1)  # [N, E]
        best, chosen = scores.topk(self.per_token, dim=-1)  # [N, k]
        best = best / best.sum(-1, keepdim=True)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows, slots = (chosen == e).nonzero(as_tuple=True)
            y = y.index_add(0, rows, expert(flat[rows]) * best[rows, slots].unsqueeze(-1))
        # Sum over experts of the share of tokens times the mean probability: minimal if both are uniform.
        count = len(self.experts)
        tokens = torch.bincount(chosen.reshape(-1), minlength=count) / chosen.numel()
        self.balance = count * (tokens * scores.mean(0)).sum()
        return y.view_as(x)


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.mlp: Experts | MLP = Experts(config) if config.experts else MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class GPT(nn.Module):
    """Byte-level decoder. Make one with `build_model`, which also initializes the parameters."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = _embedding(config.vocabulary, config.width)
        self.positions = _embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = _linear(config.width, config.vocabulary)
        if config.tie:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits [B, T, vocabulary] for tokens [B, T]; with targets [B, T], the mean loss per token in nats."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if self.training and self.config.experts:
            loss = (
                loss
                + BALANCE_WEIGHT * torch.stack([m.balance for m in self.modules() if isinstance(m, Experts)]).mean()
            )
        return loss


def build_model(config: GPTConfig, seed: int) -> GPT:
    """Build a model in f32. The same config and seed give the same bits."""
    model = GPT(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)  # weights of the norms
            # outputs to the residual stream: scaled so that the variance of their sum does not grow
            elif name.endswith("out.weight"):
                parameter.normal_(0.0, _STD / math.sqrt(2 * config.layers), generator=generator)
            else:
                parameter.normal_(0.0, _STD, generator=generator)
    return model


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def lr_factor(progress: float, warmup: float = 0.02, floor: float = 0.1) -> float:
    """Return the factor on the learning rate: linear warmup over the share `warmup`, then a cosine down to `floor`.

    >>> [lr_factor(x, warmup=0.1, floor=0.1) for x in (0.05, 0.1, 1.0)]
    [0.5, 1.0, 0.1]
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return progress / warmup
    down = (progress - warmup) / (1.0 - warmup) if warmup < 1.0 else 1.0
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * down))


def generate(model: GPT, start: list[int], tokens: int, temperature: float, seed: int) -> Iterator[int]:
    """Yield at most `tokens` tokens that continue `start`; fewer if the model ends the document.

    The same model, start, temperature and seed give the same tokens.

    Args:
        temperature: 0 takes the most likely token each time.
    """
    if not start:
        raise ValueError("the text to continue is empty; give at least one character")
    if tokens < 1:
        raise ValueError(f"cannot generate {tokens} tokens; give at least 1")
    if not 0.0 <= temperature <= 100.0:
        raise ValueError(f"temperature is {temperature:g}; give 0 (the most likely token) to 100, usually near 1")
    return _generate(model, start, tokens, temperature, seed)


@torch.no_grad()
def _generate(model: GPT, start: list[int], tokens: int, temperature: float, seed: int) -> Iterator[int]:
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


# --------------------------------------------------------------------------------------------------------------------
# Inner optimizers


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers for disjoint parameters with the interface of one: one list of groups, one state."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        self._share()

    def _share(self) -> None:
        """Replace the groups and the state of the parts by those of this optimizer."""
        start = 0
        for part in self.parts:
            stop = start + len(part.param_groups)
            part.param_groups = self.param_groups[start:stop]
            part.state = self.state
            start = stop

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("CombinedOptimizer.step() takes no closure; call backward() before step()")
        for part in self.parts:
            part.step()
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.state = defaultdict(dict, self.state)
        self._share()


class Muon(torch.optim.Optimizer):
    """Muon whose Newton-Schulz iteration uses the dtype of the parameters.

    `torch.optim.Muon` iterates in bfloat16, which on a CPU without bfloat16 instructions is eight times as slow as
    float32. Coefficients, momentum and learning rate scale (`match_rms_adamw`) are the same.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                buffer = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalize(parameter.grad.lerp(buffer, group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-0.2 * math.sqrt(max(parameter.shape)) * group["lr"])


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with the singular vectors of `matrix` and singular values near 1.

    Newton-Schulz: each step multiplies X by a I + b G + c G^2, where G = X X^T. These factors and G commute, so
    the steps need only the small square G: the wide matrix is multiplied once at the start and once at the end.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    gram = x @ x.T
    product = identity = torch.eye(len(gram)).to(gram)
    for step in range(NEWTON_SCHULZ_STEPS):
        factor = torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315).add_(identity, alpha=3.4445)
        product = factor @ product if step else factor
        if step < NEWTON_SCHULZ_STEPS - 1:
            gram = factor @ gram @ factor
    result: Tensor = product @ x
    return result.T if is_tall else result


def inner_optimizer(
    model: nn.Module,
    name: str = "adamw",
    lr: float = 3e-3,
    beta2: float = 0.95,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
) -> torch.optim.Optimizer:
    """Make the optimizer of the inner steps: `adamw`, `sgd` or `muon`.

    Muon trains the matrices of the blocks, and AdamW the embeddings and the rest, as Muon's authors advise. Weight
    decay applies to matrices, never to gains.
    """
    parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for _, p in parameters if p.ndim >= 2]
    vectors = [p for _, p in parameters if p.ndim < 2]
    if name == "adamw":
        return _adamw(matrices, vectors, lr, beta2, weight_decay)
    if name == "sgd":
        return torch.optim.SGD([p for _, p in parameters], lr=lr, momentum=momentum)
    if name == "muon":
        embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        inside = [p for p in matrices if p.ndim == 2 and id(p) not in embedded]
        outside = [p for p in matrices if p.ndim != 2 or id(p) in embedded]
        muon = Muon(inside, lr, momentum, weight_decay)
        return CombinedOptimizer(muon, _adamw(outside, vectors, lr, beta2, weight_decay))
    raise ValueError(f"inner optimizer {name!r} is unknown; give --inner adamw, muon or sgd")


def _adamw(
    matrices: list[nn.Parameter],
    vectors: list[nn.Parameter],
    lr: float,
    beta2: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=(0.9, beta2), eps=1e-8, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Scale all gradients so that their total norm is at most `max_norm`."""
    torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
