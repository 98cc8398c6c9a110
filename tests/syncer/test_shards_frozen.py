"""Stalled shards: no process is notified, and none may wait for the shard."""

from __future__ import annotations

import signal

import pytest

from tests.learner.runs import Run, endless
from tests.syncer.test_shards import versions


@pytest.mark.long
def test_stalled_shard_delays_only_its_fragments(tmp_path):
    with Run(tmp_path, endless(fragments=4), shards=2) as run:
        learners = run.joined(1, 2)
        run.go(*learners)
        run.until(run.merges(12), "merges")
        run.shards[1].send(signal.SIGSTOP)
        before = versions(run)
        run.until(lambda _: min(versions(run)[0::2]) > max(before[0::2]) + 6, "the other's fragments are merged on")
        assert {each["standing"] for each in run.status()["learners"]} == {"live"}
        run.shards[1].send(signal.SIGCONT)
        after = versions(run)
        run.until(lambda _: min(versions(run)[1::2]) > max(after[1::2]) + 3, "its fragments are merged again")
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        run.assert_clean()


@pytest.mark.long
def test_long_stalled_shard_is_disconnected_and_reconnects(tmp_path):
    with Run(tmp_path, endless(fragments=4), shards=2) as run:
        learners = run.joined(1, 2)
        run.go(*learners)
        run.until(run.merges(12), "merges")
        run.shards[1].send(signal.SIGSTOP)
        run.until(lambda _: run.log_lines(run.syncer, "shard 1 disconnected"), "it is missed")
        run.shards[1].send(signal.SIGCONT)
        after = versions(run)
        run.until(lambda _: min(versions(run)[1::2]) > max(after[1::2]) + 3, "its fragments are merged again")
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        run.assert_clean()
