"""Real faults in real processes. Each test asserts that its fault happened, and that no other process was affected."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from atoll.core.protocol import OptimizerState, Published
from atoll.core.types import Limits
from atoll.tensors.settings import Numerics
from tests.learner.fault_injection import fault_marker
from tests.learner.run_tapes import received_messages, sent_together
from tests.learner.runs import QUICK, Child, LearnerSpec, Run, config, endless, versions_by_epoch

NEVER_TOO_LONG_S = 0.05
"""Limit of Atoll's own time between two steps. Waiting for another process would take far longer."""


# --------------------------------------------------------------------------------------------------------------------
# Learners


def test_killed_learner_rejoins_as_new_incarnation_with_optimizer_state_from_a_peer(tmp_path):
    patient = Limits(initial_wait_s=5.0, min_wait_s=5.0)  # longer than the steps of a busy machine
    with Run(tmp_path, endless(limits=patient)) as run:
        one, two = run.joined(1, 2)
        run.go(one, two)
        run.until(run.merges(6), "the run is under way")
        one.kill()
        run.until(run.learner(1, standing="disconnected", incarnation=1), "the loss is noticed")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 3), "the other goes on")
        restarted = run.start(1)
        report = restarted.expect("joined")
        assert (report["learner"], report["incarnation"]) == (1, 2)
        assert report["moments"] > 0, "AdamW has counted no steps: its state is fresh"
        assert report["lr_scale"] == 1.0
        assert run.log_lines(restarted, "training starts: optimizer state from learner 2")
        ledger = run.status()["ledger"]
        for line in ledger:
            assert line["trained"] == line["merged"] + line["pending"] + sum(line["dropped"].values())
        assert any(line["dropped"].get("superseded", 0) > 0 for line in ledger), ledger
        restarted.command("go")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 3), "both go on")
        run.end()
        run.assert_same(run.finish(restarted, two), 1, 2)
        assert run.verdict().finished


def test_one_learner_sends_its_optimizer_state_to_two_at_the_same_boundary(tmp_path):
    patient = Limits(initial_wait_s=10.0, min_wait_s=10.0)
    with Run(tmp_path, endless(limits=patient)) as run:
        (source,) = run.joined(1)
        run.go(source)
        run.until(run.merges(3), "the run is under way")
        source.command("hold")
        source.expect("held")
        others = [run.start(2), run.start(3)]
        for number in (2, 3):
            line = f"learner 1 sends its optimizer state to learner {number}"
            run.until(lambda _, line=line: run.log_lines(run.syncer, line), line)  # type: ignore[misc]
        source.command("go")
        for other in others:
            assert other.expect("joined")["moments"] > 0
        run.go(*others)
        run.end()
        run.assert_same(run.finish(source, *others), 1, 2, 3)
        targets = [[body.target for body in bodies] for bodies in sent_together(run, 1, OptimizerState)]
        assert [2, 3] in [sorted(each) for each in targets], "the state was not sent at one boundary"
        run.assert_clean()


@pytest.mark.long
def test_peer_that_dies_while_sending_state_is_replaced_by_the_next_and_then_by_fresh_moments(tmp_path):
    patient = Limits(initial_wait_s=5.0, min_wait_s=5.0)
    with Run(tmp_path, endless(limits=patient)) as run:
        peers = dict(zip((1, 2), run.joined(1, 2), strict=True))
        run.go(*peers.values())
        run.until(run.merges(6), "the run is under way")
        for peer in peers.values():  # the requested peer sends at its next step, so it is killed before that
            peer.command("hold")
            peer.expect("held")
        third = run.start(3)
        _kill_source_of(run, 3, peers)
        ((left, last),) = peers.items()
        last.command("go")
        assert third.expect("joined")["moments"] > 0
        assert run.log_lines(third, f"training starts: optimizer state from learner {left}")

        last.command("hold")
        last.expect("held")
        third.kill()
        run.until(run.learner(3, standing="disconnected"), "the loss is noticed")
        fourth = run.start(4)
        _kill_source_of(run, 4, peers)
        report = fourth.expect("joined")
        assert report["moments"] == 0
        assert report["lr_scale"] < 1.0
        assert run.log_lines(fourth, "training starts: fresh optimizer state")
        fourth.command("go")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 3), "it goes on from the published model")
        run.end()
        run.assert_same(run.finish(fourth), 4)
        run.assert_clean()


def _kill_source_of(run: Run, number: int, peers: dict[int, Child]) -> None:
    """Kill the peer that must send its optimizer state to this learner, and remove it from `peers`."""

    def requested() -> list[int]:
        event = f"sends its optimizer state to learner {number}"
        return [peer for peer in peers if run.log_lines(run.syncer, f"learner {peer} {event}")]

    run.until(lambda _: requested(), "a peer receives the request")
    peers.pop(requested()[0]).kill()


