"""What becomes of islands of several ranks: they give and take inner state, stand still, die, and come back in another
shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atoll.core.protocol import MessageArrived, SetPaused, StepTaken
from tests.island.rank_runs import IslandSpec, RankedIsland
from tests.learner.fault_injection import struck
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
    """Return whether this learner has come to a step boundary after it had received the pause: there it stands still.

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
def test_inner_state_goes_from_an_island_to_one_of_another_shape_and_back(tmp_path):
    """FSDP2 on two ranks to one process, that to three ranks with FSDP2, and from those to two with DDP."""
    with Run(tmp_path, endless(quorum=1, limits=PATIENT)) as run:
        first = RankedIsland(run, IslandSpec(1, "fsdp"))
        assert [told["moments"] for told in first.joined()] == [0.0, 0.0]
        first.order("go")
        run.until(run.merges(3), "the first island trains")
        alone = run.start(2)
        assert alone.hear("joined")["moments"] > 0
        first.order("hold")
        first.hear("held")
        first.order("break")
        first.left()
        run.go(alone)
        run.until(lambda _: shown(run, 2)["step"] > 0, "it has inner state to give")
        wider = RankedIsland(run, IslandSpec(3, "fsdp", ranks=3))
        moments = [told["moments"] for told in wider.joined()]
        assert len(set(moments)) == 1
        assert moments[0] > 0
        alone.order("break")
        alone.hear("ended")
        assert alone.ended() == 0
        wider.order("go")
        run.until(lambda _: shown(run, 3)["step"] > 0, "so has the wider one")
        replicas = RankedIsland(run, IslandSpec(4, "ddp"))
        assert min(told["moments"] for told in replicas.joined()) >= moments[0]
        replicas.order("go")
        run.end()
        wider.finished(tmp_path)
        replicas.finished(tmp_path)
        assert run.syncer.hear("ended") is True
        run.verdict()


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_cannot_copy_its_state_for_a_peer_or_a_part_trains_on(tmp_path, odd):
    with Run(tmp_path, endless(quorum=1, limits=PATIENT)) as run:
        island = RankedIsland(run, IslandSpec(1, "replicas", planted="odd-state", planted_ranks=(odd,)))
        island.joined()
        island.order("go")
        run.until(run.merges(3), "it trains")
        assert snapshot_of(run)["state"] == "abandoned"
        alone = run.start(2)
        told = alone.hear("joined")
        assert (told["moments"], told["lr_scale"] < 1) == (0.0, True)
        where = f"rank {odd}: " if odd else ""
        assert run.log_lines(alone, f"no inner state from learner 1: it has none to give: {where}TypeError")
        assert run.log_lines(island.ranks[0], f"cannot give inner state to learner 2: {where}TypeError")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 2), "the island trains on")
        run.go(alone)
        run.end()
        island.finished(tmp_path)
        run.finish(alone)
        run.verdict()


@pytest.mark.long
def test_a_leader_without_memory_for_the_rows_of_its_ranks_trains_on(tmp_path):
    with Run(tmp_path, endless(quorum=1, limits=PATIENT)) as run:
        island = RankedIsland(run, IslandSpec(1, "tp", planted="no-room-for-rows"))
        island.joined()
        island.order("go")
        run.until(run.merges(3), "it trains")
        for number in (2, 3):  # the second one finds that nothing of the first is left on the way
            alone = run.start(number)
            assert alone.hear("joined")["moments"] == 0
            assert run.log_lines(
                alone, "no inner state from learner 1: it has none to give: RuntimeError: can't allocate"
            )
            alone.kill()
            run.until(run.learner(number, standing="disconnected"), "it is gone")
        assert struck(tmp_path, "room").exists()
        merges = run.status()["merges"]
        run.until(run.merges(merges + 2), "the island trains on")
        run.end()
        island.finished(tmp_path)
        run.verdict()


