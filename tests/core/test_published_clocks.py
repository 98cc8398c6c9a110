"""Tests of each rule of the protocol: time, epochs, vector clocks, fragments of several syncers."""

from __future__ import annotations

import pytest

from atoll.core.protocol import (
    CloseConnection,
    ConnectionClosed,
    Halt,
    Persist,
    PublishAck,
    Report,
    Send,
    StateRequest,
    StoreFenced,
    TimerFired,
    VersionRecord,
    Welcome,
)
from atoll.core.reasons import because
from atoll.core.types import RunConfig
from atoll.tape.format import encode
from tests.core.harness import LearnerHarness, SyncerHarness


def test_tick_counts_calls_and_seen_tick_is_the_newest_received():
    harness = SyncerHarness(RunConfig(fragments=1))
    one = harness.add_learner(1)
    one.tick = 40
    one.hello(1.0)
    harness.persisted(1.1)
    assert {(e.envelope.tick, e.envelope.seen_tick) for e in harness.of(Send)} == {(3, 41)}
    one.delivers(1.2, PublishAck(0, 0))
    one.delivers(1.3, StateRequest(()), tick=7)
    assert [(e.envelope.tick, e.envelope.seen_tick) for e in harness.of(Send)] == [(5, 42)], "seen_tick never decreases"

    learner = LearnerHarness(RunConfig(fragments=1)).trains()
    newest = learner.tick
    learner.steps(1.0)
    assert [(e.envelope.tick, e.envelope.seen_tick) for e in learner.of(Send)] == [(learner.core.state.tick, newest)]


@pytest.mark.parametrize("back_s", [0.5, 1e3, 1e9])
def test_clock_that_goes_back_is_clamped(back_s):
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one = harness.joined(1, at=1_000.0)
    one.reports(1_001.0, step=1)
    one.contributes(1_001.0 - back_s)
    assert harness.core.state.now == 1_001.0
    harness.merges_and_persists(1_001.0 - back_s)
    assert harness.fragment(0).version == 1
    assert harness.core.view().quorum_s == 0.0

    learner = LearnerHarness(RunConfig(fragments=1)).trains(1_000.0)
    learner.steps(1_000.0 - back_s)
    assert learner.core.state.now == 1_000.0
    assert learner.core.training


def test_stalled_syncer_excuses_the_silence_of_learners():
    harness = SyncerHarness(RunConfig(fragments=1, quorum=2))
    one = harness.joined(1)
    for step in range(1, 60):
        one.reports(float(step), step)
    harness.handle(10_000.0, TimerFired())
    assert harness.codes() == ["syncer-stalled"]
    assert harness.member(1).state == "live"
    harness.fire_timers(10_400.0)
    assert harness.member(1).state == "disconnected", "after that its silence counts as usual"


def test_syncer_stops_when_a_later_epoch_is_known():
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2))
    one = harness.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    one.delivers(1.2, Report(2, 200, 1.0), epoch=2)
    harness.expect(CloseConnection(1, 1, 1, because("superseded-epoch", 2, 1)), Halt(because("superseded-epoch", 2, 1)))
    harness.merged(1.3)
    harness.expect()
    harness.fire_timers(10_000.0)
    harness.expect()


def test_fenced_syncer_stops():
    harness = SyncerHarness(RunConfig(fragments=1))
    one = harness.add_learner(1)
    one.hello(1.0)
    harness.take(Persist)
    harness.handle(1.1, StoreFenced(2))
    harness.expect(Halt(because("superseded-epoch", 2, 1)))
    one.hello(1.2)
    harness.expect()


def test_learner_never_accepts_a_syncer_with_an_older_epoch():
    harness = LearnerHarness(RunConfig(fragments=1))
    harness.epoch = 3
    harness.trains()
    harness.handle(1.0, ConnectionClosed(1, "reset"))
    harness.opens(2.0)
    harness.receives(2.1, Welcome((0,), 0.0, 0.0), epoch=2)
    harness.expect()
    assert harness.core.state.link.value == "handshake"
    harness.receives(2.2, Welcome((0,), 0.0, 0.0), epoch=4)
    assert (harness.core.state.link.value, harness.core.state.epoch) == ("up", 4)


def _events(learners: tuple[int, ...]) -> list[tuple[float, int, int]]:
    """Return (time, learner, step) of learners with different speeds."""
    steps = [(i * 0.01 + n / i, i, n) for i in learners for n in range(1, 40 * i // 3)]
    return sorted(steps)


def test_two_syncers_with_disjoint_fragments_match_one_syncer():
    plan = {"fragments": 2, "every_steps": 4, "overlap_steps": 2, "quorum": 2, "grace_margin": 0.0}
    whole = SyncerHarness(RunConfig(**plan))  # type: ignore[arg-type]
    halves = [SyncerHarness(RunConfig(**plan, owned_fragments=(p,))) for p in (0, 1)]  # type: ignore[arg-type]
    records: dict[int, list[str]] = {0: [], 1: []}
    of_halves: dict[int, list[str]] = {0: [], 1: []}
    for harness, written in ((whole, records), (halves[0], of_halves), (halves[1], of_halves)):
        fakes = {i: harness.joined(i) for i in (1, 2, 3)}
        for at, learner, step in _events((1, 2, 3)):
            fakes[learner].reports(at, step)
            _serve(harness, at, written)
    assert records == of_halves
    assert min(len(lines) for lines in records.values()) > 3


def _serve(harness: SyncerHarness, at: float, written: dict[int, list[str]]) -> None:
    """Make all pulled learners contribute immediately, in order; merges and writes take no time."""
    for fake in harness.learners.values():
        for p in sorted(fake.pulls):
            fake.contributes(at, p)
            del fake.pulls[p]
    while harness.awaited:
        harness.merged(at)
        record = harness.one(Persist).record
        assert isinstance(record, VersionRecord)
        written[record.fragment].append(encode(record))
        harness.persisted(at)