def test_old_process_that_reconnects_after_its_successor_is_refused_and_ends(tmp_path):
    """A learner that was marked as lost is restarted while its first process was only stalled."""
    with Run(tmp_path, endless()) as run:
        one, two = run.joined(1, 2)
        run.go(one, two)
        run.until(run.merges(3), "the run is under way")
        one.send(signal.SIGSTOP)
        restarted = run.start(1)
        assert restarted.expect("joined")["incarnation"] == 2
        restarted.command("go")
        one.send(signal.SIGCONT)
        one.expected_to_end = True
        kind, message, threads = one.expect("failed")
        assert (kind, threads) == ("LearnerRefusedError", [])
        assert "incarnation 1 was replaced by 2" in message
        run.end()
        run.assert_same(run.finish(restarted, two), 1, 2)


def test_stalled_learner_is_suspected_and_continues_as_the_same_incarnation(tmp_path):
    impatient = Limits(initial_wait_s=1.0, initial_backoff_s=0.05, max_backoff_s=0.5)
    with Run(tmp_path, endless(limits=impatient)) as run:
        one, two = run.joined(1, 2)
        run.go(one, two)
        run.until(run.merges(6), "the run is under way")
        one.send(signal.SIGSTOP)
        is_suspect, is_disconnected = run.learner(1, standing="suspect"), run.learner(1, standing="disconnected")
        run.until(lambda status: is_suspect(status) or is_disconnected(status), "its silence is noticed")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 6), "the other goes on")
        one.send(signal.SIGCONT)
        back = run.until(run.learner(1, standing="live"), "it is back")
        assert back["incarnation"] == 1
        merges = run.status()["merges"]
        run.until(run.merges(merges + 6), "both go on")
        run.end()
        run.assert_same(run.finish(one, two), 1, 2)
        run.assert_clean()


@pytest.mark.parametrize(("fault", "error"), [("signal", "KeyboardInterrupt"), ("command", "ArithmeticError")])
def test_ctrl_c_and_exceptions_end_a_learner_cleanly_and_others_continue(tmp_path, fault, error):
    with Run(tmp_path, endless()) as run:
        one, two = run.joined(1, 2)
        run.go(one, two)
        run.until(run.merges(4), "the run is under way")
        one.expected_to_end = True
        if fault == "signal":
            one.send(signal.SIGINT)
        else:
            one.command("raise")
        kind, _, threads = one.expect("failed")
        assert (kind, threads) == (error, [])
        assert one.ended() == 0
        left = run.until(run.learner(1, standing="left"), "it has left")
        assert left["reason"] == f"left: its loop ended with {error}"
        merges = run.status()["merges"]
        run.until(run.merges(merges + 4), "the other goes on")
        run.end()
        run.finish(two)
        run.assert_clean()


def test_ctrl_c_while_a_learner_waits_for_its_syncer(tmp_path):
    with Run(tmp_path) as run:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            free = listening.getsockname()[1]
        one = run.start(LearnerSpec(1, join_timeout_s=None), f"127.0.0.1:{free}")
        one.expected_to_end = True
        run.until(lambda _: run.log_lines(one, "cannot reach syncer at"), "it waits")
        one.send(signal.SIGINT)
        kind, _, threads = one.expect("failed")
        assert (kind, threads) == ("KeyboardInterrupt", [])
        assert one.ended() == 0


def test_nan_contribution_is_refused_with_a_reason_and_quarantined_if_repeated(tmp_path):
    with Run(tmp_path, endless()) as run:
        one, two = run.joined(1, 2)
        run.go(one, two)
        run.until(run.merges(3), "the run is under way")
        one.expected_to_end = True
        one.command("poison")
        kind, message, _ = one.expect("failed")
        assert kind == "LearnerRefusedError"
        assert message.startswith(
            "the syncer refused this learner: quarantined after 3 invalid messages, the last: invalid values: "
        )
        assert "then restart the learner to join again" in message
        status = run.until(run.learner(1, standing="quarantined"), "it is quarantined")
        assert status["strikes"] == 3
        assert "invalid values" in status["reason"]
        restarted = run.start(1)  # a restarted learner is admitted
        assert restarted.expect("joined")["incarnation"] == 2
        restarted.command("go")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 3), "both go on")
        run.end()
        published = run.finish(restarted, two)
        assert all(bool(torch.isfinite(value).all()) for value in published.values())
        run.assert_same(published, 1, 2)
        run.assert_clean()


