"""Executor of tape entries on real tensors. An entry changes the tensors as the recorded event did in its run.

Entries must come in causal order, as from a simulated world or from merged tapes. There is one process and one thread,
so the same entries and the same training steps give the same bits. With this a real run can be replayed from its tapes,
and methods can be compared on one machine without a network.

    entry                             effect on tensors
    learner   StepTaken               take the inner steps on the recorded samples
              Lease arrived           store the lease
              Published arrived       rebuild the published value from the update, as a learner does
              CopyFragment            copy theta_p
              Send(Contribution)      encode A_p - theta_p with error feedback; for buffers theta_p in f32
              AdoptFragment           adopt the new value; settle the residual of the contribution
              Send(OptimizerState)    copy the optimizer state; the receiver loads it at StartTraining
              SaveSnapshot            copy the optimizer state; a restarted learner may load it at StartTraining
    syncer    Accumulate              add a contribution to the running sums
              MergeDone               apply the outer step; make the update for the learners
              Persisted               publish the version
              ShardReconnected        publish versions that the shard had made durable before it was lost
              DiscardRound            drop the running sums; undo an outer step that used them
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
"""Snapshot parts kept per learner, as many as a learner keeps on its disk."""


class StepInfo(NamedTuple):
    """Inputs of an inner step besides the learner's model and data."""

    step: int  # steps of this incarnation before this one
    progress: float  # tokens of all learners so far, as a share of the budget; `known_progress` without a budget
    known_progress: float  # newest progress that the learner had received from the syncer by the last step boundary
    lr_scale: float  # below 1 while a learner with fresh optimizer state warms up
    samples: tuple[int, ...] = ()  # sample numbers, in a run with leases


