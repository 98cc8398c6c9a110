"""Causal order: causes come before effects, with any clocks."""

from __future__ import annotations

from random import Random

import pytest

from atoll.core.protocol import (
    Envelope,
    Event,
    MembersRecord,
    MessageArrived,
    Persist,
    Persisted,
    Ping,
    Pong,
    Send,
    Started,
    TimerFired,
)
from atoll.core.syncer.state import RestoredState
from atoll.core.types import SYNCER, RunConfig
from atoll.tape.format import Actor, Entry, Header
from atoll.tape.ordering import MissingCause, find_sender, merge_tapes
from tests.tiny_run import TinyRun, eventful_run

S1, S2, A1, B1 = Actor(SYNCER, 1), Actor(SYNCER, 2), Actor(1, 1), Actor(2, 1)


def header(actor: Actor, restored: RestoredState | None = None) -> Header:
    return Header(1, "0.1.0", actor, RunConfig(), None, restored)


def up(learner: Actor, tick: int) -> Event:
    """Return the arrival, at the syncer, of a message from entry `tick` of a learner."""
    return MessageArrived(Envelope(*learner, 1, 1, tick, 0, 0, Ping(1)))


def down(learner: Actor, tick: int, epoch: int = 1) -> Event:
    return MessageArrived(Envelope(*learner, 1, epoch, tick, 0, 0, Pong(1)))


def tape(
    actor: Actor, *events: tuple[float, Event], restored: RestoredState | None = None
) -> tuple[Header, list[Entry]]:
    return header(actor, restored), [Entry(at, actor, tick, event, ()) for tick, (at, event) in enumerate(events, 1)]


def merged_order(*tapes: tuple[Header, list[Entry]]) -> list[tuple[Actor, int]]:
    missing: list[MissingCause] = []
    order = [(entry.actor, entry.tick) for entry in merge_tapes(tapes, missing.append)]
    assert missing == []
    return order


def assert_causal(entries: list[Entry]) -> None:
    place = {(entry.actor, entry.tick): number for number, entry in enumerate(entries)}
    assert len(place) == len(entries)
    for number, entry in enumerate(entries):
        assert entry.tick == 1 or place[entry.actor, entry.tick - 1] < number
        cause = find_sender(entry)
        assert cause is None or place[cause] < number


# --------------------------------------------------------------------------------------------------------------------
# The order


def test_independent_entries_are_ordered_by_time_and_actor():
    s = tape(S1, (1.0, Started()), (3.0, TimerFired()))
    a = tape(A1, (0.5, Started()), (3.0, TimerFired()))
    assert merged_order(a, s) == [(A1, 1), (S1, 1), (S1, 2), (A1, 2)]


def test_message_arrives_after_sending_with_wrong_clocks():
    s = tape(S1, (0.0, Started()), (1.0, up(A1, 2)), (1.1, TimerFired()))
    a = tape(A1, (100.0, Started()), (101.0, TimerFired()), (102.0, down(A1, 2)))
    assert merged_order(s, a) == [(S1, 1), (A1, 1), (A1, 2), (S1, 2), (S1, 3), (A1, 3)]


def test_entries_of_process_keep_order():
    a = tape(A1, (5.0, Started()), (1.0, TimerFired()), (2.0, TimerFired()))
    assert merged_order(a) == [(A1, 1), (A1, 2), (A1, 3)]


def test_receiver_determines_sender():
    """The tick of an envelope belongs to the sender, also if the receiver has an entry with this tick."""
    s = tape(S1, (0.0, Started()), (9.0, up(A1, 1)))
    a = tape(A1, (0.0, Started()), (0.1, down(A1, 1)))
    assert merged_order(s, a) == [(S1, 1), (A1, 1), (A1, 2), (S1, 2)]


def test_syncer_starts_after_end_of_predecessor():
    record = MembersRecord(1, (), (), 0)
    first = (
        header(S1),
        [
            Entry(200.0, S1, 1, Started(), (Persist(record),)),
            Entry(201.0, S1, 2, Persisted(record.key()), ()),
        ],
    )
    second = tape(S2, (1.0, Started()), (2.0, TimerFired()), restored=RestoredState({}, record))
    assert merged_order(second, first) == [(S1, 1), (S1, 2), (S2, 1), (S2, 2)]


