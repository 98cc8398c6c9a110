"""Tests of the replay of real runs from their tapes: the same bits despite faults, and differences are detected."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from atoll.cli.main import main
from atoll.core.protocol import CopyFragment, MergeRound
from atoll.reference import replay
from atoll.reference.job import resume_job, start_job
from atoll.reference.job_settings import PlannedKill
from atoll.reference.models import inner_optimizer
from atoll.reference.tape_executor import TapeExecutor
from atoll.tape.files import RunTapes
from atoll.tape.timeline import read_timeline
from tests.cli.test_train import small
from tests.reference.small_jobs import load_corpus, silent_view, small_settings, small_text, wait_until
from tests.reference.test_recovery import training
from tests.shared_runs import make_once

LONG = pytest.mark.long
TOKENS = 2 * 2 * 16 * 150


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture(scope="module")
def killed(text, tmp_path_factory):
    """Finished run of three learners, one of which was killed during training."""
    folder, _ = make_once(tmp_path_factory, "killed", lambda folder: train_with_kill(text, folder / "run"))
    return folder / "run"


def train_with_kill(text, run):
    settings = small_settings(text, learners=3, tokens=TOKENS, kills=(PlannedKill(2, 0.3, 0.1),), step_time_s=0.01)
    report = start_job(settings, run, silent_view()[0], load_corpus(settings))
    assert any(fault["planned"] for fault in report.to_json()["faults"]), "no learner was killed"


def test_run_with_a_kill_replays_to_the_same_bits(killed, capsys):
    assert main(["replay", str(killed), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["difference"] is None
    trained = result["training"]
    report = json.loads((killed / "report.json").read_text())
    assert trained["same"] is True
    assert trained["digest"] == trained["recorded"] == report["final_digest"]
    own = sum(process.tokens for processes in read_timeline(killed).processes.values() for process in processes)
    assert trained["tokens"] == own >= report["tokens"]["trained"], (
        "the last step of a killed learner may be unreported"
    )
    assert trained["versions"] > 10, "no learner rebuilt a published value"
    assert len([actor for actor in RunTapes(killed).readers if actor.learner == 2]) == 2, (
        "learner 2 has no second incarnation"
    )


def test_replay_reports_the_digest_unless_only_effects_are_compared(killed, capsys):
    assert main(["replay", str(killed)]) == 0
    assert "the model is bit-identical, digest " in capsys.readouterr().out
    assert main(["replay", str(killed), "--effects-only"]) == 0
    assert "trained again" not in capsys.readouterr().out


def change_sample(monkeypatch):
    original = TapeExecutor._samples

    def changed(self, learner, fresh):
        numbers = original(self, learner, fresh)
        return (*numbers[:-1], numbers[-1] + 1) if learner.step == 20 else numbers

    monkeypatch.setattr(TapeExecutor, "_samples", changed)


def change_beta(monkeypatch):
    def changed(*args, **kwargs):
        optimizer = inner_optimizer(*args, **kwargs)
        for group in optimizer.param_groups:
            group["betas"] = (0.9, 0.951)
        return optimizer

    monkeypatch.setattr("atoll.reference.loop.inner_optimizer", changed)


def change_progress(monkeypatch):
    original = TapeExecutor._train

    def changed(self, learner, tokens, samples):
        learner.progress_at_boundary = learner.known_progress
        if learner.step == 30:
            learner.progress_at_boundary += 0.01
        original(self, learner, tokens, samples)

    monkeypatch.setattr(TapeExecutor, "_train", changed)


@pytest.mark.parametrize(
    "change", [change_sample, *(pytest.param(p, marks=LONG) for p in (change_beta, change_progress))]
)
def test_replay_detects_another_sample_beta_or_learning_rate(change, killed, monkeypatch, capsys):
    change(monkeypatch)
    assert main(["replay", str(killed)]) == 1
    assert "the model differs" in capsys.readouterr().out


def test_missing_tape_is_reported_and_no_model_is_trained(killed, tmp_path, capsys):
    run = shutil.copytree(killed, tmp_path / "run")
    (run / "tapes" / "learner-1-i1.tape").unlink()
    assert main(["replay", str(run)]) == 0
    assert "training cannot be replayed: the tapes are incomplete" in capsys.readouterr().out


def newest_version(folder: Path) -> str:
    """Return the file name of the newest version, or an empty string if there is none."""
    return max((each.name for each in folder.iterdir()), default="") if folder.is_dir() else ""


@LONG
def test_run_resumed_on_fewer_learners_replays_to_the_same_bits(text, tmp_path, capsys):
    run = tmp_path / "run"
    arguments = small(text, "--learners", "3", "--tokens", str(2 * TOKENS), "--kill", "none", "--step-time", "20ms")
    with training(run, arguments) as process:
        wait_until(process, lambda: newest_version(run / "store" / "fragments" / "000") > "000000003", "four versions")
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
    assert replay.replay_training(run, RunTapes(run)).recorded is None, "the run has no final model yet"
    resume_job(run, silent_view()[0], learners=2)
    assert main(["replay", str(run)]) == 0
    assert "the model is bit-identical" in capsys.readouterr().out


@LONG
def test_run_whose_codec_changed_on_a_slow_link_replays_to_the_same_bits(text, tmp_path, capsys):
    """A fragment of 5 MB in bf16 over 5 MB/s takes longer than the steps between its rounds."""
    run = tmp_path / "run"
    settings = small_settings(
        text, model="5m", fragments=2, tokens=2 * 2 * 16 * 130, step_time_s=0.05, max_rate="5MB/s", snapshot_every=0
    )
    assert settings.numerics.up == settings.numerics.down == "auto"
    start_job(settings, run, silent_view()[0], load_corpus(settings))
    copies = [
        effect.codec
        for entry in RunTapes(run).merged_entries()
        for effect in entry.effects
        if type(effect) is CopyFragment
    ]
    merges = [
        effect.codec
        for entry in RunTapes(run).merged_entries()
        for effect in entry.effects
        if type(effect) is MergeRound
    ]
    for codecs in (copies, merges):
        assert None in codecs
        assert set(codecs) & {"int8", "int4"}, "the codec did not change"
    assert main(["replay", str(run), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["difference"] is None
    assert result["training"]["same"] is True
    assert main(["story", str(run), "--learner", "1"]) == 0
    assert " from here on, not in bf16: at " in capsys.readouterr().out
    assert main(["story", str(run), "--run"]) == 0
    assert " from here on, not in bf16: to the learner in the middle " in capsys.readouterr().out
