"""Real tensors that follow a tape: every entry moves exactly the values that it moved, or would have moved, in a run.

Entries must come in causal order (as a simulated world makes them, or as tapes are merged). One process, one thread:
the same entries and the same training steps give the same bits, so a real run can be replayed from its tapes, and
methods can be compared on one machine without a network.

What happens when:

    learner   StepTaken               inner steps, on the samples that it says
              Lease arrived           they are known
              Published arrived       the published value is rebuilt from the update, as a learner does
              CopyFragment            theta_p is kept
              Send(Contribution)      A_p - theta_p is encoded, with error feedback; of buffers theta_p, in f32
              AdoptFragment           the new value is taken over; the residual of what was sent is settled
              Send(InnerState)        the optimizer's state is taken, and given to its receiver at StartTraining
              SaveSnapshot            the same, for who starts from it after everybody has died
    syncer    Accumulate              a contribution joins the running sums
              MergeDone               outer step, update for the learners
              Persisted               the version is published
              ShardBack               the same, of a version that a shard had made durable when it was lost
              DiscardRound            the sums are forgotten; an outer step that was made of them is undone
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atoll.core.ledger import SampleCursor
from atoll.core.protocol import (
    Accumulate,
    AdoptFragment,
    ConnectionOpened,
    Contribution,
    CopyFragment,
    DiscardRound,
    Envelope,
    Lease,
    MergeDone,
    MergeRound,
    MessageArrived,
    OptimizerState,
    Persisted,
    PublishAck,
    Published,
    SaveSnapshot,
    Send,
    ShardReconnected,
    StartTraining,
    StepTaken,
    Stop,
    Welcome,
)
from atoll.core.syncer.state import RestoredState
from atoll.core.types import NO_VERSION, SYNCER, AdoptMode, FragmentId, Interval, LearnerId, RoundId, RunConfig, Version
from atoll.tape.format import Actor, Entry
from atoll.tensors import optimizer_state, outer_optimizer
from atoll.tensors.codecs import Codec, get_codec
from atoll.tensors.learner_fragment import LearnerFragment
from atoll.tensors.model_view import ModelView
from atoll.tensors.plan import FragmentPlan, tensor_digest
from atoll.tensors.settings import Numerics
from atoll.tensors.syncer_fragment import ServedVersion, SyncerFragment

STORED_PARTS = 4
"""As many as a learner keeps on its disk."""


class StepInfo(NamedTuple):
    """What an inner step may depend on, besides the learner's own model and data."""

    step: int  # steps that this incarnation has taken before
    progress: float  # tokens of all learners so far, as a share of the budget; what was heard, in a run without one
    known_progress: float  # the progress that the syncer had told this learner by the last step boundary
    lr_scale: float  # below 1 while a learner with fresh moments warms up
    samples: tuple[int, ...] = ()  # in a run with leases: the numbers that it trains on


