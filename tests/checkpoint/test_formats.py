"""Export, import and --init: models keep their bits in every format."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import load

from atoll.checkpoint.formats import read_checkpoint, read_run_model
from atoll.checkpoint.model_file import MODEL_FILE, model_digest, tensors_digest
from atoll.checkpoint.published_model import assemble_tensors, read_plan
from atoll.cli.main import main
from atoll.core.protocol import SnapshotRecord
from atoll.reference.job import start_job
from atoll.reference.saved_models import load_model
from atoll.store.tensor_file import read_tensors
from atoll.store.version_store import Store
from atoll.syncer.initial_model import INIT_FILE
from tests.reference.small_jobs import load_corpus, silent_view, small_settings, small_text


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the directory and the report of a run with two learners."""
    folder = tmp_path_factory.mktemp("checkpoints")
    settings = small_settings(small_text(folder / "text"))
    report = start_job(settings, folder / "run", silent_view()[0], load_corpus(settings))
    return folder / "run", report


def run_command(capsys, *arguments) -> dict:
    """Run a command that succeeds. Return its JSON output."""
    assert main([*map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    output: dict = json.loads(capsys.readouterr().out)
    return output


def run_failing_command(capsys, *arguments) -> str:
    """Run a command with a usage error. Return its error output."""
    assert main([*map(str, arguments)]) == 2
    return str(capsys.readouterr().err)


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_exported_and_imported_model_equals_the_published_one(finished, tmp_path, capsys, to):
    run, report = finished
    exported = run_command(capsys, "export", run, "--to", to, "--out", tmp_path / "out" / f"model.{to}")
    imported = run_command(capsys, "import", tmp_path / "out" / f"model.{to}", "--out", tmp_path / "start.safetensors")
    assert exported["digest"] == imported["digest"] == model_digest(load_model(run)[1]) == report.final_digest
    assert exported["which"] == "the final model"
    assert tensors_digest(load_file(tmp_path / "start.safetensors")) == exported["digest"]
    with safe_open(tmp_path / "start.safetensors", framework="pt") as file:
        assert file.metadata()["digest"] == exported["digest"]


def test_export_of_an_unfinished_run_has_its_newest_published_versions(finished, tmp_path, capsys):
    run, report = finished
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / MODEL_FILE).unlink()
    exported = run_command(capsys, "export", tmp_path / "run", "--out", tmp_path / "model.safetensors")
    assert exported["digest"] == report.final_digest
    assert "the run is not finished" in exported["which"]


def test_export_of_a_snapshot_has_the_values_of_its_cut(finished, tmp_path, capsys):
    """The test writes the snapshot, of versions before the newest: the run is too short to save one reliably."""
    run = shutil.copytree(finished[0], tmp_path / "run")
    with Store.open(run / "store") as store:
        fragments = range(len(read_plan(run).fragments))
        older = tuple(sorted((run / "store/fragments" / f"{p:03d}").iterdir())[-2] for p in fragments)
        store.write(SnapshotRecord(7, tuple(int(path.stem) for path in older), (), (), ()))
    exported = run_command(capsys, "export", run, "--snapshot", 7, "--out", tmp_path / "cut.safetensors")
    values = ((p, read_tensors(path)[1]["published"]) for p, path in enumerate(older))
    cut = assemble_tensors(read_plan(run), values)
    assert exported["which"] == "snapshot 7"
    assert exported["digest"] == tensors_digest(cut) != finished[1].final_digest


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_exported_distributed_checkpoint_is_loaded_by_torch(finished, tmp_path, capsys):
    run, _ = finished
    run_command(capsys, "export", run, "--to", "dcp", "--out", tmp_path / "dcp")
    _, model = load_model(run)
    state = {name: torch.zeros_like(tensor) for name, tensor in read_run_model(run).tensors.items()}
    load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert tensors_digest(state) == model_digest(model)


@pytest.mark.long
def test_new_run_starts_from_the_model_of_another_run(finished, tmp_path, capsys):
    """Replay recomputes the new run from its initial model, so it gives the same bits only with the same file."""
    run, report = finished
    data = json.loads((run / "config.json").read_text())["data"]
    options = ("--data", data, "--model", "100k", "--context", "16", "--batch", "2", "--eval-tokens", "256")
    schedule = ("--learners", "2", "--kill", "none", "--every", "8", "--fragments", "4", "--inner", "adamw")
    warm = run_command(
        capsys, "train", "--init", run, "--out", tmp_path / "warm", *options, *schedule, "--tokens", 2 * 2 * 16 * 40
    )
    assert warm["eval_loss_before"] == pytest.approx(report.eval_loss)
    assert tensors_digest(load_file(tmp_path / "warm" / INIT_FILE)) == report.final_digest
    assert main(["replay", str(tmp_path / "warm")]) == 0
    (tmp_path / "warm" / INIT_FILE).unlink()
    assert main(["replay", str(tmp_path / "warm")]) != 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "RUN", "--to", "transformers", "--out", "new"], "transformers has no architecture for the model"),
        (["export", "RUN", "--to", "onnx", "--out", "new"], "unknown format 'onnx'; use one of safetensors, dcp"),
        (["export", "RUN", "--out", "old.safetensors"], "exists and is not overwritten"),
        (["export", "RUN", "--to", "dcp", "--out", "."], "exists and is not overwritten"),
        (["export", "RUN", "--snapshot", "77", "--out", "new"], "has no complete snapshot 77; it has "),
        (["export", "gone", "--out", "new"], "gone: no such run directory"),
        (["export", "empty", "--out", "new"], "empty has no model yet: no learner has joined"),
        (["import", "gone", "--out", "new.safetensors"], "gone: no such checkpoint"),
        (["import", "empty", "--out", "new.safetensors"], "empty contains neither model.safetensors, "),
        (["import", "RUN", "--out", "old.safetensors"], "exists already and is not overwritten"),
        (["import", "RUN", "--out", "new.bin"], "end --out with .safetensors"),
        (["import", "RUN", "--prefix", "model.", "--out", "new.safetensors"], "no parameters with prefix 'model.'"),
        (["import", "RUN", "--rename", "a=b", "--out", "new.safetensors"], "--rename 'a=b': give NEW=OLD"),
        (["import", "text.pt", "--out", "new.safetensors"], "neither safetensors nor tensors of torch.save"),
        (["import", "text.safetensors", "--out", "new.safetensors"], "is not a safetensors file, or is damaged"),
        (
            ["train", "--init", "old.safetensors", "--out", "new", "--model", "100k"],
            ": it is a file of another model",
        ),
        (["train", "--init", "RUN", "--method", "ddp", "--out", "new"], "--init has no effect with method ddp"),
        (["syncer", "--init", "gone", "--out", "new"], "gone: no such checkpoint"),
        (["syncer", "--init", "RUN", "--resume", "--out", "RUN"], "--init has no effect with --resume"),
    ],
)
def test_failed_command_explains_the_error_and_leaves_no_files(
    finished, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    save_file({"x": torch.ones(2)}, tmp_path / "old.safetensors")
    for name in ("text.pt", "text.safetensors"):
        (tmp_path / name).write_text("text, not a model")
    before = sorted(tmp_path.iterdir())
    arguments = [str(finished[0]) if argument == "RUN" else argument for argument in arguments]
    assert message in run_failing_command(capsys, *arguments)
    assert sorted(tmp_path.iterdir()) == before


def test_torch_save_files_and_sharded_models_are_read(tmp_path):
    model = {"a.weight": torch.rand(3, 2), "b": torch.rand(4).to(torch.bfloat16), "seen": torch.tensor(7)}
    torch.save({"model": model, "step": 12}, tmp_path / "saved.pt")
    checkpoint = read_checkpoint(tmp_path / "saved.pt", "model.", ["c=b"])
    assert (list(checkpoint.tensors), checkpoint.skipped) == (["a.weight", "c"], ("seen",))
    assert checkpoint.tensors["c"].equal(model["b"])
    folder = tmp_path / "several"
    folder.mkdir()
    save_file({"a.weight": model["a.weight"]}, folder / "1.safetensors")
    save_file({"b": model["b"]}, folder / "2.safetensors")
    weight_map = {"a.weight": "1.safetensors", "b": "2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert tensors_digest(read_checkpoint(folder).tensors) == tensors_digest({k: model[k] for k in ("a.weight", "b")})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../saved.pt"}}))
    with pytest.raises(ValueError, match="which is not a file in that directory"):
        read_checkpoint(folder)
