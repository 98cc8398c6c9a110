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
import xxhash
from torch import Tensor, nn

from atoll.core.data_leases import SampleLine
from atoll.core.protocol import (
    Accumulate,
    AdoptFragment,
    Contribution,
    CopyFragment,
    Delivered,
    DiscardRound,
    Envelope,
    InnerState,
    Lease,
    LinkOpened,
    MergeDone,
    MergeRound,
    MessageArrived,
    Persisted,
    Published,
    SaveSnapshot,
    Send,
    ShardBack,
    StartTraining,
    StepTaken,
    Stop,
    Welcome,
)
from atoll.core.syncer.state import Restored
from atoll.core.types import NOTHING, SYNCER, Accepted, FragmentId, Interval, LearnerId, RoundId, RunConfig, Version
from atoll.tape.format import Actor, Entry
from atoll.tensors import optimizer_state, outer
from atoll.tensors.codecs import Codec, Feedback, codec
from atoll.tensors.model_view import ModelView
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.robust_merge import Sums, UsualSize, sums_of
from atoll.tensors.settings import Numerics

KEPT_PARTS = 4
"""As many as a learner keeps on its disk."""


class StepInfo(NamedTuple):
    """What an inner step may depend on, besides the learner's own model and data."""

    step: int  # steps that this incarnation has taken before
    progress: float  # tokens of all learners so far, as a share of the budget; what was heard, in a run without one
    heard: float  # the progress that the syncer had told this learner by the last step boundary
    lr_scale: float  # below 1 while a learner with fresh moments warms up
    samples: tuple[int, ...] = ()  # in a run with leases: the numbers that it trains on


