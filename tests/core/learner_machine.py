"""State machine of a learner: valid, stale, duplicate and hostile events in any order."""

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
from tests.core.harness import LearnerHarness
from tests.core.machine import EXTREME, MAX_STORY_LINES, Machine, check_view


class QuietLearner(LearnerHarness):
    def _write(self, line: str) -> None:
        self.story.append(line)


class LearnerMachine(Machine):
    harness: QuietLearner
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
        self.harness = self.kind(self.config, 1, incarnation)
        self.received: list[Envelope] = []
        self.published = dict.fromkeys(range(fragments), 0)  # at the syncer
        self.sent: dict[int, Contribution] = {}  # newest contribution to each fragment
        self.merged_up_to: dict[int, MergedUpTo] = {}
        self.attempt = 0
        self.dialing = True
        self.adopted = dict.fromkeys(range(fragments), NO_VERSION)
        self.may_stop = False
        self.was_training = False
        self.steps = 0
        self.is_started = True
        if joined:
            self.trains_if_it_can()

    def handle(self, event: Any) -> list[Any]:
        if isinstance(event, MessageArrived):
            self.received.append(event.envelope)
        try:
            done = self.harness.handle(self.now, event)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *self.harness.story[-MAX_STORY_LINES:]])) from error
        for effect in done:
            self._check_effect(effect)
        return done

    def _check_effect(self, effect: Any) -> None:
        if isinstance(effect, Dial):
            self.check(not self.dialing, "dialed again before the first dialing ended")
            self.dialing = True
        elif isinstance(effect, AdoptFragment):
            self.check(effect.version > self.adopted[effect.fragment], f"{effect} is not newer")
            self.adopted[effect.fragment] = effect.version
        elif isinstance(effect, Send) and isinstance(effect.envelope.body, Contribution):
            body = effect.envelope.body
            before = self.sent.get(body.round.fragment)
            if before is not None and before.round == body.round:
                self.check(before == body, "two different contributions to one pull")
            self.check(body.steps > 0 and body.tokens >= 0 and body.dropped >= 0, f"{body}")
            self.sent[body.round.fragment] = body
        elif isinstance(effect, Stop):
            self.check(self.may_stop, "stopped without an end, a refusal or an operator request")

    @invariant()
    def state_is_consistent(self):
        if not self.is_started:
            return
        core = self.harness.core
        view = check_view(core)
        self.check(view.step == self.steps, "steps are lost")
        if self.was_training and not core.training:
            self.check(self.may_stop, "a network event stopped the training")
        self.was_training = core.training
        for p, line in enumerate(view.ledger):
            self.check(line.is_balanced(), f"fragment {p}: {line}")
            self.check(
                core.state.leased_samples == 5 * core.state.lease_count or not self.config.lease_samples,
                "a lease counts twice",
            )
            if self.config.adopt == "carry":
                self.check(not line.dropped, f"fragment {p}: carry drops nothing, {line}")

    def receives(self, body: Any, **other: Any) -> list[Any]:
        core = self.harness.core
        self.harness.tick += 1
        envelope = Envelope(
            1,
            core.state.incarnation,
            self.harness.session,
            self.harness.epoch,
            self.harness.tick,
            0,
            self.harness.marker,
            body,
        )
        return self.handle(MessageArrived(structs.replace(envelope, **other)))

    # ------------------------------------------------------------------------------------------------ the link

    @precondition(lambda self: self.dialing)
    @rule(works=st.booleans())
    def dialing_ends(self, works):
        self.dialing = False
        if works:
            self.harness.session += 1
            self.handle(ConnectionOpened(self.harness.session))
        else:
            self.handle(DialFailed("connection refused"))

    @rule(stale=st.integers(0, 1))
    def link_closes(self, stale):
        self.handle(ConnectionClosed(self.harness.session - stale, "reset"))

    @rule(chance=st.integers(0, 5))
    def other_syncer_takes_over(self, chance):
        if chance == 0:
            self.harness.epoch += 1

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
            self.receives(Published(p, version, None, self.merged_up_to.get(p), 0.0))
        self.receives(NoPeer(because("peer-none"), False))
        self.leases_more(0)

    @rule(skipped=st.sampled_from([0, 0, 1, -1]))
    def leased(self, skipped):
        self.leases_more(skipped)

    def leases_more(self, skipped: int) -> None:
        """Send the next lease, a duplicate, or one that follows a lost lease."""
        number = max(0, self.harness.core.state.lease_count + skipped)
        self.receives(Lease(number, 7 * number, 7 * number + 5))

    def dialing_ends_well(self) -> None:
        self.dialing = False
        self.harness.session += 1
        self.handle(ConnectionOpened(self.harness.session))

    @rule(chance=st.integers(0, 15), final=st.booleans())
    def refused(self, chance, final):
        if chance == 0:
            reason = because("refused-incarnation", 1, 9) if final else because("refused-full", 3)
            if final:
                self.may_stop = True
            self.receives(Refuse(reason, 9, final))

    # ------------------------------------------------------------------------------------------------ training

    @precondition(lambda self: self.harness.core.training)
    @rule(tokens=st.integers(0, 200), steps=st.integers(1, 3))
    def steps_are_taken(self, tokens, steps):
        self.takes_steps(steps, tokens)

    def takes_steps(self, steps: int, tokens: int) -> None:
        if not self.harness.core.training:
            return
        self.steps += steps
        core = self.harness.core
        samples = 3 * steps if core.state.leased_samples - core.state.consumed_samples >= 3 * steps else 0
        done = self.handle(StepTaken(steps, tokens, 1.0, samples))
        is_up = self.harness.core.state.link is ConnectionState.UP
        reports = [e for e in done if isinstance(e, Send) and isinstance(e.envelope.body, Report)]
        self.check(len(reports) == is_up, "a report after every step, exactly while there is a link")

    @rule(fragment=st.integers(0, 1), ahead=st.sampled_from([0, 0, 0, 1, -1]), again=st.booleans())
    def pulled(self, fragment, ahead, again):
        p = fragment % self.config.fragments
        self.attempt += 0 if again else 1
        self.receives(Pull(RoundId(p, self.published[p] + ahead, self.harness.epoch, self.attempt)))

    @rule(fragment=st.integers(0, 1), merged=st.booleans(), base=st.sampled_from(["full", "update", "mismatch"]))
    def published_next(self, fragment, merged, base):
        p = fragment % self.config.fragments
        self.publishes_next(p, merged, {"full": None, "update": self.published[p], "mismatch": 99}[base])

    def publishes_next(self, p: int, merged: bool, base: int | None) -> None:
        body = self.sent.get(p)
        if merged and body is not None and body.round.base == self.published[p]:
            own = self.harness.core.state.incarnation
            self.merged_up_to[p] = MergedUpTo(own, body.round.base, body.copied_at, body.trained, body.dropped)
        self.published[p] += 1
        self.receives(Published(p, self.published[p], base, self.merged_up_to.get(p), 0.5))

    @precondition(lambda self: self.harness.core.training)
    @rule(fragment=st.integers(0, 1), merged=st.booleans(), tokens=st.integers(1, 50))
    def complete_round(self, fragment, merged, tokens):
        """Pull, contribute at the boundary, publish, and adopt at the next boundary."""
        p = fragment % self.config.fragments
        self.attempt += 1
        self.receives(Pull(RoundId(p, self.published[p], self.harness.epoch, self.attempt)))
        self.takes_steps(1, tokens)
        self.publishes_next(p, merged, self.published[p])
        self.takes_steps(1, tokens)

    @rule(fragment=st.integers(0, 1))
    def newest_version_is_sent_again(self, fragment):
        p = fragment % self.config.fragments
        self.receives(Published(p, self.published[p], None, self.merged_up_to.get(p), 0.5))

    @rule(fragment=EXTREME, version=EXTREME)
    def fragment_of_another_model(self, fragment, version):
        if fragment not in self.published:
            self.receives(Published(fragment, version, None, None, 0.0))
            self.receives(Pull(RoundId(fragment, version, self.harness.epoch, 1)))

    @rule(fragment=EXTREME, version=EXTREME)
    def fragment_arrives_damaged(self, fragment, version):
        self.handle(FragmentDamaged(fragment, version, "digest mismatch"))

    @rule(
        direction=st.sampled_from(["up", "down"]),
        moved=EXTREME,
        seconds=st.sampled_from([0.0, 0.1, 10.0]),
        values=EXTREME,
    )
    def link_is_measured(self, direction, moved, seconds, values):
        self.handle(LinkMeasured(direction, moved, seconds, values))

    @rule(fragment=st.integers(0, 1))
    def refused_contribution(self, fragment):
        body = self.sent.get(fragment)
        if body is not None:
            self.receives(RefuseContribution(body.round, because("contribution-late")))

    # ---------------------------------------------------------------------------------------- snapshots, state, the end

    @rule(more=st.integers(0, 1))
    def marked(self, more):
        self.harness.marker += more
        self.receives(Marker(self.harness.marker))

    @precondition(lambda self: any(isinstance(e, SaveSnapshot) for e in self.harness.awaited))
    @rule(works=st.booleans())
    def part_is_saved(self, works):
        before = len(self.harness.story)
        done = self.harness.saved(self.now) if works else self.harness.save_failed(self.now)
        for effect in done:
            self._check_effect(effect)
        self.check(len(self.harness.story) > before, "no event was recorded")

    @rule(to=st.integers(2, 40), ahead=st.sampled_from([0, 0, 1]))
    def state_requested(self, to, ahead):
        self.receives(ProvideState(to, 1, tuple(v + ahead for v in self.published.values())))

    @rule(what=st.integers(0, 3), incarnation=st.integers(0, 1))
    def state_replies(self, what, incarnation):
        versions = tuple(self.published.values())
        own = self.harness.core.state.incarnation
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
    def message_for_another_recipient(self, fields, change, what):
        """Send a message for another connection, process or syncer, which the learner must ignore."""
        versions = tuple(self.published.values())
        bodies = [Finish(versions, 1), Refuse(because("refused-finished"), 0, True), Welcome(versions, 0.0, 1.0)]
        own = {
            "session": self.harness.session,
            "incarnation": self.harness.core.state.incarnation,
            "epoch": self.harness.epoch,
        }
        if fields == "epoch" and (change == 1 or self.harness.core.state.epoch < self.harness.epoch):
            return  # a hello may be answered by a newer syncer
        self.receives(bodies[what], **{fields: own[fields] + change})
        self.received.pop()  # sent again on a connection with that number, it would be valid

    @rule(which=st.integers(0, 50))
    def message_arrives_again(self, which):
        if self.received:
            self.handle(MessageArrived(self.received[-1 - which % len(self.received)]))

    @rule(chance=st.integers(0, 15))
    def run_is_finished(self, chance):
        if chance == 0:
            self.may_stop = True
            self.receives(Finish(tuple(self.published.values()), sum(self.published.values())))

    @rule(chance=st.integers(0, 30), drain=st.booleans())
    def operator_requests_to_leave(self, chance, drain):
        if chance == 0:
            self.may_stop = True
            self.handle(LeaveRequested("operator request", drain))
