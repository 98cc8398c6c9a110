"""A model trained under the failures of a simulated fleet, from the tapes of `atoll simulate --tape`.

The tapes say when each island took a step, with how many of its slices, and what was merged and adopted when; here the
steps are taken. What the tapes do not say is the job's: the model, its data, the batch of an island with all its
slices. An island with a part of its slices takes that part of a batch, on average exactly: what is left of a sample is
carried to its next step. A step for which no whole sample is left trains nothing and is still a step.

Samples are dealt in the order of the steps, each number once, so two tapes trained for the same number of tokens have
trained the same samples. Simulated runs have no leases: what an island loses, nobody trains again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from atoll.checkpoint.model_file import model_digest
from atoll.core.protocol import MergeDone, StepTaken
from atoll.core.types import SYNCER, LearnerId
from atoll.reference.data import Corpus
from atoll.reference.evaluation import held_out_loss
from atoll.reference.job_settings import JobSettings
from atoll.reference.loop import InnerLoop, model_config
from atoll.reference.models import build_model, parameter_count
from atoll.reference.tape_executor import (
    LearnerTensors,
    ReplayLearner,
    StepInfo,
    TapeExecutor,
    initial_values,
    load_values,
)
from atoll.tape.files import SIMULATION_FILE, RunTapes, SimulationRecord
from atoll.tape.format import Actor, Entry
from atoll.tape.ordering import MissingCause
from atoll.tensors.plan import FragmentPlan, describe_tensors, make_plan

_PROGRESS_INTERVAL = 16


class LearnerTotals(NamedTuple):
    """All incarnations of a learner together."""

    starts: int
    steps: int
    empty_steps: int  # of them: too small a part of a batch for a whole sample
    tokens: int


class SimulatedTrainingResult(NamedTuple):
    """What came of it. `ended_by` says which came first: the tokens that were wished for, or the end of the tapes."""

    ended_by: Literal["tokens", "tapes"]
    loss_before: float  # on held-out text
    loss: float  # of the published model, on the same text
    eval_tokens: int
    tokens: int
    target_tokens: int
    steps: int
    merges: int
    contributions: int
    simulated_s: float  # on the tapes' clock, when training ended
    learners: dict[LearnerId, LearnerTotals]
    parameters: int
    plan: str  # how the model was cut into the fragments of the tapes
    digest: str

    @property
    def contributions_per_merge(self) -> float:
        return self.contributions / max(1, self.merges)


class SampleDealer:
    """How many samples a step trains, by its tokens on the tape.

    >>> dealer = Dealer({1: 1000}, batch=2)
    >>> [dealer.samples(1, 1000), [dealer.samples(1, 400) for _ in range(5)]]
    [2, [0, 1, 1, 1, 1]]
    """

    def __init__(self, full_step_tokens: Mapping[LearnerId, int], batch: int) -> None:
        self._full = full_step_tokens
        self._batch = batch
        self._on_tape: Counter[LearnerId] = Counter()  # tokens so far

    def samples(self, learner: LearnerId, tokens: int) -> int:
        """Whole numbers throughout: no error gathers, however long the tape is."""
        before = self._on_tape[learner]
        after = self._on_tape[learner] = before + tokens
        full = self._full[learner]
        return self._batch * after // full - self._batch * before // full


class _UnleasedExecutor(TapeExecutor):
    """Samples in the order of steps, where the tapes have no leases."""

    dealt = 0

    def _samples(self, learner: LearnerTensors, fresh: int) -> tuple[int, ...]:
        begin, self.dealt = self.dealt, self.dealt + fresh
        return tuple(range(begin, self.dealt))


def check_simulated(tapes: RunTapes, settings: JobSettings) -> None:
    """Raises `ValueError` where this cannot be trained on these tapes, as far as can be said without reading them."""
    owned = tapes.config.owned_fragments
    if owned is not None and len(owned) < tapes.config.fragments:
        raise ValueError(
            f"the tapes tell of {len(owned)} of {tapes.config.fragments} fragments, which stand for all;"
            " simulate with --full, for fewer --days"
        )
    known = SimulationRecord.load(tapes.run).full_step_tokens
    wanted = [Actor(SYNCER, 1), *(Actor(learner, 1) for learner in known)]
    lost = [actor for actor in wanted if actor not in tapes.readers]
    if lost or not set(tapes.learners()) <= set(known):
        raise ValueError(f"the tapes in {tapes.run} are not those of its {SIMULATION_FILE}; simulate again")
    found = len(_plan(settings, tapes.config.fragments).fragments)
    if found != tapes.config.fragments:
        raise ValueError(
            f"the tapes have {tapes.config.fragments} fragments, and this model gives {found};"
            f" simulate with --fragments {found}, or train with --plan rows or a larger --model"
        )


def fit_plan(settings: JobSettings, fragments: int) -> JobSettings:
    """The same, cut by rows where the model has too few tensors for the fragments of the tapes."""
    if len(_plan(settings, fragments).fragments) == fragments:
        return settings
    return replace(settings, numerics=replace(settings.numerics, plan="rows"))


def _plan(settings: JobSettings, fragments: int) -> FragmentPlan:
    return make_plan(
        describe_tensors(build_model(model_config(settings), settings.seed)), fragments, settings.numerics.plan
    )


def train_simulated(
    tapes: RunTapes, settings: JobSettings, on_tokens: Callable[[int], None] = lambda tokens: None
) -> SimulatedTrainingResult:
    """Train what `settings` say as the tapes say; the same twice gives the same bits.

    Of `settings` the model, its data, inner steps and numerics count; the protocol is that of the tapes. `on_tokens`
    hears now and then how many tokens have been trained. Raises `ValueError` where the tapes do not allow it.
    """
    check_simulated(tapes, settings)
    full_step_tokens = SimulationRecord.load(tapes.run).full_step_tokens
    torch.set_num_threads(settings.threads)
    corpus = Corpus.load(settings.data)
    settings = replace(settings, vocabulary=max(settings.vocabulary, corpus.vocabulary))
    shape = model_config(settings)
    founder = build_model(shape, settings.seed)
    plan = make_plan(describe_tensors(founder), tapes.config.fragments, settings.numerics.plan)
    before = held_out_loss(founder, corpus, shape.context, settings.eval_tokens)

    def make(actor: Actor) -> ReplayLearner:
        loop = InnerLoop(settings, corpus)

        def take_step(info: StepInfo) -> float | None:
            if not info.samples:
                return None
            trained = info.progress + len(info.samples) * shape.context / settings.tokens
            return loop.step(info.samples, min(1.0, trained), info.lr_scale).loss

        return ReplayLearner(loop.model, loop.optimizer, take_step, settings.batch)

    config = replace(tapes.config, budget_tokens=settings.tokens)
    execution = _UnleasedExecutor(
        config, settings.numerics, plan, initial_values(founder, plan), make, check_digests=True
    )
    trainer = _TapeTrainer(execution, SampleDealer(full_step_tokens, settings.batch), settings.tokens, shape.context)
    for number, entry in enumerate(tapes.merged_entries(_refuse)):
        trainer.handle_entry(entry)
        if number % _PROGRESS_INTERVAL == 0:
            on_tokens(execution.tokens)
        if trainer.is_done:
            break
    load_values(founder, plan, execution.published())
    after = held_out_loss(founder, corpus, shape.context, settings.eval_tokens)
    learners = trainer.learners()
    return SimulatedTrainingResult(
        ended_by="tokens" if trainer.is_done else "tapes",
        loss_before=before.loss,
        loss=after.loss,
        eval_tokens=after.tokens,
        tokens=execution.tokens,
        target_tokens=settings.tokens,
        steps=sum(each.steps for each in learners.values()),
        merges=trainer.merges,
        contributions=execution.contributions,
        simulated_s=trainer.now_s,
        learners=learners,
        parameters=parameter_count(founder),
        plan=plan.method,
        digest=model_digest(founder),
    )


class _TapeTrainer:
    """Entries of the tapes become steps on samples, until the wished tokens are trained."""

    def __init__(self, execution: TapeExecutor, dealer: SampleDealer, wished_tokens: int, context: int) -> None:
        self.execution = execution
        self.is_done = False
        self.merges = 0
        self.now_s = 0.0
        self._dealer = dealer
        self._target_tokens = wished_tokens
        self._context = context
        self._empty: Counter[LearnerId] = Counter()

    def handle_entry(self, entry: Entry) -> None:
        self.now_s = max(self.now_s, entry.at)
        event = entry.event
        if type(event) is StepTaken and event.steps:
            self._step(entry, event)
            return
        if type(event) is MergeDone:
            self.merges += 1
        self.execution.apply(entry)

    def _step(self, entry: Entry, event: StepTaken) -> None:
        """Steps told together are taken one by one; what was done about them is done after the last."""
        learner = entry.actor.learner
        for place in range(event.steps):
            tokens = event.tokens * (place + 1) // event.steps - event.tokens * place // event.steps
            left = -(-(self._target_tokens - self.execution.tokens) // self._context)
            samples = min(self._dealer.samples(learner, tokens), left)
            self._empty[learner] += not samples
            taken = StepTaken(1, samples * self._context, event.step_time_s, samples)
            effects = entry.effects if place == event.steps - 1 else ()
            self.execution.apply(entry._replace(event=taken, effects=effects))
            if samples == left:
                self.is_done = True
                return

    def learners(self) -> dict[LearnerId, LearnerTotals]:
        found: dict[LearnerId, LearnerTotals] = {}
        for actor, tensors in sorted(self.execution.learners.items()):
            starts, steps, _, tokens = found.get(actor.learner, LearnerTotals(0, 0, 0, 0))
            empty = self._empty[actor.learner]
            found[actor.learner] = LearnerTotals(starts + 1, steps + tensors.step, empty, tokens + tensors.tokens)
        return found


def _refuse(missing: MissingCause) -> None:
    raise ValueError(f"the tapes are incomplete: {missing}")
