"""`Learner.published()`: the model is the published one inside the block and the learner's own afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from atoll.checkpoint.published_model import assemble_tensors, read_plan
from atoll.core.types import AdoptMode
from atoll.island.fragments import Buffer, FragmentTensors
from atoll.learner import published
from atoll.learner.api import Learner
from atoll.store.snapshots import STORE_FOLDER
from atoll.store.tensor_file import read_tensors
from atoll.tensors.plan import named_tensors
from tests.island.rank_runs import IslandSpec, RankedIsland, rank_file
from tests.learner.in_process import learner_of
from tests.learner.runs import Run, endless, model_file
from tests.learner.small_models import BATCH, Work, values, work

pytestmark = pytest.mark.usefixtures("no_leaked_threads")


def are_published(run: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether every fragment is the newest durable version or the one before.

    A paused learner may not have adopted the newest version. A syncer cannot be two versions ahead of the only
    learner. Three versions are stored.
    """
    plan = read_plan(run)
    for p in range(len(plan.fragments)):
        files = sorted((run / STORE_FOLDER / "fragments" / f"{p:03d}").glob("*.safetensors"))[-2:]
        assert files, f"no version of fragment {p}"
        durable = [assemble_tensors(plan, [(p, read_tensors(file)[1]["published"])]) for file in files]
        pieces = [piece for piece, _, _ in plan.spans(p)]
        is_one = [
            all(torch.equal(rows(each[piece.tensor], piece), rows(tensors[piece.tensor], piece)) for piece in pieces)
            for each in durable
        ]
        if not any(is_one):
            return False
    return True


def rows(tensor: Tensor, piece: Any) -> Tensor:
    found: Tensor = (tensor if tensor.dim() else tensor.unsqueeze(0))[piece.start : piece.stop]
    return found


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone().view(torch.uint8) for name, tensor in values(model).items() if tensor.dim()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def train_ahead(learner: Learner, job: Work, adopted: int = 9) -> None:
    """Train until this many versions are adopted and the model differs from the published one."""
    number = 0
    while learner.stats().adopted < adopted:
        learner.step(tokens=BATCH, loss=job.step(number))
        number += 1
    learner.step(tokens=BATCH, loss=job.step(number))


@pytest.mark.parametrize(("name", "dtype"), [("mixed", "float64"), ("plain", "bfloat16")])
def test_model_is_published_inside_the_block_and_bitwise_its_own_afterwards(tmp_path, name, dtype):
    job = work(name, 1, dtype)
    with Run(tmp_path, endless()) as run, learner_of(run, job, 1) as learner:
        train_ahead(learner, job)
        own = bits(job.model)
        with learner.published():
            assert are_published(tmp_path, values(job.model))
            assert not same(own, bits(job.model)), "the learner has not trained since its last adoption"
            job.model.train()
            if name == "mixed":
                job.model(torch.arange(8))  # BatchNorm changes its running averages, which are merged
        assert same(own, bits(job.model))
        assert not are_published(tmp_path, values(job.model))
        learner.step(tokens=BATCH, loss=job.step(0))


def test_exception_inside_the_block_is_propagated_and_the_model_is_restored(tmp_path):
    job = work("plain", 1)
    with Run(tmp_path, endless()) as run, learner_of(run, job, 1) as learner:
        train_ahead(learner, job)
        own = bits(job.model)
        with pytest.raises(ArithmeticError, match="in the evaluation"), learner.published():
            raise ArithmeticError("an error in the evaluation")
        assert same(own, bits(job.model))
        with learner.published():  # the block can be entered again
            assert are_published(tmp_path, values(job.model))


def test_step_and_nested_block_inside_published_are_refused(tmp_path):
    job = work("plain", 1)
    with Run(tmp_path, endless()) as run:
        learner = learner_of(run, job, 1)
        with pytest.raises(ValueError, match="before this learner has joined"), learner.published():
            pass
        with learner:
            train_ahead(learner, job)
            own = bits(job.model)
            with learner.published():
                with pytest.raises(ValueError, match=r"published\(\) inside of published\(\)"), learner.published():
                    pass
                with pytest.raises(ValueError, match=r"step inside of published\(\)"):
                    learner.step(tokens=BATCH)
                assert are_published(tmp_path, values(job.model)), "the refused calls changed the model"
            assert same(own, bits(job.model))


def test_parameter_frozen_after_the_join_is_restored_too(tmp_path):
    """Some frameworks freeze parameters for a while. These are still merged."""
    job = work("plain", 1)
    with Run(tmp_path, endless()) as run, learner_of(run, job, 1) as learner:
        train_ahead(learner, job)
        own = bits(job.model)
        job.model.requires_grad_(False)
        with learner.published():
            assert are_published(tmp_path, values(job.model))
        assert same(own, bits(job.model))
        job.model.requires_grad_(True)
        learner.step(tokens=BATCH, loss=job.step(0))


def _copy_in_f32(model: nn.Module, *_: object) -> dict[str, Tensor]:
    return {name: tensor.detach().float() for name, tensor in named_tensors(model).items()}


def _share_memory(model: nn.Module, *_: object) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in named_tensors(model).items()}


@pytest.mark.parametrize("invalid", [_copy_in_f32, _share_memory])
def test_the_tests_above_fail_for_an_inexact_copy(monkeypatch, tmp_path, invalid: Callable[..., Any]):
    monkeypatch.setattr(published, "_copy_own_values", invalid)
    with pytest.raises(AssertionError):
        test_model_is_published_inside_the_block_and_bitwise_its_own_afterwards(tmp_path, "mixed", "float64")


def test_the_tests_above_fail_for_a_fragment_that_is_not_loaded(monkeypatch, tmp_path):
    adopt = FragmentTensors.adopt

    def skip_fragment_1(fragment: FragmentTensors, mode: AdoptMode, value: Buffer, *rest: Any) -> None:
        if fragment.p != 1 or value is not fragment.adopted:
            adopt(fragment, mode, value, *rest)

    monkeypatch.setattr(FragmentTensors, "adopt", skip_fragment_1)
    with pytest.raises(AssertionError):
        test_model_is_published_inside_the_block_and_bitwise_its_own_afterwards(tmp_path, "plain", "bfloat16")


@pytest.mark.parametrize("shape", ["fsdp", "ddp"])
def test_all_ranks_of_an_island_load_the_same_published_model(tmp_path, shape):
    with Run(tmp_path, endless()) as run:
        island = RankedIsland(run, IslandSpec(1, shape))
        island.joined()
        island.command("go")
        run.until(run.merges(6), "a few merges")
        island.command("show")
        assert all(report["restored"] for report in island.expect("shown"))
        tensors = [load_file(path) for path in (model_file(tmp_path, 1), rank_file(tmp_path, 1, 1))]
        assert same(*tensors)
        assert are_published(tmp_path, tensors[0])
        island.command("go")
        run.until(run.merges(run.status()["merges"] + 3), "it trains on")
        run.end()
        island.finished(tmp_path)