def test_superseded_syncer_continues_after_successor():
    s1 = tape(S1, (0.0, Started()), (9.0, up(A1, 2)))
    s2 = tape(S2, (5.0, Started()))
    a = tape(A1, (0.0, Started()), (6.0, down(A1, 1, epoch=2)))
    assert merged_order(s1, s2, a) == [(S1, 1), (A1, 1), (S2, 1), (A1, 2), (S1, 2)]


@pytest.mark.parametrize("lost", [None, 1, 3])
def test_missing_tape_is_reported(lost):
    """The tape of learner 1 is missing (None) or ends after `lost` entries."""
    run = TinyRun().run_until(6.0)
    tapes = [(h, list(entries)) for h, entries in run.tapes()]
    if lost is None:
        cut = [(h, entries) for h, entries in tapes if h.actor != A1]
    else:
        cut = [(h, entries[:lost] if h.actor == A1 else entries) for h, entries in tapes]
    missing: list[MissingCause] = []
    order = list(merge_tapes(cut, missing.append))
    assert len(order) == sum(len(entries) for _, entries in cut)
    assert {m.cause for m in missing} == {A1}
    assert all(m.actor == S1 and m.cause_tick is not None and m.cause_tick > (lost or 0) for m in missing)
    assert len(missing) == sum(
        1 for e in order if e.actor == S1 and (c := find_sender(e)) is not None and c[0] == A1 and c[1] > (lost or 0)
    )
    assert "was sent by learner 1 incarnation 1, tick" in str(missing[0])


def test_missing_predecessor_tape_is_reported():
    missing: list[MissingCause] = []
    orphan = tape(S2, (0.0, Started()), restored=RestoredState({}, MembersRecord(3, (), (), 0)))
    assert len(list(merge_tapes([orphan], missing.append))) == 1
    assert missing == [MissingCause(S2, 1, S1, None)]
    assert str(missing[0]) == "syncer epoch 2 started from records that are on no tape of an earlier syncer"


def test_circular_wait_is_resolved_and_reported():
    s = tape(S1, (0.0, Started()), (1.0, up(A1, 2)))
    a = tape(A1, (0.0, Started()), (2.0, down(A1, 2)))
    missing: list[MissingCause] = []
    assert [e.at for e in merge_tapes([s, a], missing.append)] == [0.0, 0.0, 1.0, 2.0]
    assert missing == [MissingCause(S1, 2, A1, 2, circular=True)]
    assert str(missing[0]) == "syncer epoch 1, tick 2 and learner 1 incarnation 1, tick 2 wait for each other"


def test_real_run_is_merged_in_causal_order():
    run = eventful_run()
    order = list(merge_tapes(run.tapes()))
    assert len(order) == len(run.entries)
    assert_causal(order)
    assert {(e.actor, e.tick) for e in order} == {(e.actor, e.tick) for e in run.entries}


@pytest.mark.parametrize("seed", range(5))
def test_order_does_not_depend_on_clocks(seed):
    draw = Random(seed)
    run = eventful_run(clocks_s={process: draw.uniform(-500, 500) for process in range(4)})
    missing: list[MissingCause] = []
    tapes = run.tapes()
    draw.shuffle(tapes)
    order = list(merge_tapes(tapes, missing.append))
    assert missing == []
    assert len(order) == len(run.entries)
    assert_causal(order)
    assert order == list(merge_tapes(run.tapes()))  # for any order of the tapes


def test_merge_buffers_one_entry_per_tape():
    read = {S1: 0, A1: 0}

    def counted(actor: Actor, entries: list[Entry]):
        for entry in entries:
            read[actor] += 1
            yield entry

    s = tape(S1, *[(float(t), TimerFired()) for t in range(100)])
    a = tape(A1, *[(float(t), TimerFired()) for t in range(100)])
    emitted = 0
    for entry in merge_tapes([(s[0], counted(S1, s[1])), (a[0], counted(A1, a[1]))]):
        emitted += 1
        assert entry.tick <= read[entry.actor] <= entry.tick + 1
        assert sum(read.values()) <= emitted + 2
    assert emitted == 200


def test_envelope_tick_names_sender_entry():
    """`Envelope.tick` is the number of the sender entry."""
    entries = eventful_run().entries
    by_place = {(e.actor, e.tick): e for e in entries}
    arrivals = [(e, cause) for e in entries if (cause := find_sender(e)) is not None]
    assert len(arrivals) > 100
    for entry, cause in arrivals:
        assert isinstance(entry.event, MessageArrived)
        assert Send(entry.event.envelope) in by_place[cause].effects
