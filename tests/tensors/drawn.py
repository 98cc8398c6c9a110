"""Numbers from seeds, and plans of one fragment, for the tests of codecs, merge and outer step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.tensors.plan import FragmentPlan, TensorInfo, make_plan


def normal(seed: int, numel: int, spread: float = 0.0) -> Tensor:
    """Numbers of both signs up to 3e38; with `spread` their magnitudes differ by so many powers of ten."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(numel) * 10.0 ** random.uniform(-spread, spread, numel)
    return torch.from_numpy(values.clip(-3e38, 3e38).astype(np.float32))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def plan_of(*tensors: tuple[str, int]) -> FragmentPlan:
    """One fragment: (kind, values) of tensors that lie in it in this order."""
    infos = [TensorInfo(f"t{place:02}", (numel,), "float32", kind) for place, (kind, numel) in enumerate(tensors)]
    return make_plan(infos, 1, "balanced")
