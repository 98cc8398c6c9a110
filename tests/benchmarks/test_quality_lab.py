"""The laboratory computes what the real protocol computes, on stacked tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from atoll.reference.data import Corpus
from atoll.reference.models import GPTConfig, build_model
from atoll.tensors.codecs import get_codec
from atoll.tensors.plan import describe_tensors, make_plan
from benchmarks import quality
from benchmarks.quality_lab.engine import Run, round_trip
from benchmarks.quality_lab.setting import make
from benchmarks.quality_lab.stacked import Layout, Stack
from benchmarks.quality_lab.tables import interval, paired

pytestmark = pytest.mark.filterwarnings("ignore:grad and param do not obey")  # both are columns of one matrix

TOKENS = 8_000

SHARED: dict[str, Any] = {
    "tokens": TOKENS,
    "k": 4,
    "h": 8,
    "outer_lr": 0.4,
    "outer_momentum": 0.85,
    "outer_ramp": 2,
    "up": "f32",
    "down": "f32",
}
"""Every learner is in every merge, and nothing is rounded."""


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("decoupled", {"merge": "radial"}),
        ("decoupled", {"merge": "average", "speeds": "1:1:0.5:0.5"}),
        ("diloco", {"merge": "average", "p": 1, "tau": 0, "adopt": "overwrite"}),
    ],
)
def test_laboratory_gives_loss_of_real_protocol(method: str, given: dict[str, Any]) -> None:
    real = quality.run_protocol(quality.Setting(method=method, batch=2, windows=256, **SHARED, **given), Corpus.load())
    found = Run(make(method, batch=2, seeds="0", **SHARED, **given)).execute(windows=256)
    assert found["merges"] == real["merges"]
    assert found["trained"] == real["trained"]
    assert found["losses"][0] == pytest.approx(real["loss"], rel=2e-5)
    assert found["losses_mean"][0] == pytest.approx(real["loss_mean"], rel=2e-5)


def test_laboratory_gives_loss_of_data_parallel_training() -> None:
    real = quality.run_plain(quality.Setting(method="ddp", tokens=TOKENS, beta2=0.99, windows=256), Corpus.load())
    found = Run(make("data-parallel", tokens=TOKENS, seeds="0")).execute(windows=256)
    assert found["losses"][0] == pytest.approx(real["loss"], rel=2e-5)


def test_stacked_mixture_of_experts_has_loss_and_gradients_of_reference_model() -> None:
    config = GPTConfig(layers=2, heads=2, width=16, context=8, experts=4, mlp_ratio=2)
    model = build_model(config, 0)
    layout = Layout(model, make_plan(describe_tensors(model), 4, "balanced"))
    stack = Stack(config, layout, layout.row_of(model).repeat(2, 1))
    x, y = torch.randint(0, 256, (2, 2, 3, 8), generator=torch.Generator().manual_seed(0))
    losses, gradient = stack.gradients([(0, 2)], x, y, clip=0.0)
    for row in range(2):
        model.zero_grad()
        loss = model(x[row], y[row])
        loss.backward()
        assert float(losses[row]) == pytest.approx(loss.item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found = layout.views(gradient)[name][row]
                torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-7)


def test_seeds_do_not_depend_on_those_beside_them() -> None:
    alone = Run(make(tokens=6_000, seeds="1", moments="both")).execute(windows=64)
    stacked = Run(make(tokens=6_000, seeds="0,1", moments="both")).execute(windows=64)
    assert stacked["losses"][1] == pytest.approx(alone["losses"][0], rel=2e-5)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_round_trip_is_that_of_codec(name: str) -> None:
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    by = get_codec(name)
    expected = torch.stack([by.decode(by.encode(row.contiguous()), 1000) for row in values])
    assert torch.equal(round_trip(values, name), expected)


def test_interval_of_paired_differences_is_that_of_student() -> None:
    gaps = paired({0: 1.01, 1: 2.04, 2: 3.09}, {0: 1.0, 1: 2.0, 2: 3.0})
    assert gaps == pytest.approx([1.0, 2.0, 3.0])
    assert interval(gaps) == pytest.approx(4.303 / math.sqrt(3))
