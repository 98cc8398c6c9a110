"""Hypothesis talks to both cores: everything that can happen, in any order, honest, stale, doubled or hostile.

The machines answer every effect that wants an answer exactly once, as a driver does, and look after each event whether
the core still makes sense. What is written to disk survives a restart of the syncer; nothing else does.
"""

from __future__ import annotations

import json
import math
from enum import Enum
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from atoll.core.protocol import (
    AdoptFragment,
    Contribution,
    Delivered,
    Dial,
    DialFailed,
    Envelope,
    Finish,
    FinishAck,
    FinishRequested,
    Hello,
    InnerState,
    LearnerDisconnected,
    Leave,
    LeaveWanted,
    LinkClosed,
    LinkOpened,
    Marker,
    MergeDone,
    MergeFailed,
    MergeRound,
    MessageArrived,
    NoPeer,
    PeerChosen,
    Persist,
    Persisted,
    PersistFailed,
    Ping,
    Pong,
    Published,
    Pull,
    Ready,
    Record,
    Refuse,
    RefuseContribution,
    Report,
    Resync,
    SaveSnapshot,
    Send,
    SnapshotPart,
    SnapshotRequested,
    StateRequest,
    StateWanted,
    StepTaken,
    Stop,
    StoreFenced,
    TimerFired,
    VersionRecord,
    Welcome,
)
from atoll.core.reasons import because
from atoll.core.tables import Link
from atoll.core.types import NOTHING, Limits, Mark, RoundId, RunConfig
from tests.core.conversation import LearnerTalk, SyncerTalk, Voice

LEARNERS = st.integers(1, 3)
FRAGMENTS = st.integers(0, 2)
WAITS_S = st.sampled_from([0.0, 0.01, 0.5, 1.0, 5.0, 40.0, 700.0, -3.0, -1e6])
WILD = st.sampled_from([-(10**9), -1, 0, 1, 2, 7, 10**6, 10**12])
STORY = 60
NONSENSE = st.one_of(
    st.builds(Report, WILD, WILD.map(lambda n: min(n, 10**6)), st.sampled_from([-1.0, 0.0, math.nan, math.inf])),
    st.builds(Delivered, WILD, WILD),
    st.builds(Resync, WILD, WILD),
    st.builds(
        Contribution,
        st.builds(RoundId, WILD, WILD, WILD, WILD),
        WILD,
        WILD,
        WILD,
        WILD,
        WILD,
        st.sampled_from([None, "values are not finite"]),
    ),
    st.builds(SnapshotPart, WILD, WILD, WILD, st.tuples(WILD), st.tuples(st.builds(RoundId, WILD, WILD, WILD, WILD))),
    st.builds(InnerState, LEARNERS, WILD, WILD, WILD, st.tuples(WILD)),
    st.builds(StateRequest, st.tuples(WILD)),
    st.builds(Ready, st.just(because("moments-kept"))),
    st.builds(FinishAck, WILD),
    st.builds(Ping, WILD),
)
"""Messages that no honest learner sends, or not now."""


def plain(value: Any) -> Any:
    """A view as JSON would have it."""
    if hasattr(value, "_asdict"):
        return {key: plain(inner) for key, inner in value._asdict().items()}
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    assert value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)), repr(value)
    return value


def look(core: Any) -> Any:
    """A view can be written as JSON, and the next deadline is a time that is still to come."""
    view = core.view()
    json.dumps(plain(view), allow_nan=False)
    deadline = core.next_deadline()
    assert deadline is None or (math.isfinite(deadline) and deadline >= core.now), f"deadline {deadline} at {core.now}"
    return view