@pytest.mark.long
def test_an_island_comes_back_with_another_number_of_ranks(tmp_path):
    """Nobody else is there to take inner state from: it goes on from its own part of the last snapshot."""
    with Run(tmp_path, endless(quorum=1)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp"))
        island.joined()
        island.order("go")
        run.until(run.merges(4), "it trains")
        assert snapshot_of(run)["state"] == "durable"
        island.kill_all()
        again = RankedIsland(run, IslandSpec(1, "fsdp", ranks=3))
        told = again.joined()
        assert {each["incarnation"] for each in told} == {2}
        assert all(each["moments"] > 0 for each in told)
        assert all(len(each["restored"]["drawn"]) == 1 for each in told), "what rank 0 had saved is told to all"
        again.order("go")
        run.until(lambda status: status["merges"] >= 6, "it goes on")
        run.end()
        again.finished(tmp_path)
        assert run.syncer.hear("ended") is True
        run.verdict()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_its_island_and_no_other(tmp_path, victim):
    with Run(tmp_path, endless(quorum=1)) as run:
        alone = run.start(1)
        island = RankedIsland(run, IslandSpec(2, "replicas"))
        alone.hear("joined")
        island.joined()
        run.go(alone)
        island.order("go")
        run.until(lambda status: shown(run, 2)["step"] > 5, "the island trains")
        island.kill(victim)
        kind, words, threads = island.ranks[1 - victim].hear("failed")
        assert kind in ("IslandBrokenError", "RuntimeError", "DistBackendError"), (
            words
        )  # ours, or of a group of the training
        assert kind != "IslandBrokenError" or "is gone" in words
        assert threads == []
        merges = run.status()["merges"]
        run.until(run.merges(merges + 3), "the other one goes on")
        again = RankedIsland(run, IslandSpec(2, "ddp", ranks=2))
        assert again.joined()[1]["incarnation"] == 2
        again.order("go")
        run.end()
        again.finished(tmp_path)
        run.finish(alone)
        run.verdict()


def test_an_exception_in_one_rank_is_told_to_the_others(tmp_path):
    with Run(tmp_path, endless(quorum=1)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp", ranks=3))
        island.joined()
        island.order("raise")
        for rank in island.ranks:
            rank.expected_to_end = True
        assert island.ranks[2].hear("failed")[0] == "ArithmeticError"
        for rank in island.ranks[:2]:
            kind, words, threads = rank.hear("failed")
            assert (kind, threads) == ("IslandBrokenError", []), words
            assert "rank 2" in words
        assert shown(run, 1)["reason"].startswith("left: its loop ended with IslandBrokenError")


@pytest.mark.parametrize(
    ("wrong", "words"), [("takes", "calls take where rank 0 calls step"), ("leaves", "leaves where rank 0 calls step")]
)
def test_ranks_that_are_out_of_step_are_told_so(tmp_path, wrong, words):
    with Run(tmp_path, endless(quorum=1, lease_samples=64)) as run:
        island = RankedIsland(run, IslandSpec(1, "replicas", wrong=wrong))
        island.joined()
        for rank in island.ranks:
            rank.expected_to_end = True
        island.order("go")
        for rank in island.ranks:
            kind, said, _ = rank.hear("failed")
            assert kind == "IslandBrokenError"
            assert f"rank 1 of this island {words}" in said


def test_what_the_leader_is_refused_for_is_raised_by_all_ranks(tmp_path):
    with Run(tmp_path) as run:
        alone = run.start(1)
        alone.hear("joined")
        island = RankedIsland(run, IslandSpec(2, "fsdp", model="taller"))
        for rank in island.ranks:
            rank.expected_to_end = True
            kind, said, threads = rank.hear("failed")
            assert (kind, threads) == ("LearnerRefusedError", []), said
            assert "first" in said


def test_an_island_stands_still_is_drained_and_deals_out_its_samples(tmp_path):
    """Pause and resume; every sample to one rank; the same tokens, progress and end on all ranks."""
    with Run(tmp_path, endless(quorum=1, lease_samples=64)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp", leases=4))
        island.joined()
        island.order("go")
        run.until(run.merges(3), "it trains")
        control(run, "pause")
        run.until(stand_still(1), "the leader knows that the run is paused")
        run.until(lambda _: has_stepped_since_pause(run, 1), "the island stands still")
        before = shown(run, 1)["step"]
        island.order("hold")  # is heard when it goes on
        control(run, "resume")
        held = island.hear("held")
        assert held[0]["steps"] == held[1]["steps"] >= before
        assert all(told["paused_s"] > 0 for told in held)
        taken = [set(told["taken"]) for told in held]
        assert not taken[0] & taken[1]
        assert [len(told["taken"]) for told in held] == [4 * held[0]["steps"]] * 2
        assert {told["stats"]["tokens"] for told in held} == {2 * BATCH * held[0]["steps"]}
        assert {told["progress"] for told in held} == {held[0]["progress"]}
        island.order("go")
        control(run, "drain", 1)
        for told in island.left():
            assert told["finished"]
            assert told["drained"]
        run.verdict()


def test_tokens_of_ranks_that_share_their_data_count_once(tmp_path):
    with Run(tmp_path, endless(quorum=1, lease_samples=64)) as run:
        island = RankedIsland(run, IslandSpec(1, "tp", leases=4))
        island.joined()
        island.order("go")
        run.until(run.merges(3), "it trains")
        island.order("hold")
        held = island.hear("held")
        assert held[0]["taken"] == held[1]["taken"]
        assert {told["stats"]["tokens"] for told in held} == {BATCH * held[0]["steps"]}
        island.order("break")
        island.left()


def test_an_island_that_comes_after_the_end_takes_the_final_model(tmp_path):
    with Run(tmp_path, config(budget_merges=3)) as run:
        (alone,) = run.joined(1)
        run.go(alone)
        published = run.finish(alone)
        run.start_syncer()
        late = RankedIsland(run, IslandSpec(2, "fsdp", ranks=3))
        assert all(told["finished"] for told in late.joined())
        late.finished(tmp_path)
        run.assert_same(published, 1, 2)


def test_a_loop_of_several_ranks_that_says_its_memory(tmp_path):
    with Run(tmp_path, endless(quorum=1)) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp", model="tall"))
        island.joined()
        island.order("go")
        run.until(run.merges(3), "it trains")
        island.order("hold")
        leader, other = (told["stats"] for told in island.hear("held"))
        total = leader["parameters"] + other["parameters"]
        assert total == 8 * 4000 + 4000 + 4 * 4000 + 4
        assert {leader["transfer_mode"], other["transfer_mode"]} == {"rows"}
        for stats in (leader, other):  # buffers, what rounding left out, and what it encoded last
            assert stats["host_bytes"] / stats["parameters"] <= 4 * 5 + 8 + 2
        island.order("break")
        island.left()
