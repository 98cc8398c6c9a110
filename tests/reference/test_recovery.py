"""Tests of `atoll train --resume` on more and fewer learners, `atoll train --restore`, and `atoll snapshot`."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.checkpoint.published_model import read_published_tensors
from atoll.checkpoint.restore import INITIAL_FOLDER, parse_restore_source, restore_run
from atoll.cli.main import main
from atoll.core.protocol import Lease, Send
from atoll.reference.job_settings import JobSettings
from atoll.reference.supervisor import run_settings_for
from atoll.store.learner_parts import list_parts, part_path
from atoll.store.run_settings import CONFIG_FILE
from atoll.store.snapshots import list_snapshots
from atoll.store.tensor_file import read_tensors
from atoll.tape.files import RunTapes
from atoll.transport.endpoint import ADDRESS_FILE
from tests.cli.test_train import assert_tapes_are_sound, small
from tests.reference.small_jobs import LIMIT_S, find_processes, small_text, wait_for_status
from tests.shared_runs import make_once

LONG = pytest.mark.long
STEP = 2 * 16  # tokens per step of one learner
TOKENS = 2 * 200 * STEP


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small_text(tmp_path_factory.mktemp("data") / "text")


@contextmanager
def training(run: Path, arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "atoll", "train", "--out", str(run), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=300)


def read_json_output(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def stopped(text, tmp_path_factory):
    """Run of two learners that was stopped with Ctrl-C after a requested snapshot: its directory and the snapshot."""
    folder, snapshot = make_once(tmp_path_factory, "stopped", lambda folder: train_and_stop(text, folder / "run"))
    return folder / "run", snapshot


def train_and_stop(text: Path, run: Path) -> dict[str, Any]:
    arguments = small(text, "--learners", "2", "--tokens", str(TOKENS), "--kill", "none", "--snapshot-every", "0")
    with training(run, [*arguments, "--step-time", "20ms"]) as process:
        wait_for_status(process, run, "it trains", lambda status: status["merges"] > 8 and status["alive"] == 2)
        assert (run / ADDRESS_FILE).stat().st_mode & 0o777 == 0o600
        token = json.loads((run / ADDRESS_FILE).read_text())["token"]
        command = [sys.executable, "-m", "atoll", "snapshot", str(run), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr
        assert token not in done.stdout + done.stderr
        snapshot: dict[str, Any] = json.loads(done.stdout)
        assert (len(snapshot["parts"]), snapshot["merges"] > 8) == (2, True), snapshot
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
    assert find_processes(run) == []
    assert not (run / ADDRESS_FILE).exists(), "the file with the token still exists"
    for log in (run / "logs").iterdir():
        assert token not in log.read_text(encoding="utf-8", errors="replace"), f"the token is in {log.name}"
    return snapshot


def copy_run(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "run"))


def test_snapshot_list_has_versions_and_parts(stopped, capsys):
    run, snapshot = stopped
    assert main(["snapshot", str(run), "--list", "--json"]) == 0
    # A snapshot that was taken while a learner was still joining is listed too, without that learner.
    listed = {each["snapshot"]: each for each in read_json_output(capsys)["snapshots"]}[snapshot["snapshot"]]
    assert listed["versions"] == snapshot["versions"]
    assert [part["learner"] for part in listed["parts"]] == [1, 2]
    assert all(part["bytes"] > 1000 for part in listed["parts"])
    assert main(["snapshot", str(run), "--list"]) == 0
    shown = capsys.readouterr().out
    assert f"snapshot {snapshot['snapshot']}" in shown
    assert "learner 2: step" in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["snapshot"], "which run?"),
        (["snapshot", "--list"], "--list needs the directory of a run"),
        (["snapshot", "RUN"], "runs on this machine: take snapshots while it runs"),
        (["snapshot", "RUN", "--syncer", "a:1"], "not both"),
        (["snapshot", "--syncer", "a"], "give host:port"),
        (["snapshot", "--syncer", "127.0.0.1:9"], "no syncer answers at 127.0.0.1:9"),
        (["snapshot", "nowhere"], "is not the directory of a run"),
        (["snapshot", "DATA", "--list"], "has no store"),
        (["train", "--out", "NEW", "--restore", "nowhere"], "no run of atoll train"),
        (["train", "--out", "NEW", "--restore", "RUN@77"], "has no snapshot 77; it has"),
        (["train", "--out", "NEW", "--restore", "RUN@x"], "the @ needs a snapshot number"),
        (["train", "--out", "NEW", "--restore", "RUN", "--model", "1m"], "--model has no effect with --restore"),
        (["train", "--out", "NEW", "--restore", "RUN", "--resume"], "give only one of them"),
        (["train", "--out", "NEW", "--restore", "RUN", "--tokens", "32"], "so nothing is left to train"),
        (["train", "--out", "DATA", "--restore", "RUN"], "is there already"),
        (["train", "--out", "RUN", "--resume", "--lr", "1"], "--lr has no effect with --resume"),
    ],
)
def test_impossible_request_is_refused_with_one_line(stopped, text, tmp_path, capsys, arguments, sentence):
    names = {"RUN": str(stopped[0]), "NEW": str(tmp_path / "new"), "DATA": str(text)}
    assert main([names.get(each, each.replace("RUN@", f"{names['RUN']}@")) for each in arguments]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("learners", [1, pytest.param(2, marks=LONG), pytest.param(3, marks=LONG)])
def test_stopped_run_resumes_from_its_parts_on_fewer_equal_and_more_learners(stopped, tmp_path, capsys, learners):
    source, snapshot = stopped
    run = copy_run(source, tmp_path)
    assert main(["train", "--out", str(run), "--resume", "--learners", str(learners), "--json"]) == 0
    report = read_json_output(capsys)
    sentences = [sentence for island in report["islands"] for sentence in island["inner_state"][-1:]]
    resumed = [s for s in sentences if s != "the run is new: no learner has optimizer state yet"]
    saved = [s for s in resumed if s.endswith(f"saved in snapshot {snapshot['snapshot']}")]
    assert saved, sentences
    assert all(s in saved or s.startswith("optimizer state from learner") for s in resumed), sentences
    assert len(resumed) >= learners
    assert report["tokens"]["trained"] >= TOKENS
    assert report["eval_loss"] < report["eval_loss_before"]
    assert report["learners"] == max(2, learners)
    assert_tapes_are_sound(run)


@pytest.mark.parametrize("learners", [pytest.param(None, marks=LONG), 1, pytest.param(3, marks=LONG)])
def test_snapshot_is_restored_into_a_new_run(stopped, tmp_path, capsys, learners):
    source, snapshot = stopped
    run = tmp_path / "new"
    number = f"@{snapshot['snapshot']}" if learners else ""
    arguments = ["--learners", str(learners)] if learners else []
    budget = sum(part["trained"] for part in snapshot["parts"]) + 300 * STEP
    arguments += ["--tokens", str(budget)]
    assert main(["train", "--out", str(run), "--restore", f"{source}{number}", *arguments, "--json"]) == 0
    report = read_json_output(capsys)
    assert len(report["islands"]) == (learners or 2)
    first = report["islands"][0]["inner_state"][0]
    assert first.endswith(f"saved in snapshot {snapshot['snapshot']}") or first.startswith(
        "optimizer state from learner"
    )
    tokens = report["tokens"]
    assert tokens["trained"] == tokens["merged"] + tokens["pending"] + tokens["dropped"]
    own = report["steps"] * STEP
    assert budget <= tokens["trained"] < budget + 200 * STEP
    assert own < tokens["trained"] - 8 * STEP, "the tokens of the snapshot were trained again"
    assert report["eval_loss"] < report["eval_loss_before"]
    assert_tapes_are_sound(run)
    assert main(["replay", str(run)]) == 0
    assert "the model is bit-identical" in capsys.readouterr().out
    assert_replay_needs_the_initial_state(run, capsys)
    assert_continues_with_the_data(run, source, snapshot["snapshot"])


def assert_replay_needs_the_initial_state(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a restored run is not replayed without its initial state."""
    (run / INITIAL_FOLDER / "000.safetensors").unlink()
    assert main(["replay", str(run)]) == 0
    assert "cannot read the state from which the run was restored" in capsys.readouterr().out
    shutil.rmtree(run / INITIAL_FOLDER)
    assert main(["replay", str(run)]) == 0
    assert "or the run was restored from another one" in capsys.readouterr().out