class Machine(RuleBasedStateMachine):
    """What both have in common: time, and the story that is told when something breaks."""

    talk: Any

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.begun = False

    def happens(self, event: Any) -> list[Any]:
        raise NotImplementedError

    def checked(self, what: bool, sentence: str) -> None:
        if not what:
            raise AssertionError("\n".join([sentence, *self.talk.story[-STORY:]]))

    @rule(seconds=WAITS_S)
    def time_passes(self, seconds):
        """Also backwards: a clock may be set."""
        self.now = max(self.now + seconds, 0.0)

    @rule()
    def a_timer_fires(self):
        deadline = self.talk.core.next_deadline()
        if deadline is not None:
            self.now = max(self.now, deadline)
            self.happens(TimerFired())


# --------------------------------------------------------------------------------------------------------------------
# The syncer


class Quiet(SyncerTalk):
    def _write(self, line: str) -> None:
        self.story.append(line)


class SyncerMachine(Machine):
    talk: Quiet

    @initialize(
        fragments=st.integers(1, 3),
        every=st.integers(1, 4),
        quorum=st.integers(1, 2),
        gamma=st.sampled_from([0.0, 0.5, 0.9]),
        snapshots=st.sampled_from([0, 0, 2]),
        budget=st.sampled_from([None, None, 4]),
        learners=st.integers(1, 3),
    )
    def begin(self, fragments, every, quorum, gamma, snapshots, budget, learners):
        self.config = RunConfig(
            fragments=fragments,
            every_steps=every,
            quorum=quorum,
            grace_margin=gamma,
            snapshot_every_merges=snapshots,
            budget_merges=budget,
            limits=Limits(first_wait_s=5.0, most_wait_s=60.0, most_learners=3),
        )
        self.talk = Quiet(self.config)
        self.heard: list[Envelope] = []
        self.versions = dict.fromkeys(range(fragments), 0)
        self.trained = 0
        self.begun = True
        for learner in range(1, learners + 1):
            self.joins_all_the_way(self.talk.voice(learner))

    def happens(self, event: Any) -> list[Any]:
        if isinstance(event, MessageArrived):
            self.heard.append(event.envelope)
        try:
            done = self.talk.tell(self.now, event)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *self.talk.story[-STORY:]])) from error
        for effect in done:
            self._look_at(effect)
        return done

    def _look_at(self, effect: Any) -> None:
        if isinstance(effect, MergeRound):
            learners = [a.learner for a in effect.contributions]
            self.checked(len(learners) >= self.config.quorum, "a merge below the quorum")
            self.checked(len(set(learners)) == len(learners), "a learner twice in a merge")
            weights = [a.weight for a in effect.contributions]
            self.checked(all(math.isfinite(w) and w > 0 for w in weights), f"weights {weights}")
        elif isinstance(effect, Persist):
            keys = [e.record.key() for e in self.talk.awaited if isinstance(e, Persist)]
            self.checked(len(set(keys)) == len(keys), f"asked twice for {effect.record.key()}")
            if isinstance(effect.record, VersionRecord):
                p = effect.record.fragment
                self.checked(effect.record.version == self.versions[p] + 1, f"version {effect.record.version} of {p}")
        elif isinstance(effect, Send) and isinstance(effect.envelope.body, Published):
            body = effect.envelope.body
            self.checked(body.version <= self.versions[body.fragment], f"{body} is not durable")

    @invariant()
    def it_makes_sense(self):
        if not self.begun:
            return
        view = look(self.talk.core)
        for f in view.fragments:
            self.checked(f.version == self.versions[f.fragment], f"fragment {f.fragment} is at version {f.version}")
        self.checked(view.rounds_in_flight == sum(f.phase != "idle" for f in view.fragments), "rounds in flight")
        self.checked(view.merges == sum(self.versions.values()), "merges")
        self.checked(view.trained >= self.trained, "tokens trained have become fewer")
        self.trained = view.trained
        if view.stage != "superseded":
            busy = sum(f.phase == "merging" for f in view.fragments)
            open_ = sum(isinstance(e, MergeRound) or isinstance(e.record, VersionRecord) for e in self.talk.awaited)
            self.checked(open_ <= busy, f"{open_} merges and writes under way, {busy} fragments merging")

    def voice(self, learner: int) -> Voice:
        return self.talk.voices.get(learner) or self.talk.voice(learner)

    def says(self, learner: int, body: Any, **other: Any) -> None:
        self.happens(MessageArrived(self.voice(learner).envelope(body, **other)))

    # ------------------------------------------------------------------------------------------------ merges and disk

    @precondition(lambda self: any(isinstance(e, MergeRound) for e in self.talk.awaited))
    @rule(works=st.sampled_from([True, True, True, False]))
    def a_merge_ends(self, works):
        round_id = self.talk.take(MergeRound).round
        self.happens(MergeDone(round_id) if works else MergeFailed(round_id, "out of memory"))

    @precondition(lambda self: any(isinstance(e, Persist) for e in self.talk.awaited))
    @rule(which=st.integers(0, 5), works=st.sampled_from([True, True, True, False]))
    def a_write_ends(self, which, works):
        writes = [e for e in self.talk.awaited if isinstance(e, Persist)]
        self._end_write(writes[which % len(writes)], works)

    def _end_write(self, effect: Persist, works: bool = True) -> None:
        self.talk.awaited.remove(effect)
        record = effect.record
        if not works:
            self.happens(PersistFailed(record.key(), "no space left on device"))
            return
        self._write(record)
        self.happens(Persisted(record.key()))

    def _write(self, record: Record) -> None:
        self.talk._write_record(record)
        if isinstance(record, VersionRecord) and self.talk.core.view().stage != "superseded":
            self.versions[record.fragment] = record.version

    @rule(chance=st.integers(0, 15), kept=st.booleans())
    def the_syncer_is_killed_and_starts_again(self, chance, kept):
        """Now and then. What was being written has reached the disk or has not."""
        if chance:
            return
        for effect in [e for e in self.talk.awaited if isinstance(e, Persist)] if kept else []:
            self._write(effect.record)
        before, self.talk = self.talk, self.talk.restarted(self.now)
        for learner, old in before.voices.items():
            voice = self.talk.voice(learner, old.incarnation, old.session + 1)
            voice.step, voice.trained, voice.received, voice.marks = old.step, old.trained, old.received, old.marks
        self.now = 0.0
        self.trained = 0

    @rule(chance=st.integers(0, 40))
    def another_syncer_owns_the_store(self, chance):
        if chance == 0:
            self.happens(StoreFenced(self.talk.epoch + 1))

    # ------------------------------------------------------------------------------------------------ members

    def hello_body(self, voice: Voice, training: bool) -> Hello:
        held = tuple(voice.received.values())
        config = self.config
        return Hello(
            config.run_id, config.fingerprint, held, voice.step, voice.trained, training and NOTHING not in held
        )

    def joins_all_the_way(self, voice: Voice) -> None:
        """As far as the disk lets it."""
        self.says(voice.id, self.hello_body(voice, False))
        for effect in [e for e in self.talk.awaited if isinstance(e, Persist)]:
            self._end_write(effect)
        self.acknowledges_all(voice)
        self.says(voice.id, Ready(because("moments-kept")))

    def acknowledges_all(self, voice: Voice) -> None:
        for p, version in list(voice.received.items()):
            self.says(voice.id, Delivered(p, version))

    @rule(learner=LEARNERS, older=st.sampled_from([False, False, True]))
    def starts_again(self, learner, older):
        old = self.voice(learner)
        voice = self.talk.voice(learner, max(old.incarnation + (-1 if older else 1), 1), 1)
        self.joins_all_the_way(voice)

    @rule(learner=LEARNERS, training=st.booleans())
    def dials_again(self, learner, training):
        voice = self.voice(learner)
        voice.session += 1
        self.says(learner, self.hello_body(voice, training))

    @rule(learner=LEARNERS, training=st.booleans())
    def says_hello_once_more(self, learner, training):
        voice = self.voice(learner)
        self.says(learner, self.hello_body(voice, training))

    @rule(learner=LEARNERS, stale=st.booleans())
    def disconnected(self, learner, stale):
        self.happens(LearnerDisconnected(learner, self.voice(learner).session - stale, "reset"))

    @rule(learner=LEARNERS, chance=st.integers(0, 8))
    def leaves(self, learner, chance):
        if chance == 0:
            self.says(learner, Leave("the operator said so"))

    # ------------------------------------------------------------------------------------------------ training

    @rule(learner=LEARNERS, steps=st.integers(1, 5), tokens=st.integers(0, 200))
    def reports(self, learner, steps, tokens):
        voice = self.voice(learner)
        voice.step += steps
        voice.trained += tokens
        self.says(learner, Report(voice.step, voice.trained, 1.0))

    @rule(seconds=st.sampled_from([0.1, 1.0]), rounds=st.integers(1, 3))
    def some_good_seconds(self, seconds, rounds):
        """Everybody trains, answers and acknowledges; merge thread and disk are quick."""
        for _ in range(rounds):
            self.now += seconds
            for voice in list(self.talk.voices.values()):
                voice.step, voice.trained = voice.step + 1, voice.trained + 10
                self.says(voice.id, Report(voice.step, voice.trained, seconds))
            self.everybody_answers()
            self.all_work_ends()
            for voice in list(self.talk.voices.values()):
                self.acknowledges_all(voice)

    def everybody_answers(self) -> None:
        for learner, voice in list(self.talk.voices.items()):
            for fragment in list(voice.pulls):
                self.says(learner, voice.contribution(fragment))

    def all_work_ends(self) -> None:
        while self.talk.awaited:
            effect = self.talk.awaited[0]
            if isinstance(effect, MergeRound):
                self.happens(MergeDone(self.talk.take(MergeRound).round))
            else:
                self._end_write(effect)

    @rule(learner=LEARNERS, fragment=FRAGMENTS)
    def contributes(self, learner, fragment):
        voice = self.voice(learner)
        if fragment in voice.pulls:
            self.says(learner, voice.contribution(fragment))

    @rule()
    def everybody_contributes(self):
        self.everybody_answers()

    @rule(learner=LEARNERS)
    def acknowledges(self, learner):
        self.acknowledges_all(self.voice(learner))

    # ------------------------------------------------------------------------------------------------ nonsense

    @rule(learner=LEARNERS, body=NONSENSE)
    def says_nonsense(self, learner, body):
        self.says(learner, body)

    @rule(learner=LEARNERS, fragment=FRAGMENTS, field=st.sampled_from(Contribution._fields[1:6]), value=WILD)
    def contributes_nonsense(self, learner, fragment, field, value):
        voice = self.voice(learner)
        if fragment in voice.pulls:
            self.says(learner, voice.contribution(fragment)._replace(**{field: value}))

    @rule(learner=st.integers(-1, 5), run=st.sampled_from(["run", "other"]), print_=st.sampled_from([(), ("other",)]))
    def a_stranger_says_hello(self, learner, run, print_):
        body = Hello(run, print_, (NOTHING,) * self.config.fragments, 0, 0, False)
        self.happens(MessageArrived(Envelope(learner, 9, 1, 0, 1, 0, 0, body)))
        if learner in self.talk.voices and (run, print_) == ("run", ()):
            self.talk.voices[learner].incarnation = max(self.talk.voices[learner].incarnation, 9)
            self.talk.voices[learner].session = 1

    # ------------------------------------------------------------------------------------------------ the rest

    @rule(learner=LEARNERS, tried=st.lists(LEARNERS, max_size=2))
    def asks_for_state(self, learner, tried):
        self.says(learner, StateRequest(tuple(tried)))

    @rule(learner=LEARNERS, to=LEARNERS)
    def gives_state(self, learner, to):
        versions = tuple(self.versions.values())
        self.says(learner, InnerState(learner, to, self.voice(to).incarnation, 1, versions))

    @rule(learner=LEARNERS, lag=st.sampled_from([0, 0, 0, 1, -1]), outstanding=st.booleans(), bad=st.booleans())
    def saves_its_part(self, learner, lag, outstanding, bad):
        voice = self.voice(learner)
        rounds = tuple(voice.pulls.values()) if outstanding else ()
        snapshot = self.talk.core.marker + lag
        voice.marker = snapshot
        versions = tuple(voice.received.values())
        part = SnapshotPart(snapshot, voice.step, voice.trained, versions, rounds, "disk" if bad else None)
        self.says(learner, part)

    @rule()
    def everybody_saves_its_part(self):
        for voice in list(self.talk.voices.values()):
            voice.marker = self.talk.core.marker
            held = tuple(voice.received.values())
            self.says(voice.id, SnapshotPart(voice.marker, voice.step, voice.trained, held, ()))

    @rule(which=st.integers(0, 50))
    def a_message_arrives_again(self, which):
        if self.heard:
            self.happens(MessageArrived(self.heard[-1 - which % len(self.heard)]))

    @rule()
    def a_snapshot_is_wanted(self):
        self.happens(SnapshotRequested())

    @rule(chance=st.integers(0, 10))
    def the_end_is_wanted(self, chance):
        if chance == 0:
            self.happens(FinishRequested())


