"""Random tensors and plans of one fragment, for the tests of codecs, merge and outer step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.tensors.codecs import BlockCodec, Codec, get_codec
from atoll.tensors.plan import FragmentPlan, TensorInfo, make_plan
from atoll.tensors.robust_merge import RunningSums


def random_tensor(seed: int, numel: int, spread: float = 0.0) -> Tensor:
    """Return random values of both signs, at most 3e38.

    Args:
        spread: Magnitudes vary by up to this many powers of ten in both directions.
    """
    random = np.random.default_rng(seed)
    values = random.standard_normal(numel) * 10.0 ** random.uniform(-spread, spread, numel)
    return torch.from_numpy(values.clip(-3e38, 3e38).astype(np.float32))


def has_same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def make_single_fragment_plan(*tensors: tuple[str, int]) -> FragmentPlan:
    """Return a plan of one fragment with these tensors in this order; each is (kind, number of values)."""
    infos = [TensorInfo(f"t{index:02}", (numel,), "float32", kind) for index, (kind, numel) in enumerate(tensors)]
    return make_plan(infos, 1, "balanced")


def add_contribution(sums: RunningSums, delta: Tensor, weight: float, scale: float = 1.0) -> None:
    """Add a contribution encoded in f32."""
    sums.add_encoded(get_codec("f32"), get_codec("f32").encode(delta), weight, scale)


def max_rounding_error(codec: Codec, x: Tensor) -> Tensor:
    """Return the upper bound of |x - decode(encode(x))| for each value."""
    if codec.name == "f32":
        return torch.zeros_like(x)
    if codec.name == "bf16":  # one rounding to 8 bits, or half the smallest denormal
        return x.abs().mul_(2.0**-8).clamp_(min=2.0**-133)
    assert isinstance(codec, BlockCodec)  # half a scale, plus the rounding of scale and products
    scales = codec.scales(codec.encode(x), x.numel()).float()
    return (scales * (0.5 + 2.0**-12)).repeat_interleave(codec.block_size)[: x.numel()]
