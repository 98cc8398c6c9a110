"""Training of a model under the failures of a simulated fleet, from the tapes of `atoll simulate --tape`.

The tapes record when each learner took a step, with how many of its slices, and what was merged and adopted when. This
module takes the steps. The job provides the rest: the model, its data, and the batch of a learner with all its slices.

A learner with a share of its slices trains that share of a batch. On average this is exact: the fraction of a sample
that is left is carried to the next step. A step without a whole sample trains nothing and still counts as a step.

Samples are assigned in the order of the steps, each number once. Two tapes trained for the same number of tokens have
therefore trained the same samples. Simulated runs have no leases: samples of lost work are not trained again.
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
    """Totals over all incarnations of a learner."""

    starts: int
    steps: int
    empty_steps: int  # steps without a whole sample
    tokens: int


class SimulatedTrainingResult(NamedTuple):
    """Result of training on simulated tapes."""

    ended_by: Literal["tokens", "tapes"]  # cause of the end: the requested tokens, or the end of the tapes
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
    plan: str  # method by which the model was cut into the fragments of the tapes
    digest: str

    @property
    def contributions_per_merge(self) -> float:
        return self.contributions / max(1, self.merges)


class SampleAllocator:
    """Assignment of samples to steps. The number of samples of a step follows from its tokens on the tape.

    >>> allocator = SampleAllocator({1: 1000}, batch=2)
    >>> [allocator.samples(1, 1000), [allocator.samples(1, 400) for _ in range(5)]]
    [2, [0, 1, 1, 1, 1]]
    """

    def __init__(self, full_step_tokens: Mapping[LearnerId, int], batch: int) -> None:
        self._full = full_step_tokens
        self._batch = batch
        self._on_tape: Counter[LearnerId] = Counter()  # tokens so far

    def samples(self, learner: LearnerId, tokens: int) -> int:
        """Return the number of samples of the next step of this learner."""
        before = self._on_tape[learner]  # integers only: rounding errors do not accumulate
        after = self._on_tape[learner] = before + tokens
        full = self._full[learner]
        return self._batch * after // full - self._batch * before // full


class _UnleasedExecutor(TapeExecutor):
    """Executor for tapes without leases. Samples are numbered in the order of the steps."""

    assigned_samples = 0

    def _samples(self, learner: LearnerTensors, fresh: int) -> tuple[int, ...]:
        begin, self.assigned_samples = self.assigned_samples, self.assigned_samples + fresh
        return tuple(range(begin, self.assigned_samples))


def check_simulated(tapes: RunTapes, settings: JobSettings) -> None:
    """Raise `ValueError` if this job cannot be trained on these tapes. Their entries are not read."""
    owned = tapes.config.owned_fragments
    if owned is not None and len(owned) < tapes.config.fragments:
        raise ValueError(
            f"the tapes contain {len(owned)} of {tapes.config.fragments} fragments as a sample of all;"
            " simulate with --full, for fewer --days"
        )
    simulated = SimulationRecord.load(tapes.run).full_step_tokens
    expected = [Actor(SYNCER, 1), *(Actor(learner, 1) for learner in simulated)]
    missing = [actor for actor in expected if actor not in tapes.readers]
    if missing or not set(tapes.learners()) <= set(simulated):
        raise ValueError(f"the tapes in {tapes.run} are not those of its {SIMULATION_FILE}; simulate again")
    count = len(_make_plan(settings, tapes.config.fragments).fragments)
    if count != tapes.config.fragments:
        raise ValueError(
            f"the tapes have {tapes.config.fragments} fragments, but this model has {count};"
            f" simulate with --fragments {count}, or train with --plan rows or a larger --model"
        )


def fit_plan(settings: JobSettings, fragments: int) -> JobSettings:
    """Return the settings with `--plan rows` if the model has too few tensors for the fragments of the tapes."""
    if len(_make_plan(settings, fragments).fragments) == fragments:
        return settings
    return replace(settings, numerics=replace(settings.numerics, plan="rows"))


def _make_plan(settings: JobSettings, fragments: int) -> FragmentPlan:
    return make_plan(
        describe_tensors(build_model(model_config(settings), settings.seed)), fragments, settings.numerics.plan
    )


def train_simulated(
    tapes: RunTapes, settings: JobSettings, on_tokens: Callable[[int], None] = lambda tokens: None
) -> SimulatedTrainingResult:
    """Train the model of `settings` with the steps and merges of the tapes. Two calls give the same bits.

    Raise `ValueError` if the job does not fit the tapes.

    Args:
        settings: model, data, inner steps and numerics. The settings of the protocol come from the tapes.
        on_tokens: called from time to time with the number of tokens trained so far.
    """
    check_simulated(tapes, settings)
    full_step_tokens = SimulationRecord.load(tapes.run).full_step_tokens
    torch.set_num_threads(settings.threads)
    corpus = Corpus.load(settings.data)
    settings = replace(settings, vocabulary=max(settings.vocabulary, corpus.vocabulary))
    shape = model_config(settings)
    model = build_model(shape, settings.seed)
    plan = make_plan(describe_tensors(model), tapes.config.fragments, settings.numerics.plan)
    before = held_out_loss(model, corpus, shape.context, settings.eval_tokens)

    def make_learner(actor: Actor) -> ReplayLearner:
        loop = InnerLoop(settings, corpus)

        def take_step(info: StepInfo) -> float | None:
            if not info.samples:
                return None
            trained = info.progress + len(info.samples) * shape.context / settings.tokens
            return loop.step(info.samples, min(1.0, trained), info.lr_scale).loss

        return ReplayLearner(loop.model, loop.optimizer, take_step, settings.batch)

    config = replace(tapes.config, budget_tokens=settings.tokens)
    executor = _UnleasedExecutor(
        config, settings.numerics, plan, initial_values(model, plan), make_learner, check_digests=True
    )
    trainer = _TapeTrainer(executor, SampleAllocator(full_step_tokens, settings.batch), settings.tokens, shape.context)
    for number, entry in enumerate(tapes.merged_entries(_refuse)):
        trainer.handle_entry(entry)
        if number % _PROGRESS_INTERVAL == 0:
            on_tokens(executor.tokens)
        if trainer.is_done:
            break
    load_values(model, plan, executor.published())
    after = held_out_loss(model, corpus, shape.context, settings.eval_tokens)
    learners = trainer.learners()
    return SimulatedTrainingResult(
        ended_by="tokens" if trainer.is_done else "tapes",
        loss_before=before.loss,
        loss=after.loss,
        eval_tokens=after.tokens,
        tokens=executor.tokens,
        target_tokens=settings.tokens,
        steps=sum(each.steps for each in learners.values()),
        merges=trainer.merges,
        contributions=executor.contributions,
        simulated_s=trainer.now_s,
        learners=learners,
        parameters=parameter_count(model),
        plan=plan.method,
        digest=model_digest(model),
    )


class _TapeTrainer:
    """Execution of tape entries as training steps, until the requested tokens are trained."""

    def __init__(self, executor: TapeExecutor, allocator: SampleAllocator, target_tokens: int, context: int) -> None:
        self.executor = executor
        self.is_done = False
        self.merges = 0
        self.now_s = 0.0
        self._allocator = allocator
        self._target_tokens = target_tokens
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
        self.executor.apply(entry)

    def _step(self, entry: Entry, event: StepTaken) -> None:
        """Take the steps of one entry one by one. The effects of the entry follow the last step."""
        learner = entry.actor.learner
        for i in range(event.steps):
            tokens = event.tokens * (i + 1) // event.steps - event.tokens * i // event.steps
            left = -(-(self._target_tokens - self.executor.tokens) // self._context)
            samples = min(self._allocator.samples(learner, tokens), left)
            self._empty[learner] += not samples
            counts = StepTaken(1, samples * self._context, event.step_time_s, samples)
            effects = entry.effects if i == event.steps - 1 else ()
            self.executor.apply(entry._replace(event=counts, effects=effects))
            if samples == left:
                self.is_done = True
                return

    def learners(self) -> dict[LearnerId, LearnerTotals]:
        totals: dict[LearnerId, LearnerTotals] = {}
        for actor, tensors in sorted(self.executor.learners.items()):
            starts, steps, _, tokens = totals.get(actor.learner, LearnerTotals(0, 0, 0, 0))
            empty = self._empty[actor.learner]
            totals[actor.learner] = LearnerTotals(starts + 1, steps + tensors.step, empty, tokens + tensors.tokens)
        return totals


def _refuse(missing: MissingCause) -> None:
    raise ValueError(f"the tapes are incomplete: {missing}")
