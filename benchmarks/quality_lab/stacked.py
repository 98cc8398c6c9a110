"""Many copies of one reference model as one matrix: a row per copy, a column per value, fragments side by side.

All copies run forward and backward together as batched matrix products. Optimizers, copies of fragments, merges and
adoptions work on slices of the matrix. The arithmetic is that of `atoll.reference.models`; only the order of sums
inside a matrix product may differ.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from atoll.reference.models import BALANCE_WEIGHT, GPT, NEWTON_SCHULZ_STEPS, GPTConfig
from atoll.tensors.plan import FragmentPlan

Tensors = dict[str, Tensor]

CHUNK_ROWS = 4
"""Rows that run forward and backward at once. Activations of four rows stay in the cache, those of twelve do not: four
at a time are a third faster."""

warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout")  # both are columns of a matrix


class Layout:
    """Columns of the matrix: fragment after fragment, and within a fragment piece after piece."""

    def __init__(self, model: GPT, plan: FragmentPlan) -> None:
        self.plan = plan
        self.shapes = {tensor.name: tensor.shape for tensor in plan.tensors}
        self.columns: dict[str, tuple[int, int]] = {}
        self.fragments: list[tuple[int, int]] = []
        at = 0
        for p in range(len(plan.fragments)):
            for piece, begin, end in plan.spans(p):
                if piece.start != 0 or piece.numel != math.prod(self.shapes[piece.tensor]):
                    raise ValueError(f"{piece.tensor} is cut by rows; the laboratory needs a plan of whole tensors")
                self.columns[piece.tensor] = (at + begin, at + end)
            self.fragments.append((at, at + plan.numel(p)))
            at += plan.numel(p)
        self.numel = at
        embedded = ("embedding.weight", "positions.weight")
        self.matrices = [name for name, shape in self.shapes.items() if len(shape) == 2 and name not in embedded]
        self.decay = torch.zeros(at)  # 1 in columns that decay
        for name, shape in self.shapes.items():
            begin, end = self.columns[name]
            self.decay[begin:end] = float(len(shape) >= 2)

    def views(self, matrix: Tensor) -> Tensors:
        rows = len(matrix)
        return {
            name: matrix[:, begin:end].view(rows, *self.shapes[name]) for name, (begin, end) in self.columns.items()
        }

    def row_of(self, model: GPT) -> Tensor:
        """The values of one model as a row."""
        row = torch.empty(self.numel)
        parameters = dict(model.named_parameters())
        for name, (begin, end) in self.columns.items():
            row[begin:end] = parameters[name].detach().reshape(-1)
        return row

    def load(self, model: GPT, row: Tensor) -> None:
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, (begin, end) in self.columns.items():
                parameters[name].copy_(row[begin:end].view(self.shapes[name]))


class _RowNorm(torch.autograd.Function):
    """RMS norm with a gain per row, without the intermediate tensors that autograd would keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:  # [R, N, W], [R, W]
        factor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(1e-6).rsqrt_()
        unit = x * factor
        ctx.save_for_backward(unit, factor, gain)
        scaled: Tensor = unit * gain[:, None, :]
        return scaled

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        unit, factor, gain = ctx.saved_tensors
        (gradient,) = gradients
        along = torch.mul(gradient, unit)
        to_gain = along.sum(1)
        inner = torch.bmm(along, gain[:, :, None]).div_(unit.shape[-1])  # [R, N, 1]
        back = torch.mul(gradient, gain[:, None, :])
        back.addcmul_(unit, inner, value=-1.0).mul_(factor)
        return back, to_gain


class _SquaredRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = F.relu(x)
        ctx.save_for_backward(positive)
        return positive.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        gradient: Tensor = positive.mul(gradients[0]).mul_(2.0)
        return gradient


