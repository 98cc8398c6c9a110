"""The schedule of one run: which learner steps, copies, contributes and adopts when, decided by the real cores.

The cores run in virtual time without tensors (`tests.reference.lockstep`), so fragments, quorum, grace window, unequal
speeds and late learners are those of the protocol and not of a model of it. What they decide is recorded and rewritten
as a program for stacked tensors. The program keeps the order of operations within each learner and within each
fragment. It moves operations of different learners against each other, so that as many learners as possible take an
inner step in the same instruction.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from atoll.core.protocol import (
    Accumulate,
    AdoptFragment,
    Contribution,
    CopyFragment,
    DiscardRound,
    MergeDone,
    Send,
    StartTraining,
    StepTaken,
)
from atoll.core.types import SYNCER, AcceptedContribution, Limits, RoundId, RunConfig
from atoll.tape.format import Entry
from atoll.tensors.outer_optimizer import ParticipationTracker
from tests.reference.lockstep import PATIENT_LIMITS, Lockstep, Paced


@dataclass(frozen=True, slots=True)
class LearnerStep:
    """One inner step of one learner. `progress` is the share of the token budget that all learners have trained."""

    learner: int
    number: int
    progress: float
    lr_scale: float


@dataclass(frozen=True, slots=True)
class Steps:
    """Inner steps of different learners that one instruction executes."""

    steps: tuple[LearnerStep, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    learner: int
    fragment: int


@dataclass(frozen=True, slots=True)
class Contribute:
    learner: int
    round: RoundId


@dataclass(frozen=True, slots=True)
class Merge:
    """`breadth` is the factor of the outer step: the share of the learners that took part, weighted by their tokens."""

    round: RoundId
    learners: tuple[int, ...]
    weights: tuple[float, ...]
    breadth: float

    @property
    def version(self) -> int:
        return self.round.base + 1


@dataclass(frozen=True, slots=True)
class Adopt:
    """`merged_copy`: the version holds the learner's last contribution."""

    learner: int
    fragment: int
    version: int
    how: str
    merged_copy: bool


Operation = Steps | Copy | Contribute | Merge | Adopt


@dataclass
class Program:
    """The operations of one run in an order that respects all dependencies."""

    operations: list[Operation]
    adoptions: Counter[tuple[int, int]]  # by fragment and version: how often a version is still needed
    tokens: int
    steps: int
    merges: int
    contributions: int

    @property
    def waves(self) -> int:
        return sum(type(operation) is Steps for operation in self.operations)


@dataclass
class Recorder:
    """Collects the operations from tape entries; the counterpart of `Execution.apply` without tensors."""

    config: RunConfig
    queues: dict[int, deque[LearnerStep | Copy | Contribute | Adopt]] = field(default_factory=dict)
    merges: dict[int, deque[Merge]] = field(default_factory=dict)
    tokens: int = 0
    _accepted: dict[RoundId, list[AcceptedContribution]] = field(default_factory=lambda: defaultdict(list))
    _breadths: dict[int, ParticipationTracker] = field(default_factory=lambda: defaultdict(ParticipationTracker))
    _numbers: Counter[int] = field(default_factory=Counter)
    _warmups: Counter[int] = field(default_factory=Counter)
    _contributed: set[tuple[int, RoundId]] = field(default_factory=set)

    def apply(self, entry: Entry) -> None:
        if entry.actor.learner == SYNCER:
            self._apply_at_syncer(entry)
        else:
            self._apply_at_learner(entry)

    def _apply_at_syncer(self, entry: Entry) -> None:
        if type(entry.event) is MergeDone:
            round_id = entry.event.round
            accepted = self._accepted.pop(round_id)
            rates = {each.learner: each.tokens / each.steps for each in accepted}
            breadth = self._breadths[round_id.fragment].record_merge(rates)
            learners = tuple(each.learner for each in accepted)
            weights = tuple(each.weight / accepted[0].weight for each in accepted)
            merge = Merge(round_id, learners, weights, breadth)
            self.merges.setdefault(round_id.fragment, deque()).append(merge)
        for effect in entry.effects:
            if type(effect) is Accumulate:
                self._accepted[effect.round].append(effect.contribution)
            elif type(effect) is DiscardRound:
                self._accepted.pop(effect.round, None)

    def _apply_at_learner(self, entry: Entry) -> None:
        learner = entry.actor.learner
        assert entry.actor.generation == 1, "the laboratory has no learners that restart"
        queue = self.queues.setdefault(learner, deque())
        if type(entry.event) is StepTaken:
            for _ in range(entry.event.steps):
                number = self._numbers[learner]
                progress = min(1.0, self.tokens / (self.config.budget_tokens or 1))
                scale = min(1.0, (number + 1) / (self._warmups[learner] + 1))
                queue.append(LearnerStep(learner, number, progress, scale))
                self._numbers[learner] += 1
                self.tokens += entry.event.tokens // entry.event.steps
        for effect in entry.effects:
            if type(effect) is CopyFragment:
                queue.append(Copy(learner, effect.round.fragment))
            elif type(effect) is Send and type(effect.envelope.body) is Contribution:
                round_id = effect.envelope.body.round
                if (learner, round_id) not in self._contributed:  # a repeated request gets the same bytes
                    self._contributed.add((learner, round_id))
                    queue.append(Contribute(learner, round_id))
            elif type(effect) is AdoptFragment:
                queue.append(Adopt(learner, effect.fragment, effect.version, effect.mode, effect.merged_copy))
            elif type(effect) is StartTraining:
                self._warmups[learner] = effect.warmup_steps

    def program(self) -> Program:
        adoptions = Counter((op.fragment, op.version) for q in self.queues.values() for op in q if type(op) is Adopt)
        merges = sum(map(len, self.merges.values()))
        contributions = sum(len(merge.learners) for found in self.merges.values() for merge in found)
        steps = sum(self._numbers.values())
        operations = list(_ordered(self.queues, self.merges))
        return Program(operations, adoptions, self.tokens, steps, merges, contributions)


