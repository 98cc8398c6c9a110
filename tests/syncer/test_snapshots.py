"""Snapshots of real processes: stored parts, interrupted snapshots, and restarts from a snapshot.

Every fault is a real one, and each test asserts that it happened.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.checkpoint.restore import parse_restore_source, restore_run
from atoll.cli.main import main
from atoll.core.types import Limits
from atoll.files import write_file
from atoll.reference.job_settings import JobSettings
from atoll.reference.supervisor import run_settings_for
from atoll.store.learner_parts import MAX_PARTS, find_optimizer_state, list_parts, part_path, read_part
from atoll.store.run_settings import CONFIG_FILE
from atoll.store.snapshots import list_snapshots
from atoll.store.tensor_file import encode_tensor_file
from atoll.tensors import optimizer_state
from tests.learner.fault_injection import fault_marker
from tests.learner.in_process import driver_of, learner_of, train
from tests.learner.runs import QUICK, Child, LearnerSpec, Run, config, endless
from tests.learner.small_models import work

PATIENT = Limits(initial_wait_s=5.0, min_wait_s=2.0, initial_backoff_s=0.05, max_backoff_s=0.5)


def take_snapshot(run: Run) -> dict[str, Any]:
    """Request a snapshot and wait until it is durable or abandoned."""
    code, body = run.request("POST", "/v1/snapshot")
    assert code == 202, body
    number = json.loads(body)["snapshot"]

    def get_result(_: object) -> dict[str, Any] | None:
        reply: dict[str, Any] = json.loads(run.request("GET", f"/v1/snapshot/{number}")[1])
        return reply if reply["state"] != "being taken" else None

    return run.until(get_result, f"snapshot {number} is durable or abandoned")


def wait_until_training(run: Run, *learners: Child, merges: int = 3) -> None:
    run.go(*learners)
    run.until(run.merges(merges), "the run is under way")


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# --------------------------------------------------------------------------------------------------------------------
# Stored parts


def test_requested_snapshot_is_durable_when_reported(tmp_path):
    with Run(tmp_path, endless(limits=PATIENT)) as run:
        learners = run.joined(1, 2)
        wait_until_training(run, *learners)
        reply = take_snapshot(run)
        assert reply["state"] == "durable", reply
        number = reply["snapshot"]
        assert [part["learner"] for part in reply["parts"]] == [1, 2]
        assert reply["left_out"] == []
        (info,) = list_snapshots(tmp_path)
        assert (info.number, info.problem) == (number, "")
        assert info.record is not None
        assert list(info.record.versions) == reply["versions"]
        for learner, entry in info.record.parts:
            part = read_part(part_path(tmp_path, learner, number))
            assert (part.learner, part.snapshot) == (learner, number)
            assert (part.metadata["step"], part.metadata["trained"]) == (entry.step, entry.trained)
            assert tuple(part.metadata["versions"]) == entry.versions
            assert all(v <= cut for v, cut in zip(entry.versions, info.record.versions, strict=True))
            assert float(part.optimizer_tensors()["0"].flatten()[0]) == float(
                part.optimizer_tensors()["0"].flatten()[0]
            )
            steps = {int(t) for name, t in part.optimizer_tensors().items() if t.dim() == 0}
            assert steps == {entry.step}, "the optimizer was copied at another step than the counters"
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        run.assert_clean()


def test_part_is_consistent_copy_of_one_step_boundary(tmp_path):
    """The learner runs in this process, so that its parameters can be compared at the step of the cut."""
    with Run(tmp_path, endless(limits=PATIENT)) as run:
        job = work("plain", 1)
        with learner_of(run, job, 1) as learner:
            train(learner, job, 3)
            before = learner.stats().steps
            assert run.request("POST", "/v1/snapshot")[0] == 202
            by_step: dict[int, dict[str, torch.Tensor]] = {}
            for number in range(before, before + 5000):
                loss = job.step(number)
                if driver_of(learner).core.state.snapshot_due:
                    by_step[learner.stats().steps + 1] = {
                        n: p.detach().clone() for n, p in job.model.named_parameters()
                    }
                learner.step(tokens=16, loss=loss)
                if list_parts(tmp_path):
                    break
            train(learner, job, 3)
            (number,) = list_parts(tmp_path)[1]
            part = read_part(part_path(tmp_path, 1, number))
            at = by_step[part.metadata["step"]]
            for fragment in driver_of(learner).boundary.fragments:
                flat = part.tensors[f"model.{fragment.p:03d}"]
                for piece, begin, end in fragment._view.plan.spans(fragment.p):
                    wanted = at[piece.tensor].reshape(at[piece.tensor].shape[0], -1)[piece.start : piece.stop]
                    assert torch.equal(flat[begin:end], wanted.flatten())


@pytest.mark.long
def test_number_of_snapshots_and_parts_is_bounded(tmp_path):
    with Run(tmp_path, endless(snapshot_every_merges=4, limits=PATIENT)) as run:
        (one,) = run.joined(1)
        wait_until_training(run, one, merges=60)
        durable = len(run.log_lines(run.syncer, "is durable"))
        assert durable > MAX_PARTS + 2
        run.end()
        run.finish(one)
        assert len(list_parts(tmp_path)[1]) == MAX_PARTS
        assert len(list_snapshots(tmp_path)) == 3
        run.assert_clean()


def test_slow_snapshot_parts_keep_versions(tmp_path):
    """Keep the versions of the cut until its parts arrive.

    1. The cut is made at version v.
    2. A learner is slow to write its part.
    3. The fragment is merged more often than the store keeps versions.
    4. The part arrives.
    """
    hold = tmp_path / "hold"
    with Run(tmp_path, endless(limits=PATIENT)) as run:
        learners = run.joined(LearnerSpec(1, planted="blocked-parts"))
        wait_until_training(run, *learners)
        os.mkfifo(hold)
        number = json.loads(run.request("POST", "/v1/snapshot")[1])["snapshot"]
        run.until(lambda _: fault_marker(tmp_path, "part").exists(), "the part is being written")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 15), "five more versions of every fragment")
        hold.write_bytes(b"go on")
        reply = run.until(
            lambda _: next((i for i in list_snapshots(tmp_path) if i.number == number), None), "the snapshot"
        )
        assert reply.record is not None
        for fragment, version in enumerate(reply.record.versions):
            assert not (tmp_path / f"store/fragments/{fragment:03d}/{version:09d}.safetensors").exists()
            assert (tmp_path / f"store/snapshots/{number:09d}/{fragment:03d}.safetensors").exists()


def test_snapshot_without_run_directories_is_restored(tmp_path, capsys):
    old, new = tmp_path / "old", tmp_path / "new"
    with Run(old, endless(limits=PATIENT)) as run:
        learners = run.joined(LearnerSpec(1, has_run_directory=False), LearnerSpec(2, has_run_directory=False))
        wait_until_training(run, *learners)
        assert take_snapshot(run)["state"] == "durable"
        assert main(["snapshot", str(old)]) == 0
        output = capsys.readouterr().out
        for learner in (1, 2):
            assert re.search(rf"learner {learner}: step [\d,]+, [\d,]+ tokens, no part \(no run directory\)", output)
        assert "to save parts, give run_directory= to atoll.Learner" in output
        for child in learners:
            assert len(run.log_lines(child, "no run_directory: ")) == 1, "two snapshots, and it is logged once"
            assert not run.log_lines(child, "WARNING")
        assert not run.log_lines(run.syncer, "is not part of snapshot")
    settings = JobSettings(numerics=run.settings.numerics)
    settings.save(old / CONFIG_FILE)
    lines: list[str] = []
    assert restore_run(parse_restore_source(str(old)), new, run_settings_for(settings, "new"), lines.append) > 0
    assert "learners start with fresh optimizer state" in lines[-1]
    with Run(new, endless(limits=PATIENT)) as run:
        (again,) = run.joined(LearnerSpec(1, has_run_directory=False))
        assert run.log_lines(again, "training starts: fresh optimizer state")


def test_snapshot_lists_part_of_learner_without_run_directory(tmp_path):
    with Run(tmp_path, endless(limits=PATIENT)) as run:
        wait_until_training(run, *run.joined(1, LearnerSpec(2, has_run_directory=False)))
        reply = take_snapshot(run)
        assert (reply["state"], reply["left_out"]) == ("durable", [])
        assert [part["problem"] for part in reply["parts"]] == [None, "no run directory"]


def test_failed_snapshot_reports_reason_for_each_learner(tmp_path, capsys):
    with Run(tmp_path, endless(limits=PATIENT)) as run:
        (one,) = run.joined(LearnerSpec(1, "tall"))
        wait_until_training(run, one)
        one.command("small files", 100_000)
        assert main(["snapshot", str(tmp_path)]) == 1
        output = capsys.readouterr().err
        assert "is abandoned: no learner has saved its part; learner 1 is not part of snapshot" in output
        assert "File too large" in output
        one.command("small files", resource.RLIM_INFINITY)


def test_snapshot_needs_model_and_token(tmp_path):
    with Run(tmp_path, token="abcdefgh") as run:
        code, body = run.request("POST", "/v1/snapshot")
        assert (code, "no model yet" in body.decode()) == (409, True)
        assert run.request("POST", "/v1/snapshot", Authorization="Bearer wrong")[0] == 401
        assert run.request("GET", "/v1/snapshot/1000001")[0] == 404
        assert run.request("GET", f"/v1/snapshot/{'9' * 4000}")[0] == 404


# --------------------------------------------------------------------------------------------------------------------
# Faults


def test_full_disk_during_snapshot_part_does_not_stop_training(tmp_path):
    with Run(tmp_path, endless(limits=PATIENT)) as run:
        one, two = run.joined(LearnerSpec(1, "tall"), LearnerSpec(2, "tall"))
        wait_until_training(run, one, two)
        one.command("small files", 100_000)
        reply = take_snapshot(run)
        assert (reply["state"], reply["left_out"]) == ("durable", [1])
        lines = run.log_lines(one, "could not save its part")
        assert "File too large" in lines[0]
        assert f"{reply['snapshot']:09d}.safetensors" in lines[0]
        assert "WARNING" in lines[0]
        assert not [*tmp_path.glob("parts/learner-1/.*")], "half a part is left"
        merges = run.status()["merges"]
        run.until(run.merges(merges + 6), "both go on")
        one.command("small files", resource.RLIM_INFINITY)
        again = take_snapshot(run)
        assert (again["state"], again["left_out"]) == ("durable", [])
        run.end()
        run.assert_same(run.finish(one, two), 1, 2)


def test_learner_killed_during_snapshot_part_is_left_out(tmp_path):
    with Run(tmp_path, endless(limits=PATIENT)) as run:
        one, two = run.joined(LearnerSpec(1, planted="kill-during-part"), 2)
        wait_until_training(run, one, two)
        first = take_snapshot(run)["snapshot"]
        (tmp_path / "die").touch()
        one.expected_to_end = True
        reply = take_snapshot(run)
        assert one.ended() == -signal.SIGKILL
        assert fault_marker(tmp_path, "part").exists()
        assert (reply["state"], reply["left_out"]) == ("durable", [1])
        (tmp_path / "die").unlink()
        assert list_parts(tmp_path) == {1: [first], 2: [first, reply["snapshot"]]}
        assert [path.name for path in (tmp_path / "parts/learner-1").iterdir() if path.name.startswith(".")]
        again = run.start(1)
        assert again.expect("joined")["moments"] > 0
        again.command("go")
        third = take_snapshot(run)
        assert third["state"] == "durable"
        assert not [*tmp_path.glob("parts/learner-1/.*")], "the half of a part was not cleared away"
        run.end()
        run.assert_same(run.finish(again, two), 1, 2)


def test_syncer_killed_during_snapshot_leaves_no_partial_snapshot(tmp_path):
    with Run(tmp_path, endless(limits=PATIENT), planted="kill-before-snapshot-record") as run:
        one, two = run.joined(1, 2)
        wait_until_training(run, one, two)
        first = take_snapshot(run)["snapshot"]
        (tmp_path / "die").touch()
        run.syncer.expected_to_end = True
        assert run.request("POST", "/v1/snapshot")[0] == 202
        assert run.syncer.ended() == -signal.SIGKILL
        assert fault_marker(tmp_path, "snapshot").exists()
        half = [path for path in (tmp_path / "store/snapshots").iterdir() if not (path / "record.json").exists()]
        assert len(half) == 1
        assert [info.number for info in list_snapshots(tmp_path)] == [first]
        (tmp_path / "die").unlink()
        run.start_syncer()
        assert not half[0].exists()
        run.until(lambda status: status["alive"] == 2, "both are back")
        reply = take_snapshot(run)
        assert reply["state"] == "durable"
        assert [info.number for info in list_snapshots(tmp_path)] == [first, reply["snapshot"]]
        run.end()
        run.assert_same(run.finish(one, two), 1, 2)
        run.assert_clean()


@pytest.mark.long
def test_slow_snapshot_parts_do_not_accumulate(tmp_path):
    """The next snapshot is requested while the part of the previous one is still being written."""
    hold = tmp_path / "hold"
    short = Limits(initial_wait_s=1.0, min_wait_s=0.1, max_wait_s=2.0, initial_backoff_s=0.05, max_backoff_s=0.5)
    with Run(tmp_path, endless(limits=short)) as run:
        one, two = run.joined(LearnerSpec(1, planted="blocked-parts"), LearnerSpec(2, planted="blocked-parts"))
        wait_until_training(run, one, two)
        os.mkfifo(hold)
        assert take_snapshot(run)["state"] == "abandoned"
        assert fault_marker(tmp_path, "part").exists()
        assert take_snapshot(run)["state"] == "abandoned"
        assert run.log_lines(one, "the part before it is still being written")


# --------------------------------------------------------------------------------------------------------------------
# Restart of all processes


def all_dead(run: Run, *learners: Child) -> None:
    for learner in learners:
        learner.kill()
    run.until(lambda status: status["alive"] == 0, "all learners have left")


def test_all_learners_restart_from_parts_and_newest_versions(tmp_path):
    """No learner starts from new weights: all start from the newest published versions."""
    with Run(tmp_path, endless(limits=PATIENT)) as run:
        one, two = run.joined(LearnerSpec(1, draws=True), 2)
        wait_until_training(run, one, two)
        reply = take_snapshot(run)
        merges = run.status()["merges"]
        run.until(run.merges(merges + 6), "versions beyond the snapshot")
        all_dead(run, one, two)
        before = run.status()
        run.syncer.kill()
        run.start_syncer()
        assert run.status()["merges"] >= before["merges"], "versions went back"
        again = run.start(LearnerSpec(1, draws=True))
        joined = again.expect("joined")
        steps = {part["learner"]: part["step"] for part in reply["parts"]}
        assert (joined["moments"], joined["lr_scale"]) == (steps[1], 1.0)
        words = f"training starts: optimizer state that learner 1 saved in snapshot {reply['snapshot']}"
        assert run.log_lines(again, words)
        part = read_part(part_path(tmp_path, 1, reply["snapshot"]))
        same = torch.Generator()
        same.set_state(part.tensors["rng.cpu"])
        assert joined["next_drawn"] == float(torch.rand(1, generator=same)), "torch draws other numbers"
        assert joined["restored"] == part.extra != {"drawn": []}
        again.command("go")
        run.until(run.learner(1, standing="live"), "it trains")
        run.until(lambda status: status["merges"] > before["merges"], "and merges")
        other = run.start(2)
        assert other.expect("joined")["moments"] > 0
        assert run.log_lines(other, "training starts: optimizer state from learner 1"), "a live peer has precedence"
        other.command("go")
        run.end()
        run.assert_same(run.finish(again, other), 1, 2)
        run.verdict()


def test_new_learner_restores_part_of_another(tmp_path):
    with Run(tmp_path, endless(limits=PATIENT)) as run:
        one, two = run.joined(1, 2)
        wait_until_training(run, one, two)
        reply = take_snapshot(run)
        all_dead(run, one, two)
        (three,) = [run.start(3)]
        joined = three.expect("joined")
        assert joined["moments"] == reply["parts"][0]["step"]
        assert joined["restored"] is None
        words = f"optimizer state that learner 1 saved in snapshot {reply['snapshot']}"
        assert run.log_lines(three, words)
        three.command("go")
        run.end()
        run.assert_same(run.finish(three), 3)


def test_damaged_part_is_reported_and_older_one_restored(tmp_path):
    with Run(tmp_path, endless(limits=PATIENT)) as run:
        (one,) = run.joined(1)
        wait_until_training(run, one)
        older, newer = take_snapshot(run), take_snapshot(run)
        all_dead(run, one)
        damage(part_path(tmp_path, 1, newer["snapshot"]))
        again = run.start(1)
        assert again.expect("joined")["moments"] == older["parts"][0]["step"]
        (line,) = run.log_lines(again, "trying an older one")
        assert f"{newer['snapshot']:09d}.safetensors: the digest does not match" in line
        again.kill()
        run.until(lambda status: status["alive"] == 0, "all learners have left")
        damage(part_path(tmp_path, 1, older["snapshot"]))
        fresh = run.start(1)
        reply = fresh.expect("joined")
        assert (reply["moments"], reply["lr_scale"] < 1) == (0.0, True)
        assert run.log_lines(fresh, "training starts: fresh optimizer state")


def test_parts_of_another_run_or_optimizer_are_ignored(tmp_path):
    with Run(tmp_path, endless(limits=PATIENT)) as run:
        (one,) = run.joined(1)
        wait_until_training(run, one)
        assert take_snapshot(run)["state"] == "durable"
        settings = json.loads(run.request("GET", "/v1/run")[1])
        fingerprint = tuple(settings["config"][1]["fingerprint"])
    job = work("plain", 1)
    messages: list[str] = []
    ours = config(run_id="test", fingerprint=fingerprint)

    def found(settings: Any, optimizer: Any) -> bool:
        return find_optimizer_state(tmp_path, settings, 1, optimizer, job.model, messages.append) is not None

    assert found(ours, job.optimizer)
    assert not found(config(run_id="other", fingerprint=fingerprint), job.optimizer)
    assert "belongs to the run 'test', this is 'other'" in messages[-1]
    assert not found(config(run_id="test", fingerprint=("x",)), job.optimizer)
    assert "is of another model" in messages[-1]
    sgd = torch.optim.SGD(job.model.parameters(), lr=0.1, momentum=0.9)
    assert not found(ours, sgd)
    assert "the optimizer state is of AdamW" in messages[-1]
    assert not sgd.state, "it was changed all the same"


def test_prepared_optimizer_state_has_no_effect_before_install():
    job, other = work("plain", 1), work("plain", 2)
    for number in range(3):
        job.step(number)
    taken_state = optimizer_state.copy_state(job.optimizer, job.model)
    prepared = optimizer_state.prepare(taken_state.metadata, taken_state.tensors, other.optimizer, other.model)
    assert not other.optimizer.state
    prepared.install()
    assert {float(s["step"]) for s in other.optimizer.state.values()} == {3.0}


def test_failing_extra_state_loses_only_the_part(tmp_path):
    with Run(tmp_path, endless(limits=QUICK)) as run:
        job = work("plain", 1)

        def failing_state() -> Any:
            raise KeyError("no such thing")

        with learner_of(run, job, 1, extra_state=failing_state) as learner:
            train(learner, job, 3)
            number = json.loads(run.request("POST", "/v1/snapshot")[1])["snapshot"]
            reply: dict[str, Any] = {}
            for _ in range(5000):
                train(learner, job, 1)
                reply = json.loads(run.request("GET", f"/v1/snapshot/{number}")[1])
                if reply["state"] != "being taken":
                    break
            assert reply["state"] == "abandoned"
            assert list_parts(tmp_path) == {}
            steps = learner.stats().steps
            train(learner, job, 5)
            assert learner.stats().steps == steps + 5


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"format": 2}', "not JSON"])
def test_invalid_part_file_is_refused(tmp_path, text):
    path = tmp_path / "000000001.safetensors"
    write_file(path, encode_tensor_file(text, {"a": torch.zeros(2)}))
    with pytest.raises(ValueError, match=r"not a part of a learner|Expecting value"):
        read_part(path)
