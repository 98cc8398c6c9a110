"""A run created from a checkpoint: every learner starts from it, and its own initial weights are ignored."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from atoll.errors import LearnerRefusedError
from atoll.syncer.initial_model import INIT_FILE, load_initial_values
from atoll.tensors.plan import describe_tensors, make_plan, named_tensors
from tests.learner.in_process import learner_of
from tests.learner.runs import Run
from tests.learner.small_models import Work, values, work

pytestmark = pytest.mark.usefixtures("no_leaked_threads")


def make_checkpoint(job: Work, **changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint with other values. `changes` replaces tensors, or removes them (None)."""
    generator = torch.Generator().manual_seed(99)
    found = {
        name: (torch.rand(tensor.shape, generator=generator) + 0.5).to(tensor.dtype)
        for name, tensor in named_tensors(job.model).items()
    }
    return {name: value for name, value in (found | changes).items() if value is not None}


@pytest.mark.parametrize(("name", "shards"), [("plain", 0), ("mixed", 0), ("plain", 2)])
def test_every_learner_starts_from_checkpoint(tmp_path, name, shards):
    checkpoint = make_checkpoint(work(name))
    save_file(checkpoint, tmp_path / INIT_FILE)
    synced = [tensor.name for tensor in describe_tensors(work(name).model) if tensor.is_synced]
    first, second = work(name, seed=1), work(name, seed=2)
    with Run(tmp_path, shards=shards) as run, learner_of(run, first, 1), learner_of(run, second, 2):
        for job in (first, second):
            tensors = named_tensors(job.model)
            assert all(torch.equal(tensors[tensor], checkpoint[tensor]) for tensor in synced)


def test_frozen_tensor_of_checkpoint_is_ignored(tmp_path):
    job = work("mixed", seed=1)
    before = values(job.model)["frozen.weight"].clone()
    save_file(make_checkpoint(job), tmp_path / INIT_FILE)
    with Run(tmp_path) as run, learner_of(run, job, 1):
        assert torch.equal(values(job.model)["frozen.weight"], before)


def test_buffers_of_frozen_module_in_checkpoint_are_ignored(tmp_path):
    """The plan does not have these buffers, and a checkpoint of the full model does."""
    job = work("mixed", seed=1)
    job.model.get_submodule("norm").requires_grad_(False)
    checkpoint = make_checkpoint(job)
    save_file(checkpoint, tmp_path / INIT_FILE)
    with Run(tmp_path) as run, learner_of(run, job, 1):
        tensors = named_tensors(job.model)
        assert torch.equal(tensors["embedding.weight"], checkpoint["embedding.weight"])
        assert torch.equal(tensors["norm.running_var"], torch.ones(12))
    plan = make_plan(describe_tensors(job.model), 2, "balanced")
    save_file(checkpoint | {"norms.running_var": torch.ones(12)}, tmp_path / INIT_FILE)
    with pytest.raises(ValueError, match=r"it has 'norms\.running_var'"):
        load_initial_values(tmp_path, plan)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"first.bias": None}, "is of another model: it lacks 'first.bias'; make it again with atoll import"),
        ({"more": torch.ones(1)}, "is of another model: it has 'more'"),
        ({"last.bias": None, "end.bias": torch.ones(4)}, "it lacks 'last.bias' and has 'end.bias'"),
        ({"first.bias": torch.ones(5)}, r"first.bias is \(5,\), the model has \(24,\)"),
        ({"first.bias": torch.full((24,), torch.inf)}, "holds values that are not finite"),
    ],
)
def test_make_checkpoint_another_model_creates_no_run(tmp_path, changes, sentence):
    job = work()
    save_file(make_checkpoint(job, **changes), tmp_path / INIT_FILE)
    with Run(tmp_path) as run:
        with pytest.raises(LearnerRefusedError, match=sentence), learner_of(run, job, 1):
            pass
        assert not (tmp_path / "store/run.json").exists()


def test_damaged_checkpoint_is_reported(tmp_path):
    plan = make_plan(describe_tensors(work().model), 2, "balanced")
    assert load_initial_values(tmp_path, plan) is None
    (tmp_path / INIT_FILE).write_bytes(b"\x10\0\0\0\0\0\0\0this is not JSON")
    with pytest.raises(ValueError, match="is damaged"):
        load_initial_values(tmp_path, plan)
