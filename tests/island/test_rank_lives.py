"""Islands of several ranks exchange optimizer state, pause, fail and rejoin in another shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atoll.core.protocol import MessageArrived, SetPaused, StepTaken
from tests.island.rank_runs import IslandSpec, RankedIsland
from tests.learner.fault_injection import fault_marker
from tests.learner.run_tapes import entries
from tests.learner.runs import Run, config, endless
from tests.learner.small_models import BATCH
from tests.syncer.test_controls import are_paused
from tests.syncer.test_snapshots import PATIENT
from tests.syncer.test_snapshots import take_snapshot as snapshot_of


def learner_status(run: Run, number: int) -> dict[str, Any]:
    return run.until(run.learner(number), f"learner {number} is shown")


def control(run: Run, kind: str, value: float | None = None) -> None:
    body = json.dumps({"kind": kind, "value": value, "requested_by": "the test"}).encode()
    code, reply = run.request("POST", "/v1/control", body)
    assert code in (200, 204), reply


def has_stepped_since_pause(run: Run, learner: int) -> bool:
    """Return whether this learner has reached a step boundary after it received the pause.

    Without this check the run could be resumed too early:

    1. The connection thread receives the pause and acknowledges it.
    2. The syncer shows the learner as paused.
    3. The training thread is still in its step.
    """
    is_paused = False
    for entry in entries(run, learner):
        if type(entry.event) is MessageArrived and type(entry.event.envelope.body) is SetPaused:
            is_paused = entry.event.envelope.body.paused
        elif is_paused and type(entry.event) is StepTaken:
            return True
    return False


@pytest.mark.long
def test_optimizer_state_is_sent_between_islands_of_different_shapes(tmp_path):
    """FSDP2 on two ranks, then one process, then FSDP2 on three ranks, then DDP on two ranks."""
    with Run(tmp_path, endless(quorum=1, limits=PATIENT)) as run:
        first = RankedIsland(run, IslandSpec(1, "fsdp"))
        assert [report["moments"] for report in first.joined()] == [0.0, 0.0]
        first.command("go")
        run.until(run.merges(3), "the first island trains")
        alone = run.start(2)
        assert alone.expect("joined")["moments"] > 0
        first.command("hold")
        first.expect("held")
        first.command("break")
        first.left()
        run.go(alone)
        run.until(lambda _: learner_status(run, 2)["step"] > 0, "it has optimizer state")
        wider = RankedIsland(run, IslandSpec(3, "fsdp", ranks=3))
        moments = [report["moments"] for report in wider.joined()]
        assert len(set(moments)) == 1
        assert moments[0] > 0
        alone.command("break")
        alone.expect("ended")
        assert alone.ended() == 0
        wider.command("go")
        run.until(lambda _: learner_status(run, 3)["step"] > 0, "the wider island has optimizer state")
        replicas = RankedIsland(run, IslandSpec(4, "ddp"))
        assert min(report["moments"] for report in replicas.joined()) >= moments[0]
        replicas.command("go")
        run.end()
        wider.finished(tmp_path)
        replicas.finished(tmp_path)
        assert run.syncer.expect("ended") is True
        run.verdict()


@pytest.mark.parametrize("odd", [0, 1])
def test_rank_that_cannot_copy_its_state_continues_training(tmp_path, odd):
    with Run(tmp_path, endless(quorum=1, limits=PATIENT)) as run:
        island = RankedIsland(run, IslandSpec(1, "replicas", planted="uncopyable-state", planted_ranks=(odd,)))
        island.joined()
        island.command("go")
        run.until(run.merges(3), "it trains")
        assert snapshot_of(run)["state"] == "abandoned"
        alone = run.start(2)
        report = alone.expect("joined")
        assert (report["moments"], report["lr_scale"] < 1) == (0.0, True)
        prefix = f"rank {odd}: " if odd else ""
        assert run.log_lines(
            alone, f"no optimizer state from learner 1: the peer has no state to provide: {prefix}TypeError"
        )
        assert run.log_lines(island.ranks[0], f"cannot send optimizer state to learner 2: {prefix}TypeError")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 2), "the island trains on")
        run.go(alone)
        run.end()
        island.finished(tmp_path)
        run.finish(alone)
        run.verdict()


@pytest.mark.long
def test_leader_without_memory_for_rows_of_its_ranks_continues_training(tmp_path):
    with Run(tmp_path, endless(quorum=1, limits=PATIENT)) as run:
        island = RankedIsland(run, IslandSpec(1, "tp", planted="no-memory-for-rows"))
        island.joined()
        island.command("go")
        run.until(run.merges(3), "it trains")
        for number in (2, 3):  # the second one finds no leftover transfer of the first
            alone = run.start(number)
            assert alone.expect("joined")["moments"] == 0
            assert run.log_lines(
                alone,
                "no optimizer state from learner 1: the peer has no state to provide: RuntimeError: can't allocate",
            )
            alone.kill()
            run.until(run.learner(number, standing="disconnected"), "it is disconnected")
        assert fault_marker(tmp_path, "room").exists()
        merges = run.status()["merges"]
        run.until(run.merges(merges + 2), "the island trains on")
        run.end()
        island.finished(tmp_path)
        run.verdict()


@pytest.mark.long
def test_island_rejoins_with_another_number_of_ranks(tmp_path):
    """No peer can send optimizer state, so the island resumes from its own part of the last snapshot."""
    with Run(tmp_path, endless(quorum=1)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp"))
        island.joined()
        island.command("go")
        run.until(run.merges(4), "it trains")
        assert snapshot_of(run)["state"] == "durable"
        island.kill_all()
        restarted = RankedIsland(run, IslandSpec(1, "fsdp", ranks=3))
        report = restarted.joined()
        assert {each["incarnation"] for each in report} == {2}
        assert all(each["moments"] > 0 for each in report)
        assert all(len(each["restored"]["drawn"]) == 1 for each in report), (
            "some ranks did not get the state that rank 0 saved"
        )
        restarted.command("go")
        run.until(lambda status: status["merges"] >= 6, "it goes on")
        run.end()
        restarted.finished(tmp_path)
        assert run.syncer.expect("ended") is True
        run.verdict()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_its_island_and_no_other(tmp_path, victim):
    with Run(tmp_path, endless(quorum=1)) as run:
        alone = run.start(1)
        island = RankedIsland(run, IslandSpec(2, "replicas"))
        alone.expect("joined")
        island.joined()
        run.go(alone)
        island.command("go")
        run.until(lambda status: learner_status(run, 2)["step"] > 5, "the island trains")
        island.kill(victim)
        kind, message, threads = island.ranks[1 - victim].expect("failed")
        # The error is that of Atoll or that of a process group of the training.
        assert kind in ("IslandBrokenError", "RuntimeError", "DistBackendError"), message
        assert kind != "IslandBrokenError" or "is gone" in message
        assert threads == []
        merges = run.status()["merges"]
        run.until(run.merges(merges + 3), "the other one goes on")
        restarted = RankedIsland(run, IslandSpec(2, "ddp", ranks=2))
        assert restarted.joined()[1]["incarnation"] == 2
        restarted.command("go")
        run.end()
        restarted.finished(tmp_path)
        run.finish(alone)
        run.verdict()


def test_exception_in_one_rank_is_raised_by_the_others(tmp_path):
    with Run(tmp_path, endless(quorum=1)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp", ranks=3))
        island.joined()
        island.command("raise")
        for rank in island.ranks:
            rank.expected_to_end = True
        assert island.ranks[2].expect("failed")[0] == "ArithmeticError"
        for rank in island.ranks[:2]:
            kind, message, threads = rank.expect("failed")
            assert (kind, threads) == ("IslandBrokenError", []), message
            assert "rank 2" in message
        assert learner_status(run, 1)["reason"].startswith("left: its loop ended with IslandBrokenError")


@pytest.mark.parametrize(
    ("misstep", "expected"),
    [("takes", "calls take where rank 0 calls step"), ("leaves", "leaves where rank 0 calls step")],
)
def test_ranks_that_are_out_of_step_raise_an_error(tmp_path, misstep, expected):
    with Run(tmp_path, endless(quorum=1, lease_samples=64)) as run:
        island = RankedIsland(run, IslandSpec(1, "replicas", misstep=misstep))
        island.joined()
        for rank in island.ranks:
            rank.expected_to_end = True
        island.command("go")
        for rank in island.ranks:
            kind, message, _ = rank.expect("failed")
            assert kind == "IslandBrokenError"
            assert f"rank 1 of this island {expected}" in message


def test_refusal_of_the_leader_is_raised_by_all_ranks(tmp_path):
    with Run(tmp_path) as run:
        alone = run.start(1)
        alone.expect("joined")
        island = RankedIsland(run, IslandSpec(2, "fsdp", model="taller"))
        for rank in island.ranks:
            rank.expected_to_end = True
            kind, message, threads = rank.expect("failed")
            assert (kind, threads) == ("LearnerRefusedError", []), message
            assert "first" in message


def test_island_pauses_is_drained_and_scatters_its_samples(tmp_path):
    """Every sample goes to one rank. All ranks report the same tokens and progress, and end together."""
    with Run(tmp_path, endless(quorum=1, lease_samples=64)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp", leases=4))
        island.joined()
        island.command("go")
        run.until(run.merges(3), "it trains")
        control(run, "pause")
        run.until(are_paused(1), "the leader has acknowledged the pause")
        run.until(lambda _: has_stepped_since_pause(run, 1), "the island is paused")
        before = learner_status(run, 1)["step"]
        island.command("hold")  # is received when the run is resumed
        control(run, "resume")
        reports = island.expect("held")
        assert reports[0]["steps"] == reports[1]["steps"] >= before
        assert all(report["paused_s"] > 0 for report in reports)
        taken = [set(report["taken"]) for report in reports]
        assert not taken[0] & taken[1]
        assert [len(report["taken"]) for report in reports] == [4 * reports[0]["steps"]] * 2
        assert {report["stats"]["tokens"] for report in reports} == {2 * BATCH * reports[0]["steps"]}
        assert {report["progress"] for report in reports} == {reports[0]["progress"]}
        island.command("go")
        control(run, "drain", 1)
        for report in island.left():
            assert report["finished"]
            assert report["drained"]
        run.verdict()


def test_tokens_of_ranks_that_share_their_data_count_once(tmp_path):
    with Run(tmp_path, endless(quorum=1, lease_samples=64)) as run:
        island = RankedIsland(run, IslandSpec(1, "tp", leases=4))
        island.joined()
        island.command("go")
        run.until(run.merges(3), "it trains")
        island.command("hold")
        reports = island.expect("held")
        assert reports[0]["taken"] == reports[1]["taken"]
        assert {report["stats"]["tokens"] for report in reports} == {BATCH * reports[0]["steps"]}
        island.command("break")
        island.left()


def test_island_that_joins_after_the_end_gets_the_final_model(tmp_path):
    with Run(tmp_path, config(budget_merges=3)) as run:
        (alone,) = run.joined(1)
        run.go(alone)
        published = run.finish(alone)
        run.start_syncer()
        late = RankedIsland(run, IslandSpec(2, "fsdp", ranks=3))
        assert all(report["finished"] for report in late.joined())
        late.finished(tmp_path)
        run.assert_same(published, 1, 2)


def test_loop_of_several_ranks_logs_its_memory(tmp_path):
    with Run(tmp_path, endless(quorum=1)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp", model="tall"))
        island.joined()
        island.command("go")
        run.until(run.merges(3), "it trains")
        island.command("hold")
        leader, other = (report["stats"] for report in island.expect("held"))
        total = leader["parameters"] + other["parameters"]
        assert total == 8 * 4000 + 4000 + 4 * 4000 + 4
        assert {leader["transfer_mode"], other["transfer_mode"]} == {"rows"}
        for stats in (leader, other):  # buffers, rounding errors, and the last encoded contribution
            assert stats["host_bytes"] / stats["parameters"] <= 4 * 5 + 8 + 2
        island.command("break")
        island.left()