# --------------------------------------------------------------------------------------------------------------------
# A learner


class QuietLearner(LearnerTalk):
    def _write(self, line: str) -> None:
        self.story.append(line)


class LearnerMachine(Machine):
    talk: QuietLearner

    @initialize(
        fragments=st.integers(1, 2),
        every=st.integers(1, 4),
        adopt=st.sampled_from(["carry", "overwrite", "blend"]),
        incarnation=st.integers(1, 3),
        joined=st.sampled_from([True, True, False]),
    )
    def begin(self, fragments, every, adopt, incarnation, joined):
        limits = Limits(first_wait_s=5.0, most_wait_s=60.0)
        self.config = RunConfig(fragments=fragments, every_steps=every, adopt=adopt, limits=limits)
        self.talk = QuietLearner(self.config, 1, incarnation)
        self.heard: list[Envelope] = []
        self.published = dict.fromkeys(range(fragments), 0)  # at the syncer
        self.sent: dict[int, Contribution] = {}  # newest contribution to each fragment
        self.marks: dict[int, Mark] = {}
        self.attempt = 0
        self.dialing = True
        self.adopted = dict.fromkeys(range(fragments), NOTHING)
        self.may_stop = False
        self.was_training = False
        self.steps = 0
        self.begun = True
        if joined:
            self.trains_if_it_can()

    def happens(self, event: Any) -> list[Any]:
        if isinstance(event, MessageArrived):
            self.heard.append(event.envelope)
        try:
            done = self.talk.tell(self.now, event)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *self.talk.story[-STORY:]])) from error
        for effect in done:
            self._look_at(effect)
        return done

    def _look_at(self, effect: Any) -> None:
        if isinstance(effect, Dial):
            self.checked(not self.dialing, "a second dialing before the first was answered")
            self.dialing = True
        elif isinstance(effect, AdoptFragment):
            self.checked(effect.version > self.adopted[effect.fragment], f"{effect} is not newer")
            self.adopted[effect.fragment] = effect.version
        elif isinstance(effect, Send) and isinstance(effect.envelope.body, Contribution):
            body = effect.envelope.body
            before = self.sent.get(body.round.fragment)
            if before is not None and before.round == body.round:
                self.checked(before == body, "two different answers to one pull")
            self.checked(body.steps > 0 and body.tokens >= 0 and body.dropped >= 0, f"{body}")
            self.sent[body.round.fragment] = body
        elif isinstance(effect, Stop):
            self.checked(self.may_stop, "stopped, and neither the end nor a refusal nor the operator said so")

    @invariant()
    def it_makes_sense(self):
        if not self.begun:
            return
        core = self.talk.core
        view = look(core)
        self.checked(view.step == self.steps, "steps are lost")
        if self.was_training and not core.training:
            self.checked(self.may_stop, "training stopped because of something that the network did")
        self.was_training = core.training
        for p, line in enumerate(view.ledger):
            self.checked(line.balanced(), f"fragment {p}: {line}")
            if self.config.adopt == "carry":
                self.checked(not line.dropped, f"fragment {p}: carry drops nothing, {line}")

    def hears(self, body: Any, **other: Any) -> list[Any]:
        core = self.talk.core
        if core.link is Link.DIALING:
            return []
        self.talk.tick += 1
        plain_ = Envelope(
            1, core.incarnation, self.talk.session, self.talk.epoch, self.talk.tick, 0, self.talk.marker, body
        )
        return self.happens(MessageArrived(plain_._replace(**other)))

    # ------------------------------------------------------------------------------------------------ the link

    @precondition(lambda self: self.dialing)
    @rule(works=st.booleans())
    def dialing_ends(self, works):
        self.dialing = False
        if works:
            self.talk.session += 1
            self.happens(LinkOpened(self.talk.session))
        else:
            self.happens(DialFailed("nobody answers"))

    @rule(stale=st.integers(0, 1))
    def the_link_closes(self, stale):
        self.happens(LinkClosed(self.talk.session - stale, "reset"))

    @rule(chance=st.integers(0, 5))
    def another_syncer_takes_over(self, chance):
        if chance == 0:
            self.talk.epoch += 1

    @rule(step_s=st.sampled_from([0.0, 0.5, 1e6]))
    def welcomed(self, step_s):
        self.hears(Welcome(tuple(self.published.values()), 0.0, step_s))

    @rule()
    def comes_back(self):
        self.trains_if_it_can()

    def trains_if_it_can(self) -> None:
        """All the way to training, if nothing stands in between."""
        if self.dialing:
            self.dialing_ends_well()
        self.hears(Welcome(tuple(self.published.values()), 0.0, 1.0))
        for p, version in self.published.items():
            self.hears(Published(p, version, None, self.marks.get(p), 0.0))
        self.hears(NoPeer(because("peer-none"), False))

    def dialing_ends_well(self) -> None:
        self.dialing = False
        self.talk.session += 1
        self.happens(LinkOpened(self.talk.session))

    @rule(chance=st.integers(0, 15), final=st.booleans())
    def refused(self, chance, final):
        if chance == 0:
            reason = because("refused-incarnation", 1, 9) if final else because("refused-full", 3)
            if final:
                self.may_stop = True
            self.hears(Refuse(reason, 9, final))

    # ------------------------------------------------------------------------------------------------ training

    @precondition(lambda self: self.talk.core.training)
    @rule(tokens=st.integers(0, 200), steps=st.integers(1, 3))
    def steps_are_taken(self, tokens, steps):
        self.steps += steps
        done = self.happens(StepTaken(steps, tokens, 1.0))
        up = self.talk.core.link.value == "up"
        told = [e for e in done if isinstance(e, Send) and isinstance(e.envelope.body, Report)]
        self.checked(len(told) == up, "a report after every step, exactly while there is a link")

    @rule(fragment=st.integers(0, 1), ahead=st.sampled_from([0, 0, 0, 1, -1]), again=st.booleans())
    def pulled(self, fragment, ahead, again):
        p = fragment % self.config.fragments
        self.attempt += 0 if again else 1
        self.hears(Pull(RoundId(p, self.published[p] + ahead, self.talk.epoch, self.attempt)))

    @rule(fragment=st.integers(0, 1), merged=st.booleans(), base=st.sampled_from(["whole", "update", "wrong"]))
    def published_next(self, fragment, merged, base):
        p = fragment % self.config.fragments
        body = self.sent.get(p)
        if merged and body is not None and body.round.base == self.published[p]:
            incarnation = self.talk.core.incarnation
            self.marks[p] = Mark(incarnation, body.round.base, body.copied_at, body.trained, body.dropped)
        self.published[p] += 1
        version = self.published[p]
        self.hears(
            Published(p, version, {"whole": None, "update": version - 1, "wrong": 99}[base], self.marks.get(p), 0.5)
        )

    @rule(fragment=st.integers(0, 1))
    def the_newest_is_sent_again(self, fragment):
        p = fragment % self.config.fragments
        self.hears(Published(p, self.published[p], None, self.marks.get(p), 0.5))

    @rule(fragment=WILD, version=WILD)
    def a_fragment_of_another_model(self, fragment, version):
        if fragment not in self.published:
            self.hears(Published(fragment, version, None, None, 0.0))
            self.hears(Pull(RoundId(fragment, version, self.talk.epoch, 1)))

    @rule(fragment=st.integers(0, 1))
    def refused_contribution(self, fragment):
        body = self.sent.get(fragment)
        if body is not None:
            self.hears(RefuseContribution(body.round, because("contribution-late")))

    # ------------------------------------------------------------------------------------------------ the rest

    @rule(more=st.integers(0, 1))
    def marked(self, more):
        self.talk.marker += more
        self.hears(Marker(self.talk.marker))

    @precondition(lambda self: any(isinstance(e, SaveSnapshot) for e in self.talk.awaited))
    @rule(works=st.booleans())
    def a_part_is_saved(self, works):
        before = len(self.talk.story)
        done = self.talk.saved(self.now) if works else self.talk.save_failed(self.now)
        for effect in done:
            self._look_at(effect)
        self.checked(len(self.talk.story) > before, "nothing was told")

    @rule(to=st.integers(2, 40), ahead=st.sampled_from([0, 0, 1]))
    def state_wanted(self, to, ahead):
        self.hears(StateWanted(to, 1, tuple(v + ahead for v in self.published.values())))

    @rule(what=st.integers(0, 3), incarnation=st.integers(0, 1))
    def told_about_inner_state(self, what, incarnation):
        versions = tuple(self.published.values())
        own = self.talk.core.incarnation
        bodies = [
            PeerChosen(7),
            NoPeer(because("peer-none"), False),
            NoPeer(because("peer-new-run"), True),
            InnerState(7, 1, own + incarnation, 3, versions),
        ]
        self.hears(bodies[what])

    @rule(serial=st.integers(0, 3))
    def pong(self, serial):
        self.hears(Pong(serial))

    @rule(
        fields=st.sampled_from(["session", "incarnation", "epoch"]),
        change=st.sampled_from([-1, 1]),
        what=st.integers(0, 2),
    )
    def a_message_for_somebody_else(self, fields, change, what):
        """Of another link, process or syncer. Even the end and a refusal are not for us."""
        versions = tuple(self.published.values())
        bodies = [Finish(versions, 1), Refuse(because("refused-finished"), 0, True), Welcome(versions, 0.0, 1.0)]
        own = {"session": self.talk.session, "incarnation": self.talk.core.incarnation, "epoch": self.talk.epoch}
        if fields == "epoch" and (change == 1 or self.talk.core.epoch < self.talk.epoch):
            return  # whoever greets may be answered by a newer syncer
        self.hears(bodies[what], **{fields: own[fields] + change})

    @rule(which=st.integers(0, 50))
    def a_message_arrives_again(self, which):
        if self.heard and self.talk.core.link is not Link.DIALING:
            self.happens(MessageArrived(self.heard[-1 - which % len(self.heard)]))

    @rule(chance=st.integers(0, 15))
    def the_run_is_finished(self, chance):
        if chance == 0:
            self.may_stop = True
            self.hears(Finish(tuple(self.published.values()), sum(self.published.values())))

    @rule(chance=st.integers(0, 30))
    def the_operator_wants_it_to_leave(self, chance):
        if chance == 0:
            self.may_stop = True
            self.happens(LeaveWanted("the operator said so"))


TestSyncerCore = SyncerMachine.TestCase
TestSyncerCore.settings = settings(max_examples=120, stateful_step_count=60)
TestLearnerCore = LearnerMachine.TestCase
TestLearnerCore.settings = settings(max_examples=120, stateful_step_count=60)