# --------------------------------------------------------------------------------------------------------------------
# The syncer


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_syncer_killed_at_any_moment_resumes_from_its_directory(tmp_path, seed):
    rng = random.Random(seed)
    numerics = Numerics(up="int8", down="int4") if seed % 2 else Numerics()
    with Run(tmp_path, endless(quorum=1 + seed % 2), numerics) as run:
        one, two = run.joined(1, 2)
        run.go(one, two)
        before: dict[int, int] = {}
        for _ in range(2):
            merges = run.status()["merges"]
            run.until(run.merges(merges + rng.randrange(1, 7)), "the run is under way")
            for _ in range(rng.randrange(2000)):  # vary the moment within the next round
                os.stat(tmp_path)
            last_status = run.status()
            run.syncer.kill()
            run.start_syncer()
            for fragment in last_status["fragments"]:
                before[fragment["fragment"]] = fragment["version"]
            after = {each["fragment"]: each["version"] for each in run.status()["fragments"]}
            assert all(after[p] >= version for p, version in before.items()), (before, after)
            for learner in (1, 2):
                back = run.until(run.learner(learner, standing="live", link="up"), f"learner {learner} is back")
                assert back["incarnation"] == 1
        merges = run.status()["merges"]
        run.until(run.merges(merges + 4), "merges go on")
        run.end()
        run.assert_same(run.finish(one, two), 1, 2)
        assert run.verdict().finished
    epochs = dict(versions_by_epoch(tmp_path))
    assert sorted(epochs) == [1, 2, 3]
    assert all(epochs[3].get(p, 0) >= version for p, version in epochs[2].items())


def test_stopped_syncer_logs_it_and_can_be_restarted(tmp_path):
    with Run(tmp_path, endless()) as run:
        (one,) = run.joined(1)
        run.go(one)
        run.until(run.merges(3), "the run is under way")
        merges = run.status()["merges"]
        run.syncer.expected_to_end = True
        run.syncer.send(signal.SIGTERM)
        assert run.syncer.expect("ended") is False
        assert run.syncer.ended() == 0
        run.start_syncer()
        assert run.status()["merges"] >= merges
        run.until(run.merges(merges + 3), "merges go on")
        run.end()
        run.assert_same(run.finish(one), 1)
        assert run.log_lines(one, "connection closed: ")
        run.assert_clean()


def test_steps_continue_without_waiting_while_the_syncer_is_down(tmp_path):
    with Run(tmp_path, endless()) as run:
        one, two = run.joined(1, 2)
        run.go(one, two)
        run.until(run.merges(4), "the run is under way")
        for learner in (one, two):
            learner.command("hold")
            learner.expect("held")
        run.syncer.kill()
        learners: list[Child] = [one, two]
        for learner in learners:
            learner.command("train", 300)
        for learner in learners:
            report = learner.expect("trained")
            assert report["link"] in ("dialing", "down")
            # On a machine with other work many boundaries are interrupted. A wait for the syncer would be in all.
            assert sorted(report["boundaries_s"])[150] < NEVER_TOO_LONG_S
            assert run.log_lines(learner, "WARNING cannot reach syncer at 127.0.0.1")
            learner.command("break")
            learner.expect("ended")


def test_error_in_the_syncer_core_ends_it_and_a_restarted_one_continues(tmp_path):
    with Run(tmp_path, endless(), planted="failing-core") as run:
        (one,) = run.joined(1)
        run.go(one)
        run.until(run.merges(3), "the run is under way")
        run.syncer.expected_to_end = True
        (tmp_path / "fail").touch()
        kind, message = run.syncer.expect("failed")
        assert (kind, message) == ("RuntimeError", "the syncer has failed: an injected bug in the core")
        (tmp_path / "fail").unlink()
        run.syncer.ended()
        run.start_syncer()
        run.until(run.learner(1, standing="live"), "it is back")
        run.end()
        run.assert_same(run.finish(one), 1)
        run.verdict()


# --------------------------------------------------------------------------------------------------------------------
# The disk


@contextmanager
def blocked_writes(directory: Path) -> Iterator[None]:
    """Block writes of versions until the end of the block."""
    hold = directory / "hold"
    os.mkfifo(hold)
    try:
        yield
    finally:
        is_blocked = fault_marker(directory, "write").exists()
        writer = os.open(hold, os.O_RDWR)
        hold.unlink()
        if is_blocked:
            os.write(writer, b".")
        os.close(writer)


