"""Links that are thin, break, swallow or change what they carry. Each test asserts that its fault happened."""

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
    """A fragment travels for as long as two of its versions live, however fast the machine is, so newer ones come
    meanwhile."""
    with (
        Run(tmp_path, endless(fragments=4, every_steps=8), Numerics(plan="rows")) as run,
        relay_to(run.address) as relay,
    ):
        (near,) = run.joined(LearnerSpec(1, "wide", pace_s=0.01))
        run.go(near)
        run.until(run.merges(8), "versions come")
        began, merges = time.monotonic(), run.status()["merges"]
        run.until(run.merges(merges + 16), "four versions of each fragment come")
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
            "fragments have travelled both ways",
        )
        run.until(lambda _: len(received_messages(run, 0, Report, until=1e9, learner=2)) > 40, "its reports arrive")
        thin = run.status()
        shown = run.learner(2)(thin)
        assert shown is not None
        assert (shown["standing"], shown["incarnation"]) == ("live", 1)
        assert thin["merges"] > merges + 8, "the near one does not wait for the far one"
        relay.throttle(None)
        run.end()
        run.assert_same(run.finish(near, far), 1, 2)
        assert not run.log_lines(run.syncer, "learner 2: no message for"), "reports were starved"
        assert not run.log_lines(far, "connection closed: ")
        arrived: dict[int, list[int]] = {}
        for body in received_messages(run, 2, Published, until=thin["wall_s"]):
            arrived.setdefault(body.fragment, []).append(body.version)
        assert len(arrived) == 4
        assert all(versions == sorted(versions) for versions in arrived.values())
        assert all(versions[-1] > 0 for versions in arrived.values()), "a fragment was starved by its newer versions"
        assert any(b - a > 1 for each in arrived.values() for a, b in itertools.pairwise(each)), "nothing was replaced"
        reports = received_messages(run, 0, Report, until=thin["wall_s"], learner=2)
        assert len(reports) > 40
        assert events(run, 2, FragmentDamaged) == []
        run.assert_clean()


@pytest.mark.long
def test_high_latency_link_gets_pinned_fragments(tmp_path):
    """A request is under way for as long as eight versions of the only fragment live, however quick the machine is."""
    with Run(tmp_path, endless(fragments=1, every_steps=1)) as run, relay_to(run.address) as relay:
        near = run.start(LearnerSpec(1, pace_s=0.001))
        near.expect("joined")
        near.command("go")
        run.until(run.merges(10), "versions come")
        began, merges = time.monotonic(), run.status()["merges"]
        run.until(run.merges(merges + 8), "versions come")
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
        run.until(lambda _: run.log_lines(run.syncer, "pulling 1 learners again"), "the syncer is impatient")
        relay.throttle(60_000.0)
        run.until(run.merges(1), "merges go on")
        one.command("break")
        told = one.expect("ended")["stats"]
        assert told["bytes_up"] > 100_000
        sent = relay.counts().up_bytes - before - 110_000  # one more may be under way when the learner ends
        assert sent < 2 * told["bytes_up"], "most of what was sent was sent in vain"


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
            run.until(run.learner(1, standing="live", link="up"), "it is back")
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
        run.until(run.merges(4), "the run is under way")
        relay.cut()
        run.until(run.learner(1, standing="disconnected"), "the syncer gives the link up")
        run.until(lambda _: run.log_lines(one, "did not answer 3 pings"), "the learner gives the link up")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 3), "the other goes on")
        relay.cut(is_cut=False)
        back = run.until(run.learner(1, standing="live", link="up"), "it is back")
        assert back["incarnation"] == 1
        run.end()
        run.assert_same(run.finish(one, two), 1, 2)
        run.assert_clean()


class Flip:
    """Changes the last byte of pieces that hold the payload of a fragment, `count` times."""

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
    """At once, and if they are damaged again the whole value: six are more than can be under way at once."""
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
        assert len(run.log_lines(one, "came damaged")) + len(damaged) == 6
        assert len(damaged) >= 1
        assert all("digest" in event.cause for event in damaged)
        assert len(sent_together(run, 1, Resync)) >= 1
        run.assert_clean()


def wrong_updates(directory: Path, planted: str) -> list[Any]:
    """A syncer whose updates lead elsewhere, on frames whose digests are right."""
    with Run(directory, config(), planted="wrong-update") as run:
        learners = run.joined(LearnerSpec(1, planted=planted), LearnerSpec(2, planted=planted))
        run.go(*learners)
        published = run.finish(*learners)
        assert fault_marker(directory, "update").exists()
        run.assert_same(published, 1, 2)
        run.assert_clean()
        return events(run, 1, FragmentDamaged)


def test_an_update_that_leads_to_another_value_is_never_adopted(tmp_path):
    damaged = wrong_updates(tmp_path, "")
    assert damaged
    assert {event.cause for event in damaged} == {"the downloaded value differs from the published one"}


def test_the_test_above_finds_a_learner_that_does_not_check(tmp_path):
    with pytest.raises(AssertionError, match="is not the published one"):
        wrong_updates(tmp_path, "no-digest-check")
