"""Runs with shards: results, killed shards and syncers, and shards of other runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atoll.core.protocol import CopyFragment, LogReason, MergeRound, Persisted, ShardLost, ShardReconnected
from atoll.core.reasons import Reason
from atoll.core.types import SYNCER
from atoll.syncer.shards.process import serve_shard
from atoll.tape.files import RunTapes
from atoll.transport.endpoint import parse_endpoint
from tests.learner.run_tapes import entries
from tests.learner.runs import LearnerSpec, Run, endless


def syncer_entries(run: Run) -> list[Any]:
    readers = RunTapes(run.directory).readers
    return [entry for actor, reader in sorted(readers.items()) if actor.learner == SYNCER for entry in reader]


def test_run_with_shards_trains_and_finishes(tmp_path):
    with Run(tmp_path, endless(fragments=4), shards=2) as run:
        learners = run.joined(1, 2)
        run.go(*learners)
        run.until(run.merges(16), "merges")
        run.until(lambda status: status["bytes"]["down"] and status["bytes"]["up"], "their traffic is reported")
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        stored = sorted(int(folder.name) for folder in (tmp_path / "shards" / "0" / "store" / "fragments").iterdir())
        assert stored == [0, 2]
        run.assert_clean()


@pytest.mark.parametrize(
    ("shards", "slow_links"),
    [(0, 1), (2, 2), pytest.param(0, 2, marks=pytest.mark.long), pytest.param(2, 1, marks=pytest.mark.long)],
)
def test_codec_changes_during_run_keep_values_identical(tmp_path, shards, slow_links):
    """Contributions get coarser for each slow link, and updates if the median learner has one."""
    with Run(tmp_path, endless(fragments=2), shards=shards) as run:
        plants = ["slow-link small-slices", "slow-link" if slow_links == 2 else ""]
        learners = [run.start(LearnerSpec(i + 1, "tall", planted=plant)) for i, plant in enumerate(plants)]
        for learner in learners:
            learner.expect("joined")
        run.go(*learners)

        def changed(status: Any) -> bool:
            return "int4" in codecs_up(run, 1)[:-8] and (slow_links == 1 or "int4" in codecs_down(run)[:-8])

        run.until(changed, "values go in another codec")
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        assert set(codecs_up(run, 1)) == {None, "int4"}
        assert set(codecs_up(run, 2)) == ({None} if slow_links == 1 else {None, "int4"})
        assert set(codecs_down(run)) == ({None} if slow_links == 1 else {None, "int4"})
        assert [reason.code for reason in logged_reasons(run, 1)].count("contribution-codec-coarser") == 1
        assert [reason.code for reason in logged_reasons(run, SYNCER)].count("update-codec-coarser") == slow_links - 1
        run.assert_clean()


def codecs_down(run: Run) -> list[str | None]:
    return [e.codec for entry in syncer_entries(run) for e in entry.effects if type(e) is MergeRound]


def codecs_up(run: Run, learner: int) -> list[str | None]:
    return [e.codec for entry in entries(run, learner) for e in entry.effects if type(e) is CopyFragment]


def logged_reasons(run: Run, learner: int) -> list[Reason]:
    return [e.reason for entry in entries(run, learner) for e in entry.effects if type(e) is LogReason]


def shard_addresses(run: Run) -> list[str | None]:
    addresses: list[str | None] = json.loads(run.request("GET", "/v1/shards")[1])["shards"]
    return addresses


def versions(run: Run) -> list[int]:
    return [fragment["version"] for fragment in run.status()["fragments"]]


def test_killed_shard_stops_only_its_fragments_and_reconnects(tmp_path):
    with Run(tmp_path, endless(fragments=4), shards=2) as run:
        learners = run.joined(1, 2)
        run.go(*learners)
        run.until(run.merges(12), "merges")
        run.shards[1].kill()
        run.until(lambda _: run.log_lines(run.syncer, "shard 1 disconnected"), "the syncer notices the disconnect")
        before = versions(run)
        run.until(lambda _: min(versions(run)[0::2]) > max(before[0::2]) + 3, "fragments of the other shard are merged")
        after = versions(run)
        assert after[1::2] == before[1::2], "fragments of an unavailable shard are not merged"
        shown = run.status()["fragments"]
        assert [each["unavailable"] for each in shown] == [False, True, False, True]
        assert shown[1]["reason"] == shown[3]["reason"] == "its shard is unavailable: the connection was closed"
        assert {each["standing"] for each in run.status()["learners"]} == {"live"}
        run.shards[1] = run.start_shard(1)
        run.until(lambda _: min(versions(run)[1::2]) > max(after[1::2]) + 3, "its fragments are merged again")
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        events = [type(entry.event) for entry in syncer_entries(run)]
        assert (events.count(ShardLost), events.count(ShardReconnected)) == (1, 1)
        run.assert_clean()


def test_restarted_syncer_recovers_versions_from_shards(tmp_path):
    with Run(tmp_path, endless(fragments=4), shards=2) as run:
        learners = run.joined(1, 2)
        run.go(*learners)
        run.until(run.merges(12), "merges")
        run.syncer.kill()
        run.start_syncer()
        merges = run.until(lambda status: status["merges"] if status["founded"] else None, "it has them")
        assert merges >= 12
        run.until(run.merges(merges + 8), "merges go on")
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        run.assert_clean()


@pytest.mark.long
def test_merge_not_durable_at_disconnect_is_repeated(tmp_path):
    """A shard is killed repeatedly at any moment, and every announced version is found again."""
    with Run(tmp_path, endless(fragments=2), shards=2) as run:
        learners = run.joined(1, 2)
        run.go(*learners)
        for number in range(4):
            merges = run.status()["merges"]
            run.until(run.merges(merges + 3), "merges")
            run.shards[number % 2].kill()
            run.shards[number % 2] = run.start_shard(number % 2)
        merges = run.status()["merges"]
        run.until(run.merges(merges + 8), "merges")
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        entries = syncer_entries(run)
        events = [e.event.key.version for e in entries if type(e.event) is Persisted and e.event.key.kind == "version"]
        assert len(events) >= 16
        assert any(type(effect) is MergeRound for entry in entries for effect in entry.effects)
        run.assert_clean()


def test_shard_without_its_fragments_is_refused(tmp_path):
    with Run(tmp_path, endless(fragments=4), shards=2) as run:
        run.joined(1)
        for shard in run.shards:
            shard.kill()
        shard = run.start_shard(0, "elsewhere")
        run.until(lambda _: run.log_lines(shard, "stores no run"), "it is refused")
        assert run.status()["stage"] == "running"
        with pytest.raises(ValueError, match="does not belong to shard 1 of 2"):
            serve_shard(tmp_path / "shards" / "0", 1, 2, parse_endpoint(run.address))


def test_run_is_not_created_without_its_shards(tmp_path):
    with Run(tmp_path, endless(fragments=4), shards=2) as run:
        run.shards[1].kill()
        run.until(lambda _: [each is None for each in shard_addresses(run)] == [False, True], "one shard is connected")
        learner = run.start(1)
        run.until(lambda _: run.log_lines(learner, "shard 1 of 2 is unavailable"), "the learner logs why it waits")
        run.start_shard(1)
        learner.expect("joined")
