"""Tensors without dimensions or with unusual dtypes: each is saved with the final model, or refused at the join."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atoll.checkpoint.formats import read_run_model
from atoll.checkpoint.model_file import write_tensors
from atoll.checkpoint.published_model import assemble_tensors
from atoll.cli.main import main
from atoll.learner.api import Learner
from atoll.reference.tape_executor import initial_values
from atoll.store.snapshots import list_snapshots
from atoll.syncer.initial_model import INIT_FILE
from atoll.tensors.plan import describe_tensors, make_plan
from tests.learner.in_process import learner_of, train
from tests.learner.runs import LIMIT_S, Run, config
from tests.learner.small_models import Work

pytestmark = pytest.mark.usefixtures("no_leaked_threads")


class Clip(nn.Module):
    """A parameter and a buffer without dimensions, such as `logit_scale` of CLIP."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("offset", torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.offset.mul_(0.9).add_(0.1 * x.mean())
        out: Tensor = self.logit_scale * self.first(x) + self.offset
        return out


def clip(seed: int) -> Work:
    torch.manual_seed(seed)
    model = Clip()
    return Work(model, torch.optim.AdamW(model.parameters(), lr=1e-2), seed)


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    assert main([*map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.long
def test_0_dimensional_parameters_and_buffers_are_saved_exported_and_imported(tmp_path, capsys):
    run, job = tmp_path / "run", clip(1)
    command = [sys.executable, "-m", "atoll", "syncer", "--out", str(run), "--port", "0", "--tokens", "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as syncer:
        try:
            assert syncer.stdout is not None
            address = syncer.stdout.readline().split()[-1].rstrip(".")
            with Learner(job.model, job.optimizer, address, run_directory=run, join_timeout_s=LIMIT_S) as learner:
                train(learner, job)
            _, errors = syncer.communicate(timeout=LIMIT_S)
            assert syncer.returncode == 0, errors
        finally:
            syncer.kill()
    trained = job.model.state_dict()
    model = load_file(run / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in model.items()} == {
        "first.bias": (4,),
        "first.weight": (4, 8),
        "logit_scale": (),
        "offset": (),
    }
    assert all(torch.equal(trained[name], value) for name, value in model.items())
    assert trained["logit_scale"].item() != 1.5
    (run / "model.safetensors").unlink()  # so that the store is read
    for to in ("safetensors", "dcp"):
        exported = report(capsys, "export", run, "--to", to, "--out", tmp_path / f"model.{to}")
        imported = report(capsys, "import", tmp_path / f"model.{to}", "--out", tmp_path / f"of-{to}.safetensors")
        assert exported["digest"] == imported["digest"]
    assert torch.equal(load_file(tmp_path / "of-dcp.safetensors")["logit_scale"], trained["logit_scale"])


def test_0_dimensional_tensors_are_in_checkpoints_snapshots_and_the_published_model(tmp_path):
    initial = {"first.bias": torch.ones(4), "first.weight": torch.ones(4, 8), "logit_scale": torch.tensor(3.0)}
    save_file(initial | {"offset": torch.tensor(0.5)}, tmp_path / INIT_FILE)
    job = clip(1)
    with Run(tmp_path, config(snapshot_every_merges=3)) as run:
        with learner_of(run, job, 1) as learner:
            assert job.model.get_parameter("logit_scale").item() == 3.0
            train(learner, job)
        assert run.syncer.expect("ended") is True
        published = load_file(tmp_path / "published.safetensors")
        assert torch.equal(published["logit_scale"], job.model.state_dict()["logit_scale"])
        run.assert_clean()
    number = max(info.number for info in list_snapshots(tmp_path) if info.record is not None)
    assert read_run_model(tmp_path, number).tensors["logit_scale"].shape == ()


# --------------------------------------------------------------------------------------------------------------------
# Dtypes


class Odd(nn.Module):
    """A layer and one tensor of another dtype."""

    def __init__(self, tensor: Tensor, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        if kind == "buffer":
            self.register_buffer("odd", tensor)
        else:
            self.odd = nn.Parameter(tensor, requires_grad=kind == "trained")


@pytest.mark.parametrize(
    ("kind", "instead"),
    [("trained", "or freeze it, and it stays local"), ("buffer", "or register it with persistent=False")],
)
def test_complex_tensors_are_refused_when_joining(tmp_path, kind, instead):
    model = Odd(torch.zeros(3, dtype=torch.complex64), kind)
    job = Work(model, torch.optim.AdamW(model.first.parameters()), 1)
    with Run(tmp_path) as run:
        with (
            pytest.raises(ValueError, match=rf"odd is complex64, .* torch\.view_as_real .*; {instead}"),
            learner_of(run, job, 1),
        ):
            pass
        assert run.status()["founded"] is False


MERGED = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
REFUSED = ("complex64", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2")
LOCAL = ("int64", "int8", "uint8", "bool")


def saved(model: nn.Module, path: Path) -> dict[str, Tensor]:
    """Save the model as `atoll syncer` does at the end of a run, and return the tensors of the file."""
    plan = make_plan(describe_tensors(model), 2, "balanced")
    return load_file(write_tensors(assemble_tensors(plan, enumerate(initial_values(model, plan))), path))


CASES = [(kind, name) for kind in ("frozen", "buffer") for name in (*MERGED, *REFUSED, *LOCAL)]


@pytest.mark.parametrize(("kind", "name"), CASES + [("trained", name) for name in (*MERGED, *REFUSED)])
def test_no_dtype_that_may_join_breaks_the_final_save(tmp_path, kind, name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip("this version of torch has no such dtype")
    model = Odd(torch.zeros(48, dtype=torch.uint8).view(dtype), kind)
    if kind != "frozen" and name in REFUSED:
        with pytest.raises(ValueError, match=f"odd is {name}, which cannot be merged and saved"):
            describe_tensors(model)
        return
    found = saved(model, tmp_path / "model.safetensors")
    assert ("odd" in found) is (kind != "frozen" and name in MERGED)
    assert "odd" not in found or found["odd"].dtype == dtype