class _MixedLinear(torch.autograd.Function):
    """A matrix product in bf16 of f32 tensors, forward and backward: three times as fast where the CPU has bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        low_x, low_weight = x.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(low_x, low_weight)
        return torch.bmm(low_x, low_weight.transpose(1, 2)).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        low_x, low_weight = ctx.saved_tensors
        gradient = gradients[0].bfloat16()
        return torch.bmm(gradient, low_weight).float(), torch.bmm(gradient.transpose(1, 2), low_x).float()


def _linear(x: Tensor, weight: Tensor, mixed: bool = False) -> Tensor:
    found: Tensor = _MixedLinear.apply(x, weight) if mixed else torch.bmm(x, weight.transpose(1, 2))
    return found


def _experts(config: GPTConfig, values: Tensors, at: str, x: Tensor, mixed: bool) -> tuple[Tensor, Tensor]:
    """Every expert on every token, then weighted: at these sizes that is faster than gathering rows."""
    scores = _linear(x, values[f"{at}.router.weight"]).softmax(-1)  # [R, N, E]
    best, chosen = scores.topk(config.experts_per_token, dim=-1)
    weights = torch.zeros_like(scores).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
    y = torch.zeros_like(x)
    for e in range(config.experts):
        up = _SquaredRelu.apply(_linear(x, values[f"{at}.experts.{e}.up.weight"], mixed))
        y = y + _linear(up, values[f"{at}.experts.{e}.out.weight"], mixed) * weights[:, :, e : e + 1]
    tokens = (weights.detach() > 0).float().sum(1) / chosen[0].numel()  # [R, E]
    return y, config.experts * (tokens * scores.mean(1)).sum(-1)


def losses(
    config: GPTConfig, values: Tensors, tokens: Tensor, targets: Tensor, training: bool = True, mixed: bool = False
) -> Tensor:
    """tokens, targets [R, B, T] -> the loss of each row [R]."""
    rows, batch, context = tokens.shape
    width, heads, count = config.width, config.heads, batch * context
    embedding = values["embedding.weight"]
    table = embedding.reshape(rows * config.vocabulary, width)
    index = tokens + (torch.arange(rows) * config.vocabulary)[:, None, None]
    x = F.embedding(index, table) + values["positions.weight"][:, None, :context]
    x = x.view(rows, count, width)
    balances: list[Tensor] = []
    for i in range(config.layers):
        block = f"blocks.{i}"
        normed = _RowNorm.apply(x, values[f"{block}.attention_norm.weight"])
        qkv = _linear(normed, values[f"{block}.attention.qkv.weight"], mixed)
        q, k, v = qkv.view(rows * batch, context, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, count, width)
        x = x + _linear(y, values[f"{block}.attention.out.weight"], mixed)
        normed = _RowNorm.apply(x, values[f"{block}.mlp_norm.weight"])
        if config.experts:
            y, balance = _experts(config, values, f"{block}.mlp", normed, mixed)
            balances.append(balance)
            x = x + y
        else:
            up = _SquaredRelu.apply(_linear(normed, values[f"{block}.mlp.up.weight"], mixed))
            x = x + _linear(up, values[f"{block}.mlp.out.weight"], mixed)
    head = embedding if config.tie else values["head.weight"]
    logits = _linear(_RowNorm.apply(x, values["norm.weight"]), head)
    found = F.cross_entropy(logits.view(rows * count, -1), targets.reshape(-1), reduction="none")
    found = found.view(rows, count).mean(1)
    return found + BALANCE_WEIGHT * torch.stack(balances).mean(0) if training and balances else found


class Stack:
    """Rows of parameters with their gradients and the state of the inner optimizer."""

    def __init__(self, config: GPTConfig, layout: Layout, values: Tensor, mixed: bool = False) -> None:
        self.config = config
        self.layout = layout
        self.values = values  # [R, N]
        self.first = torch.zeros_like(values)  # first moments, or Muon's momentum
        self.second = torch.zeros_like(values)
        self.mixed = mixed
        self._parts: dict[int, tuple[Tensor, Tensor, list[Tensors]]] = {}  # by count of rows

    def gradients(
        self, ranges: Sequence[tuple[int, int]], tokens: Tensor, targets: Tensor, clip: float
    ) -> tuple[Tensor, Tensor]:
        """Return losses and clipped gradients of these ranges of rows, in their order."""
        matrix, gradient, leaves = self._part(sum(end - begin for begin, end in ranges))
        if matrix is not self.values:
            torch.cat([self.values[begin:end] for begin, end in ranges], out=matrix)
        gradient.zero_()
        found = torch.empty(len(matrix))
        for part, begin in zip(leaves, range(0, len(matrix), CHUNK_ROWS), strict=True):
            end = min(begin + CHUNK_ROWS, len(matrix))
            with torch.enable_grad():
                loss = losses(self.config, part, tokens[begin:end], targets[begin:end], mixed=self.mixed)
                loss.sum().backward()
            found[begin:end] = loss.detach()
        if clip:
            norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient.mul_((clip / (norms + 1e-6)).clamp_(max=1.0))
        return found, gradient

    def _part(self, rows: int) -> tuple[Tensor, Tensor, list[Tensors]]:
        """Return parameters, gradients and leaves by chunk. All rows: the matrix itself, so ranges must be sorted."""
        part = self._parts.get(rows)
        if part is None:
            matrix = self.values if rows == len(self.values) else torch.empty(rows, self.layout.numel)
            gradient = torch.zeros_like(matrix)
            chunks = []
            for begin in range(0, rows, CHUNK_ROWS):
                views = self.layout.views(matrix[begin : begin + CHUNK_ROWS])
                leaves = {name: view.detach().requires_grad_() for name, view in views.items()}
                for name, view in self.layout.views(gradient[begin : begin + CHUNK_ROWS]).items():
                    leaves[name].grad = view
                chunks.append(leaves)
            part = self._parts[rows] = (matrix, gradient, chunks)
        return part

    def evaluate(self, values: Tensor, batches: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
        """The mean loss of each row of `values` over batches [B, T] that all rows share."""
        views = self.layout.views(values)
        totals, count = torch.zeros(len(values), dtype=torch.float64), 0
        with torch.no_grad():
            for x, y in batches:
                shape = (len(values), *x.shape)
                totals += losses(self.config, views, x.expand(shape), y.expand(shape), training=False) * x.numel()
                count += x.numel()
        found: list[float] = (totals / count).tolist()
        return found


class AdamW:
    """torch's fused kernel on rows of the matrix."""

    def __init__(self, stack: Stack, beta1: float, beta2: float, weight_decay: float) -> None:
        self.stack, self.betas, self.weight_decay = stack, (beta1, beta2), weight_decay

    def step(self, begin: int, end: int, gradient: Tensor, number: int, lr: float) -> None:
        """Step rows [begin, end) for the time `number`, counted from 1."""
        stack = self.stack
        values = stack.values[begin:end]
        values.mul_(1.0 - lr * self.weight_decay * stack.layout.decay)
        self._fused([values], [gradient], [stack.first[begin:end]], [stack.second[begin:end]], number, lr)

    def _fused(
        self,
        values: list[Tensor],
        gradients: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
        number: int,
        lr: float,
    ) -> None:
        torch._fused_adamw_(
            values,
            gradients,
            first,
            second,
            [],
            [torch.tensor(float(number))] * len(values),
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )


