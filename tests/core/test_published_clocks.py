"""One test per sentence of the protocol: time, epochs, vector clocks, fragments spread over several syncers."""

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
from tests.core.conversation import LearnerTalk, SyncerTalk


def test_a_tick_counts_the_calls_and_seen_is_the_newest_tick_that_arrived():
    talk = SyncerTalk(RunConfig(fragments=1))
    one = talk.voice(1)
    one.tick = 40
    one.hello(1.0)
    talk.persisted(1.1)
    assert {(e.envelope.tick, e.envelope.seen_tick) for e in talk.of(Send)} == {(3, 41)}
    one.delivers(1.2, PublishAck(0, 0))
    one.delivers(1.3, StateRequest(()), tick=7)
    assert [(e.envelope.tick, e.envelope.seen_tick) for e in talk.of(Send)] == [(5, 42)], "seen never falls"

    learner = LearnerTalk(RunConfig(fragments=1)).trains()
    newest = learner.tick
    learner.steps(1.0)
    assert [(e.envelope.tick, e.envelope.seen_tick) for e in learner.of(Send)] == [(learner.core.state.tick, newest)]


@pytest.mark.parametrize("back_s", [0.5, 1e3, 1e9])
def test_clock_that_goes_back_is_clamped(back_s):
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one = talk.joined(1, at=1_000.0)
    one.reports(1_001.0, step=1)
    one.contributes(1_001.0 - back_s)
    assert talk.core.state.now == 1_001.0
    talk.merges_and_persists(1_001.0 - back_s)
    assert talk.fragment(0).version == 1
    assert talk.core.view().quorum_s == 0.0

    learner = LearnerTalk(RunConfig(fragments=1)).trains(1_000.0)
    learner.steps(1_000.0 - back_s)
    assert learner.core.state.now == 1_000.0
    assert learner.core.training


def test_stalled_syncer_excuses_the_silence_of_learners():
    talk = SyncerTalk(RunConfig(fragments=1, quorum=2))
    one = talk.joined(1)
    for step in range(1, 60):
        one.reports(float(step), step)
    talk.handle(10_000.0, TimerFired())
    assert talk.codes() == ["syncer-stalled"]
    assert talk.member(1).state == "live"
    talk.fires(10_400.0)
    assert talk.member(1).state == "disconnected", "after that its silence counts as usual"


def test_syncer_stops_when_a_later_epoch_is_known():
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2))
    one = talk.joined(1)
    one.reports(1.0, step=1)
    one.contributes(1.1)
    one.delivers(1.2, Report(2, 200, 1.0), epoch=2)
    talk.expect(CloseConnection(1, 1, 1, because("superseded-epoch", 2, 1)), Halt(because("superseded-epoch", 2, 1)))
    talk.merged(1.3)
    talk.expect()
    talk.fires(10_000.0)
    talk.expect()


def test_a_syncer_whose_store_is_taken_over_stops():
    talk = SyncerTalk(RunConfig(fragments=1))
    one = talk.voice(1)
    one.hello(1.0)
    talk.take(Persist)
    talk.handle(1.1, StoreFenced(2))
    talk.expect(Halt(because("superseded-epoch", 2, 1)))
    one.hello(1.2)
    talk.expect()


def test_a_learner_never_follows_an_older_syncer_than_the_one_it_has_met():
    talk = LearnerTalk(RunConfig(fragments=1))
    talk.epoch = 3
    talk.trains()
    talk.handle(1.0, ConnectionClosed(1, "reset"))
    talk.opens(2.0)
    talk.receives(2.1, Welcome((0,), 0.0, 0.0), epoch=2)
    talk.expect()
    assert talk.core.state.link.value == "handshake"
    talk.receives(2.2, Welcome((0,), 0.0, 0.0), epoch=4)
    assert (talk.core.state.link.value, talk.core.state.epoch) == ("up", 4)


def _events(learners: tuple[int, ...]) -> list[tuple[float, int, int]]:
    """(time, learner, step): three learners of different speeds."""
    steps = [(i * 0.01 + n / i, i, n) for i in learners for n in range(1, 40 * i // 3)]
    return sorted(steps)


def test_fragments_are_independent_two_syncers_with_disjoint_fragments_do_what_one_does():
    plan = {"fragments": 2, "every_steps": 4, "overlap_steps": 2, "quorum": 2, "grace_margin": 0.0}
    whole = SyncerTalk(RunConfig(**plan))  # type: ignore[arg-type]
    halves = [SyncerTalk(RunConfig(**plan, owned_fragments=(p,))) for p in (0, 1)]  # type: ignore[arg-type]
    records: dict[int, list[str]] = {0: [], 1: []}
    of_halves: dict[int, list[str]] = {0: [], 1: []}
    for talk, written in ((whole, records), (halves[0], of_halves), (halves[1], of_halves)):
        voices = {i: talk.joined(i) for i in (1, 2, 3)}
        for at, learner, step in _events((1, 2, 3)):
            voices[learner].reports(at, step)
            _serve(talk, at, written)
    assert records == of_halves
    assert min(len(lines) for lines in records.values()) > 3


def _serve(talk: SyncerTalk, at: float, written: dict[int, list[str]]) -> None:
    """All pulled learners reply immediately, in order; merge thread and disk take no time."""
    for voice in talk.voices.values():
        for p in sorted(voice.pulls):
            voice.contributes(at, p)
            del voice.pulls[p]
    while talk.awaited:
        talk.merged(at)
        record = talk.one(Persist).record
        assert isinstance(record, VersionRecord)
        written[record.fragment].append(encode(record))
        talk.persisted(at)
