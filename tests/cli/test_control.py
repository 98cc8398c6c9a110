"""`atoll control` on a run of `atoll train`: pause, resume, drain, quorum; and its replay."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll.cli import control
from atoll.cli.main import main
from atoll.core.protocol import ControlRequested
from atoll.core.types import SYNCER
from atoll.tape.files import RunTapes
from tests.cli.test_train import assert_tapes_are_sound, small
from tests.reference.small_jobs import LIMIT_S, small_text, wait_for_status
from tests.reference.test_recovery import training

TOKENS = 3 * 200 * 32


def controlled(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> dict[str, Any]:
    assert main(["control", str(run), *arguments, "--who", "ada", "--json"]) == 0, capsys.readouterr().err
    reply: dict[str, Any] = json.loads(capsys.readouterr().out)
    return reply


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small_text(tmp_path_factory.mktemp("data") / "text")


@pytest.mark.long
def test_a_job_that_was_paused_drained_and_changed_ends_and_replays_to_the_same_bits(text, tmp_path, capsys):
    run = tmp_path / "run"
    arguments = small(text, "--learners", "3", "--tokens", str(TOKENS), "--kill", "none", "--step-time", "20ms")
    with training(run, arguments) as process:
        wait_for_status(process, run, "it trains", lambda status: status["merges"] > 8 and status["alive"] == 3)
        reply = controlled(capsys, run, "pause")
        assert reply["done"].startswith("the run is paused by ada: ")
        paused = wait_for_status(
            process,
            run,
            "all stand still",
            lambda status: all(each["reason"] == "paused with the run" for each in status["learners"]),
        )
        assert paused["paused"]
        assert main(["control", str(run), "snapshot", "--json"]) == 0
        snapshot = json.loads(capsys.readouterr().out)
        assert (snapshot["state"], len(snapshot["parts"])) == ("durable", 3)
        controlled(capsys, run, "quorum", "2")
        controlled(capsys, run, "grace", "0.5")
        controlled(capsys, run, "resume")
        reply = controlled(capsys, run, "drain", "3", "--yes")
        assert reply["done"] == "learner 3: drain requested by ada"
        wait_for_status(process, run, "it has left", lambda status: status["learners"][2]["standing"] == "left")
        assert main(["control", str(run), "drain", "3", "--yes"]) == 1
        assert "learner 3 is not in the run any more" in capsys.readouterr().err
        assert main(["control", str(run), "drain", "9", "--yes"]) == 1
        assert "learner 9 is not in this run" in capsys.readouterr().err
        assert main(["control", str(run), "quorum", "0"]) == 2
        assert "the quorum is a whole number from 1 to" in capsys.readouterr().err
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
    assert "is restarted" not in err
    tapes = RunTapes(run)
    assert sorted(actor for actor in tapes.readers if actor.learner != SYNCER) == [(1, 1), (2, 1), (3, 1)]
    events = [e.event for a, reader in tapes.readers.items() if a.learner == SYNCER for e in reader]
    requests = [event for event in events if isinstance(event, ControlRequested)]
    assert [(request.kind, request.value) for request in requests] == [
        ("pause", None),
        ("quorum", 2),
        ("grace", 0.5),
        ("resume", None),
        ("drain", 3),
    ]
    assert {request.requested_by for request in requests} == {"ada"}
    assert assert_tapes_are_sound(run).finished
    assert main(["replay", str(run), "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)["training"]
    assert trained["same"] is True
    assert main(["ledger", str(run), "--json"]) == 0
    capsys.readouterr()
    assert main(["story", str(run), "--run"]) == 0
    story = capsys.readouterr().out
    assert "paused by ada" in story
    assert "quorum changed from 1 to 2 by ada" in story


@pytest.mark.long
def test_job_whose_learners_have_all_left_ends_with_the_cause(text, tmp_path, capsys):
    run = tmp_path / "run"
    with training(run, small(text, "--learners", "1", "--tokens", str(TOKENS), "--kill", "none")) as process:
        wait_for_status(process, run, "it trains", lambda status: status["merges"] > 2)
        controlled(capsys, run, "drain", "1", "--yes")
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1
        assert "no learner is left: all were drained" in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["control", "RUN", "pause"], "runs on this machine: control the run while its syncer runs"),
        (["control", "nowhere", "pause"], "is not the directory of a run"),
        (["control", "127.0.0.1:9", "pause"], "no syncer answers at 127.0.0.1:9"),
        (["control", "RUN", "sing"], "unknown control 'sing'; give one of pause, resume, drain"),
        (["control", "RUN", "pause", "3"], "pause takes no value, got '3'"),
        (["control", "RUN", "quorum"], "quorum takes K, as in: atoll control RUN quorum 2"),
        (["control", "RUN", "quorum", "two"], "quorum takes K, got 'two'"),
        (["control", "RUN", "drain", "1.5"], "drain takes the number of a learner, got '1.5'"),
    ],
)
def test_invalid_control_is_refused_with_one_line(arguments, complaint, tmp_path, capsys):
    assert main([str(tmp_path) if word == "RUN" else word for word in arguments]) == 2
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1


def test_drain_without_a_terminal_needs_yes(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y"))
    with pytest.raises(ValueError, match="give --yes"):
        control._confirm("sure?")
