"""Tests of Muon of the reference trainer against torch.optim.Muon, and of its orthogonalization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.reference.models import Muon, orthogonalize

MUON: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.5}
BFLOAT16 = torch.finfo(torch.bfloat16).eps
"""Allowed relative difference: torch iterates in this dtype."""

shapes_of_matrices = pytest.mark.parametrize("shape", [(8, 64), (64, 8), (32, 32), (1, 7)], ids=str)


def total_update(
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], shape: tuple[int, int]
) -> Tensor:
    """Return the change of a matrix after four steps with random gradients."""
    draw = torch.Generator().manual_seed(3)
    matrix = nn.Parameter(torch.randn(shape, generator=draw))
    start, optimizer = matrix.detach().clone(), make_optimizer([matrix])
    for _ in range(4):
        matrix.grad = torch.randn(shape, generator=draw)
        optimizer.step()
    return matrix.detach() - start


def distance_to_torch(shape: tuple[int, int], **changes: Any) -> float:
    """Return the relative distance between our Muon and torch's Muon with changed settings."""
    settings = MUON | {"adjust_lr_fn": "match_rms_adamw"} | changes
    ours = total_update(lambda matrices: Muon(matrices, **MUON), shape)
    theirs = total_update(lambda matrices: torch.optim.Muon(matrices, **settings), shape)
    return float((ours - theirs).norm() / theirs.norm())


@shapes_of_matrices
def test_muon_equals_torch_muon_within_the_precision_of_bfloat16(shape):
    assert distance_to_torch(shape) < BFLOAT16


@shapes_of_matrices
@pytest.mark.parametrize(
    "changes",
    [
        {"ns_coefficients": (3.5, -4.775, 2.0315)},
        {"ns_coefficients": (3.4445, -4.6, 2.0315)},
        {"ns_coefficients": (3.4445, -4.775, 2.2)},
        {"ns_steps": 4},
        {"adjust_lr_fn": "original"},
        {"nesterov": False},
        {"momentum": 0.8},
        {"weight_decay": 0.4},
        {"lr": 0.055},
    ],
    ids=str,
)
def test_comparison_detects_another_coefficient_scale_or_momentum_of_muon(shape, changes):
    assert distance_to_torch(shape, **changes) > 2 * BFLOAT16


def test_orthogonalize_returns_singular_values_near_one_and_the_same_vectors():
    matrix = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    result = orthogonalize(matrix)
    assert bool((torch.linalg.svdvals(result) - 1).abs().max() < 0.35)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inside = left.T @ result @ right.T
    assert torch.allclose(inside, inside.diagonal().diag(), atol=1e-4)
    assert torch.allclose(orthogonalize(matrix.T), result.T, atol=1e-5)
