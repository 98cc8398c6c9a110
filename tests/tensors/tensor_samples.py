"""Numbers from seeds, and plans of one fragment, for the tests of codecs, merge and outer step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.tensors.codecs import BlockCodec, Codec, get_codec
from atoll.tensors.plan import FragmentPlan, TensorInfo, make_plan
from atoll.tensors.robust_merge import RunningSums


def random_tensor(seed: int, numel: int, spread: float = 0.0) -> Tensor:
    """Numbers of both signs up to 3e38; with `spread` their magnitudes differ by so many powers of ten."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(numel) * 10.0 ** random.uniform(-spread, spread, numel)
    return torch.from_numpy(values.clip(-3e38, 3e38).astype(np.float32))


def has_same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def make_single_fragment_plan(*tensors: tuple[str, int]) -> FragmentPlan:
    """One fragment: (kind, values) of tensors that lie in it in this order."""
    infos = [TensorInfo(f"t{place:02}", (numel,), "float32", kind) for place, (kind, numel) in enumerate(tensors)]
    return make_plan(infos, 1, "balanced")


def add_contribution(sums: RunningSums, delta: Tensor, weight: float, scale: float = 1.0) -> None:
    """Add a contribution that travelled in f32."""
    sums.add_encoded(get_codec("f32"), get_codec("f32").encode(delta), weight, scale)


def max_rounding_error(coder: Codec, x: Tensor) -> Tensor:
    """For each value the bound of |x - decode(encode(x))|."""
    if coder.name == "f32":
        return torch.zeros_like(x)
    if coder.name == "bf16":  # one rounding to 8 bits, or half the smallest denormal
        return x.abs().mul_(2.0**-8).clamp_(min=2.0**-133)
    assert isinstance(coder, BlockCodec)  # half a scale, and a little for the rounding of scale and products
    scales = coder.scales(coder.encode(x), x.numel()).float()
    return (scales * (0.5 + 2.0**-12)).repeat_interleave(coder.block_size)[: x.numel()]