class Muon(AdamW):
    """Muon for matrices inside blocks, AdamW with a learning rate of its own for the rest."""

    def __init__(
        self, stack: Stack, beta1: float, beta2: float, weight_decay: float, momentum: float, ratio: float
    ) -> None:
        super().__init__(stack, beta1, beta2, weight_decay)
        self.momentum, self.ratio = momentum, ratio  # ratio: learning rate of AdamW by that of Muon
        layout = stack.layout
        matrices = set(layout.matrices)
        self._others = [span for name, span in layout.columns.items() if name not in matrices]
        self._groups: dict[tuple[int, ...], list[str]] = {}
        for name in layout.matrices:
            self._groups.setdefault(layout.shapes[name], []).append(name)

    def step(self, begin: int, end: int, gradient: Tensor, number: int, lr: float) -> None:
        stack, layout = self.stack, self.stack.layout
        values, first = stack.values[begin:end], stack.first[begin:end]
        others_lr = lr * self.ratio
        slices = [(row, span) for row in range(end - begin) for span in self._others]
        for row, (b, e) in slices:
            values[row, b:e].mul_(1.0 - others_lr * self.weight_decay * layout.decay[b:e])
        second = stack.second[begin:end]
        parts = [[each[row, b:e] for row, (b, e) in slices] for each in (values, gradient, first, second)]
        self._fused(parts[0], parts[1], parts[2], parts[3], number, others_lr)
        for shape, names in self._groups.items():
            spans = [layout.columns[name] for name in names]
            rows = end - begin
            new = torch.stack([gradient[:, b:e] for b, e in spans], 1)
            old = torch.stack([first[:, b:e] for b, e in spans], 1)
            old.lerp_(new, 1 - self.momentum)
            update = orthogonalize(new.lerp_(old, self.momentum).view(-1, *shape)).reshape(rows, len(names), -1)
            for place, (b, e) in enumerate(spans):
                first[:, b:e] = old[:, place]
                part = values[:, b:e]
                part.mul_(1 - lr * self.weight_decay)
                part.add_(update[:, place], alpha=-0.2 * math.sqrt(max(shape)) * lr)


def orthogonalize(matrices: Tensor) -> Tensor:
    """`atoll.reference.models.orthogonalize` of a stack of matrices [K, a, b]."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.transpose(1, 2) if is_tall else matrices
    wide = wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=1e-7)
    gram = torch.bmm(wide, wide.transpose(1, 2))
    identity = torch.eye(gram.shape[1])
    product = gram
    for step in range(NEWTON_SCHULZ_STEPS):
        factor = torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315).add_(identity, alpha=3.4445)
        product = torch.bmm(factor, product) if step else factor
        if step < NEWTON_SCHULZ_STEPS - 1:
            gram = torch.bmm(torch.bmm(factor, gram), factor)
    result = torch.bmm(product, wide)
    return result.transpose(1, 2) if is_tall else result