def assert_continues_with_the_data(run: Path, source: Path, number: int) -> None:
    """Check that samples merged before the snapshot are not trained again, and that unmerged ones are trained first."""
    cut = next(each.record for each in list_snapshots(source) if each.number == number)
    assert cut is not None
    assert cut.next_sample > 0
    leases = [e.envelope.body for entry in RunTapes(run).merged_entries() for e in entry.effects if type(e) is Send]
    sent = [lease for lease in leases if type(lease) is Lease]
    assert sent, "no samples were leased"
    for lease in sent:
        inside = any(begin <= lease.begin and lease.end <= end for begin, end in cut.unmerged)
        assert inside or lease.begin >= cut.next_sample, f"{lease} was trained before the snapshot"
    assert min(lease.begin for lease in sent) == min([begin for begin, _ in cut.unmerged] or [cut.next_sample])


def test_restored_run_starts_with_the_values_of_the_snapshot(stopped, tmp_path):
    run, snapshot = stopped
    source = parse_restore_source(str(run))
    lines: list[str] = []
    done = restore_run(
        source, tmp_path / "new", run_settings_for(JobSettings.load(run / CONFIG_FILE), "new-1"), lines.append
    )
    assert 0 < done < TOKENS
    assert "optimizer state of 2 learners" in lines[-1]
    assert list_parts(tmp_path / "new") == {1: [snapshot["snapshot"]], 2: [snapshot["snapshot"]]}
    restored = read_published_tensors(tmp_path / "new")
    plan = source.settings.plan
    assert plan is not None
    for p in range(len(plan.fragments)):
        path = run / "store" / "snapshots" / f"{snapshot['snapshot']:09d}" / f"{p:03d}.safetensors"
        flat = read_tensors(path)[1]["published"]
        for piece, begin, end in plan.spans(p):
            value = restored[piece.tensor]
            rows = (value if value.dim() else value.unsqueeze(0))[piece.start : piece.stop]
            assert torch.equal(rows.flatten(), flat[begin:end])