@dataclass
class ReplayLearner:
    """Model of a learner and the function that takes one step. `take_step` returns the loss or None."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    take_step: Callable[[StepInfo], float | None]
    batch: int = 0  # samples per step, in a run with leases


class SentVersion(NamedTuple):
    """Published version that was sent to a learner and not adopted yet. `fragment` pins it."""

    fragment: SyncerFragment
    served: ServedVersion
    as_update: bool  # otherwise the full value was sent

    def release(self) -> None:
        self.fragment.unpin(self.served.version)


@dataclass
class LearnerTensors:
    """Tensors and counters of one incarnation of a learner. Keys of dictionaries are fragments."""

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
    peer_optimizer_state: bytes | None = None  # received from a peer while joining
    leases: dict[int, Interval] = field(default_factory=dict)  # by number of the lease
    sample_cursor: SampleCursor = field(default_factory=lambda: SampleCursor(0))
    received: dict[FragmentId, Version] = field(default_factory=dict)
    values: dict[FragmentId, Tensor] = field(default_factory=dict)  # newest received values, adopted or not
    anchors: dict[FragmentId, Tensor] = field(default_factory=dict)  # newest adopted values
    copies: dict[FragmentId, Tensor] = field(default_factory=dict)
    codecs: dict[FragmentId, Codec] = field(default_factory=dict)  # for the contributions made from the copies


class SyncerTensors:
    """Fragments of one epoch of the syncer, with the state needed to undo a merge when a shard is lost."""

    def __init__(self, fragments: list[SyncerFragment]) -> None:
        self.fragments = fragments
        self.merging: dict[RoundId, MergeRound] = {}
        # until the merged version is durable
        self._state_before_merge: dict[FragmentId, tuple[RoundId, dict[str, Tensor]]] = {}

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
        """Drop a round and undo its merge: a shard lost after the outer step restarts from the durable version."""
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
    """All tensors of a run. Each entry changes them as in the recorded run.

    A simulated world calls it directly:
    `SwarmWorld(scenario, on_entry=executor.apply, on_start=executor.start_process)`.

    Args:
        initial: initial values of the fragments.
        make: makes the model of each incarnation of a learner. Its initial values are replaced by those of the syncer.
        history: states kept per fragment for a restarted syncer; 0 if no syncer restarts.
        check_digests: compare every version that a learner receives with that of the syncer.
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
                f"the plan has {len(plan.fragments)} fragments, the run {config.fragments}, and there are "
                f"{len(initial)} initial values; make all three from one plan"
            )
        self.config = config
        self.numerics = numerics
        self.plan = plan
        self.tokens = 0  # trained by all learners
        self.bytes_up = 0
        self.bytes_down = 0
        self.contributions = 0  # accumulated contributions
        self.learners: dict[Actor, LearnerTensors] = {}
        self.syncers: dict[Actor, SyncerTensors] = {}
        self.digests: dict[tuple[FragmentId, Version], str] = {}
        self.compared_digests = 0  # all were equal
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
        self._durable: list[dict[RoundId, dict[str, Tensor]]] = [{} for _ in initial]  # newest `history` per fragment
        self._contributions: dict[tuple[Actor, FragmentId], tuple[RoundId, Codec, Tensor]] = {}  # sent, not accumulated
        self._sent: dict[tuple[Actor, FragmentId], dict[Version, SentVersion]] = {}  # not adopted yet
        self._sent_optimizer_states: dict[OptimizerState, bytes] = {}
        self._snapshot_parts: dict[LearnerId, dict[int, bytes]] = {}  # optimizer state, by snapshot

    def add_stored_version(self, p: FragmentId, round_id: RoundId, state: dict[str, Tensor]) -> None:
        """Add a version that the first syncer of a restored run finds in its store, without an entry on a tape.

        Args:
            state: as returned by `SyncerFragment.stored_state`.
        """
        self._durable[p][round_id] = state

    def add_stored_part(self, learner: LearnerId, snapshot: int, state: bytes) -> None:
        """Add the optimizer state of a learner in the snapshot from which the run was restored."""
        self._snapshot_parts.setdefault(learner, {})[snapshot] = state

    # ---------------------------------------------------------------------------------------------------- processes

    def start_process(self, actor: Actor, restored: RestoredState | None = None) -> None:
        """Start a process. A restarted syncer continues from the durable versions of its predecessor."""
        if actor.learner != SYNCER:
            self._get_learner(actor)
        elif actor not in self.syncers:
            records = restored.versions if restored is not None else {}
            states = list(self._initial)
            for p, record in records.items():
                assert record.round in self._durable[p], (
                    f"{actor} starts from {record.round}, but the stored states are {list(self._durable[p])}"
                )
                states[p] = self._durable[p][record.round]
            fragments = [
                self._make_fragment(p, records[p].version if p in records else 0, state)
                for p, state in enumerate(states)
            ]
            self.syncers[actor] = SyncerTensors(fragments)
            self._record_digests(fragments)

    def _make_fragment(self, p: FragmentId, version: Version, state: dict[str, Tensor]) -> SyncerFragment:
        value = state["published"].clone()  # the fragment writes to this buffer
        fragment = self.fragment_type(self.plan, p, self.numerics, version, value)
        fragment.restore(state)
        return fragment

    def _get_learner(self, actor: Actor) -> LearnerTensors:
        learner = self.learners.get(actor)
        if learner is None:
            replay = self._make_learner(actor)
            view, up = ModelView(replay.model, self.plan), self.numerics.upload_codecs[0]
            fragments = [LearnerFragment(view, p, up) for p in range(len(self.plan.fragments))]
            learner = self.learners[actor] = LearnerTensors(actor, replay, view, fragments)
            learner.sample_cursor = SampleCursor(self.config.lease_samples)
        return learner

    @property
    def syncer(self) -> SyncerTensors:
        """Newest syncer."""
        return self.syncers[max(self.syncers, key=lambda actor: actor.generation)]

    def published(self) -> list[Tensor]:
        """Return the published value of every fragment as flat tensors, which must not be changed."""
        return [fragment.served.value for fragment in self.syncer.fragments]

    # ---------------------------------------------------------------------------------------------------- entries

    @torch.no_grad()
    def apply(self, entry: Entry) -> None:
        """Apply the event of an entry, then its effects in their order."""
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
        """Store the state of a merge before its entry `Persisted`.

        1. The process writes the version to disk. 2. It is killed before it handles `Persisted`. 3. Its successor finds
        the version.
        """
        if not self._history:
            return
        stored = self._durable[fragment.id]
        stored[round_id] = copy_state(fragment, round_id.base + 1)
        while len(stored) > self._history:
            del stored[next(iter(stored))]

    def _record_digests(self, fragments: Iterable[SyncerFragment]) -> None:
        if not self._check_digests:
            return
        for fragment in fragments:
            served = fragment.served
            digest = self.digests.setdefault((fragment.id, served.version), served.value_digest)
            assert digest == served.value_digest, f"fragment {fragment.id} has two values of version {served.version}"

    def _send_published(self, syncer: SyncerTensors, envelope: Envelope, body: Published) -> None:
        fragment = syncer.fragments[body.fragment]
        served = fragment.pin(body.version)
        newest = fragment.served.version
        assert served is not None and body.version == newest, f"version {body.version} sent, but {newest} is published"
        sent = SentVersion(fragment, served, body.base is not None and served.update is not None)
        data = served.update if sent.as_update and served.update is not None else served.value
        self.bytes_down += data.numel() * data.element_size()
        sent_versions = self._sent.setdefault((Actor(envelope.learner, envelope.incarnation), body.fragment), {})
        if body.version in sent_versions:
            sent_versions[body.version].release()
        sent_versions[body.version] = sent

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
        return learner.sample_cursor.replayed(learner.leases, learner.replay.batch, fresh)

    def _train(self, learner: LearnerTensors, tokens: int, samples: tuple[int, ...]) -> None:
        budget = self.config.budget_tokens
        known_progress = learner.progress_at_boundary
        progress = min(1.0, self.tokens / budget) if budget else known_progress
        scale = min(1.0, (learner.step + 1) / (learner.warmup_steps + 1))  # equals `Learner.lr_scale`
        with torch.enable_grad():
            loss = learner.replay.take_step(StepInfo(learner.step, progress, known_progress, scale, samples))
        learner.step += 1
        learner.tokens += tokens
        self.tokens += tokens
        if self.on_step is not None:
            self.on_step(learner, loss)

    def _handle_message(self, learner: LearnerTensors, envelope: Envelope, entry: Entry) -> None:
        body = envelope.body
        if type(body) is Lease:
            learner.leases.setdefault(body.number, (body.begin, body.end))  # leases are valid on any session
            return
        if envelope.session != learner.session:
            return  # a message of an older session; the core drops it
        if learner.is_stopped:
            return  # the core still acknowledges versions, but the learner will not adopt them
        if type(body) is Published:
            # The core acknowledges exactly the versions that it accepts.
            ack = PublishAck(body.fragment, body.version)
            is_accepted = any(type(e) is Send and e.envelope.body == ack for e in entry.effects)
            if is_accepted and body.version > learner.received.get(body.fragment, NO_VERSION):
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
            base = learner.values[p]
            assert learner.received[p] == served.base, (
                f"the update is based on version {served.base}, but {learner.actor} has {learner.received[p]}"
            )
            value = self.rebuild(learner, base, served.update, get_codec(served.codec))
        else:
            value = served.value.clone()
        learner.values[p] = value
        learner.received[p] = body.version
        learner.known_progress = max(learner.known_progress, body.progress)
        expected = self.digests.get((p, body.version))
        if expected is not None:
            found = tensor_digest(value)
            assert found == expected, f"{learner.actor} has {found} as version {body.version} of {p}, not {expected}"
            self.compared_digests += 1

    def rebuild(self, learner: LearnerTensors, base: Tensor, update: Tensor, down: Codec) -> Tensor:
        """Return the published value that a learner computes from the value `base` and an update."""
        return outer_optimizer.PublishedValue.apply(down, base, update, torch.empty_like(base))

    def _copy(self, learner: LearnerTensors, effect: CopyFragment) -> None:
        p = effect.round.fragment
        copy = learner.copies.get(p)
        if copy is None:
            copy = learner.copies[p] = torch.empty(self.plan.numel(p))
        learner.view.read(p, copy)
        learner.codecs[p] = learner.fragments[p].select_codec(effect.codec)

    def _send(self, learner: LearnerTensors, effect: Send) -> None:
        body = effect.envelope.body
        if type(body) is Contribution:
            self._contribute(learner, body.round)
        elif type(body) is OptimizerState and learner.replay.optimizer is not None:
            self._sent_optimizer_states[body] = optimizer_state.pack(learner.replay.optimizer, learner.replay.model)

    def _contribute(self, learner: LearnerTensors, round_id: RoundId) -> None:
        p = round_id.fragment
        fragment, codec = learner.fragments[p], learner.codecs[p]
        data = fragment.encoded_contribution(round_id)
        if data is None:
            anchor, copy = learner.anchors[p], learner.copies[p]
            data = fragment.encode(round_id, codec, anchor, copy, torch.empty_like(copy))
        self.bytes_up += data.numel()
        self._contributions[learner.actor, p] = (round_id, codec, data)

    def _adopt(self, learner: LearnerTensors, effect: AdoptFragment) -> None:
        p = effect.fragment
        assert learner.received[p] == effect.version, (
            f"{learner.actor} adopts version {effect.version}, but has {learner.received[p]}"
        )
        value = learner.values[p]
        reference = learner.copies[p] if effect.merged_copy else learner.anchors.get(p)
        self.adopt_value(learner, p, effect.mode, value, reference)
        learner.anchors[p] = value
        learner.fragments[p].settle(effect.merged_copy)
        sent = self._sent.get((learner.actor, p), {})
        for version in [v for v in sent if v <= effect.version]:
            sent.pop(version).release()

    def adopt_value(
        self, learner: LearnerTensors, p: FragmentId, mode: AdoptMode, value: Tensor, reference: Tensor | None
    ) -> None:
        learner.fragments[p].adopt(mode, value, reference, self.config.blend_alpha, torch.empty_like(value))

    def _start(self, learner: LearnerTensors, effect: StartTraining) -> None:
        learner.warmup_steps = effect.warmup_steps
        learner.progress_at_boundary = learner.known_progress
        if effect.state_source.code == "state-from-peer" and learner.replay.optimizer is not None:
            assert learner.peer_optimizer_state is not None, (
                f"{learner.actor} starts from the optimizer state of a peer, which has not arrived"
            )
            optimizer_state.unpack(learner.peer_optimizer_state, learner.replay.optimizer, learner.replay.model)
        elif effect.state_source.code == "state-from-snapshot" and learner.replay.optimizer is not None:
            source, snapshot = (int(str(arg)) for arg in effect.state_source.args)
            saved = self._snapshot_parts.get(source, {}).get(snapshot)
            assert saved is not None, (
                f"{learner.actor} starts from learner {source}'s part of snapshot {snapshot}, which is on no tape"
            )
            optimizer_state.unpack(saved, learner.replay.optimizer, learner.replay.model)
        learner.peer_optimizer_state = None
        for sent in [s for s in self._sent_optimizer_states if Actor(s.target, s.target_incarnation) == learner.actor]:
            del self._sent_optimizer_states[sent]

    def _save(self, learner: LearnerTensors, effect: SaveSnapshot) -> None:
        if learner.replay.optimizer is None:
            return
        parts = self._snapshot_parts.setdefault(learner.actor.learner, {})
        parts[effect.snapshot] = optimizer_state.pack(learner.replay.optimizer, learner.replay.model)
        while len(parts) > STORED_PARTS:
            del parts[next(iter(parts))]

    def _stop(self, learner: LearnerTensors, effect: Stop) -> None:
        """Release all tensors of a stopped learner except its model."""
        learner.is_stopped = True
        learner.fragments.clear()
        for tensors in (learner.values, learner.anchors, learner.copies):
            tensors.clear()


def initial_values(model: nn.Module, plan: FragmentPlan) -> list[Tensor]:
    """Return the current values of a model's fragments."""
    view = ModelView(model, plan)
    values = [torch.empty(plan.numel(p)) for p in range(len(plan.fragments))]
    for p, value in enumerate(values):
        view.read(p, value)
    return values


@torch.no_grad()
def load_values(model: nn.Module, plan: FragmentPlan, values: Sequence[Tensor]) -> None:
    """Write the values of the fragments into a model."""
    view = ModelView(model, plan)
    for p, value in enumerate(values):
        view.write(p, value)
