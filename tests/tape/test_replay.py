"""Replay: derives every effect and stops at the first difference."""

from __future__ import annotations

import pytest
from msgspec import structs

from atoll.core.learner.core import LearnerCore
from atoll.core.protocol import PublishAck, Report, Resync, Send, StepTaken
from atoll.core.syncer.core import SyncerCore
from atoll.core.syncer.state import RestoredState
from atoll.core.types import RunConfig
from atoll.tape.format import Actor, Entry, Header, TapeError, decode_entry, decode_header, encode_entry, encode_header
from atoll.tape.replay import ReplayMismatchError, create_core, replay
from tests.tiny_run import eventful_run

RUN = eventful_run()


def written_and_read(header: Header, entries: list[Entry]) -> tuple[Header, list[Entry]]:
    back = decode_header(encode_header(header)[:-1])
    return back, [decode_entry(encode_entry(entry)[:-1], back.actor) for entry in entries]


@pytest.mark.parametrize("tape", RUN.tapes(), ids=lambda tape: str(tape[0].actor))
def test_tape_replays_from_header(tape):
    header, entries = written_and_read(*tape)
    assert replay(header, entries) == len(entries) > 0


def test_run_has_restarts():
    """The run covers the starts that the test above needs."""
    assert [h.actor for h, _ in RUN.tapes()] == [(0, 1), (0, 2), (1, 1), (2, 1), (2, 2), (3, 1)]
    restored = RUN.headers[Actor(0, 2)].restored
    assert restored is not None
    assert len(restored.versions) == 3


def learner_tape() -> tuple[Header, list[Entry]]:
    return RUN.headers[Actor(1, 1)], [e for e in RUN.entries if e.actor == Actor(1, 1)]


def first_step(entries: list[Entry]) -> int:
    return next(index for index, entry in enumerate(entries) if isinstance(entry.event, StepTaken))


def test_changed_effect_is_located():
    header, entries = learner_tape()
    index = first_step(entries)
    send = entries[index].effects[0]
    assert isinstance(send, Send)
    assert isinstance(send.envelope.body, Report)
    changed = Send(structs.replace(send.envelope, body=structs.replace(send.envelope.body, trained=101)))
    entries[index] = entries[index]._replace(effects=(changed, *entries[index].effects[1:]))
    with pytest.raises(ReplayMismatchError) as caught:
        replay(header, entries)
    difference = caught.value
    assert (difference.actor, difference.tick) == (Actor(1, 1), index + 1)
    assert difference.event == StepTaken(1, 100, 1.0)
    assert difference.recorded[0] == changed
    assert difference.derived is not None
    assert difference.derived[0] == send
    assert difference.first_difference() == 0
    message = str(difference)
    assert f"learner 1 incarnation 1, tick {index + 1}" in message
    assert '["Report",1,101,1.0,0]' in message.split(", derived as ")[0]
    assert '["Report",1,100,1.0,0]' in message.split(", derived as ")[1]


def test_missing_and_additional_effects_are_found():
    header, entries = learner_tape()
    index = first_step(entries)
    original = entries[index]
    entries[index] = original._replace(effects=original.effects[:-1])
    with pytest.raises(ReplayMismatchError, match="is recorded as nothing, derived as"):
        replay(header, entries)
    entries[index] = original._replace(effects=(*original.effects, original.effects[0]))
    with pytest.raises(ReplayMismatchError, match="derived as nothing"):
        replay(header, entries)


def test_effect_of_another_type_is_a_difference():
    header, entries = learner_tape()
    index, effect = next(
        (index, effect)
        for index, entry in enumerate(entries)
        for effect in entry.effects
        if isinstance(effect, Send) and isinstance(effect.envelope.body, PublishAck)
    )
    swapped = Send(structs.replace(effect.envelope, body=Resync(*structs.astuple(effect.envelope.body))))
    effects = tuple(swapped if each is effect else each for each in entries[index].effects)
    entries[index] = entries[index]._replace(effects=effects)
    with pytest.raises(ReplayMismatchError, match=r'recorded as .*"Resync".* derived as .*"PublishAck"'):
        replay(header, entries)


def test_raising_core_is_a_difference():
    header, entries = learner_tape()
    entries[0] = entries[0]._replace(event=StepTaken(1, 100, 1.0))
    with pytest.raises(ReplayMismatchError, match="the replay raised AssertionError") as caught:
        replay(header, entries)
    assert caught.value.derived is None


def test_changed_time_is_a_difference():
    """The recorded time is that of the driver, also if the core corrected it."""
    header = RUN.headers[Actor(0, 1)]
    entries = [e for e in RUN.entries if e.actor == header.actor]
    with pytest.raises(ReplayMismatchError):
        replay(header, [entry._replace(at=entry.at * 3) for entry in entries])


def test_changed_config_is_a_difference():
    header, entries = RUN.headers[Actor(0, 1)], [e for e in RUN.entries if e.actor == Actor(0, 1)]
    other = Header(1, "0.1.0", header.actor, RunConfig(fragments=3, every_steps=5, quorum=2), None)
    with pytest.raises(ReplayMismatchError):
        replay(other, entries)


def test_replay_with_custom_core():
    class NoEffects(LearnerCore):
        def handle(self, now, event):
            super().handle(now, event)
            return []

    header, entries = learner_tape()
    with pytest.raises(ReplayMismatchError, match="derived as nothing"):
        replay(header, entries, lambda h: NoEffects(h.config, h.actor.learner, h.actor.generation))


def test_create_core_from_header():
    syncer = create_core(RUN.headers[Actor(0, 2)])
    assert isinstance(syncer, SyncerCore)
    assert syncer.state.epoch == 2
    assert syncer.state.merges > 0
    learner = create_core(RUN.headers[Actor(2, 2)])
    assert isinstance(learner, LearnerCore)
    assert (learner.state.id, learner.state.incarnation) == (2, 2)


def test_invalid_header_raises():
    restored = RUN.headers[Actor(0, 2)].restored
    assert restored is not None
    record = structs.replace(next(iter(restored.versions.values())), fragment=99)
    header = Header(1, "0.1.0", Actor(0, 2), RUN.config, None, RestoredState({99: record}))
    with pytest.raises(TapeError, match="cannot create the core of syncer epoch 2 from this header"):
        replay(header, [])
