"""LoRA: adapters are merged, the base model stays local, and learners with another base model are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from atoll.checkpoint.published_model import read_plan, read_published_tensors
from atoll.errors import LearnerRefusedError
from atoll.integrations.transformers import AtollCallback
from atoll.learner.api import Learner
from atoll.learner.loop_check import CHECK_INTERVAL_STEPS
from atoll.tensors.plan import describe_tensors, named_tensors
from tests.integrations.small_texts import gpt2, trainer
from tests.learner.runs import LIMIT_S, Run, config, endless
from tests.learner.test_published import same

pytestmark = pytest.mark.usefixtures("no_leaked_threads", "one_thread")


def with_lora(base: Any, rank: int = 2, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"target_modules": ["c_attn"], "task_type": "CAUSAL_LM", "fan_in_fan_out": True}
    return get_peft_model(base, LoraConfig(r=rank, lora_alpha=4, **settings))


def values(model: Any, trained: bool) -> dict[str, Tensor]:
    found = {name: each for name, each in named_tensors(model).items() if each.requires_grad is trained}
    return {name: each.detach().clone() for name, each in found.items()}


def callback(run: Run, number: int) -> AtollCallback:
    return AtollCallback(run.address, learner=number, join_timeout_s=LIMIT_S)


def test_only_adapters_are_merged_and_the_base_is_bitwise_unchanged(tmp_path):
    model = with_lora(gpt2())
    base, adapters = values(model, False), values(model, True)
    assert len(adapters) == 4
    assert all("lora_" in name for name in adapters)
    with Run(tmp_path / "run", config(budget_merges=9)) as run:
        atoll_ = callback(run, 1)
        trainer(tmp_path, atoll_, model=model).train()
        assert atoll_.learner.finished
        plan = read_plan(run.directory)
        numbers = sum(each.numel() for each in adapters.values())
        assert plan.total_numel == numbers
        merged = {piece.tensor for pieces in plan.fragments for piece in pieces}
        assert merged == set(adapters)
        stats = atoll_.learner.stats()
        fragment_bytes = 2 * max(plan.numel(p) for p in range(len(plan.fragments)))  # deltas are bf16
        messages = 500 * (stats.steps + stats.contributed)
        assert 0 < stats.bytes_up < 4 * numbers + fragment_bytes * stats.contributed + messages
        assert same(base, values(model, False))
        assert not same(adapters, values(model, True))
        assert same(read_published_tensors(run.directory), values(model, True))


def another_base() -> Any:
    base = gpt2()
    with torch.no_grad():
        base.transformer.h[1].mlp.c_fc.weight[0, 0] += 1e-3
    return with_lora(base)


@pytest.mark.long
@pytest.mark.parametrize(
    ("other", "cause"),
    [
        (another_base, r"different model.*h\.1\.mlp\.c_fc\.weight"),
        (lambda: with_lora(gpt2(), rank=4), r"different model.*lora_A"),
    ],
    ids=["another base", "another rank"],
)
def test_an_island_with_another_base_or_rank_is_refused_with_the_first_tensor_that_differs(tmp_path, other, cause):
    with Run(tmp_path / "run", endless()) as run:
        first = callback(run, 1)
        trainer(tmp_path, first, model=with_lora(gpt2()), max_steps=2).train()
        with pytest.raises(LearnerRefusedError, match=cause):
            trainer(tmp_path, callback(run, 2), model=other(), max_steps=2).train()
        third = callback(run, 3)  # initial adapters may differ: those of the run replace them
        trainer(tmp_path, third, model=with_lora(gpt2(), seed=7), max_steps=2).train()
        assert third.learner.stats().steps == 2


def test_adapter_added_after_joining_is_an_error(tmp_path):
    model = with_lora(gpt2())
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    with Run(tmp_path, endless()) as run, Learner(model, optimizer, run.address, join_timeout_s=LIMIT_S) as learner:
        learner.step(tokens=1)
        model.add_adapter("second", model.peft_config["default"])
        model.set_adapter("second")
        for _ in range(CHECK_INTERVAL_STEPS - 1):
            learner.step(tokens=1)
        with pytest.raises(ValueError, match=r"was added after the join: .*lora_A\.second\.weight"):
            learner.step(tokens=1)


def test_buffers_of_frozen_modules_are_not_merged():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3))
    model[1].requires_grad_(False)
    kinds = {info.name: info.kind for info in describe_tensors(model)}
    assert "1.running_mean" not in kinds
    assert kinds["1.weight"] == "frozen"
    assert kinds["2.running_mean"] == "buffer"
