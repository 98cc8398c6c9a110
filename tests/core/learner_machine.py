"""Everything that can happen to a learner, in any order: honest, stale, doubled or hostile."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from msgspec import structs

from atoll.core.protocol import (
    AdoptFragment,
    ConnectionClosed,
    ConnectionOpened,
    Contribution,
    Dial,
    DialFailed,
    Envelope,
    Finish,
    FragmentDamaged,
    Lease,
    LeaveRequested,
    LinkMeasured,
    Marker,
    MessageArrived,
    NoPeer,
    OptimizerState,
    PeerChosen,
    Pong,
    ProvideState,
    Published,
    Pull,
    Refuse,
    RefuseContribution,
    Report,
    SaveSnapshot,
    Send,
    StepTaken,
    Stop,
    Welcome,
)
from atoll.core.reasons import because
from atoll.core.states import ConnectionState
from atoll.core.types import NO_VERSION, Limits, MergedUpTo, RoundId, RunConfig
from tests.core.conversation import LearnerTalk
from tests.core.machine import STORY, WILD, Machine, look


class QuietLearner(LearnerTalk):
    def _write(self, line: str) -> None:
        self.story.append(line)


class LearnerMachine(Machine):
    talk: QuietLearner
    kind = QuietLearner

    @initialize(
        fragments=st.integers(1, 2),
        every=st.integers(1, 4),
        adopt=st.sampled_from(["carry", "overwrite", "blend"]),
        incarnation=st.integers(1, 3),
        joined=st.sampled_from([True, True, False]),
        leases=st.sampled_from([0, 5]),
    )
    def begin(self, fragments, every, adopt, incarnation, joined, leases):
        limits = Limits(initial_wait_s=5.0, max_wait_s=60.0)
        self.config = RunConfig(
            fragments=fragments, every_steps=every, adopt=adopt, limits=limits, lease_samples=leases, leases_ahead=1
        )
        self.talk = self.kind(self.config, 1, incarnation)
        self.heard: list[Envelope] = []
        self.published = dict.fromkeys(range(fragments), 0)  # at the syncer
        self.sent: dict[int, Contribution] = {}  # newest contribution to each fragment
        self.marks: dict[int, MergedUpTo] = {}
        self.attempt = 0
        self.dialing = True
        self.adopted = dict.fromkeys(range(fragments), NO_VERSION)
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
            done = self.talk.handle(self.now, event)
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
            self.checked(self.may_stop, "stopped without an end, a refusal or an operator request")

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
            self.checked(line.is_balanced(), f"fragment {p}: {line}")
            self.checked(
                core.state.leased_samples == 5 * core.state.lease_count or not self.config.lease_samples,
                "a lease counts twice",
            )
            if self.config.adopt == "carry":
                self.checked(not line.dropped, f"fragment {p}: carry drops nothing, {line}")

    def receives(self, body: Any, **other: Any) -> list[Any]:
        core = self.talk.core
        self.talk.tick += 1
        plain_ = Envelope(
            1, core.state.incarnation, self.talk.session, self.talk.epoch, self.talk.tick, 0, self.talk.marker, body
        )
        return self.happens(MessageArrived(structs.replace(plain_, **other)))

    # ------------------------------------------------------------------------------------------------ the link

    @precondition(lambda self: self.dialing)
    @rule(works=st.booleans())
    def dialing_ends(self, works):
        self.dialing = False
        if works:
            self.talk.session += 1
            self.happens(ConnectionOpened(self.talk.session))
        else:
            self.happens(DialFailed("nobody answers"))

    @rule(stale=st.integers(0, 1))
    def the_link_closes(self, stale):
        self.happens(ConnectionClosed(self.talk.session - stale, "reset"))

    @rule(chance=st.integers(0, 5))
    def another_syncer_takes_over(self, chance):
        if chance == 0:
            self.talk.epoch += 1

    @rule(step_s=st.sampled_from([0.0, 0.5, 1e6]))
    def welcomed(self, step_s):
        self.receives(Welcome(tuple(self.published.values()), 0.0, step_s))

    @rule()
    def comes_back(self):
        self.trains_if_it_can()

    def trains_if_it_can(self) -> None:
        """Join and start to train, unless something prevents it."""
        if self.dialing:
            self.dialing_ends_well()
        self.receives(Welcome(tuple(self.published.values()), 0.0, 1.0))
        for p, version in self.published.items():
            self.receives(Published(p, version, None, self.marks.get(p), 0.0))
        self.receives(NoPeer(because("peer-none"), False))
        self.leases_more(0)

    @rule(skipped=st.sampled_from([0, 0, 1, -1]))
    def leased(self, skipped):
        self.leases_more(skipped)

    def leases_more(self, skipped: int) -> None:
        """The next lease, one that it has had, or one after another that was lost."""
        number = max(0, self.talk.core.state.lease_count + skipped)
        self.receives(Lease(number, 7 * number, 7 * number + 5))

    def dialing_ends_well(self) -> None:
        self.dialing = False
        self.talk.session += 1
        self.happens(ConnectionOpened(self.talk.session))

    @rule(chance=st.integers(0, 15), final=st.booleans())
    def refused(self, chance, final):
        if chance == 0:
            reason = because("refused-incarnation", 1, 9) if final else because("refused-full", 3)
            if final:
                self.may_stop = True
            self.receives(Refuse(reason, 9, final))

    # ------------------------------------------------------------------------------------------------ training

    @precondition(lambda self: self.talk.core.training)
    @rule(tokens=st.integers(0, 200), steps=st.integers(1, 3))
    def steps_are_taken(self, tokens, steps):
        self.takes_steps(steps, tokens)

    def takes_steps(self, steps: int, tokens: int) -> None:
        if not self.talk.core.training:
            return
        self.steps += steps
        core = self.talk.core
        samples = 3 * steps if core.state.leased_samples - core.state.consumed_samples >= 3 * steps else 0
        done = self.happens(StepTaken(steps, tokens, 1.0, samples))
        up = self.talk.core.state.link is ConnectionState.UP
        told = [e for e in done if isinstance(e, Send) and isinstance(e.envelope.body, Report)]
        self.checked(len(told) == up, "a report after every step, exactly while there is a link")

    @rule(fragment=st.integers(0, 1), ahead=st.sampled_from([0, 0, 0, 1, -1]), again=st.booleans())
    def pulled(self, fragment, ahead, again):
        p = fragment % self.config.fragments
        self.attempt += 0 if again else 1
        self.receives(Pull(RoundId(p, self.published[p] + ahead, self.talk.epoch, self.attempt)))

    @rule(fragment=st.integers(0, 1), merged=st.booleans(), base=st.sampled_from(["whole", "update", "wrong"]))
    def published_next(self, fragment, merged, base):
        p = fragment % self.config.fragments
        self.publishes_next(p, merged, {"whole": None, "update": self.published[p], "wrong": 99}[base])

    def publishes_next(self, p: int, merged: bool, base: int | None) -> None:
        body = self.sent.get(p)
        if merged and body is not None and body.round.base == self.published[p]:
            own = self.talk.core.state.incarnation
            self.marks[p] = MergedUpTo(own, body.round.base, body.copied_at, body.trained, body.dropped)
        self.published[p] += 1
        self.receives(Published(p, self.published[p], base, self.marks.get(p), 0.5))

    @precondition(lambda self: self.talk.core.training)
    @rule(fragment=st.integers(0, 1), merged=st.booleans(), tokens=st.integers(1, 50))
    def a_good_round(self, fragment, merged, tokens):
        """Pulled, answered at the boundary, published, adopted at the next one."""
        p = fragment % self.config.fragments
        self.attempt += 1
        self.receives(Pull(RoundId(p, self.published[p], self.talk.epoch, self.attempt)))
        self.takes_steps(1, tokens)
        self.publishes_next(p, merged, self.published[p])
        self.takes_steps(1, tokens)

    @rule(fragment=st.integers(0, 1))
    def the_newest_is_sent_again(self, fragment):
        p = fragment % self.config.fragments
        self.receives(Published(p, self.published[p], None, self.marks.get(p), 0.5))

    @rule(fragment=WILD, version=WILD)
    def a_fragment_of_another_model(self, fragment, version):
        if fragment not in self.published:
            self.receives(Published(fragment, version, None, None, 0.0))
            self.receives(Pull(RoundId(fragment, version, self.talk.epoch, 1)))

    @rule(fragment=WILD, version=WILD)
    def a_fragment_arrives_damaged(self, fragment, version):
        self.happens(FragmentDamaged(fragment, version, "wrong digest"))

    @rule(way=st.sampled_from(["up", "down"]), moved=WILD, seconds=st.sampled_from([0.0, 0.1, 10.0]), values=WILD)
    def a_link_is_measured(self, way, moved, seconds, values):
        self.happens(LinkMeasured(way, moved, seconds, values))

    @rule(fragment=st.integers(0, 1))
    def refused_contribution(self, fragment):
        body = self.sent.get(fragment)
        if body is not None:
            self.receives(RefuseContribution(body.round, because("contribution-late")))

    # ------------------------------------------------------------------------------------------------ the rest

    @rule(more=st.integers(0, 1))
    def marked(self, more):
        self.talk.marker += more
        self.receives(Marker(self.talk.marker))

    @precondition(lambda self: any(isinstance(e, SaveSnapshot) for e in self.talk.awaited))
    @rule(works=st.booleans())
    def a_part_is_saved(self, works):
        before = len(self.talk.story)
        done = self.talk.saved(self.now) if works else self.talk.save_failed(self.now)
        for effect in done:
            self._look_at(effect)
        self.checked(len(self.talk.story) > before, "no event was recorded")

    @rule(to=st.integers(2, 40), ahead=st.sampled_from([0, 0, 1]))
    def state_wanted(self, to, ahead):
        self.receives(ProvideState(to, 1, tuple(v + ahead for v in self.published.values())))

    @rule(what=st.integers(0, 3), incarnation=st.integers(0, 1))
    def told_about_inner_state(self, what, incarnation):
        versions = tuple(self.published.values())
        own = self.talk.core.state.incarnation
        bodies = [
            PeerChosen(7),
            NoPeer(because("peer-none"), False),
            NoPeer(because("peer-new-run"), True),
            OptimizerState(7, 1, own + incarnation, 3, versions),
        ]
        self.receives(bodies[what])

    @rule(serial=st.integers(0, 3))
    def pong(self, serial):
        self.receives(Pong(serial))

    @rule(
        fields=st.sampled_from(["session", "incarnation", "epoch"]),
        change=st.sampled_from([-1, 1]),
        what=st.integers(0, 2),
    )
    def a_message_for_somebody_else(self, fields, change, what):
        """Of another link, process or syncer. Even the end and a refusal are not for us."""
        versions = tuple(self.published.values())
        bodies = [Finish(versions, 1), Refuse(because("refused-finished"), 0, True), Welcome(versions, 0.0, 1.0)]
        own = {"session": self.talk.session, "incarnation": self.talk.core.state.incarnation, "epoch": self.talk.epoch}
        if fields == "epoch" and (change == 1 or self.talk.core.state.epoch < self.talk.epoch):
            return  # a hello may be answered by a newer syncer
        self.receives(bodies[what], **{fields: own[fields] + change})
        self.heard.pop()  # told again when the link has that number, it would be for us after all

    @rule(which=st.integers(0, 50))
    def a_message_arrives_again(self, which):
        if self.heard:
            self.happens(MessageArrived(self.heard[-1 - which % len(self.heard)]))

    @rule(chance=st.integers(0, 15))
    def the_run_is_finished(self, chance):
        if chance == 0:
            self.may_stop = True
            self.receives(Finish(tuple(self.published.values()), sum(self.published.values())))

    @rule(chance=st.integers(0, 30), push=st.booleans())
    def the_operator_wants_it_to_leave(self, chance, push):
        if chance == 0:
            self.may_stop = True
            self.happens(LeaveRequested("the operator said so", push))
