"""Shards that store what their syncer has no record of: a version, a model, or the epoch of another syncer."""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any

import pytest
from safetensors.torch import load_file

from atoll.core.protocol import ManifestRecord, ShardReconnected
from atoll.core.types import Limits, RunConfig
from atoll.store.tensor_file import decode_small_file
from atoll.store.version_store import Store
from atoll.tape.format import decode
from tests.learner.fault_injection import fault_marker
from tests.learner.runs import Child, Run, endless
from tests.store.store_samples import make_tensors, make_version
from tests.syncer.test_shards import syncer_entries, versions

SOON = Limits(initial_wait_s=1.0, max_wait_s=2.0, initial_backoff_s=0.05, max_backoff_s=0.5)
"""Limits with a short wait for a missing shard at the end of a run."""


def manifest(run: Run) -> tuple[int, ...]:
    found = decode(decode_small_file((run.directory / "store" / "manifest.json").read_bytes()))
    assert isinstance(found, ManifestRecord)
    return found.versions


def on_disk(run: Run, shard: int) -> dict[int, list[int]]:
    folders = (run.directory / "shards" / str(shard) / "store" / "fragments").iterdir()
    return {int(folder.name): sorted(int(path.stem) for path in folder.glob("*.safetensors")) for folder in folders}


def two_fragments() -> RunConfig:
    """One fragment per shard, and both learners in every merge.

    A learner in a round already has the previous version, so none downloads from a shard that is killed in the round.
    """
    return endless(fragments=2, quorum=2, limits=SOON)


def ended_without_a_version(run: Run) -> tuple[list[Child], int, int]:
    """Kill shard 1 after it has made a version durable and before it reports it. Then end the run without it.

    Return the learners, the fragment and its version.
    """
    learners = run.joined(1, 2)
    run.shards[1].kill()
    run.shards[1] = run.start_shard(1, planted="kill-after-version")
    run.go(*learners)
    run.until(run.merges(12), "merges")
    run.shards[1].expected_to_end = True
    (run.directory / "shards" / "1" / "die").touch()
    run.shards[1].ended()
    run.until(lambda _: len(run.log_lines(run.syncer, "shard 1 disconnected")) == 2, "shard 1 is disconnected")
    (run.directory / "shards" / "1" / "die").unlink()
    fragment, number = map(int, fault_marker(run.directory / "shards" / "1", "version").read_text().split())
    assert versions(run)[fragment] == number - 1
    run.end()
    for learner in learners:
        assert learner.expect("ended")["finished"]
    assert manifest(run)[fragment] == number - 1
    assert on_disk(run, 1)[fragment][-1] == number
    return learners, fragment, number


@pytest.mark.long
def test_version_not_in_manifest_is_rolled_back_on_reconnect(tmp_path):
    with Run(tmp_path, two_fragments(), shards=2) as run:
        _, fragment, number = ended_without_a_version(run)
        run.shards[1] = run.start_shard(1)
        assert run.syncer.expect("ended") is True
        run.assert_same(load_file(tmp_path / "published.safetensors"), 1, 2)
        assert on_disk(run, 1)[fragment][-1] == number - 1
        back = [entry.event for entry in syncer_entries(run) if type(entry.event) is ShardReconnected][-1]
        assert dict(back.versions)[fragment] == number - 1
        run.assert_clean()


@pytest.mark.long
def test_version_not_in_manifest_is_rolled_back_after_restart(tmp_path):
    with Run(tmp_path, two_fragments(), shards=2) as run:
        _, fragment, number = ended_without_a_version(run)
        run.syncer.kill()
        run.start_syncer()
        run.shards[1] = run.start_shard(1)
        assert run.syncer.expect("ended") is True
        run.assert_same(load_file(tmp_path / "published.safetensors"), 1, 2)
        assert on_disk(run, 1)[fragment][-1] == number - 1
        run.assert_clean()


def has_version(fragment: int, number: int, status: dict[str, Any]) -> bool:
    return bool(status["founded"] and status["fragments"][fragment]["version"] >= number)


