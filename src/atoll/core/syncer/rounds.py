"""Rounds: a fragment goes from version v to v + 1, or nothing happens at all."""

from __future__ import annotations

from abc import ABC, abstractmethod

from atoll.core.policy import CODECS, backoff_s, down_codec_for, flight_limit, grace_window, patience
from atoll.core.protocol import (
    Accumulate,
    Contribution,
    Delivered,
    DiscardRound,
    Envelope,
    FetchTime,
    MergeDone,
    MergeFailed,
    MergeRound,
    OpenGrace,
    Persist,
    Published,
    Pull,
    RefuseContribution,
    Resync,
    VersionRecord,
)
from atoll.core.reasons import Reason
from atoll.core.states import Phase, Stage, Standing
from atoll.core.syncer.state import Fragment, Member, Owed, SyncerState
from atoll.core.types import Accepted, FragmentId, LearnerId, Mark, RoundId, is_positive, weight_of


class Rounds(SyncerState, ABC):
    # ---------------------------------------------------------------------------------------------------- opening

    def _open_ripe(self, now: float) -> None:
        """Open every round that is ripe, as far as the limit of rounds in flight allows."""
        if self.stage is Stage.FINISHING:
            self._open_final(now)
            return
        if self.stage is not Stage.RUNNING:
            return
        if self.leavers:
            self._open_for_leavers(now)
        if self.paused:
            return
        for f in list(self.retrying.values()):
            if self._places_taken() >= self.flight_limit:
                return
            if self._is_ripe(f):
                self._open(now, f)
        while self._places_taken() < self.flight_limit:
            f_or_none = self._front()
            if f_or_none is None or not self._is_ripe(f_or_none) or not self._open(now, f_or_none):
                return

    def _front(self) -> Fragment | None:
        """The idle fragment that opened longest ago. Fragments in flight are few and passed over, and so are those
        whose shard is away: they are in front when it is back."""
        for f in self.by_opening.values():
            if f.phase is Phase.IDLE and f.id not in self.retrying and not f.away:
                return f
        return None

    def _is_ripe(self, f: Fragment) -> bool:
        """K live learners have taken H steps since the last round of this fragment opened."""
        return not f.away and self._steps_ready(f) >= self.config.quorum

    def _steps_ready(self, f: Fragment) -> int:
        """Live learners with enough steps since the last opening. Reports that a link has held up arrive together and
        tell of steps from before it: nobody takes that many in less than half of their time."""
        need = f.need_steps
        opened = f.open_steps
        since_s = self.now - f.turned_at
        return sum(
            1
            for m in self.live.values()
            if m.step - opened.get(m.id, m.first_step) >= need and m.quick_s * need <= 2 * since_s
        )

    def _askable(self, f: Fragment) -> list[Member]:
        """Live learners with at least one step on the fragment."""
        return [m for m in self.live.values() if self._has_news(f, m)]

    def _has_news(self, f: Fragment, member: Member) -> bool:
        """One that leaves takes no more steps, and says itself what it still has."""
        return f.id in member.unmerged if member.leaving else member.step > self._baseline(f, member)

    def _open(self, now: float, f: Fragment, final: bool = False, in_turn: bool = True) -> bool:
        members = self._askable(f)
        if len(members) < self.config.quorum:
            f.reason = Reason("round-too-few", (len(members), self.config.quorum))
            return False
        self._phase(f, "opened")
        f.attempt += 1
        f.round = f.latest_round = RoundId(f.id, f.version, self.epoch, f.attempt)
        f.opened_at = now
        f.in_turn = in_turn
        if in_turn:
            self._take_turn(now, f)
        f.asked = {m.id: now for m in members}
        f.contributions = {}
        f.pull_tries = 1
        f.round_is_final = final
        f.merged = False
        f.save_tries = 0
        f.reason = self._note(Reason("round-opened", (f.version, len(members), self.config.quorum)))
        pull = Pull(f.round)
        for m in members:
            self._send(m, pull)
            if m.leaving:
                m.pushes[f.id] = m.pushes.get(f.id, 0) + 1
        self._arm_pull(now, f)
        return True

    def _take_turn(self, now: float, f: Fragment) -> None:
        """Steps towards its next round count from here. Out of turn they go on: whoever is not in that merge would
        otherwise have to wait for another H."""
        f.turned_at = now
        # A learner that did not report right now is in the middle of a step, which does not count as taken since.
        # One that is suspected now may be heard again, and must not count the steps before this opening then.
        f.open_steps = {
            m.id: m.step if m.reported_at == now else m.step + 1
            for m in self.members.values()
            if m.standing in (Standing.LIVE, Standing.SUSPECT)
        }
        f.need_steps = self.config.every_steps
        self.retrying.pop(f.id, None)
        del self.by_opening[f.id]
        self.by_opening[f.id] = f

    def _arm_pull(self, now: float, f: Fragment) -> None:
        """As long as its K-th quickest may take, which makes the quorum. One that is slow, or says so, delays none."""
        waits = sorted(self._pull_patience(m) for m in self._waiting(f))
        missing = max(1, self.config.quorum - len(f.contributions))
        wait = waits[min(missing, len(waits)) - 1] if waits else self.limits.least_wait_s
        f.pull_again_at = now + wait * 2.0 ** (f.pull_tries - 1)
        self._arm(f.pull_again_at, "pull", f.id)

    def _ask_too(self, now: float, member: Member) -> None:
        """A learner whose first step on a fragment ends while its round still wants a quorum is asked at once."""
        for f in self.pulling.values():
            if member.id not in f.asked and self._has_news(f, member):
                assert f.round is not None
                f.asked[member.id] = now
                self._send(member, Pull(f.round))

    def _waiting(self, f: Fragment) -> list[Member]:
        """Asked, still live, not answered."""
        live = self.live
        return [live[i] for i in f.asked if i not in f.contributions and i in live]

    def _on_pull_timer(self, now: float, fragment: FragmentId) -> None:
        f = self.fragments[fragment]
        if f.phase is not Phase.PULLING or now < f.pull_again_at:
            return
        if f.pull_tries >= self.limits.pull_tries:
            code, spent = "round-abandoned", now - f.opened_at
            for m in () if self.paused else self._waiting(f):
                # It takes at least as long as we have waited in vain. Without this sample a patience that was once
                # measured too short would abandon every round before its answer, and never be measured again.
                m.answer.add(spent)
            self._abandon(now, f, Reason(code, (spent, len(f.contributions), self.config.quorum)))
            return
        assert f.round is not None
        f.pull_tries += 1
        self._phase(f, "asked again")
        waiting = self._waiting(f)
        args = (len(f.contributions), self.config.quorum, now - f.opened_at, len(waiting))
        f.reason = self._say("fragment", f.id, "round-asked-again", *args)
        for m in waiting:
            self._send(m, Pull(f.round))
        self._arm_pull(now, f)
        if f.round_is_final or self.leavers:
            self._check_round(now, f)  # asked for the last time: from here on a quorum is enough

    def _abandon(self, now: float, f: Fragment, reason: Reason, what: str = "") -> None:
        """Nothing is merged, every learner keeps its progress, the fragment becomes ripe again.

        The steps it takes to be ripe again double with each attempt up to H: when learners are gone, asking the same
        ones at once would only fill their links.
        """
        assert f.round is not None
        self._out.append(DiscardRound(f.round, self._note(reason)))
        self._phase(f, what or ("abandoned" if f.phase is Phase.PULLING else "merge failed"))
        f.reason = reason
        f.round = None
        f.asked = {}
        f.contributions = {}
        if f.in_turn:
            f.need_steps = min(self.config.every_steps, 2 ** min(f.attempt - 1, 20))
            self.retrying[f.id] = f
        if self.lease_closing:
            self._settle_leases()
        if f.round_is_final:
            self._final_failed(now, f, reason)
        self._open_ripe(now)

    # ---------------------------------------------------------------------------------------------------- contributing

    def _on_contribution(self, now: float, member: Member, envelope: Envelope, body: Contribution) -> None:
        f = self.fragments.get(body.round.fragment)
        if f is None:
            self._ignore("unknown fragment")
            return
        self._record_in_flight(member, envelope, body)
        heard = member.heard_rounds.get(f.id)
        if heard is None or heard < body.round:
            member.heard_rounds[f.id] = body.round
        self._correct_baseline(f, member, body)
        if self._is_duplicate(f, member, body):
            self._ignore("duplicate contribution")
            return
        asked_at = f.asked.get(member.id, f.missed.get(member.id))
        is_first = body.round == f.latest_round and f.pull_tries == 1
        if asked_at is not None and is_first and not self._was_cut_off(member.id, asked_at):
            took_s = now - asked_at  # also of a late one: it is how long its way is
            member.answers_s = min(took_s, 1.25 * member.answers_s) if member.answer.count else took_s
            member.answer.add(took_s)
        refusal = self._refusal(f, member, body)
        if refusal is not None:
            self._send(member, RefuseContribution(body.round, self._note(refusal)))
            if refusal.code in ("contribution-wild", "contribution-bad"):
                self._strike(now, member, refusal)
            return
        accepted = self._accepted(member, body)
        f.contributions[member.id] = accepted
        self.ledger.tell(member.id, body.trained)  # it may have overtaken the report of the same step
        self._out.append(Accumulate(body.round, accepted))
        self._check_round(now, f)

    def _correct_baseline(self, f: Fragment, member: Member, body: Contribution) -> None:
        """The copy was made at the first boundary after the pull, so it tells how far the learner was at the opening
        even if its reports were late. Steps that it had taken by then do not count towards the next round."""
        if body.round == f.latest_round and f.in_turn and member.id in f.open_steps:
            f.open_steps[member.id] = max(f.open_steps[member.id], min(body.copied_at - 1, member.step))

    def _is_duplicate(self, f: Fragment, member: Member, body: Contribution) -> bool:
        return f.round == body.round and member.id in f.contributions

    def _accepted(self, member: Member, body: Contribution) -> Accepted:
        weight = weight_of(body.tokens, body.steps)
        return Accepted(
            member.id,
            member.incarnation,
            body.copied_at,
            body.steps,
            body.tokens,
            body.trained,
            body.dropped,
            weight,
            body.taken,
        )

    def _refusal(self, f: Fragment, member: Member, body: Contribution) -> Reason | None:
        """Why this contribution cannot be merged; None if it can."""
        if f.round is None:
            return Reason("contribution-no-round", (f.id,))
        if body.round != f.round:
            return Reason("contribution-other-round", (body.round.attempt, body.round.epoch, body.round.base))
        if f.phase not in (Phase.PULLING, Phase.GRACE):
            return Reason("contribution-late")
        if member.id not in f.asked:
            return Reason("contribution-not-asked", (member.id,))
        if body.problem is not None:
            return Reason("contribution-bad", (body.problem,))
        if body.steps <= 0 or body.tokens <= 0:
            return Reason("contribution-no-steps")
        mark = f.marks.get(member.id)
        settled = mark.trained if mark is not None and mark.incarnation == member.incarnation else 0
        counted = body.steps <= body.copied_at and 0 <= body.dropped <= body.trained - body.tokens
        known = self._is_plausible(member, body.copied_at, body.trained) and settled + body.tokens <= body.trained
        known = known and self._is_leased(member, body)
        if not counted or not known or not is_positive(weight_of(body.tokens, body.steps)):
            return Reason("contribution-wild", (body.steps, body.tokens, body.copied_at))
        return None

    def _check_round(self, now: float, f: Fragment) -> None:
        """Does the round have its quorum, is its grace over, is there anybody left to wait for?"""
        if f.phase is Phase.PULLING:
            if self._has_quorum(f):
                self._enter_grace(now, f)
            elif not self._waiting(f):
                code, args = "round-lost-quorum", (len(f.contributions), self.config.quorum)
                self._abandon(now, f, Reason(code, args))
                return
        if f.phase is Phase.GRACE:
            if not self._waiting(f):
                self._seal(now, f, Reason("sealed-all", (len(f.contributions),)))
            elif now >= f.grace_until:
                self._seal(now, f, Reason("sealed-grace-over", (len(f.contributions), len(f.asked))))

    def _has_quorum(self, f: Fragment) -> bool:
        """A last round wants everybody who was asked, as long as asking goes on: no later one takes up what it leaves,
        and nobody waits for it. So does any round want a learner that leaves."""
        if f.pull_tries < self.limits.pull_tries:
            if f.round_is_final and self._waiting(f):
                return False
            if self.leavers and self._awaits_leaver(f):
                return False
        return len(f.contributions) >= self.config.quorum

    def _enter_grace(self, now: float, f: Fragment) -> None:
        assert f.round is not None
        self._phase(f, "quorum")
        f.quorum = self.config.quorum
        step_s = self._step_s()
        sync_time = self._sync_time()
        awaited_s = max((m.pace.mean for m in self._waiting(f)), default=0.0)
        missed = [self._still_needs(now, f, m) for m in self._waiting(f) if m.id in f.missed and m.answer.count]
        window_s, reason, missed_s = grace_window(
            self.config, len(f.contributions), step_s, awaited_s, missed, self.quorum_time, sync_time
        )
        terms = (step_s, max(step_s, awaited_s), self.quorum_time.mean, sync_time.mean, missed_s)
        if not any(self._was_cut_off(i, f.opened_at) for i in f.contributions):
            self.quorum_time.add(now - f.opened_at)
        f.reason = self._note(reason)
        f.grace_until = now + window_s
        self._out.append(OpenGrace(f.round, window_s, *terms, reason))
        if window_s > 0:
            self._arm(f.grace_until, "grace", f.id)

    def _still_needs(self, now: float, f: Fragment, member: Member) -> float:
        """Until its contribution is here, if it is as quick as others of it were. One that took much longer, because
        the learner stood still meanwhile, says nothing about the next."""
        return member.answers_s - (now - f.asked[member.id])

    def _on_grace_timer(self, now: float, fragment: FragmentId) -> None:
        self._check_round(now, self.fragments[fragment])

    # ---------------------------------------------------------------------------------------------------- merging

    def _seal(self, now: float, f: Fragment, reason: Reason) -> None:
        assert f.round is not None
        self._phase(f, "sealed")
        f.sealed_at = now
        f.missed = {m.id: f.asked[m.id] for m in self._waiting(f)}
        f.reason = self._note(reason)
        contributions = tuple(f.contributions[i] for i in sorted(f.contributions))
        if self.fetches_known:
            self._choose_codec()
        self._out.append(MergeRound(f.round, contributions, reason, self.codec))

    def _choose_codec(self) -> None:
        """Of this update and the next ones. Everybody holds the same bits, so everybody gets the same bytes."""
        known = [member.fetch_s for member in self.live.values()]
        chosen = down_codec_for(self.config, self.codec or CODECS[0], known, self._step_s())
        if chosen.reason is not None:
            self.codec = chosen.codec
            self._say("run", 0, chosen.reason.code, *chosen.reason.args)

    def _on_fetch_time(self, now: float, member: Member, envelope: Envelope, body: FetchTime) -> None:
        if not is_positive(body.seconds):
            self._ignore("an impossible time of a fetch")
            return
        member.fetch_s = body.seconds
        self.fetches_known = True

    def _on_merge_done(self, now: float, event: MergeDone) -> None:
        f = self.fragments[event.round.fragment]
        if f.away:
            self._ignore("the word of a shard that is away")
            return
        assert f.round == event.round and f.phase is Phase.MERGING, f"merge of {event.round} was not asked for"
        self._phase(f, "merged")
        f.merged = True
        f.reason = Reason("persisting", (f.version + 1,))
        self._save_version(f)

    def _on_merge_failed(self, now: float, event: MergeFailed) -> None:
        f = self.fragments[event.round.fragment]
        if f.away:
            self._ignore("the word of a shard that is away")
            return
        assert f.round == event.round and f.phase is Phase.MERGING, f"merge of {event.round} was not asked for"
        self._abandon(now, f, Reason("merge-failed", (event.why,)))

    def _save_version(self, f: Fragment) -> None:
        assert f.round is not None
        contributions = tuple(f.contributions[i] for i in sorted(f.contributions))
        marks = dict(f.marks)
        for a in contributions:
            marks[a.learner] = Mark(a.incarnation, f.version, a.copied_at, a.trained, a.dropped, a.taken)
        merged_tokens = self.ledger.merged(f.id) + sum(a.tokens for a in contributions)
        record = VersionRecord(f.id, f.version + 1, f.round, contributions, tuple(sorted(marks.items())), merged_tokens)
        self._out.append(Persist(record))

    def _version_not_saved(self, now: float, f: Fragment, why: str) -> None:
        """A full or failing disk: say it, publish nothing, keep what is merged and try again."""
        self._phase(f, "not durable")
        delay = backoff_s(f.save_tries, f.id, self.limits)
        f.save_tries += 1
        f.reason = self._say("fragment", f.id, "persist-failed", f.version + 1, why, delay)
        self.unsaved[f.id] = None
        self._arm(now + delay, "save", f.id)

    def _on_save_timer(self, now: float, fragment: FragmentId) -> None:
        if fragment in self.unsaved:
            del self.unsaved[fragment]
            self._save_version(self.fragments[fragment])

    def _save_unsaved(self) -> None:
        """The disk takes something again: nobody waits for the end of a delay that was meant for a full one."""
        waiting, self.unsaved = self.unsaved, {}
        for fragment in waiting:
            self._save_version(self.fragments[fragment])

    def _version_saved(self, now: float, f: Fragment) -> None:
        self._phase(f, "durable")
        for a in f.contributions.values():
            f.marks[a.learner] = Mark(a.incarnation, f.version, a.copied_at, a.trained, a.dropped, a.taken)
            self.ledger.merge(f.id, a)
            if a.taken:
                self.leases.merge((a.learner, a.incarnation), a.taken)
        if self.leavers:
            self._pushed(f)
        f.last_contributors = tuple(sorted(f.contributions))
        f.version += 1
        f.attempt = 0
        f.merge_s = now - f.sealed_at
        f.published_at = now
        self.merges += 1
        f.reason = self._note(Reason("published", (f.version, len(f.last_contributors))))
        f.round = None
        f.asked = {}
        f.contributions = {}
        self._publish(now, f)
        self._phase(f, "queued")
        if f.round_is_final:
            f.final = True
        if self.lease_closing:
            self._settle_leases()
        self.flight_limit = flight_limit(self.config, self._step_s(), self.quorum_time, self._sync_time())

    # ---------------------------------------------------------------------------------------------------- publishing

    def _publish(self, now: float, f: Fragment) -> None:
        for m in self.members.values():
            if m.standing in (Standing.LIVE, Standing.SUSPECT, Standing.JOINING):
                self._owe(now, m, f)

    def _owe(self, now: float, member: Member, f: Fragment) -> None:
        """Send the newest version of a fragment to a learner that does not hold it.

        A newer version replaces an older one that is still owed, so what is owed to a learner is bounded by P.
        """
        held = self._received(member, f.id)
        if held >= f.version:
            return
        owed = member.owed.get(f.id)
        if f.away:
            member.owed[f.id] = Owed(f.version, now, 0)
            return
        tries = max(1, owed.tries) if owed is not None and owed.version != f.version else 1
        member.owed[f.id] = Owed(f.version, now, tries)
        self._send_version(member, f, base=held if held == f.version - 1 and held >= 0 and owed is None else None)
        self._watch_delivery(now, member)

    def _watch_delivery(self, now: float, member: Member) -> None:
        if not member.publish_timer:
            member.publish_timer = True
            self._arm(now + self._ack_patience(member), "publish", member.id)

    def _send_version(self, member: Member, f: Fragment, base: int | None) -> None:
        self._send(member, Published(f.id, f.version, base, f.marks.get(member.id), self._progress()))

    def _ack_patience(self, member: Member) -> float:
        return patience(member.ack, 2, self.limits)

    def _on_publish_timer(self, now: float, learner: int) -> None:
        member = self.members.get(learner)
        if member is None or not member.publish_timer:
            return
        member.publish_timer = False
        wait = self._ack_patience(member)
        for p, owed in list(member.owed.items()):
            if self.fragments[p].away or now < owed.sent_at + wait * 2.0 ** (owed.tries - 1):
                continue
            if owed.tries >= self.limits.publish_tries:
                member.ack.add(now - owed.sent_at)  # at least: see the same in _on_pull_timer
                reason = Reason("member-publish-unanswered", (owed.version, p, owed.tries))
                self._drop_link(now, member, reason)
                return
            member.owed[p] = Owed(owed.version, now, owed.tries + 1)
            self._send_version(member, self.fragments[p], base=None)
        sent = [owed for p, owed in member.owed.items() if not self.fragments[p].away]
        if sent:
            member.publish_timer = True
            due = min(o.sent_at + wait * 2.0 ** (o.tries - 1) for o in sent)
            self._arm(max(due, now + self.limits.least_wait_s), "publish", member.id)

    def _on_delivered(self, now: float, member: Member, envelope: Envelope, body: Delivered) -> None:
        f = self.fragments.get(body.fragment)
        if f is None or body.version > f.version:
            self._ignore("acknowledged what was never published")
            return
        news = body.version > self._received(member, f.id)
        if news:
            member.received[f.id] = body.version
        owed = member.owed.get(f.id)
        if owed is None or owed.version > body.version:
            return
        del member.owed[f.id]
        if news and owed.tries == 1:
            # A version that was sent twice says nothing about the time of either sending.
            member.ack.add(now - owed.sent_at)
            newest = body.version == f.version and owed.sent_at == f.published_at
            if newest and not self._was_cut_off(member.id, f.published_at):
                member.sync.add(now - f.published_at + f.merge_s)

    def _was_cut_off(self, learner: LearnerId, since: float) -> bool:
        """It was away or silent at some time since: what took until now says nothing about its way."""
        return self.members[learner].back_at > since

    def _on_resync(self, now: float, member: Member, envelope: Envelope, body: Resync) -> None:
        f = self.fragments.get(body.fragment)
        if f is None or body.have >= f.version or self._received(member, f.id) >= f.version:
            self._ignore("resync of nothing")
            return
        owed = member.owed.get(f.id)
        tries = 2 if owed is None else owed.tries + 1
        if f.away:
            member.owed.setdefault(f.id, Owed(f.version, now, 1))  # sent again when its shard is back
            return
        if tries > self.limits.publish_tries:
            self._drop_link(now, member, Reason("member-publish-unanswered", (f.version, f.id, tries - 1)))
            return
        member.owed[f.id] = Owed(f.version, now, tries)
        self._send_version(member, f, base=None)
        self._watch_delivery(now, member)

    # ------------------------------------------------------------------------------------ what other parts provide

    @abstractmethod
    def _open_final(self, now: float) -> None: ...

    @abstractmethod
    def _final_failed(self, now: float, f: Fragment, reason: Reason) -> None: ...

    @abstractmethod
    def _open_for_leavers(self, now: float) -> None: ...

    @abstractmethod
    def _awaits_leaver(self, f: Fragment) -> bool: ...

    @abstractmethod
    def _pushed(self, f: Fragment) -> None: ...

    @abstractmethod
    def _trains(self, now: float, member: Member, moments: Reason) -> None: ...

    @abstractmethod
    def _record_in_flight(self, member: Member, envelope: Envelope, body: Contribution) -> None: ...

    @abstractmethod
    def _settle_leases(self) -> None: ...

    @abstractmethod
    def _is_leased(self, member: Member, body: Contribution) -> bool: ...

    @abstractmethod
    def _strike(self, now: float, member: Member, reason: Reason) -> None: ...

    @abstractmethod
    def _drop_link(self, now: float, member: Member, reason: Reason) -> None: ...