@dataclass
class ReplayLearner:
    """A learner's model and how it takes one step. `take_step` returns the loss, or None where nobody wants it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    take_step: Callable[[StepInfo], float | None]
    batch: int = 0  # samples of one step, in a run with leases


class SentVersion(NamedTuple):
    """A published version on its way to a learner, for which `fragment` holds it."""

    fragment: SyncerFragment
    served: ServedVersion
    as_update: bool  # otherwise the whole value

    def release(self) -> None:
        self.fragment.unpin(self.served.version)


@dataclass
class LearnerTensors:
    """One incarnation of one learner. Dictionaries are by fragment."""

    actor: Actor
    replay: ReplayLearner
    view: ModelView
    fragments: list[LearnerFragment]
    step: int = 0
    tokens: int = 0
    session: int = 0
    known_progress: float = 0.0
    progress_at_boundary: float = 0.0
    warmup_steps: int = 0
    is_stopped: bool = False
    peer_optimizer_state: bytes | None = None  # a peer's, while joining
    leases: dict[int, Interval] = field(default_factory=dict)  # by number
    sample_line: SampleCursor = field(default_factory=lambda: SampleCursor(0))
    received: dict[FragmentId, Version] = field(default_factory=dict)
    values: dict[FragmentId, Tensor] = field(default_factory=dict)  # as received, adopted or not
    anchors: dict[FragmentId, Tensor] = field(default_factory=dict)  # as adopted
    copies: dict[FragmentId, Tensor] = field(default_factory=dict)
    codecs: dict[FragmentId, Codec] = field(default_factory=dict)  # of the copies: what they travel in


class SyncerTensors:
    """The fragments of one epoch of the syncer, and what a shard that is lost undoes."""

    def __init__(self, fragments: list[SyncerFragment]) -> None:
        self.fragments = fragments
        self.merging: dict[RoundId, MergeRound] = {}
        self._state_before_merge: dict[
            FragmentId, tuple[RoundId, dict[str, Tensor]]
        ] = {}  # state before a merge, until durable

    @property
    def versions(self) -> list[Version]:
        return [fragment.served.version for fragment in self.fragments]

    def merge(self, round_id: RoundId) -> None:
        fragment, effect = self.fragments[round_id.fragment], self.merging.pop(round_id)
        self._state_before_merge[fragment.id] = round_id, copy_state(fragment, fragment.served.version)
        fragment.merge(round_id, len(effect.contributions), effect.codec)

    def publish(self, p: FragmentId) -> None:
        self.fragments[p].mark_durable()
        del self._state_before_merge[p]

    def discard(self, round_id: RoundId) -> None:
        """Drop a round. A shard that is lost between its outer step and the disk restarts from what is durable."""
        p = round_id.fragment
        self.merging.pop(round_id, None)
        merged_round, state = self._state_before_merge.get(p, (None, {}))
        if merged_round == round_id:
            del self._state_before_merge[p]
            self.fragments[p] = self.fragments[p].restore_copy(self.fragments[p].served.version, state)
        else:
            self.fragments[p].discard(round_id)


def copy_state(fragment: SyncerFragment, version: Version) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in fragment.stored_state(version).items()}


class TapeExecutor:
    """All tensors of a run, moved by its entries: `Driver(plan, on_entry=execution.apply, on_start=execution.started)`.

    `make` gives each incarnation of a learner its model, whose initial values do not matter: they come from the syncer.
    `history` is how many states of each fragment are kept for a syncer that is started again; 0 where none ever is.
    With `check_digests` each learner compares every version that it receives with the syncer's.
    """

    fragment_type: type[SyncerFragment] = SyncerFragment

    def __init__(
        self,
        config: RunConfig,
        numerics: Numerics,
        plan: FragmentPlan,
        initial: Sequence[Tensor],
        make: Callable[[Actor], ReplayLearner],
        history: int = 0,
        check_digests: bool = False,
    ) -> None:
        if len(initial) != len(plan.fragments) or config.fragments != len(plan.fragments):
            raise ValueError(
                f"the plan has {len(plan.fragments)} fragments, the run {config.fragments} and there are "
                f"{len(initial)} initial values: make all three from one plan"
            )
        self.config = config
        self.numerics = numerics
        self.plan = plan
        self.tokens = 0  # of all learners, ever
        self.bytes_up = 0
        self.bytes_down = 0
        self.contributions = 0  # that were accumulated
        self.learners: dict[Actor, LearnerTensors] = {}
        self.syncers: dict[Actor, SyncerTensors] = {}
        self.digests: dict[tuple[FragmentId, Version], str] = {}
        self.compared_digests = 0  # digests that were found equal
        self.on_step: Callable[[LearnerTensors, float | None], None] | None = None
        self._learner_effects: dict[type, Callable[[LearnerTensors, Any], None]] = {
            CopyFragment: self._copy,
            Send: self._send,
            AdoptFragment: self._adopt,
            SaveSnapshot: self._save,
            StartTraining: self._start,
            Stop: self._stop,
        }
        self._make_learner = make
        self._history = history
        self._check_digests = check_digests
        self._initial = [{"published": value.clone()} for value in initial]
        self._durable: list[dict[RoundId, dict[str, Tensor]]] = [{} for _ in initial]  # the newest `history` of each
        self._contributions: dict[tuple[Actor, FragmentId], tuple[RoundId, Codec, Tensor]] = {}  # sent, not accumulated
        self._sent: dict[tuple[Actor, FragmentId], dict[Version, SentVersion]] = {}  # and not adopted
        self._sent_optimizer_states: dict[OptimizerState, bytes] = {}
        self._snapshot_parts: dict[
            LearnerId, dict[int, bytes]
        ] = {}  # inner state of the newest snapshots of each learner

    def add_stored_version(self, p: FragmentId, round_id: RoundId, state: dict[str, Tensor]) -> None:
        """Add a version that the first syncer finds in its store and no entry names: the run was restored from another
        one. `state`: as `SyncerFragment.stored_state` returns it."""
        self._durable[p][round_id] = state

    def add_stored_part(self, learner: LearnerId, snapshot: int, inner: bytes) -> None:
        """A part that was there before any learner of this run."""
        self._snapshot_parts.setdefault(learner, {})[snapshot] = inner

    # ---------------------------------------------------------------------------------------------------- processes

    def start_process(self, actor: Actor, restored: RestoredState | None = None) -> None:
        """A process has begun. A syncer that is started again goes on from what its predecessor had made durable."""
        if actor.learner != SYNCER:
            self._get_learner(actor)
        elif actor not in self.syncers:
            records = restored.versions if restored is not None else {}
            states = list(self._initial)
            for p, record in records.items():
                assert record.round in self._durable[p], (
                    f"{actor} starts from {record.round}, of which no state is kept: {list(self._durable[p])}"
                )
                states[p] = self._durable[p][record.round]
            made = [self._make_fragment(p, records[p].version if p in records else 0, s) for p, s in enumerate(states)]
            self.syncers[actor] = SyncerTensors(made)
            self._record_digests(made)

    def _make_fragment(self, p: FragmentId, version: Version, state: dict[str, Tensor]) -> SyncerFragment:
        value = state["published"].clone()  # its buffer is written again
        fragment = self.fragment_type(self.plan, p, self.numerics, version, value)
        fragment.restore(state)
        return fragment

    def _get_learner(self, actor: Actor) -> LearnerTensors:
        found = self.learners.get(actor)
        if found is None:
            trainee = self._make_learner(actor)
            view, up = ModelView(trainee.model, self.plan), self.numerics.upload_codecs[0]
            fragments = [LearnerFragment(view, p, up) for p in range(len(self.plan.fragments))]
            found = self.learners[actor] = LearnerTensors(actor, trainee, view, fragments)
            found.sample_line = SampleCursor(self.config.lease_samples)
        return found

    @property
    def syncer(self) -> SyncerTensors:
        """The newest."""
        return self.syncers[max(self.syncers, key=lambda actor: actor.generation)]

    def published(self) -> list[Tensor]:
        """The published value of every fragment, flat; not to be changed."""
        return [fragment.served.value for fragment in self.syncer.fragments]

    # ---------------------------------------------------------------------------------------------------- entries

    @torch.no_grad()
    def apply(self, entry: Entry) -> None:
        """First what happened, then what was done about it, in that order."""
        if entry.actor not in self.syncers and entry.actor not in self.learners:
            self.start_process(entry.actor)
        if entry.actor.learner == SYNCER:
            self._apply_at_syncer(self.syncers[entry.actor], entry)
        else:
            self._apply_at_learner(self.learners[entry.actor], entry)

    def _apply_at_syncer(self, syncer: SyncerTensors, entry: Entry) -> None:
        event = entry.event
        if type(event) is MergeDone:
            syncer.merge(event.round)
            self._store_state(syncer.fragments[event.round.fragment], event.round)
        elif type(event) is Persisted and event.key.kind == "version":
            self._publish(syncer, event.key.number)
        elif type(event) is ShardReconnected:
            for p, version in event.versions:
                merged = syncer.fragments[p].merged
                if merged is not None and merged.version == version:
                    self._publish(syncer, p)
        for effect in entry.effects:
            if type(effect) is Send and type(effect.envelope.body) is Published:
                self._send_published(syncer, effect.envelope, effect.envelope.body)
            elif type(effect) is Accumulate:
                actor = Actor(effect.contribution.learner, effect.contribution.incarnation)
                round_id, up, data = self._contributions.pop((actor, effect.round.fragment))
                assert round_id == effect.round, f"{actor} sent {round_id}, the syncer adds {effect.round}"
                syncer.fragments[round_id.fragment].accumulate(round_id, effect.contribution, data, up.name)
                self.contributions += 1
            elif type(effect) is MergeRound:
                syncer.merging[effect.round] = effect
            elif type(effect) is DiscardRound:
                syncer.discard(effect.round)

    def _publish(self, syncer: SyncerTensors, p: FragmentId) -> None:
        syncer.publish(p)
        self._record_digests([syncer.fragments[p]])

    def _store_state(self, fragment: SyncerFragment, round_id: RoundId) -> None:
        """Before it is durable: the process may die between the write and the answer, and its successor finds it."""
        if not self._history:
            return
        kept = self._durable[fragment.id]
        kept[round_id] = copy_state(fragment, round_id.base + 1)
        while len(kept) > self._history:
            del kept[next(iter(kept))]

    def _record_digests(self, fragments: Iterable[SyncerFragment]) -> None:
        if not self._check_digests:
            return
        for fragment in fragments:
            served = fragment.served
            known = self.digests.setdefault((fragment.id, served.version), served.value_digest)
            assert known == served.value_digest, f"fragment {fragment.id} has two values of version {served.version}"

    def _send_published(self, syncer: SyncerTensors, envelope: Envelope, body: Published) -> None:
        fragment = syncer.fragments[body.fragment]
        served = fragment.pin(body.version)
        newest = fragment.served.version
        assert served is not None and body.version == newest, f"version {body.version} is sent, {newest} is published"
        sent = SentVersion(fragment, served, body.base is not None and served.update is not None)
        data = served.update if sent.as_update and served.update is not None else served.value
        self.bytes_down += data.numel() * data.element_size()
        under_way = self._sent.setdefault((Actor(envelope.learner, envelope.incarnation), body.fragment), {})
        if body.version in under_way:
            under_way[body.version].release()
        under_way[body.version] = sent

    # ---------------------------------------------------------------------------------------------------- learners

    def _apply_at_learner(self, learner: LearnerTensors, entry: Entry) -> None:
        event = entry.event
        if type(event) is StepTaken:
            fresh = event.new_samples
            for _ in range(event.steps):
                new = min(fresh, learner.replay.batch)
                fresh -= new
                self._train(learner, event.tokens // event.steps, self._samples(learner, new))
        elif type(event) is MessageArrived:
            self._handle_message(learner, event.envelope, entry)
        elif type(event) is ConnectionOpened:
            learner.session = event.session
        for effect in entry.effects:
            handler = self._learner_effects.get(type(effect))
            if handler is not None:
                handler(learner, effect)
        if type(event) is StepTaken:
            learner.progress_at_boundary = learner.known_progress

    def _samples(self, learner: LearnerTensors, fresh: int) -> tuple[int, ...]:
        if not self.config.lease_samples or not learner.replay.batch:
            return ()
        return learner.sample_line.replayed(learner.leases, learner.replay.batch, fresh)

    def _train(self, learner: LearnerTensors, tokens: int, samples: tuple[int, ...]) -> None:
        budget = self.config.budget_tokens
        heard = learner.progress_at_boundary
        progress = min(1.0, self.tokens / budget) if budget else heard
        scale = min(1.0, (learner.step + 1) / (learner.warmup_steps + 1))  # as `Learner.lr_scale`
        with torch.enable_grad():
            loss = learner.replay.take_step(StepInfo(learner.step, progress, heard, scale, samples))
        learner.step += 1
        learner.tokens += tokens
        self.tokens += tokens
        if self.on_step is not None:
            self.on_step(learner, loss)

    def _handle_message(self, learner: LearnerTensors, envelope: Envelope, entry: Entry) -> None:
        body = envelope.body
        if type(body) is Lease:
            learner.leases.setdefault(body.number, (body.begin, body.end))  # the same, on whatever link it comes
            return
        if envelope.session != learner.session:
            return  # of an older link; the core drops it
        if learner.is_stopped:
            return  # the core still acknowledges what was on its way, but nobody will adopt it
        if type(body) is Published:
            # The core acknowledges what it has taken, and takes nothing while it does not.
            acknowledged = PublishAck(body.fragment, body.version)
            taken = any(type(e) is Send and e.envelope.body == acknowledged for e in entry.effects)
            if taken and body.version > learner.received.get(body.fragment, NO_VERSION):
                self._receive(learner, body)
        elif type(body) is Welcome:
            learner.known_progress = max(learner.known_progress, body.progress)
        elif type(body) is OptimizerState and learner.peer_optimizer_state is None:
            learner.peer_optimizer_state = self._sent_optimizer_states.get(body)

    def _receive(self, learner: LearnerTensors, body: Published) -> None:
        p = body.fragment
        sent = self._sent[learner.actor, p][body.version]
        served = sent.served
        if sent.as_update and served.update is not None:
            held = learner.values[p]
            assert learner.received[p] == served.base, f"an update to {served.base}, {learner.received[p]} is held"
            value = self.rebuild(learner, held, served.update, get_codec(served.codec))
        else:
            value = served.value.clone()
        learner.values[p] = value
        learner.received[p] = body.version
        learner.known_progress = max(learner.known_progress, body.progress)
        expected = self.digests.get((p, body.version))
        if expected is not None:
            found = tensor_digest(value)
            assert found == expected, f"{learner.actor} holds {found} as version {body.version} of {p}, not {expected}"
            self.compared_digests += 1

    def rebuild(self, learner: LearnerTensors, held: Tensor, update: Tensor, down: Codec) -> Tensor:
        """The next published value from the one that is held, as every learner does it."""
        return outer_optimizer.PublishedValue.apply(down, held, update, torch.empty_like(held))

    def _copy(self, learner: LearnerTensors, effect: CopyFragment) -> None:
        p = effect.round.fragment
        kept = learner.copies.get(p)
        if kept is None:
            kept = learner.copies[p] = torch.empty(self.plan.numel(p))
        learner.view.read(p, kept)
        learner.codecs[p] = learner.fragments[p].select_codec(effect.codec)

    def _send(self, learner: LearnerTensors, effect: Send) -> None:
        body = effect.envelope.body
        if type(body) is Contribution:
            self._contribute(learner, body.round)
        elif type(body) is OptimizerState and learner.replay.optimizer is not None:
            self._sent_optimizer_states[body] = optimizer_state.pack(learner.replay.optimizer, learner.replay.model)

    def _contribute(self, learner: LearnerTensors, round_id: RoundId) -> None:
        p = round_id.fragment
        fragment, by = learner.fragments[p], learner.codecs[p]
        data = fragment.encoded_contribution(round_id)
        if data is None:
            anchor, copy = learner.anchors[p], learner.copies[p]
            data = fragment.encode(round_id, by, anchor, copy, torch.empty_like(copy))
        self.bytes_up += data.numel()
        self._contributions[learner.actor, p] = (round_id, by, data)

    def _adopt(self, learner: LearnerTensors, effect: AdoptFragment) -> None:
        p = effect.fragment
        assert learner.received[p] == effect.version, f"{learner.received[p]} is held, {effect.version} is adopted"
        value = learner.values[p]
        reference = learner.copies[p] if effect.merged_copy else learner.anchors.get(p)
        self.adopt_value(learner, p, effect.mode, value, reference)
        learner.anchors[p] = value
        learner.fragments[p].settle(effect.merged_copy)
        sent = self._sent.get((learner.actor, p), {})
        for version in [v for v in sent if v <= effect.version]:
            sent.pop(version).release()

    def adopt_value(
        self, learner: LearnerTensors, p: FragmentId, how: AdoptMode, value: Tensor, reference: Tensor | None
    ) -> None:
        learner.fragments[p].adopt(how, value, reference, self.config.blend_alpha, torch.empty_like(value))

    def _start(self, learner: LearnerTensors, effect: StartTraining) -> None:
        learner.warmup_steps = effect.warmup_steps
        learner.progress_at_boundary = learner.known_progress
        if effect.state_source.code == "state-from-peer" and learner.replay.optimizer is not None:
            assert learner.peer_optimizer_state is not None, (
                f"{learner.actor} starts from a peer's state that never arrived"
            )
            optimizer_state.unpack(learner.peer_optimizer_state, learner.replay.optimizer, learner.replay.model)
        elif effect.state_source.code == "state-from-snapshot" and learner.replay.optimizer is not None:
            giver, snapshot = (int(str(arg)) for arg in effect.state_source.args)
            saved = self._snapshot_parts.get(giver, {}).get(snapshot)
            assert saved is not None, f"{learner.actor} starts from a part that no tape here tells of"
            optimizer_state.unpack(saved, learner.replay.optimizer, learner.replay.model)
        learner.peer_optimizer_state = None
        for given in [g for g in self._sent_optimizer_states if Actor(g.target, g.target_incarnation) == learner.actor]:
            del self._sent_optimizer_states[given]

    def _save(self, learner: LearnerTensors, effect: SaveSnapshot) -> None:
        if learner.replay.optimizer is None:
            return
        kept = self._snapshot_parts.setdefault(learner.actor.learner, {})
        kept[effect.snapshot] = optimizer_state.pack(learner.replay.optimizer, learner.replay.model)
        while len(kept) > STORED_PARTS:
            del kept[next(iter(kept))]

    def _stop(self, learner: LearnerTensors, effect: Stop) -> None:
        """The model stays, everything else is given back."""
        learner.is_stopped = True
        learner.fragments.clear()
        for held in (learner.values, learner.anchors, learner.copies):
            held.clear()


def initial_values(model: nn.Module, plan: FragmentPlan) -> list[Tensor]:
    """The fragments of a model as it stands."""
    view = ModelView(model, plan)
    values = [torch.empty(plan.numel(p)) for p in range(len(plan.fragments))]
    for p, value in enumerate(values):
        view.read(p, value)
    return values


@torch.no_grad()
def load_values(model: nn.Module, plan: FragmentPlan, values: Sequence[Tensor]) -> None:
    view = ModelView(model, plan)
    for p, value in enumerate(values):
        view.write(p, value)
