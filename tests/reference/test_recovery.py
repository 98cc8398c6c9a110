"""`atoll train` stopped, resumed on more and on fewer islands, restored into a new run; `atoll snapshot` beside it."""

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
from tests.reference.small_jobs import LIMIT_S, processes_of, small_text, until
from tests.shared_runs import make_once

LONG = pytest.mark.long
STEP = 2 * 16  # tokens of one step of one learner
TOKENS = 2 * 200 * STEP


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small_text(tmp_path_factory.mktemp("data") / "text")


@contextmanager
def training(run: Path, words: list[str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "atoll", "train", "--out", str(run), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=300)


def said(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def stopped(text, tmp_path_factory):
    """A run of two islands that was stopped in order after a snapshot on request: its directory, and the snapshot."""
    folder, told = make_once(tmp_path_factory, "stopped", lambda folder: train_and_stop(text, folder / "run"))
    return folder / "run", told


def train_and_stop(text: Path, run: Path) -> dict[str, Any]:
    words = small(text, "--learners", "2", "--tokens", str(TOKENS), "--kill", "none", "--snapshot-every", "0")
    with training(run, [*words, "--step-time", "20ms"]) as process:
        until(process, run, "it trains", lambda status: status["merges"] > 8 and status["alive"] == 2)
        assert (run / ADDRESS_FILE).stat().st_mode & 0o777 == 0o600
        token = json.loads((run / ADDRESS_FILE).read_text())["token"]
        command = [sys.executable, "-m", "atoll", "snapshot", str(run), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr
        assert token not in done.stdout + done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        assert (len(told["parts"]), told["merges"] > 8) == (2, True), told
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
    assert processes_of(run) == []
    assert not (run / ADDRESS_FILE).exists(), "the token is left behind"
    for log in (run / "logs").iterdir():
        assert token not in log.read_text(encoding="utf-8", errors="replace"), f"the token is in {log.name}"
    return told


def copy_of(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "run"))


def test_the_snapshot_is_listed_with_what_it_holds(stopped, capsys):
    run, told = stopped
    assert main(["snapshot", str(run), "--list", "--json"]) == 0
    # One that was asked for while an island was still starting is listed too, without that island.
    listed = {each["snapshot"]: each for each in said(capsys)["snapshots"]}[told["snapshot"]]
    assert listed["versions"] == told["versions"]
    assert [part["learner"] for part in listed["parts"]] == [1, 2]
    assert all(part["bytes"] > 1000 for part in listed["parts"])
    assert main(["snapshot", str(run), "--list"]) == 0
    shown = capsys.readouterr().out
    assert f"snapshot {told['snapshot']}" in shown
    assert "learner 2: step" in shown


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["snapshot"], "which run?"),
        (["snapshot", "--list"], "--list needs the directory of a run"),
        (["snapshot", "RUN"], "runs on this machine: take snapshots while it runs"),
        (["snapshot", "RUN", "--syncer", "a:1"], "not both"),
        (["snapshot", "--syncer", "a"], "give host:port"),
        (["snapshot", "--syncer", "127.0.0.1:9"], "no syncer answers at 127.0.0.1:9"),
        (["snapshot", "nowhere"], "no directory"),
        (["snapshot", "DATA", "--list"], "has no store"),
        (["train", "--out", "NEW", "--restore", "nowhere"], "no run of atoll train"),
        (["train", "--out", "NEW", "--restore", "RUN@77"], "has no snapshot 77; it has"),
        (["train", "--out", "NEW", "--restore", "RUN@x"], "the @ needs a snapshot number"),
        (["train", "--out", "NEW", "--restore", "RUN", "--model", "1m"], "--model means nothing with --restore"),
        (["train", "--out", "NEW", "--restore", "RUN", "--resume"], "give only one of them"),
        (["train", "--out", "NEW", "--restore", "RUN", "--tokens", "32"], "nothing would be left to train"),
        (["train", "--out", "DATA", "--restore", "RUN"], "is there already"),
        (["train", "--out", "RUN", "--resume", "--lr", "1"], "--lr means nothing with --resume"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(stopped, text, tmp_path, capsys, words, sentence):
    names = {"RUN": str(stopped[0]), "NEW": str(tmp_path / "new"), "DATA": str(text)}
    real = [names.get(word, word.replace("RUN@", f"{names['RUN']}@")) for word in words]
    assert main(real) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("learners", [1, pytest.param(2, marks=LONG), pytest.param(3, marks=LONG)])
def test_a_stopped_run_goes_on_from_its_parts_on_fewer_as_many_and_more_islands(stopped, tmp_path, capsys, learners):
    source, told = stopped
    run = copy_of(source, tmp_path)
    assert main(["train", "--out", str(run), "--resume", "--learners", str(learners), "--json"]) == 0
    report = said(capsys)
    sentences = [sentence for island in report["islands"] for sentence in island["inner_state"][-1:]]
    resumed = [s for s in sentences if s != "the run is new: no learner has optimizer state yet"]
    saved = [s for s in resumed if s.endswith(f"saved in snapshot {told['snapshot']}")]
    assert saved, sentences
    assert all(s in saved or s.startswith("optimizer state from learner") for s in resumed), sentences
    assert len(resumed) >= learners
    assert report["tokens"]["trained"] >= TOKENS
    assert report["eval_loss"] < report["eval_loss_before"]
    assert report["learners"] == max(2, learners)
    assert_tapes_are_sound(run)


@pytest.mark.parametrize("learners", [pytest.param(None, marks=LONG), 1, pytest.param(3, marks=LONG)])
def test_a_snapshot_is_restored_into_a_new_run(stopped, tmp_path, capsys, learners):
    source, told = stopped
    run = tmp_path / "new"
    number = f"@{told['snapshot']}" if learners else ""
    words = ["--learners", str(learners)] if learners else []
    budget = sum(part["trained"] for part in told["parts"]) + 300 * STEP
    words += ["--tokens", str(budget)]
    assert main(["train", "--out", str(run), "--restore", f"{source}{number}", *words, "--json"]) == 0
    report = said(capsys)
    assert len(report["islands"]) == (learners or 2)
    first = report["islands"][0]["inner_state"][0]
    assert first.endswith(f"saved in snapshot {told['snapshot']}") or first.startswith("optimizer state from learner")
    tokens = report["tokens"]
    assert tokens["trained"] == tokens["merged"] + tokens["pending"] + tokens["dropped"]
    own = report["steps"] * STEP
    assert budget <= tokens["trained"] < budget + 200 * STEP
    assert own < tokens["trained"] - 8 * STEP, "the tokens of the snapshot were trained again"
    assert report["eval_loss"] < report["eval_loss_before"]
    assert_tapes_are_sound(run)
    assert main(["replay", str(run)]) == 0
    assert "the model is bit-identical" in capsys.readouterr().out
    assert_nothing_is_made_up(run, capsys)
    assert_goes_on_with_the_data(run, source, told["snapshot"])


def assert_nothing_is_made_up(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without what it began with, a restored run is not replayed from anything else."""
    (run / INITIAL_FOLDER / "000.safetensors").unlink()
    assert main(["replay", str(run)]) == 0
    assert "what the run was restored from cannot be read" in capsys.readouterr().out
    shutil.rmtree(run / INITIAL_FOLDER)
    assert main(["replay", str(run)]) == 0
    assert "the run was restored from another one" in capsys.readouterr().out


def assert_goes_on_with_the_data(run: Path, source: Path, number: int) -> None:
    """What the versions of the cut hold is not trained again; what they do not is trained first."""
    cut = next(each.record for each in list_snapshots(source) if each.number == number)
    assert cut is not None
    assert cut.next_sample > 0
    leases = [e.envelope.body for entry in RunTapes(run).merged_entries() for e in entry.effects if type(e) is Send]
    given = [lease for lease in leases if type(lease) is Lease]
    assert given, "nothing was leased"
    for lease in given:
        inside = any(begin <= lease.begin and lease.end <= end for begin, end in cut.unmerged)
        assert inside or lease.begin >= cut.next_sample, f"{lease} was trained before the cut"
    assert min(lease.begin for lease in given) == min([begin for begin, _ in cut.unmerged] or [cut.next_sample])


def test_a_restored_run_starts_with_the_values_of_the_cut(stopped, tmp_path):
    run, told = stopped
    source = parse_restore_source(str(run))
    lines: list[str] = []
    done = restore_run(
        source, tmp_path / "new", run_settings_for(JobSettings.load(run / CONFIG_FILE), "new-1"), lines.append
    )
    assert 0 < done < TOKENS
    assert "optimizer state of 2 learners is there" in lines[-1]
    assert list_parts(tmp_path / "new") == {1: [told["snapshot"]], 2: [told["snapshot"]]}
    restored = read_published_tensors(tmp_path / "new")
    plan = source.settings.plan
    assert plan is not None
    for p in range(len(plan.fragments)):
        path = run / "store" / "snapshots" / f"{told['snapshot']:09d}" / f"{p:03d}.safetensors"
        flat = read_tensors(path)[1]["published"]
        for piece, begin, end in plan.spans(p):
            value = restored[piece.tensor]
            rows = (value if value.dim() else value.unsqueeze(0))[piece.start : piece.stop]
            assert torch.equal(rows.flatten(), flat[begin:end])


def test_a_damaged_snapshot_and_a_damaged_part_are_said(stopped, tmp_path, capsys):
    source, told = stopped
    run = copy_of(source, tmp_path)
    for number in list_parts(run)[2]:  # of every snapshot: the one before would do for a part that is damaged
        part = part_path(run, 2, number)
        part.write_bytes(part.read_bytes()[:-1])
    lines: list[str] = []
    restore_run(
        parse_restore_source(str(run)),
        tmp_path / "new",
        run_settings_for(JobSettings.load(run / CONFIG_FILE), "new-1"),
        lines.append,
    )
    assert any("cut short" in line for line in lines)
    assert "optimizer state of 1 learners is there" in lines[-1]
    path = run / "store" / "snapshots" / f"{told['snapshot']:09d}" / "001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()  # it is a second name of a version
    path.write_bytes(data)
    assert main(["train", "--out", str(tmp_path / "newer"), "--restore", str(run)]) == 2
    assert "001.safetensors: the digest does not match" in capsys.readouterr().err
    assert not (tmp_path / "newer").exists()
    record = path.with_name("record.json")
    record.write_bytes(record.read_bytes()[:-3])
    assert main(["train", "--out", str(tmp_path / "newer"), "--restore", str(run)]) == 2
    assert "record.json" in capsys.readouterr().err
    assert [info.record for info in list_snapshots(run) if info.number == told["snapshot"]] == [None]
