"""Slow, breaking, lossy and corrupting links. Each test asserts that its fault happened."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.core.protocol import FragmentDamaged, Published, Report, Resync
from atoll.core.types import Limits
from atoll.tensors.settings import Numerics
from tests.chaos.relays import relay_to
from tests.learner.fault_injection import fault_marker
from tests.learner.run_tapes import events, received_messages, sent_together
from tests.learner.runs import LearnerSpec, Run, config, endless


@pytest.mark.long
def test_slow_link_carries_reports_during_transfers(tmp_path):
    """A transfer takes as long as two merges of its fragment on any machine, so newer versions arrive meanwhile."""
    with (
        Run(tmp_path, endless(fragments=4, every_steps=8), Numerics(plan="rows")) as run,
        relay_to(run.address) as relay,
    ):
        (near,) = run.joined(LearnerSpec(1, "wide", pace_s=0.01))
        run.go(near)
        run.until(run.merges(8), "versions are merged")
        began, merges = time.monotonic(), run.status()["merges"]
        run.until(run.merges(merges + 16), "four versions of each fragment are merged")
        two_versions_s = (time.monotonic() - began) / 2
        far = run.start(LearnerSpec(2, "wide"), relay.address)
        far.expect("joined")
        relay.throttle(min(1e6, 500_000 / two_versions_s))  # the model has 2 MB
        relay.delay(0.03)
        before = relay.counts()
        merges = run.status()["merges"]
        run.go(far)
        run.until(
            lambda _: (
                relay.counts().down_bytes - before.down_bytes > 3_000_000
                and relay.counts().up_bytes - before.up_bytes > 300_000
            ),
            "fragments were transferred in both directions",
        )
        run.until(lambda _: len(received_messages(run, 0, Report, until=1e9, learner=2)) > 40, "its reports arrive")
        status = run.status()
        shown = run.learner(2)(status)
        assert shown is not None
        assert (shown["standing"], shown["incarnation"]) == ("live", 1)
        assert status["merges"] > merges + 8, "the fast learner does not wait for the slow one"
        relay.throttle(None)
        run.end()
        run.assert_same(run.finish(near, far), 1, 2)
        assert not run.log_lines(run.syncer, "learner 2: no message for"), "reports were starved"
        assert not run.log_lines(far, "connection closed: ")
        arrived: dict[int, list[int]] = {}
        for body in received_messages(run, 2, Published, until=status["wall_s"]):
            arrived.setdefault(body.fragment, []).append(body.version)
        assert len(arrived) == 4
        assert all(versions == sorted(versions) for versions in arrived.values())
        assert all(versions[-1] > 0 for versions in arrived.values()), "a fragment was starved by its newer versions"
        assert any(b - a > 1 for each in arrived.values() for a, b in itertools.pairwise(each)), "nothing was replaced"
        reports = received_messages(run, 0, Report, until=status["wall_s"], learner=2)
        assert len(reports) > 40
        assert events(run, 2, FragmentDamaged) == []
        run.assert_clean()


@pytest.mark.long
def test_high_latency_link_gets_pinned_fragments(tmp_path):
    """A request takes as long as eight merges of the only fragment on any machine."""
    with Run(tmp_path, endless(fragments=1, every_steps=1)) as run, relay_to(run.address) as relay:
        near = run.start(LearnerSpec(1, pace_s=0.001))
        near.expect("joined")
        near.command("go")
        run.until(run.merges(10), "versions are merged")
        began, merges = time.monotonic(), run.status()["merges"]
        run.until(run.merges(merges + 8), "versions are merged")
        relay.delay(time.monotonic() - began)
        merges = run.status()["merges"]
        far = run.start(2, relay.address)
        far.expect("joined")
        assert run.status()["merges"] > merges + 8, "the versions were not quick enough to show anything"
        far.command("go")
        run.until(lambda _: len(received_messages(run, 2, Published, until=1e9)) > 3, "versions arrive")
        relay.delay(0.0)
        run.end()
        run.assert_same(run.finish(near, far), 1, 2)
        assert events(run, 2, FragmentDamaged) == []
        run.assert_clean()


@pytest.mark.long
def test_slow_link_does_not_restart_the_same_contribution(tmp_path):
    """An upload takes longer than the pull timeout of the syncer, which pulls the same copy again."""
    settings = endless(fragments=1, every_steps=4, limits=Limits(initial_wait_s=0.25, initial_backoff_s=0.05))
    with Run(tmp_path, settings) as run, relay_to(run.address) as relay:
        one = run.start(LearnerSpec(1, "tall"), relay.address)
        one.expect("joined")
        relay.throttle(30_000.0)  # the fragment has 104 KB
        before = relay.counts().up_bytes
        one.command("go")
        run.until(lambda _: run.log_lines(run.syncer, "pulling 1 learners again"), "the syncer pulls again")
        relay.throttle(60_000.0)
        run.until(run.merges(1), "merges go on")
        one.command("break")
        stats = one.expect("ended")["stats"]
        assert stats["bytes_up"] > 100_000
        sent = relay.counts().up_bytes - before - 110_000  # one more may be in flight when the learner ends
        assert sent < 2 * stats["bytes_up"], "most of the sent bytes were wasted"


def test_learner_reconnects_after_connection_reset(tmp_path):
    with Run(tmp_path, endless()) as run, relay_to(run.address) as relay:
        one, two = run.start(1, relay.address), run.start(2)
        for learner in (one, two):
            learner.expect("joined")
        run.go(one, two)
        for _ in range(3):
            merges = run.status()["merges"]
            run.until(run.merges(merges + 2), "merges go on")
            relay.reset()
            run.until(run.learner(1, standing="live", link="up"), "it has reconnected")
        assert run.until(run.learner(1), "learner 1 is shown")["incarnation"] == 1
        assert len(run.log_lines(one, "connection closed: ")) >= 2
        run.end()
        run.assert_same(run.finish(one, two), 1, 2)
        run.assert_clean()


@pytest.mark.long
def test_both_sides_detect_black_hole_and_reconnect(tmp_path):
    impatient = Limits(initial_wait_s=0.5, initial_backoff_s=0.05, max_backoff_s=0.5)
    with Run(tmp_path, endless(limits=impatient)) as run, relay_to(run.address) as relay:
        one, two = run.start(1, relay.address), run.start(2)
        for learner in (one, two):
            learner.expect("joined")
        run.go(one, two)
        run.until(run.merges(4), "the run trains")
        relay.cut()
        run.until(run.learner(1, standing="disconnected"), "the syncer detects the lost link")
        run.until(lambda _: run.log_lines(one, "did not answer 3 pings"), "the learner detects the lost link")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 3), "the other continues")
        relay.cut(is_cut=False)
        back = run.until(run.learner(1, standing="live", link="up"), "it has reconnected")
        assert back["incarnation"] == 1
        run.end()
        run.assert_same(run.finish(one, two), 1, 2)
        run.assert_clean()


class Flip:
    """Change the last byte of chunks with fragment payload, `count` times."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.fired = 0

    def __call__(self, data: bytes) -> bytes:
        head = data.find(b"ATLF\x04\x02")
        if head < 0 or self.left == 0 or len(data) < head + 300:
            return data
        self.left -= 1
        self.fired += 1
        return data[:-1] + bytes([data[-1] ^ 1])


