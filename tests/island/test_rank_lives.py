"""Islands of several ranks: they exchange optimizer state, pause, die, and rejoin in another
shape."""

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
from tests.syncer.test_controls import stand_still
from tests.syncer.test_snapshots import PATIENT
from tests.syncer.test_snapshots import taken as snapshot_of


def shown(run: Run, number: int) -> dict[str, Any]:
    return run.until(run.learner(number), f"learner {number} is shown")


def control(run: Run, what: str, value: float | None = None) -> None:
    body = json.dumps({"kind": what, "value": value, "requested_by": "the test"}).encode()
    code, answer = run.ask("POST", "/v1/control", body)
    assert code in (200, 204), answer


def has_stepped_since_pause(run: Run, learner: int) -> bool:
    """Return whether this learner has come to a step boundary after it had received the pause, and waits there.

    1. The connection thread receives the pause and acknowledges it. 2. The syncer shows that the learner stands still.
    3. The training thread is still in its step; without a wait for its end the run would be resumed before it stands.
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
    """FSDP2 on two ranks to one process, that to three ranks with FSDP2, and from those to two with DDP."""
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
        run.until(lambda _: shown(run, 2)["step"] > 0, "it has inner state to give")
        wider = RankedIsland(run, IslandSpec(3, "fsdp", ranks=3))
        moments = [report["moments"] for report in wider.joined()]
        assert len(set(moments)) == 1
        assert moments[0] > 0
        alone.command("break")
        alone.expect("ended")
        assert alone.ended() == 0
        wider.command("go")
        run.until(lambda _: shown(run, 3)["step"] > 0, "so has the wider one")
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
        island = RankedIsland(run, IslandSpec(1, "replicas", planted="odd-state", planted_ranks=(odd,)))
        island.joined()
        island.command("go")
        run.until(run.merges(3), "it trains")
        assert snapshot_of(run)["state"] == "abandoned"
        alone = run.start(2)
        report = alone.expect("joined")
        assert (report["moments"], report["lr_scale"] < 1) == (0.0, True)
        where = f"rank {odd}: " if odd else ""
        assert run.log_lines(
            alone, f"no optimizer state from learner 1: the peer has no state to provide: {where}TypeError"
        )
        assert run.log_lines(island.ranks[0], f"cannot send optimizer state to learner 2: {where}TypeError")
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
        island = RankedIsland(run, IslandSpec(1, "tp", planted="no-room-for-rows"))
        island.joined()
        island.command("go")
        run.until(run.merges(3), "it trains")
        for number in (2, 3):  # the second one finds that nothing of the first is left on the way
            alone = run.start(number)
            assert alone.expect("joined")["moments"] == 0
            assert run.log_lines(
                alone,
                "no optimizer state from learner 1: the peer has no state to provide: RuntimeError: can't allocate",
            )
            alone.kill()
            run.until(run.learner(number, standing="disconnected"), "it is gone")
        assert fault_marker(tmp_path, "room").exists()
        merges = run.status()["merges"]
        run.until(run.merges(merges + 2), "the island trains on")
        run.end()
        island.finished(tmp_path)
        run.verdict()


@pytest.mark.long
def test_island_rejoins_with_another_number_of_ranks(tmp_path):
    """No peer is left to send optimizer state, so it resumes from its own part of the last snapshot."""
    with Run(tmp_path, endless(quorum=1)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp"))
        island.joined()
        island.command("go")
        run.until(run.merges(4), "it trains")
        assert snapshot_of(run)["state"] == "durable"
        island.kill_all()
        again = RankedIsland(run, IslandSpec(1, "fsdp", ranks=3))
        report = again.joined()
        assert {each["incarnation"] for each in report} == {2}
        assert all(each["moments"] > 0 for each in report)
        assert all(len(each["restored"]["drawn"]) == 1 for each in report), "all get what rank 0 had saved"
        again.command("go")
        run.until(lambda status: status["merges"] >= 6, "it goes on")
        run.end()
        again.finished(tmp_path)
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
        run.until(lambda status: shown(run, 2)["step"] > 5, "the island trains")
        island.kill(victim)
        kind, words, threads = island.ranks[1 - victim].expect("failed")
        assert kind in ("IslandBrokenError", "RuntimeError", "DistBackendError"), (
            words
        )  # ours, or of a group of the training
        assert kind != "IslandBrokenError" or "is gone" in words
        assert threads == []
        merges = run.status()["merges"]
        run.until(run.merges(merges + 3), "the other one goes on")
        again = RankedIsland(run, IslandSpec(2, "ddp", ranks=2))
        assert again.joined()[1]["incarnation"] == 2
        again.command("go")
        run.end()
        again.finished(tmp_path)
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
            kind, words, threads = rank.expect("failed")
            assert (kind, threads) == ("IslandBrokenError", []), words
            assert "rank 2" in words
        assert shown(run, 1)["reason"].startswith("left: its loop ended with IslandBrokenError")


@pytest.mark.parametrize(
    ("invalid", "words"),
    [("takes", "calls take where rank 0 calls step"), ("leaves", "leaves where rank 0 calls step")],
)
def test_ranks_that_are_out_of_step_raise_an_error(tmp_path, misstep, words):
    with Run(tmp_path, endless(quorum=1, lease_samples=64)) as run:
        island = RankedIsland(run, IslandSpec(1, "replicas", misstep=misstep))
        island.joined()
        for rank in island.ranks:
            rank.expected_to_end = True
        island.command("go")
        for rank in island.ranks:
            kind, said, _ = rank.expect("failed")
            assert kind == "IslandBrokenError"
            assert f"rank 1 of this island {words}" in said


def test_refusal_of_the_leader_is_raised_by_all_ranks(tmp_path):
    with Run(tmp_path) as run:
        alone = run.start(1)
        alone.expect("joined")
        island = RankedIsland(run, IslandSpec(2, "fsdp", model="taller"))
        for rank in island.ranks:
            rank.expected_to_end = True
            kind, said, threads = rank.expect("failed")
            assert (kind, threads) == ("LearnerRefusedError", []), said
            assert "first" in said


def test_island_pauses_is_drained_and_scatters_its_samples(tmp_path):
    """Pause and resume; every sample to one rank; the same tokens, progress and end on all ranks."""
    with Run(tmp_path, endless(quorum=1, lease_samples=64)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp", leases=4))
        island.joined()
        island.command("go")
        run.until(run.merges(3), "it trains")
        control(run, "pause")
        run.until(stand_still(1), "the leader knows that the run is paused")
        run.until(lambda _: has_stepped_since_pause(run, 1), "the island is paused")
        before = shown(run, 1)["step"]
        island.command("hold")  # is received when the run is resumed
        control(run, "resume")
        held = island.expect("held")
        assert held[0]["steps"] == held[1]["steps"] >= before
        assert all(report["paused_s"] > 0 for report in held)
        taken = [set(report["taken"]) for report in held]
        assert not taken[0] & taken[1]
        assert [len(report["taken"]) for report in held] == [4 * held[0]["steps"]] * 2
        assert {report["stats"]["tokens"] for report in held} == {2 * BATCH * held[0]["steps"]}
        assert {report["progress"] for report in held} == {held[0]["progress"]}
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
        held = island.expect("held")
        assert held[0]["taken"] == held[1]["taken"]
        assert {report["stats"]["tokens"] for report in held} == {BATCH * held[0]["steps"]}
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
        for stats in (leader, other):  # buffers, what rounding left out, and what it encoded last
            assert stats["host_bytes"] / stats["parameters"] <= 4 * 5 + 8 + 2
        island.command("break")
        island.left()