def test_damaged_snapshot_and_damaged_part_are_reported(stopped, tmp_path, capsys):
    source, snapshot = stopped
    run = copy_run(source, tmp_path)
    for number in list_parts(run)[2]:  # in every snapshot: restore uses an older part if one is damaged
        part = part_path(run, 2, number)
        part.write_bytes(part.read_bytes()[:-1])
    lines: list[str] = []
    restore_run(
        parse_restore_source(str(run)),
        tmp_path / "new",
        run_settings_for(JobSettings.load(run / CONFIG_FILE), "new-1"),
        lines.append,
    )
    assert any("truncated" in line for line in lines)
    assert "optimizer state of 1 learners" in lines[-1]
    path = run / "store" / "snapshots" / f"{snapshot['snapshot']:09d}" / "001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()  # it is a hard link to a stored version
    path.write_bytes(data)
    assert main(["train", "--out", str(tmp_path / "newer"), "--restore", str(run)]) == 2
    assert "001.safetensors: the digest does not match" in capsys.readouterr().err
    assert not (tmp_path / "newer").exists()
    record = path.with_name("record.json")
    record.write_bytes(record.read_bytes()[:-3])
    assert main(["train", "--out", str(tmp_path / "newer"), "--restore", str(run)]) == 2
    assert "record.json" in capsys.readouterr().err
    assert [info.record for info in list_snapshots(run) if info.number == snapshot["snapshot"]] == [None]