@pytest.mark.long
def test_unreported_durable_version_counts_while_run_continues(tmp_path):
    """The version is merged once, after a restart of its shard alone or with the syncer."""
    with Run(tmp_path, endless(fragments=4), shards=2) as run:
        learners = run.joined(1, 2)
        run.go(*learners)
        for syncer_too in (False, True):
            run.shards[1].kill()
            run.shards[1] = run.start_shard(1, planted="kill-after-version")
            merges = run.status()["merges"]
            run.until(run.merges(merges + 8), "merges")
            run.shards[1].expected_to_end = True
            (tmp_path / "shards" / "1" / "die").touch()
            run.shards[1].ended()
            (tmp_path / "shards" / "1" / "die").unlink()
            fragment, number = map(int, fault_marker(tmp_path / "shards" / "1", "version").read_text().split())
            if syncer_too:
                run.syncer.kill()
                run.start_syncer()
            run.shards[1] = run.start_shard(1)
            run.until(partial(has_version, fragment, number), "the version counts")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 8), "merges")
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        assert run.log_lines(run.syncer, "check that its directory belongs to this run") == []
        run.assert_clean()


@pytest.mark.long
def test_fragments_without_syncer_record_belong_to_no_run(tmp_path):
    with Run(tmp_path, endless(fragments=4), shards=2, planted="kill-before-settings") as run:
        run.syncer.expected_to_end = True
        learners = [run.start(1), run.start(2)]
        run.syncer.ended()
        assert fault_marker(tmp_path, "founding").exists()
        run.planted = ""
        run.start_syncer()
        for learner in learners:
            learner.expect("joined")
        run.go(*learners)
        run.until(run.merges(8), "merges")
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        assert run.verdict().finished


def test_new_syncer_refuses_shard_of_existing_run(tmp_path):
    with Run(tmp_path, endless(fragments=4), shards=2) as run:
        run.joined(1)
        assert run.log_lines(run.shards[0], "created 2 fragments")
        other = Run(tmp_path / "other", endless(fragments=4), shards=2)
        with other:
            other.shards[0].kill()
            run.shards[0].kill()
            shutil.copytree(tmp_path / "shards" / "0", tmp_path / "other" / "shards" / "copy")
            shard = other.start_shard(0, "copy")
            other.until(lambda _: other.log_lines(shard, "a new run without a model"), "it is refused")


@pytest.mark.long
def test_shard_refuses_syncer_of_older_epoch(tmp_path):
    """The shard stores the newest epoch on disk, so a restart changes nothing."""
    with Run(tmp_path, endless(fragments=4), shards=2) as run:
        learners = run.joined(1, 2)
        run.go(*learners)
        run.until(run.merges(8), "merges")
        run.syncer.kill()
        shutil.copytree(tmp_path / "store", tmp_path / "older" / "store")
        for _ in range(2):
            run.start_syncer()
            run.until(lambda status: status["founded"], "the run continues")
            run.syncer.kill()
        newest = run.start_syncer()
        run.until(lambda status: status["founded"], "the run continues")
        run.shards[0].kill()
        here, run.directory, run.address = run.address, tmp_path / "older", ""
        older = run.start_syncer()  # epoch 2, while another syncer has epoch 4
        run.directory = tmp_path
        shard = run.start_shard(0)
        run.until(lambda _: run.log_lines(shard, "this shard has served epoch 4"), "the shard refuses it")
        assert run.log_lines(older, "shard 0 of 2 connected") == []
        shard.kill()
        older.kill()
        run.address, run.syncer = here, newest
        run.shards[0] = run.start_shard(0)
        merges = run.status()["merges"]
        run.until(run.merges(merges + 8), "merges go on")
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        run.assert_clean()


# --------------------------------------------------------------------------------------------------------------------
# Its directory


def test_roll_back_removes_only_newest_version(tmp_path):
    with Store.open(tmp_path) as store:
        store.write_initial(0, make_tensors(0))
        for number in (1, 2, 3):
            store.write(make_version(0, number), make_tensors(number))
        with pytest.raises(AssertionError, match="cannot go back to 1"):
            store.roll_back(0, 1)
        record, _ = store.roll_back(0, 2)
        assert record == make_version(0, 2)
        store.write(make_version(0, 3), make_tensors(9))
    with Store.open(tmp_path) as store:
        assert store.read_newest(0)[0] == 3