def durable_before_published(directory: Path, planted: str) -> None:
    """Assert that no learner gets a version while its write is blocked, and that all get it afterwards."""
    with Run(directory, endless(), planted=planted) as run:
        (one,) = run.joined(1)
        run.go(one)
        run.until(run.merges(3), "the run is under way")
        with blocked_writes(directory):
            run.until(lambda _: fault_marker(directory, "write").exists(), "a version is being written")
            one.command("hold")
            one.expect("held")
            one.command("train", 200)
            one.expect("trained")
            status = run.status()
            on_disk = {int(path.parent.name): 0 for path in (directory / "store").rglob("*.safetensors")}
            for path in (directory / "store" / "fragments").rglob("*.safetensors"):
                p = int(path.parent.name)
                on_disk[p] = max(on_disk[p], int(path.stem))
            published = {each["fragment"]: each["version"] for each in status["fragments"]}
            assert all(published[p] <= on_disk[p] for p in published), f"{published} is published, {on_disk} is on disk"
            arrived: dict[int, int] = {}
            for body in received_messages(run, 1, Published, until=status["wall_s"]):
                arrived[body.fragment] = max(arrived.get(body.fragment, 0), body.version)
            assert all(arrived[p] <= on_disk[p] for p in arrived), f"{arrived} has arrived, {on_disk} is on disk"
        one.command("go")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 3), "merges go on")
        run.end()
        run.assert_same(run.finish(one), 1)


def test_version_is_durable_before_it_is_published(tmp_path):
    durable_before_published(tmp_path, "blocked-versions")


def test_the_test_above_fails_for_a_syncer_that_publishes_first(tmp_path):
    with pytest.raises(AssertionError, match="on disk"):
        durable_before_published(tmp_path, "published-before-durable blocked-versions")


@contextmanager
def disk_of_8_mib(folder: Path) -> Iterator[Callable[[], Callable[[], None]]]:
    """Mount a disk; yield a function that fills it and returns one that frees it."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], timeout=300, check=True)

    def fill() -> Callable[[], None]:
        filler = folder / "filler"
        with open(filler, "wb", buffering=0) as file:
            try:
                while file.write(bytes(65536)):
                    pass
            except OSError:
                pass
        return filler.unlink

    try:
        yield fill
    finally:
        subprocess.run(["umount", "-l", str(folder)], timeout=300, check=True)


def test_learner_waits_while_the_disk_is_full_at_the_start_of_the_run(tmp_path):
    with Run(tmp_path, config(budget_merges=3)) as run:
        free = limit_file_size(run.syncer.pid)
        one = run.start(LearnerSpec(1, "tall"))
        run.until(lambda _: run.log_lines(one, "the syncer cannot write the model: File too large"), "it is logged")
        assert run.status()["founded"] is False
        free()
        one.expect("joined")
        one.command("go")
        run.assert_same(run.finish(one), 1)
        run.assert_clean()


def limit_file_size(pid: int) -> Callable[[], None]:
    """Limit the files of a process to 16 KiB, so that writes fail as on a full disk. Return a function to undo it."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (16 * 1024, hard))
    return lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard)) and None


@pytest.mark.parametrize("limit", [pytest.param("a full disk", marks=pytest.mark.needs_root), "a limit on files"])
def test_full_disk_is_reported_and_the_run_continues_when_there_is_space(tmp_path, limit):
    """The model is so large that no version fits on the disk any more."""
    with disk_of_8_mib(tmp_path / "disk") if limit == "a full disk" else nullcontext() as fill:
        directory = tmp_path / "disk" if fill is not None else tmp_path / "run"
        directory.mkdir(exist_ok=True)
        with Run(directory, endless(fragments=2, every_steps=4)) as run:
            one, two = run.joined(LearnerSpec(1, "tall"), LearnerSpec(2, "tall"))
            run.go(one, two)
            run.until(run.merges(2), "the run is under way")
            free = fill() if fill is not None else limit_file_size(run.syncer.pid)
            run.until(lambda _: run.log_lines(run.syncer, "could not be made durable"), "the syncer logs the error")
            merges = run.status()["merges"]
            steps = run.until(run.learner(1), "learner 1 is shown")["step"]
            run.until(
                lambda status: status["learners"][0]["step"] > steps + 20 or status["merges"] > merges,
                "learners train on",
            )
            assert run.status()["merges"] == merges, "a version was published that is not on disk"
            free()
            run.until(run.merges(merges + 3), "merges go on when there is space")
            run.end()
            run.assert_same(run.finish(one, two), 1, 2)
            run.assert_clean()  # tape entries that did not fit were written later
            if limit == "a limit on files":
                assert run.log_lines(run.syncer, "writing to the tape again; no entry was lost")


# --------------------------------------------------------------------------------------------------------------------
# Limits of these runs


def test_quick_limits_differ_from_default_limits_only_in_waiting_times():
    changed = {name for name in Limits.__dataclass_fields__ if getattr(QUICK, name) != getattr(Limits(), name)}
    assert changed == {"initial_wait_s", "initial_backoff_s", "max_backoff_s"}