def test_damaged_bytes_are_detected_and_downloaded_again(tmp_path):
    """Download damaged bytes again, and after a second damage the full value. Six exceeds the concurrent transfers."""
    with Run(tmp_path, endless()) as run, relay_to(run.address) as relay:
        flip = Flip(6)
        one, two = run.start(1, relay.address), run.start(2)
        for learner in (one, two):
            learner.expect("joined")
        relay.change_down(flip)
        run.go(one, two)
        run.until(lambda _: flip.left == 0, "bytes were changed")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 6), "merges go on")
        run.end()
        run.assert_same(run.finish(one, two), 1, 2)
        assert flip.fired == 6
        damaged = events(run, 1, FragmentDamaged)
        assert len(run.log_lines(one, "were damaged")) + len(damaged) == 6
        assert len(damaged) >= 1
        assert all("digest" in event.cause for event in damaged)
        assert len(sent_together(run, 1, Resync)) >= 1
        run.assert_clean()


def run_with_invalid_updates(directory: Path, planted: str) -> list[Any]:
    """Run with a syncer that sends updates with invalid results in frames with valid digests."""
    with Run(directory, config(), planted="wrong-update") as run:
        learners = run.joined(LearnerSpec(1, planted=planted), LearnerSpec(2, planted=planted))
        run.go(*learners)
        published = run.finish(*learners)
        assert fault_marker(directory, "update").exists()
        run.assert_same(published, 1, 2)
        run.assert_clean()
        return events(run, 1, FragmentDamaged)


def test_update_with_invalid_result_is_never_adopted(tmp_path):
    damaged = run_with_invalid_updates(tmp_path, "")
    assert damaged
    assert {event.cause for event in damaged} == {"the downloaded value differs from the published one"}


def test_learner_without_the_check_adopts_invalid_update(tmp_path):
    with pytest.raises(AssertionError, match="is not the published one"):
        run_with_invalid_updates(tmp_path, "no-digest-check")