@dataclass
class Trainee:
    """A learner's model and how it takes one step. `take_step` returns the loss, or None where nobody wants it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    take_step: Callable[[StepInfo], float | None]
    batch: int = 0  # samples of one step, in a run with leases


class Parcel(NamedTuple):
    """A published version on its way. `base` None: the whole value as f32; else the update."""

    base: Version | None
    data: Tensor
    codec: Codec | None = None


@dataclass
class LearnerTensors:
    """One incarnation of one learner. Dictionaries are by fragment."""

    actor: Actor
    trainee: Trainee
    view: ModelView
    step: int = 0
    tokens: int = 0
    session: int = 0
    heard: float = 0.0
    heard_at_boundary: float = 0.0
    warmup_steps: int = 0
    stopped: bool = False
    inner: bytes | None = None  # a peer's, while joining
    leases: dict[int, Interval] = field(default_factory=dict)  # by number
    line: SampleLine = field(default_factory=lambda: SampleLine(0))
    received: dict[FragmentId, Version] = field(default_factory=dict)
    values: dict[FragmentId, Tensor] = field(default_factory=dict)  # as received, adopted or not
    anchors: dict[FragmentId, Tensor] = field(default_factory=dict)  # as adopted and as the parameters hold it
    copies: dict[FragmentId, Tensor] = field(default_factory=dict)
    codecs: dict[FragmentId, Codec] = field(default_factory=dict)  # of the copies: what they travel in
    sent: dict[FragmentId, tuple[RoundId, Codec, Tensor]] = field(default_factory=dict)
    feedback: dict[FragmentId, Feedback] = field(default_factory=dict)


@dataclass
class FragmentState:
    """What a syncer makes durable of one version."""

    value: Tensor
    momentum: dict[str, Tensor]
    published: Tensor
    usual: Tensor | None = None


class SyncerTensors:
    """One epoch of the syncer."""

    def __init__(self, plan: FragmentPlan, numerics: Numerics, states: Sequence[FragmentState]) -> None:
        self.outer: list[outer.OuterStep] = []
        self.published: list[Tensor] = []  # never changed in place: messages on their way hold them
        self.versions: list[Version] = [0] * len(states)
        self.updates: list[tuple[Codec, Tensor] | None] = [None] * len(states)  # from the version before
        self.downs: dict[RoundId, Codec] = {}  # of rounds that are being merged: of their update, if it was chosen
        # Of open rounds: sums, sizes of the contributions and tokens per step of each learner.
        self.rounds: dict[RoundId, tuple[Sums, list[float], dict[LearnerId, float]]] = {}
        self.usual: list[UsualSize] = []
        self.merged: dict[FragmentId, tuple[Tensor, tuple[Codec, Tensor]]] = {}  # value and update, not durable yet
        self._undo: dict[FragmentId, tuple[RoundId, FragmentState]] = {}  # of those: from what the outer step was made
        self._plan = plan
        self._numerics = numerics
        self._down = codec(numerics.downs[0])
        for p, state in enumerate(states):
            step, usual = self._loaded(p, state)
            self.outer.append(step)
            self.usual.append(usual)
            self.published.append(state.published)

    def _loaded(self, p: FragmentId, state: FragmentState) -> tuple[outer.OuterStep, UsualSize]:
        step = outer.OuterStep(self._plan, p, self._numerics, state.value.clone())
        if state.momentum:
            step.load(state.momentum)
        usual = UsualSize(self._plan.holds_buffers(p))
        if state.usual is not None:
            usual.load(state.usual)
        return step, usual

    def state(self, p: FragmentId, published: Tensor) -> FragmentState:
        """As it stands, with what is published of it."""
        momentum = {name: tensor.clone() for name, tensor in self.outer[p].state().items()}
        return FragmentState(self.outer[p].value.clone(), momentum, published, self.usual[p].state())

    def accumulate(self, round_id: RoundId, up: Codec, data: Tensor, accepted: Accepted) -> None:
        p = round_id.fragment
        if round_id not in self.rounds:
            self.rounds[round_id] = (sums_of(self._plan, p, self._numerics.merge), [], {})
        sums, sizes, rates = self.rounds[round_id]
        usual = self.usual[p]
        size = usual.size_of(usual.examine(up, data, self._plan.numel(p))[1], accepted.steps)
        sums.add_encoded(up, data, accepted.weight, usual.scale(size, self._numerics.norm_clip))
        sizes.append(size)
        rates[accepted.learner] = accepted.tokens / accepted.steps

    def step(self, round_id: RoundId) -> None:
        p = round_id.fragment
        sums, sizes, rates = self.rounds.pop(round_id)
        self._undo[p] = round_id, self.state(p, self.published[p])
        self.outer[p].step(sums.result(), rates)
        self.usual[p].note(sizes)
        down = self.downs.pop(round_id, self._down)
        moving = outer.Published(codec(*self._plan.codecs(p, (down.name,))), self.published[p].clone())
        update = moving.advance(self.outer[p].value)
        self.merged[p] = (moving.value, (moving.codec, update))

    def publish(self, p: FragmentId, version: Version) -> None:
        self.published[p], self.updates[p] = self.merged.pop(p)
        self.versions[p] = version
        del self._undo[p]

    def discard(self, round_id: RoundId) -> None:
        """A shard that is lost between its outer step and the disk starts again from what is durable."""
        p = round_id.fragment
        self.rounds.pop(round_id, None)
        self.downs.pop(round_id, None)
        undo = self._undo.get(p)
        if undo is not None and undo[0] == round_id:
            del self._undo[p], self.merged[p]
            self.outer[p], self.usual[p] = self._loaded(p, undo[1])


class Execution:
    """All tensors of a run, moved by its entries: `Driver(plan, on_entry=execution.apply, on_start=execution.started)`.

    `make` gives each incarnation of a learner its model, whose initial values do not matter: they come from the syncer.
    `history` is how many states of each fragment are kept for a syncer that is started again; 0 where none ever is.
    With `check_digests` each learner compares every version that it receives with the syncer's.
    """

    syncer_type: type[SyncerTensors] = SyncerTensors

    def __init__(
        self,
        config: RunConfig,
        numerics: Numerics,
        plan: FragmentPlan,
        initial: Sequence[Tensor],
        make: Callable[[Actor], Trainee],
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
        self.up = codec(numerics.ups[0])  # of a copy that names no other
        self.tokens = 0  # of all learners, ever
        self.bytes_up = 0
        self.bytes_down = 0
        self.contributions = 0  # that were accumulated
        self.learners: dict[Actor, LearnerTensors] = {}
        self.syncers: dict[Actor, SyncerTensors] = {}
        self.digests: dict[tuple[FragmentId, Version], str] = {}
        self.compared = 0  # digests that were found equal
        self.on_step: Callable[[LearnerTensors, float | None], None] | None = None
        self._make = make
        self._history = history
        self._check_digests = check_digests
        self._initial = [FragmentState(v.clone(), {}, v.clone()) for v in initial]
        self._durable: list[dict[RoundId, FragmentState]] = [{} for _ in initial]  # the newest `history` of each
        self._contributions: dict[tuple[Actor, FragmentId], tuple[RoundId, Codec, Tensor]] = {}  # sent, not accumulated
        self._parcels: dict[tuple[Actor, FragmentId], dict[Version, Parcel]] = {}  # sent, not adopted
        self._given: dict[InnerState, bytes] = {}
        self._parts: dict[LearnerId, dict[int, bytes]] = {}  # inner state of the newest snapshots of each learner

    def found(self, p: FragmentId, round_id: RoundId, state: FragmentState) -> None:
        """The first syncer finds this version, which no entry tells of: the run was restored from another one."""
        self._durable[p][round_id] = state

    def found_part(self, learner: LearnerId, snapshot: int, inner: bytes) -> None:
        """A part that was there before any learner of this run."""
        self._parts.setdefault(learner, {})[snapshot] = inner

    # ---------------------------------------------------------------------------------------------------- processes

    def started(self, actor: Actor, restored: Restored | None = None) -> None:
        """A process has begun. A syncer that is started again goes on from what its predecessor had made durable."""
        if actor.learner != SYNCER:
            self._learner(actor)
        elif actor not in self.syncers:
            records = restored.versions if restored is not None else {}
            states = list(self._initial)
            for p, record in records.items():
                assert record.round in self._durable[p], (
                    f"{actor} starts from {record.round}, of which no state is kept: {list(self._durable[p])}"
                )
                states[p] = self._durable[p][record.round]
            made = self.syncer_type(self.plan, self.numerics, states)
            for p, record in records.items():
                made.versions[p] = record.version
            self.syncers[actor] = made
            self._note_digests(made, range(len(states)))

    def _learner(self, actor: Actor) -> LearnerTensors:
        found = self.learners.get(actor)
        if found is None:
            trainee = self._make(actor)
            found = self.learners[actor] = LearnerTensors(actor, trainee, ModelView(trainee.model, self.plan))
            found.line = SampleLine(self.config.lease_samples)
        return found

    @property
    def syncer(self) -> SyncerTensors:
        """The newest."""
        return self.syncers[max(self.syncers, key=lambda actor: actor.start)]

    def published(self) -> list[Tensor]:
        """The published value of every fragment, flat; not to be changed."""
        return list(self.syncer.published)

    # ---------------------------------------------------------------------------------------------------- entries

    @torch.no_grad()
    def apply(self, entry: Entry) -> None:
        """First what happened, then what was done about it, in that order."""
        if entry.actor not in self.syncers and entry.actor not in self.learners:
            self.started(entry.actor)
        if entry.actor.learner == SYNCER:
            self._apply_at_syncer(self.syncers[entry.actor], entry)
        else:
            self._apply_at_learner(self.learners[entry.actor], entry)

    def _apply_at_syncer(self, syncer: SyncerTensors, entry: Entry) -> None:
        event = entry.event
        if type(event) is MergeDone:
            syncer.step(event.round)
            self._keep(syncer, event.round)
        elif type(event) is Persisted and event.key.kind == "version":
            syncer.publish(event.key.number, event.key.version)
            self._note_digests(syncer, (event.key.number,))
        elif type(event) is ShardBack:
            for p, version in event.held:
                if p in syncer.merged and version == syncer.versions[p] + 1:
                    syncer.publish(p, version)
                    self._note_digests(syncer, (p,))
        for effect in entry.effects:
            if type(effect) is Send and type(effect.envelope.body) is Published:
                self._post(syncer, effect.envelope, effect.envelope.body)
            elif type(effect) is Accumulate:
                actor = Actor(effect.accepted.learner, effect.accepted.incarnation)
                round_id, up, data = self._contributions.pop((actor, effect.round.fragment))
                assert round_id == effect.round, f"{actor} sent {round_id}, the syncer adds {effect.round}"
                syncer.accumulate(effect.round, up, data, effect.accepted)
                self.contributions += 1
            elif type(effect) is MergeRound and effect.codec is not None:
                syncer.downs[effect.round] = codec(effect.codec)
            elif type(effect) is DiscardRound:
                syncer.discard(effect.round)

    def _keep(self, syncer: SyncerTensors, round_id: RoundId) -> None:
        """Before it is durable: the process may die between the write and the answer, and its successor finds it."""
        if not self._history:
            return
        p = round_id.fragment
        self._durable[p][round_id] = syncer.state(p, syncer.merged[p][0])
        while len(self._durable[p]) > self._history:
            del self._durable[p][next(iter(self._durable[p]))]

    def _note_digests(self, syncer: SyncerTensors, fragments: Iterable[FragmentId]) -> None:
        if not self._check_digests:
            return
        for p in fragments:
            found = digest(syncer.published[p])
            known = self.digests.setdefault((p, syncer.versions[p]), found)
            assert known == found, f"fragment {p} has two values of version {syncer.versions[p]}"

    def _post(self, syncer: SyncerTensors, envelope: Envelope, body: Published) -> None:
        p = body.fragment
        assert body.version == syncer.versions[p], f"version {body.version} is sent, {syncer.versions[p]} is published"
        update = syncer.updates[p]
        parcel = Parcel(None, syncer.published[p])
        if body.base is not None and update is not None:
            parcel = Parcel(body.base, update[1], update[0])
        self.bytes_down += parcel.data.numel() * parcel.data.element_size()
        to = Actor(envelope.learner, envelope.incarnation)
        self._parcels.setdefault((to, p), {})[body.version] = parcel

    # ---------------------------------------------------------------------------------------------------- learners

    def _apply_at_learner(self, learner: LearnerTensors, entry: Entry) -> None:
        event = entry.event
        if type(event) is StepTaken:
            fresh = event.samples
            for _ in range(event.steps):
                new = min(fresh, learner.trainee.batch)
                fresh -= new
                self._train(learner, event.tokens // event.steps, self._samples(learner, new))
        elif type(event) is MessageArrived:
            self._arrived(learner, event.envelope, entry)
        elif type(event) is LinkOpened:
            learner.session = event.session
        for effect in entry.effects:
            handler = _LEARNER_EFFECTS.get(type(effect))
            if handler is not None:
                handler(self, learner, effect)
        if type(event) is StepTaken:
            learner.heard_at_boundary = learner.heard

    def _samples(self, learner: LearnerTensors, fresh: int) -> tuple[int, ...]:
        if not self.config.lease_samples or not learner.trainee.batch:
            return ()
        return learner.line.replayed(learner.leases, learner.trainee.batch, fresh)

    def _train(self, learner: LearnerTensors, tokens: int, samples: tuple[int, ...]) -> None:
        budget = self.config.budget_tokens
        heard = learner.heard_at_boundary
        progress = min(1.0, self.tokens / budget) if budget else heard
        scale = min(1.0, (learner.step + 1) / (learner.warmup_steps + 1))  # as `Learner.lr_scale`
        with torch.enable_grad():
            loss = learner.trainee.take_step(StepInfo(learner.step, progress, heard, scale, samples))
        learner.step += 1
        learner.tokens += tokens
        self.tokens += tokens
        if self.on_step is not None:
            self.on_step(learner, loss)

    def _arrived(self, learner: LearnerTensors, envelope: Envelope, entry: Entry) -> None:
        body = envelope.body
        if type(body) is Lease:
            learner.leases.setdefault(body.number, (body.begin, body.end))  # the same, on whatever link it comes
            return
        if envelope.session != learner.session:
            return  # of an older link; the core drops it
        if learner.stopped:
            return  # the core still acknowledges what was on its way, but nobody will adopt it
        if type(body) is Published:
            # The core acknowledges what it has taken, and takes nothing while it does not.
            acknowledged = Delivered(body.fragment, body.version)
            taken = any(type(e) is Send and e.envelope.body == acknowledged for e in entry.effects)
            if taken and body.version > learner.received.get(body.fragment, NOTHING):
                self._receive(learner, body)
        elif type(body) is Welcome:
            learner.heard = max(learner.heard, body.progress)
        elif type(body) is InnerState and learner.inner is None:
            learner.inner = self._given.get(body)

    def _receive(self, learner: LearnerTensors, body: Published) -> None:
        p = body.fragment
        parcel = self._parcels[learner.actor, p][body.version]
        if parcel.codec is None:
            value = parcel.data
        else:
            held = learner.values[p]
            assert learner.received[p] == parcel.base, f"an update to {parcel.base}, {learner.received[p]} is held"
            value = self.rebuild(learner, held, parcel.data, parcel.codec)
        learner.values[p] = value
        learner.received[p] = body.version
        learner.heard = max(learner.heard, body.progress)
        expected = self.digests.get((p, body.version))
        if expected is not None:
            found = digest(value)
            assert found == expected, f"{learner.actor} holds {found} as version {body.version} of {p}, not {expected}"
            self.compared += 1

    def rebuild(self, learner: LearnerTensors, held: Tensor, update: Tensor, down: Codec) -> Tensor:
        """The next published value from the one that is held, as every learner does it."""
        return outer.Published.apply(down, held, update, torch.empty_like(held))

    def _copy(self, learner: LearnerTensors, effect: CopyFragment) -> None:
        p = effect.round.fragment
        kept = learner.copies.get(p)
        if kept is None:
            kept = learner.copies[p] = torch.empty(self.plan.numel(p))
        learner.view.read(p, kept)
        learner.codecs[p] = codec(*self.plan.codecs(p, (effect.codec or self.up.name,)))
        learner.sent.pop(p, None)

    def _send(self, learner: LearnerTensors, effect: Send) -> None:
        body = effect.envelope.body
        if type(body) is Contribution:
            self._contribute(learner, body.round)
        elif type(body) is InnerState and learner.trainee.optimizer is not None:
            self._given[body] = optimizer_state.pack(learner.trainee.optimizer, learner.trainee.model)

    def _contribute(self, learner: LearnerTensors, round_id: RoundId) -> None:
        """An answer that was lost is sent again as it was: the same bytes."""
        p = round_id.fragment
        sent = learner.sent.get(p)
        if sent is None or sent[0] != round_id:
            feedback = learner.feedback.get(p)
            if feedback is None:
                feedback = learner.feedback[p] = Feedback(learner.codecs[p], self.plan.numel(p))
            feedback.settle(False)  # an older answer with the same anchor was in no version
            copy = learner.copies[p]
            given = copy if self.plan.holds_buffers(p) else learner.anchors[p] - copy
            data = feedback.encode(given, by=learner.codecs[p])
            sent = learner.sent[p] = (round_id, learner.codecs[p], data)
        self.bytes_up += sent[2].numel()
        self._contributions[learner.actor, p] = sent

    def _adopt(self, learner: LearnerTensors, effect: AdoptFragment) -> None:
        p = effect.fragment
        assert learner.received[p] == effect.version, f"{learner.received[p]} is held, {effect.version} is adopted"
        value = learner.values[p]
        reference = learner.copies[p] if effect.merged_copy else learner.anchors.get(p)
        self.take_over(learner, p, effect.how, value, reference)
        anchor = value
        if not learner.view.is_exact(p):
            anchor = torch.empty_like(value)
            learner.view.as_held(p, value, anchor)
        learner.anchors[p] = anchor
        if p in learner.sent:
            learner.feedback[p].settle(effect.merged_copy)
            del learner.sent[p]
        parcels = self._parcels.get((learner.actor, p), {})
        for version in [v for v in parcels if v <= effect.version]:
            del parcels[version]

    def take_over(
        self, learner: LearnerTensors, p: FragmentId, how: str, value: Tensor, reference: Tensor | None
    ) -> None:
        learner.view.adopt(p, how, value, reference, self.config.blend_alpha)

    def _start(self, learner: LearnerTensors, effect: StartTraining) -> None:
        learner.warmup_steps = effect.warmup_steps
        learner.heard_at_boundary = learner.heard
        if effect.moments.code == "moments-peer" and learner.trainee.optimizer is not None:
            assert learner.inner is not None, f"{learner.actor} starts from a peer's state that never arrived"
            optimizer_state.unpack(learner.inner, learner.trainee.optimizer, learner.trainee.model)
        elif effect.moments.code == "moments-saved" and learner.trainee.optimizer is not None:
            giver, snapshot = (int(str(arg)) for arg in effect.moments.args)
            saved = self._parts.get(giver, {}).get(snapshot)
            assert saved is not None, f"{learner.actor} starts from a part that no tape here tells of"
            optimizer_state.unpack(saved, learner.trainee.optimizer, learner.trainee.model)
        learner.inner = None
        for given in [g for g in self._given if Actor(g.to, g.to_incarnation) == learner.actor]:
            del self._given[given]

    def _save(self, learner: LearnerTensors, effect: SaveSnapshot) -> None:
        if learner.trainee.optimizer is None:
            return
        kept = self._parts.setdefault(learner.actor.learner, {})
        kept[effect.snapshot] = optimizer_state.pack(learner.trainee.optimizer, learner.trainee.model)
        while len(kept) > KEPT_PARTS:
            del kept[next(iter(kept))]

    def _stop(self, learner: LearnerTensors, effect: Stop) -> None:
        """The model stays, everything else is given back."""
        learner.stopped = True
        for held in (learner.values, learner.anchors, learner.copies, learner.sent, learner.feedback):
            held.clear()


_LEARNER_EFFECTS: dict[type, Callable[[Execution, LearnerTensors, Any], None]] = {
    CopyFragment: Execution._copy,
    Send: Execution._send,
    AdoptFragment: Execution._adopt,
    SaveSnapshot: Execution._save,
    StartTraining: Execution._start,
    Stop: Execution._stop,
}


def digest(value: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(value.numpy().data)


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


def mean_of_learners(execution: Execution) -> list[Tensor]:
    """The mean of the models of all learners, each in its newest incarnation, as they stand."""
    newest: dict[LearnerId, LearnerTensors] = {}
    for actor, learner in sorted(execution.learners.items()):
        newest[actor.learner] = learner
    found: list[Tensor] = []
    for p in range(len(execution.plan.fragments)):
        values = [torch.empty(execution.plan.numel(p)) for _ in newest]
        for value, learner in zip(values, newest.values(), strict=True):
            learner.view.read(p, value)
        found.append(torch.stack(values).mean(0))
    return found