def _ordered(
    queues: Mapping[int, deque[LearnerStep | Copy | Contribute | Adopt]], merges: Mapping[int, deque[Merge]]
) -> Iterator[Operation]:
    """Run whatever is ready; take one step of every learner that has nothing else to do first."""
    contributed: set[tuple[int, RoundId]] = set()
    versions: Counter[int] = Counter()
    while any(queues.values()):
        busy = True
        while busy:
            busy = False
            for queue in queues.values():
                while queue and type(queue[0]) is not LearnerStep:
                    head = queue[0]
                    if type(head) is Adopt and versions[head.fragment] < head.version:
                        break
                    if type(head) is Contribute:
                        contributed.add((head.learner, head.round))
                    busy = True
                    yield queue.popleft()  # type: ignore[misc]
            for fragment, left in merges.items():
                while left and all((learner, left[0].round) in contributed for learner in left[0].learners):
                    contributed.difference_update((learner, left[0].round) for learner in left[0].learners)
                    versions[fragment] = left[0].version
                    busy = True
                    yield left.popleft()
        wave = [queue.popleft() for queue in queues.values() if queue and type(queue[0]) is LearnerStep]
        if wave:
            yield Steps(tuple(wave))  # type: ignore[arg-type]
        else:
            assert not any(queues.values()), "a learner waits for a version that is never merged"
    for left in merges.values():
        assert not left, "a merge waits for a contribution that is never sent"


@dataclass(frozen=True)
class Timing:
    """What the schedule depends on. `method` is diloco, streaming (both in lockstep) or decoupled."""

    method: str
    fragments: int
    learners: int
    step_tokens: int
    budget: int
    h: int
    tau: int
    quorum: int
    grace: float
    adopt: str
    alpha: float
    speeds: tuple[float, ...]
    delay: float
    bulk: float
    draw: int = 0

    def config(self) -> RunConfig:
        lockstep = self.method != "decoupled"
        return RunConfig(
            fragments=self.fragments,
            every_steps=self.h,
            overlap_steps=max(1, self.tau),
            quorum=self.learners if lockstep else self.quorum,
            grace_margin=self.grace,
            adopt=self.adopt,  # type: ignore[arg-type]
            blend_alpha=self.alpha,
            budget_tokens=self.budget,
            rounds_in_flight=self.fragments if lockstep else None,
            limits=PATIENT_LIMITS if lockstep else Limits(),
        )


@functools.lru_cache(maxsize=2)
def program_of(timing: Timing) -> Program:
    """Run the cores once. Settings that differ in numerics only share the program."""
    config = timing.config()
    recorder = Recorder(config)
    tokens = dict.fromkeys(range(1, timing.learners + 1), timing.step_tokens)
    if timing.method == "decoupled":
        cycle = itertools.cycle(timing.speeds)
        speeds = {learner: next(cycle) for learner in tokens}
        drawn = Paced.make_scenario(config, tokens, speeds, timing.draw, timing.delay, timing.bulk)
        Paced(drawn, on_entry=recorder.apply).run()
    else:
        run = Lockstep(config, tokens, recorder.apply, timing.tau)
        while run.syncer.state.stage.value == "running":
            run.step()
        run.finish()
    return recorder.program()
