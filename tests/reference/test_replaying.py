"""A real run trained again from its tapes: the same bits, faults and all; and a difference is noticed."""

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
from tests.reference.small_jobs import corpus_of, silent_view, small_settings, small_text, wait_for
from tests.reference.test_recovery import training
from tests.shared_runs import make_once

LONG = pytest.mark.long
TOKENS = 2 * 2 * 16 * 150


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture(scope="module")
def killed(text, tmp_path_factory):
    """A finished run of three islands, one of which was killed on the way."""
    folder, _ = make_once(tmp_path_factory, "killed", lambda folder: train_with_kill(text, folder / "run"))
    return folder / "run"


def train_with_kill(text, run):
    settings = small_settings(text, learners=3, tokens=TOKENS, kills=(PlannedKill(2, 0.3, 0.1),), step_time_s=0.01)
    report = start_job(settings, run, silent_view()[0], corpus_of(settings))
    assert any(fault["planned"] for fault in report.to_json()["faults"]), "nobody was killed"


def test_a_run_with_a_kill_ends_with_the_same_bits(killed, capsys):
    assert main(["replay", str(killed), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["difference"] is None
    trained = told["training"]
    report = json.loads((killed / "report.json").read_text())
    assert trained["same"] is True
    assert trained["digest"] == trained["recorded"] == report["final_digest"]
    own = sum(process.tokens for processes in read_timeline(killed).processes.values() for process in processes)
    assert trained["tokens"] == own >= report["tokens"]["trained"], "its last step was never told"
    assert trained["versions"] > 10, "no learner rebuilt a published value"
    assert len([actor for actor in RunTapes(killed).readers if actor.learner == 2]) == 2, "two incarnations are in it"


def test_what_is_said_of_it(killed, capsys):
    assert main(["replay", str(killed)]) == 0
    assert "the model is bit-identical, digest " in capsys.readouterr().out
    assert main(["replay", str(killed), "--effects-only"]) == 0
    assert "trained again" not in capsys.readouterr().out


def wrong_sample(monkeypatch):
    honest = TapeExecutor._samples

    def wrong(self, learner, fresh):
        numbers = honest(self, learner, fresh)
        return (*numbers[:-1], numbers[-1] + 1) if learner.step == 20 else numbers

    monkeypatch.setattr(TapeExecutor, "_samples", wrong)


def wrong_moment(monkeypatch):
    def wrong(*args, **kwargs):
        made = inner_optimizer(*args, **kwargs)
        for group in made.param_groups:
            group["betas"] = (0.9, 0.951)
        return made

    monkeypatch.setattr("atoll.reference.loop.inner_optimizer", wrong)


def wrong_progress(monkeypatch):
    honest = TapeExecutor._train

    def wrong(self, learner, tokens, samples):
        learner.progress_at_boundary = learner.known_progress
        if learner.step == 30:
            learner.progress_at_boundary += 0.01
        honest(self, learner, tokens, samples)

    monkeypatch.setattr(TapeExecutor, "_train", wrong)


@pytest.mark.parametrize(
    "plant", [wrong_sample, *(pytest.param(p, marks=LONG) for p in (wrong_moment, wrong_progress))]
)
def test_one_other_sample_moment_or_rate_is_another_model(plant, killed, monkeypatch, capsys):
    plant(monkeypatch)
    assert main(["replay", str(killed)]) == 1
    assert "the model differs" in capsys.readouterr().out


def test_a_tape_that_is_lost_is_said_and_no_model_is_made_up(killed, tmp_path, capsys):
    run = shutil.copytree(killed, tmp_path / "run")
    (run / "tapes" / "learner-1-i1.tape").unlink()
    assert main(["replay", str(run)]) == 0
    assert "training cannot be replayed: the tapes are incomplete" in capsys.readouterr().out


def newest_version(folder: Path) -> str:
    """Return the name of the file of the newest version, or nothing where there is none."""
    return max((each.name for each in folder.iterdir()), default="") if folder.is_dir() else ""


@LONG
def test_a_run_that_was_stopped_and_resumed_on_fewer_islands_replays(text, tmp_path, capsys):
    run = tmp_path / "run"
    words = small(text, "--learners", "3", "--tokens", str(2 * TOKENS), "--kill", "none", "--step-time", "20ms")
    with training(run, words) as process:
        wait_for(process, lambda: newest_version(run / "store" / "fragments" / "000") > "000000003", "four versions")
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
    assert replay.replay_training(run, RunTapes(run)).recorded is None, "nothing is final yet"
    resume_job(run, silent_view()[0], learners=2)
    assert main(["replay", str(run)]) == 0
    assert "the model is bit-identical" in capsys.readouterr().out


@LONG
def test_a_run_whose_codec_changed_on_a_thin_link_ends_with_the_same_bits(text, tmp_path, capsys):
    """A fragment of 5 MB in bf16 over 5 MB/s takes longer than its few short steps."""
    run = tmp_path / "run"
    settings = small_settings(
        text, model="5m", fragments=2, tokens=2 * 2 * 16 * 130, step_time_s=0.05, max_rate="5MB/s", snapshot_every=0
    )
    assert settings.numerics.up == settings.numerics.down == "auto"
    start_job(settings, run, silent_view()[0], corpus_of(settings))
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
        assert set(codecs) & {"int8", "int4"}, "the codec was never changed"
    assert main(["replay", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["difference"] is None
    assert told["training"]["same"] is True
    assert main(["story", str(run), "--learner", "1"]) == 0
    assert " from here on, not in bf16: at " in capsys.readouterr().out
    assert main(["story", str(run), "--run"]) == 0
    assert " from here on, not in bf16: to the learner in the middle " in capsys.readouterr().out
