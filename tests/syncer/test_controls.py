"""Operator controls with real processes: pause, resume, drain, quorum and grace margin."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.core.protocol import ControlRequested, LogReason, MergeRound, PausedAck, Send, SnapshotRequested, StepTaken
from atoll.core.states import RunStage
from atoll.core.types import SYNCER
from atoll.store.run_settings import RunSettings
from atoll.store.tensor_file import StoreDamagedError
from atoll.store.version_store import Store
from atoll.syncer import controls
from atoll.syncer.controls import ControlState
from atoll.syncer.process import SyncerProcess
from atoll.tape.files import RunTapes
from atoll.tape.format import Actor
from atoll.tensors.settings import Numerics
from tests.learner.in_process import learner_of, train
from tests.learner.runs import QUICK, Child, Run, endless
from tests.learner.small_models import work
from tests.syncer.test_snapshots import take_snapshot, wait_until_training


def control(
    run: Run, kind: str, value: object = None, requested_by: str = "ada@desk", **headers: str
) -> tuple[int, str]:
    code, body = run.request(
        "POST",
        "/v1/control",
        json.dumps({"kind": kind, "value": value, "requested_by": requested_by}).encode(),
        **headers,
    )
    reply = json.loads(body)
    return code, reply.get("done") or reply["error"]


def apply_control(run: Run, kind: str, value: object = None) -> str:
    code, message = control(run, kind, value)
    assert code == 200, message
    return message


def are_paused(*learners: int) -> Any:
    """Return a condition for `until`: these learners have acknowledged the pause, and no round is open."""

    def is_met(status: dict[str, Any]) -> bool:
        paused = [each["learner"] for each in status["learners"] if each["reason"] == "paused with the run"]
        return bool(status["paused"] and paused == list(learners) and status["rounds_in_flight"] == 0)

    return is_met


def steps(run: Run) -> dict[int, int]:
    return {each["learner"]: each["step"] for each in run.status()["learners"]}


def syncer_entries(directory: Path) -> list[Any]:
    readers = RunTapes(directory).readers
    return [entry for actor, reader in sorted(readers.items()) if actor.learner == SYNCER for entry in reader]


def controls_on_tape(directory: Path) -> list[tuple[int, ControlRequested]]:
    """Return the control events with the epoch of the syncer that handled them."""
    entries = syncer_entries(directory)
    return [(entry.actor.generation, entry.event) for entry in entries if isinstance(entry.event, ControlRequested)]


def pause_and_wait(run: Run, *numbers: int) -> dict[int, int]:
    """Return the step of each paused learner. A snapshot is a round trip to every learner and would show training."""
    sentence = apply_control(run, "pause")
    assert sentence.startswith("the run is paused by ada@desk")
    run.until(are_paused(*numbers), "all learners are paused")
    take_snapshot(run)  # the step in progress at the pause has ended by now
    return steps(run)


# --------------------------------------------------------------------------------------------------------------------
# Pause and resume


def test_paused_run_takes_no_step_and_no_merge_until_resumed(tmp_path):
    with Run(tmp_path, endless()) as run:
        learners = run.joined(1, 2)
        wait_until_training(run, *learners)
        paused_at, merges = pause_and_wait(run, 1, 2), run.status()["merges"]
        snapshot = take_snapshot(run)
        assert snapshot["state"] == "durable", snapshot
        assert [part["step"] for part in snapshot["parts"]] == [paused_at[1], paused_at[2]]
        assert steps(run) == paused_at
        assert run.status()["merges"] == merges
        assert {fragment["reason"] for fragment in run.status()["fragments"]} == {"the run is paused"}
        assert apply_control(run, "pause") == "the run is paused already"
        assert apply_control(run, "resume") == "the run is resumed by ada@desk"
        assert not run.status()["paused"]
        run.until(run.merges(merges + 6), "the run continues")
        assert all(now > paused_at[learner] for learner, now in steps(run).items())
        assert apply_control(run, "resume") == "the run is not paused"
        run.end()
        published = run.finish(*learners)
        run.assert_same(published, 1, 2)
        run.assert_clean()
        events = [event for _, event in controls_on_tape(tmp_path)]
        assert events == [ControlRequested("pause", None, "ada@desk"), ControlRequested("resume", None, "ada@desk")]


def test_pause_is_not_a_step_and_causes_no_strikes(tmp_path):
    """The pause exceeds every timeout that applies to a training learner: steps take milliseconds here."""
    with Run(tmp_path, endless(limits=QUICK)) as run:
        (one,) = run.joined(1)
        wait_until_training(run, one, merges=9)
        before = run.status()["step_s"]
        pause_and_wait(run, 1)
        one.pipe.poll(2.0)  # wait two seconds, with pings and no other messages
        assert run.until(run.learner(1), "a learner")["standing"] == "live"
        apply_control(run, "resume")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 3), "the run continues")
        run.end()
        ended = one.expect("ended")
        assert run.syncer.expect("ended") is True
        assert ended["stats"]["paused_s"] > 2.0
        assert before < 1.0
        run.verdict()
        entries = list(RunTapes(tmp_path).readers[Actor(1, 1)])
        slowest = max(entry.event.step_time_s for entry in entries if isinstance(entry.event, StepTaken))
        assert slowest < 1.0, "the pause was counted as a step"
        codes = {
            effect.reason.code
            for entry in syncer_entries(tmp_path)
            for effect in entry.effects
            if isinstance(effect, LogReason)
        }
        assert not codes & {"member-suspected", "member-timed-out", "member-disconnected"}


def test_learner_that_joins_paused_run_waits_before_its_first_step(tmp_path):
    with Run(tmp_path, endless()) as run:
        (one,) = run.joined(1)
        wait_until_training(run, one)
        pause_and_wait(run, 1)
        two = run.start(2)
        run.until(are_paused(1, 2), "the second one is paused too")
        assert steps(run)[2] == 0
        apply_control(run, "resume")
        two.expect("joined")
        run.go(two)
        run.until(lambda status: steps(run)[2] > 0, "it trains")
        run.end()
        run.assert_same(run.finish(one, two), 1, 2)
        run.assert_clean()


def test_paused_run_finishes_on_request(tmp_path):
    with Run(tmp_path, endless()) as run:
        learners = run.joined(1, 2)
        wait_until_training(run, *learners)
        pause_and_wait(run, 1, 2)
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        run.assert_clean()
        assert stored_controls(tmp_path)["pause"]["kind"] == "resume"


def stored_controls(directory: Path) -> dict[str, Any]:
    with Store.open(directory / "store") as store:
        return store.read_controls() or {}


def test_paused_learner_can_be_interrupted_and_leaves(tmp_path):
    with Run(tmp_path, endless()) as run:
        one, two = run.joined(1, 2)
        wait_until_training(run, one, two)
        pause_and_wait(run, 1, 2)
        one.expected_to_end = True
        one.send(signal.SIGINT)
        assert one.expect("failed")[0] == "KeyboardInterrupt"
        run.until(run.learner(1, standing="left"), "it has left")
        apply_control(run, "resume")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 3), "the other continues")
        run.end()
        run.assert_same(run.finish(two), 2)
        run.assert_clean()


def test_killed_syncer_is_still_paused_after_restart(tmp_path):
    with Run(tmp_path, endless()) as run:
        learners = run.joined(1, 2)
        wait_until_training(run, *learners)
        apply_control(run, "quorum", 2)
        apply_control(run, "grace", 0.25)
        paused_at = pause_and_wait(run, 1, 2)
        run.syncer.kill()
        run.start_syncer()
        status = run.status()
        assert (status["paused"], status["quorum"], status["grace"], status["epoch"]) == (True, 2, 0.25, 2)
        run.until(are_paused(1, 2), "they have reconnected and are paused")
        take_snapshot(run)
        assert steps(run) == paused_at
        apply_control(run, "resume")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 3), "the run continues")
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        run.assert_clean()
        again = [event.kind for epoch, event in controls_on_tape(tmp_path) if epoch == 2]
        assert sorted(again) == ["grace", "pause", "quorum", "resume"]


def test_library_learner_is_paused_and_resumed(tmp_path):
    with Run(tmp_path, endless()) as run:
        job = work("plain", 1)
        with learner_of(run, job, 1) as learner:
            training = threading.Thread(target=train, args=(learner, job))
            training.start()
            run.until(run.merges(3), "it trains")
            paused_at = pause_and_wait(run, 1)
            assert learner.stats().steps == paused_at[1]
            assert not learner.finished
            apply_control(run, "resume")
            run.until(lambda status: learner.stats().steps > paused_at[1], "it continues")
            run.end()
            training.join(300)
            assert not training.is_alive()
            ended = (learner.finished, learner.drained)
            assert ended == (True, False)
            assert learner.paused_s > 0
        acks = [
            effect.envelope.body
            for entry in RunTapes(tmp_path).readers[Actor(1, 1)]
            for effect in entry.effects
            if isinstance(effect, Send) and isinstance(effect.envelope.body, PausedAck)
        ]
        assert acks == [PausedAck(1, True), PausedAck(2, False)]


# --------------------------------------------------------------------------------------------------------------------
# Drain


def assert_drained(child: Child) -> None:
    ended = child.expect("ended")
    assert (ended["finished"], ended["drained"]) == (True, True)
    assert child.ended() == 0


def test_drained_learner_leaves_and_its_samples_are_leased_to_others(tmp_path):
    with Run(tmp_path, endless(lease_samples=64)) as run:
        one, two, three = run.joined(1, 2, 3)
        wait_until_training(run, one, two, three)
        assert apply_control(run, "drain", 2) == "learner 2: drain requested by ada@desk"
        assert_drained(two)
        left = run.until(run.learner(2, standing="left"), "it has left")
        assert left["reason"] == "left: drained by ada@desk"
        run.until(lambda status: returned(run), "its samples are returned")
        assert control(run, "drain", 2) == (409, "learner 2 is not in the run any more: left: drained by ada@desk")
        assert control(run, "drain", 7) == (404, "learner 7 is not in this run")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 3), "the others continue")
        for line in run.status()["ledger"]:
            assert line["trained"] == line["merged"] + line["pending"] + sum(line["dropped"].values())
        run.end()
        run.assert_same(run.finish(one, three), 1, 3)
        run.assert_clean()


def returned(run: Run) -> list[str]:
    lines = run.log_lines(run.syncer, "they are leased again before new samples")
    return [line for line in lines if "learner 2:" in line]


def test_paused_learner_can_be_drained(tmp_path):
    with Run(tmp_path, endless()) as run:
        one, two = run.joined(1, 2)
        wait_until_training(run, one, two)
        pause_and_wait(run, 1, 2)
        apply_control(run, "drain", 1)
        assert_drained(one)
        run.until(are_paused(2), "the other is paused")
        run.end()
        run.assert_same(run.finish(two), 2)
        run.assert_clean()


def test_drained_learner_may_rejoin(tmp_path):
    with Run(tmp_path, endless()) as run:
        one, two = run.joined(1, 2)
        wait_until_training(run, one, two)
        apply_control(run, "drain", 2)
        assert_drained(two)
        (again,) = run.joined(2)
        run.go(again)
        run.until(run.learner(2, standing="live", incarnation=2), "it has rejoined")
        run.end()
        run.assert_same(run.finish(one, again), 1, 2)
        run.assert_clean()


# --------------------------------------------------------------------------------------------------------------------
# Quorum and grace


def test_changed_quorum_applies_to_every_later_merge(tmp_path):
    with Run(tmp_path, endless(grace_margin=0.0)) as run:
        learners = run.joined(1, 2)
        wait_until_training(run, *learners)
        assert apply_control(run, "quorum", 2) == "quorum changed from 1 to 2 by ada@desk"
        assert apply_control(run, "grace", 0.9) == "grace margin changed from 0 to 0.9 by ada@desk"
        status = run.status()
        assert (status["quorum"], status["grace"]) == (2, 0.9)
        run.until(run.merges(status["merges"] + 12), "merges of two")
        sentence = apply_control(run, "quorum", 3)
        assert sentence.endswith("2 learners train, and no round opens until there are more")
        run.until(lambda status: status["rounds_in_flight"] == 0, "no round opens")
        apply_control(run, "quorum", 2)
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        run.assert_clean()
        changed_at = [
            entry.tick for entry in syncer_entries(tmp_path) if entry.event == ControlRequested("quorum", 2, "ada@desk")
        ]
        merged = [
            len(effect.contributions)
            for entry in syncer_entries(tmp_path)
            if entry.tick > changed_at[0]
            for effect in entry.effects
            if isinstance(effect, MergeRound)
        ]
        assert merged.count(2) >= 12
        assert merged.count(1) <= 3, "only rounds that had their quorum already may have had one contribution"


# --------------------------------------------------------------------------------------------------------------------
# Refused requests


def test_impossible_control_is_refused_with_message(tmp_path):
    with Run(tmp_path, endless(), token="a long secret") as run:
        code, sentence = control(run, "pause")
        assert (code, sentence) == (409, "the run has no model yet, so there is nothing to control")
        (one,) = run.joined(1)
        wait_until_training(run, one)
        assert control(run, "pause", Authorization="Bearer wrong")[0] == 401
        assert run.request("POST", "/v1/control", b"{", Authorization="Bearer a long secret")[0] == 400
        assert not run.status()["paused"]
        before = run.status()["quorum"], run.status()["grace"]
        for kind, value in INVALID_CONTROLS:
            code, sentence = control(run, kind, value)
            assert code == 400, (kind, value, sentence)
        for raw in (
            b"[]",
            b'{"kind": "pause"}',
            b'{"kind": "pause", "requested_by": ""}',
            b'{"kind":"pause","requested_by":"a","x":1}',
        ):
            assert run.request("POST", "/v1/control", raw)[0] == 400
        assert control(run, "pause", requested_by="x" * 201)[0] == 400
        assert control(run, "pause", requested_by="a\nb")[0] == 400
        assert (run.status()["quorum"], run.status()["grace"]) == before
        run.end()
        run.finish(one)
        assert controls_on_tape(tmp_path) == []


INVALID_CONTROLS: list[tuple[Any, Any]] = [
    ("stop", None),
    (7, None),
    ("pause", 1),
    ("quorum", None),
    ("quorum", 0),
    ("quorum", 1025),
    ("quorum", 1.5),
    ("quorum", True),
    ("quorum", "2"),
    ("grace", None),
    ("grace", 1.0),
    ("grace", -0.1),
    ("grace", "much"),
    ("drain", None),
    ("drain", 0),
    ("drain", "all"),
]


@pytest.mark.parametrize(
    "raw",
    [
        [],
        {"pause": 1},
        {"pause": {"kind": "pause", "value": None}},
        {"quorum": {"kind": "quorum", "value": 0, "requested_by": "a", "at": 0.0}},
        {"drain": {"kind": "drain", "value": 1, "requested_by": "a", "at": 0.0}},
    ],
)
def test_invalid_controls_file_is_refused(raw, tmp_path):
    with pytest.raises(StoreDamagedError, match="remove it"):
        ControlState.from_json(raw, tmp_path / "controls.json", QUICK)


def test_control_that_waited_for_the_lock_is_refused_after_the_end(tmp_path):
    """The control is checked while the run is running, but the run ends before the lock is free."""

    async def scene() -> controls.HttpReply:
        syncer: Any = SyncerProcess(tmp_path, RunSettings(endless(), Numerics()))
        syncer.core = SimpleNamespace(state=SimpleNamespace(stage=RunStage.RUNNING, paused=False))
        async with syncer._control_lock:  # as `finish` does
            request = asyncio.create_task(controls.handle_control(syncer, {"kind": "pause", "requested_by": "ada"}))
            await asyncio.wait((request,), timeout=0)  # it passes the check, then waits for the lock
            syncer.core.state.stage = RunStage.FINISHING
        answer = await request
        assert syncer.controls.controls == {}
        syncer.core = None
        await syncer.stop()
        return answer

    assert asyncio.run(scene()) == controls.RUN_ENDED


def test_snapshot_request_on_tape_has_requested_by(tmp_path):
    with Run(tmp_path, endless()) as run:
        learners = run.joined(1)
        run.go(*learners)
        run.until(run.merges(1), "the learner trains")
        assert run.request("POST", "/v1/snapshot", json.dumps({"requested_by": "ada@desk"}).encode())[0] == 202
        invalid_bodies: tuple[Any, ...] = (
            {"requested_by": "a\nb"},
            {"requested_by": 3},
            {"whom": "ada"},
            [],
            {"requested_by": "x" * 201},
        )
        for invalid in invalid_bodies:
            code, body = run.request("POST", "/v1/snapshot", json.dumps(invalid).encode())
            assert (code, "requested_by" in json.loads(body)["error"]) == (400, True)
        run.end()
        run.finish(*learners)
    wanted = [entry for entry in syncer_entries(tmp_path) if isinstance(entry.event, SnapshotRequested)]
    assert [entry.event.requested_by for entry in wanted] == ["ada@desk"]
    messages = [str(effect.reason) for entry in wanted for effect in entry.effects if isinstance(effect, LogReason)]
    assert any(message.endswith(" of 1 learners, requested by ada@desk") for message in messages)
