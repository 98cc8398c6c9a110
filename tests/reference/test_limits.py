"""Tests of the limits in which the protocol equals a known method, bit by bit or up to f32 rounding.

Every limit is also tested with an executor that has one bug, which the comparison must detect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn

from atoll.core.types import AcceptedContribution, AdoptMode, RoundId, RunConfig
from atoll.reference.tape_executor import LearnerTensors, TapeExecutor
from atoll.tensors.codecs import Codec
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.settings import Numerics
from atoll.tensors.syncer_fragment import SyncerFragment
from tests.reference import tiny
from tests.reference.lockstep import Lockstep, Paced

STEPS = 14


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in model.named_parameters()}


def learner_models(executor: TapeExecutor) -> list[nn.Module]:
    return [learner.replay.model for _, learner in sorted(executor.learners.items())]


def published_model(executor: TapeExecutor) -> dict[str, Tensor]:
    """Return the published parameters by name."""
    model = tiny.new_model()
    learner = next(iter(executor.learners.values()))
    view = type(learner.view)(model, executor.plan)
    for p, value in enumerate(executor.published()):
        view.write(p, value)
    return parameters(model)


# --------------------------------------------------------------------------------------------------------------------
# Reference implementations in plain torch. Only the tiny model is ours.


class Reference:
    """M learners with their optimizers, and a global model with its outer optimizer."""

    def __init__(self, learners: int, fragments: list[list[str]], lr: float, momentum: float) -> None:
        self.learners = [tiny.new_model() for _ in range(learners)]
        self.optimizers = [tiny.new_optimizer(model) for model in self.learners]
        self.global_model = tiny.new_model()
        named = dict(self.global_model.named_parameters())
        # Fused like the syncer's optimizer: another kernel rounds in another order.
        self.outer = [
            torch.optim.SGD([named[n] for n in names], lr, momentum, nesterov=momentum > 0, fused=True)
            for names in fragments
        ]
        self.fragments = fragments

    def inner_step(self, step: int) -> None:
        for i, (model, optimizer) in enumerate(zip(self.learners, self.optimizers, strict=True)):
            tiny.train_step(model, optimizer, i + 1, step)

    @torch.no_grad()
    def outer_step(self, p: int, anchors: list[dict[str, Tensor]]) -> None:
        """Apply the outer step to fragment p. The gradient is the mean of anchor - theta over the learners."""
        global_parameters = dict(self.global_model.named_parameters())
        for name in self.fragments[p]:
            deltas = [a[name] - parameters(m)[name] for a, m in zip(anchors, self.learners, strict=True)]
            total = deltas[0].clone()
            for delta in deltas[1:]:
                total += delta
            global_parameters[name].grad = total / len(deltas)
        self.outer[p].step()


def diloco(learners: int, every: int, steps: int) -> Reference:
    names = [n for n, _ in tiny.new_model().named_parameters()]
    reference = Reference(learners, [names], 0.7, 0.9)
    for step in range(1, steps + 1):
        reference.inner_step(step - 1)
        if step % every == 1:  # the first round of fragment 0 opens after one step
            reference.outer_step(0, [parameters(reference.global_model)] * learners)
            for model in reference.learners:
                model.load_state_dict(reference.global_model.state_dict())
    return reference


@torch.no_grad()
def _blend(model: nn.Module, values: dict[str, Tensor], alpha: float) -> None:
    for name, value in values.items():
        theta = parameters(model)[name]
        theta.copy_(alpha * theta + (1.0 - alpha) * value)


def streaming(plan: FragmentPlan, learners: int, every: int, tau: int, alpha: float, steps: int) -> Reference:
    """Train with Streaming DiLoCo: fragment p is copied every H steps, and its new value arrives tau steps later."""
    fragments = [[piece.tensor for piece in pieces] for pieces in plan.fragments]
    reference = Reference(learners, fragments, 0.7, 0.9)
    offsets = [1 + p * every // len(fragments) for p in range(len(fragments))]
    arriving: dict[int, list[dict[str, Tensor]]] = {}
    for step in range(1, steps + 1):
        reference.inner_step(step - 1)
        for values in arriving.pop(step, []):
            for model in reference.learners:
                _blend(model, values, alpha)
        for p, offset in enumerate(offsets):
            if step >= offset and (step - offset) % every == 0:
                reference.outer_step(p, [parameters(reference.global_model)] * learners)
                values = {n: parameters(reference.global_model)[n].clone() for n in fragments[p]}
                arriving.setdefault(step + tau, []).append(values)
    return reference


# --------------------------------------------------------------------------------------------------------------------
# Executors with one bug


class MomentumLostFragment(SyncerFragment):
    def merge(self, round_id: RoundId, contributions: int, down: str | None = None) -> None:
        self.outer_optimizer.load_state_dict({})
        super().merge(round_id, contributions, down)


class UnevenMeanFragment(SyncerFragment):
    """Give later contributions a larger weight in the mean."""

    def accumulate(
        self, round_id: RoundId, accepted: AcceptedContribution, data: Tensor, up: str, norm: float | None = None
    ) -> None:
        before = self._sums.count if self._sums is not None and self._round == round_id else 0
        heavier = structs.replace(accepted, weight=accepted.weight * (1 + before * 1e-6))
        super().accumulate(round_id, heavier, data, up, norm)


class MomentumLost(TapeExecutor):
    fragment_type = MomentumLostFragment


class UnevenMean(TapeExecutor):
    fragment_type = UnevenMeanFragment


class CarriesFromAnchor(TapeExecutor):
    """Count merged steps twice in carry: use the anchor as the reference although the copy is merged."""

    def adopt_value(
        self, learner: LearnerTensors, p: int, mode: AdoptMode, value: Tensor, reference: Tensor | None
    ) -> None:
        super().adopt_value(learner, p, mode, value, learner.anchors.get(p, reference))


class BlendsInverted(TapeExecutor):
    def adopt_value(
        self, learner: LearnerTensors, p: int, mode: AdoptMode, value: Tensor, reference: Tensor | None
    ) -> None:
        learner.view.adopt(p, mode, value, reference, 1.0 - self.config.blend_alpha)


class RebuildsOneBitOff(TapeExecutor):
    """Give learner 2 a value that is off by one bit, such as the syncer's value before rounding."""

    def rebuild(self, learner: LearnerTensors, base: Tensor, update: Tensor, down: Codec) -> Tensor:
        value = super().rebuild(learner, base, update, down)
        return torch.nextafter(value, value + 1) if learner.actor.learner == 2 else value


# --------------------------------------------------------------------------------------------------------------------
# K = M, equal tokens, no overlap, f32, average, P = 1: synchronous DiLoCo


def run_diloco(executor_type: type[TapeExecutor], adopt: str) -> TapeExecutor:
    plan = tiny.tiny_plan(1)
    config = tiny.lockstep_config(plan, learners=3, every=4, adopt=adopt)
    executor = tiny.make_executor(config, tiny.EXACT, plan, executor_type)
    run = Lockstep(config, tiny.tokens_by_learner(3), executor.apply)
    for _ in range(STEPS):
        run.step()
    assert run.syncer.state.merges == 4
    return executor


def is_diloco(executor: TapeExecutor) -> bool:
    reference = diloco(learners=3, every=4, steps=STEPS)
    same = [tiny.same_bits(published_model(executor), parameters(reference.global_model))]
    for ours, theirs in zip(learner_models(executor), reference.learners, strict=True):
        same.append(tiny.same_bits(parameters(ours), parameters(theirs)))
    assert len(same) == 4
    return all(same)


@pytest.mark.parametrize("adopt", ["carry", "overwrite"])
def test_lockstep_without_overlap_equals_diloco_bit_by_bit(adopt):
    """No step is trained between copy and adoption, so the difference that carry adds is exactly zero."""
    assert is_diloco(run_diloco(TapeExecutor, adopt))


@pytest.mark.parametrize("bug", [MomentumLost, UnevenMean, CarriesFromAnchor])
def test_bug_in_outer_step_mean_or_adoption_differs_from_diloco(bug):
    assert not is_diloco(run_diloco(bug, "carry"))


# --------------------------------------------------------------------------------------------------------------------
# P > 1, publication tau steps after the copy: Streaming DiLoCo


def run_streaming(
    executor_type: type[TapeExecutor], adopt: str, alpha: float, plan_method: str = "balanced"
) -> TapeExecutor:
    plan = tiny.tiny_plan(3, plan_method)
    config = tiny.lockstep_config(plan, learners=2, every=6, overlap_steps=2, adopt=adopt, blend_alpha=alpha)
    executor = tiny.make_executor(config, tiny.EXACT, plan, executor_type)
    run = Lockstep(config, tiny.tokens_by_learner(2), executor.apply, overlap=2)
    for _ in range(STEPS + 4):
        run.step()
    assert run.syncer.state.merges == 9
    return executor


def is_streaming(executor: TapeExecutor, alpha: float) -> bool:
    reference = streaming(executor.plan, learners=2, every=6, tau=2, alpha=alpha, steps=STEPS + 4)
    same = [tiny.same_bits(published_model(executor), parameters(reference.global_model))]
    for ours, theirs in zip(learner_models(executor), reference.learners, strict=True):
        same.append(tiny.same_bits(parameters(ours), parameters(theirs)))
    return all(same)


@pytest.mark.parametrize("plan_method", ["balanced", "layers"])
@pytest.mark.parametrize(("adopt", "alpha"), [("overwrite", 0.0), ("blend", 0.5), ("blend", 0.25)])
def test_lockstep_with_fragments_and_overlap_equals_streaming_diloco_bit_by_bit(adopt, alpha, plan_method):
    assert is_streaming(run_streaming(TapeExecutor, adopt, alpha, plan_method), alpha)


@pytest.mark.parametrize("bug", [MomentumLost, UnevenMean, BlendsInverted])
def test_bug_in_outer_step_mean_or_blend_differs_from_streaming_diloco(bug):
    assert not is_streaming(run_streaming(bug, "blend", 0.25), 0.25)


# --------------------------------------------------------------------------------------------------------------------
# M = 1, outer learning rate 1, no momentum: plain training

PLAIN = Numerics(merge="average", outer="nesterov", outer_lr=1.0, outer_momentum=0.0, up="f32", down="f32")

TOLERANCE = 1e-6
"""Bound that the README states.

It is not zero: the outer step computes A - (A - x), which equals x up to half an ulp of A at every merge, and the inner
steps that follow amplify the difference. The largest weight is about 1, so one rounding is 6e-8. An incorrect formula
is off by entire inner steps, which are LR = 1e-2. Measured: 1.4e-7 here, 2.4e-7 in another loop."""


def run_alone(
    executor_type: type[TapeExecutor],
    overlap: int,
    fragments: int,
    every: int = 4,
    tokens: Sequence[int] = (tiny.TOKENS,),
) -> dict[str, Tensor]:
    plan = tiny.tiny_plan(fragments)
    config = tiny.lockstep_config(plan, learners=1, every=every)
    executor = tiny.make_executor(config, PLAIN, plan, executor_type)
    run = Lockstep(config, tiny.tokens_by_learner(1), executor.apply, overlap)
    for step in range(STEPS):
        run.tokens[1] = tokens[step % len(tokens)]
        run.step()
    assert run.syncer.state.merges >= STEPS // every * fragments
    return parameters(learner_models(executor)[0])


def plain_training() -> dict[str, Tensor]:
    model = tiny.new_model()
    optimizer = tiny.new_optimizer(model)
    for step in range(STEPS):
        tiny.train_step(model, optimizer, 1, step)
    return parameters(model)


@pytest.mark.parametrize(("overlap", "fragments"), [(0, 1), (0, 3), (2, 3)])
def test_one_learner_with_plain_averaging_equals_plain_training_up_to_rounding(overlap, fragments):
    assert tiny.largest_difference(run_alone(TapeExecutor, overlap, fragments), plain_training()) < TOLERANCE


@pytest.mark.parametrize(
    "tokens", [(144, 48, 96, 130, 60, 48, 48, 70, 50, 48), (1000, 10**6, *[1000] * 8)], ids=["48-to-144", "one-of-1e6"]
)
def test_one_learner_with_varying_tokens_per_step_equals_plain_training(tokens):
    alone = run_alone(TapeExecutor, 0, 1, every=5, tokens=tokens)
    assert tiny.largest_difference(alone, plain_training()) < TOLERANCE


@pytest.mark.parametrize("overlap", [0, 2])
def test_bug_that_carries_merged_steps_twice_differs_from_plain_training(overlap):
    assert tiny.largest_difference(run_alone(CarriesFromAnchor, overlap, 3), plain_training()) > 100 * TOLERANCE


# --------------------------------------------------------------------------------------------------------------------
# M learners with identical data equal one learner


def run_same_data(executor_type: type[TapeExecutor], learners: int, merge: str) -> list[dict[str, Tensor]]:
    plan = tiny.tiny_plan(3)
    config = tiny.lockstep_config(plan, learners=learners, every=4)
    numerics = Numerics(merge=merge, outer_lr=0.7, outer_momentum=0.9, up="bf16", down="bf16")  # type: ignore[arg-type]
    executor = tiny.make_executor(
        config, numerics, plan, executor_type, lambda actor: tiny.make_learner(actor, lambda learner: 1)
    )
    run = Lockstep(config, tiny.tokens_by_learner(learners), executor.apply, overlap=1)
    for _ in range(STEPS):
        run.step()
    return [published_model(executor), *(parameters(m) for m in learner_models(executor))]


def test_two_learners_with_identical_data_equal_one_bit_by_bit():
    """(v + v) / 2 is exactly v."""
    one = run_same_data(TapeExecutor, 1, "average")
    two = run_same_data(TapeExecutor, 2, "average")
    assert tiny.same_bits(two[0], one[0])
    assert tiny.same_bits(two[1], one[1])
    assert tiny.same_bits(two[2], one[1])


@pytest.mark.parametrize(("learners", "merge"), [(3, "average"), (2, "radial"), (3, "radial")])
def test_more_learners_with_identical_data_equal_one_up_to_rounding(learners, merge):
    """v + v + v rounds, and so does a direction times a length. In bf16 the difference is at most a few ulps."""
    one = run_same_data(TapeExecutor, 1, "average")
    many = run_same_data(TapeExecutor, learners, merge)
    assert all(tiny.largest_difference(m, one[1]) < 2e-3 for m in many[1:])
    assert all(tiny.same_bits(many[1], m) for m in many[2:])


def test_bug_that_loses_momentum_differs_from_one_learner():
    assert not tiny.same_bits(
        run_same_data(MomentumLost, 2, "average")[0], run_same_data(TapeExecutor, 1, "average")[0]
    )


# --------------------------------------------------------------------------------------------------------------------
# All learners have the same bits of every version


def run_paced(executor_type: type[TapeExecutor], **numbers: Any) -> TapeExecutor:
    plan = tiny.tiny_plan(4)
    config = RunConfig(fragments=4, every_steps=4, budget_tokens=60 * tiny.TOKENS)
    executor = tiny.make_executor(config, Numerics(**numbers), plan, executor_type, check_digests=True)
    scenario = Paced.make_scenario(config, tiny.tokens_by_learner(3), {1: 1.0, 2: 0.8, 3: 0.45}, seed=3)
    Paced(scenario, on_entry=executor.apply, on_start=executor.start_process).run()
    return executor


@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("merge", ["average", "radial"])
def test_every_learner_has_the_same_bits_of_every_version(name, merge):
    """Each learner rebuilds the value from updates and compares its digest with the syncer's at every version."""
    executor = run_paced(TapeExecutor, up=name, down=name, merge=merge)
    assert len(executor.digests) > 30
    assert executor.compared_digests > 2 * len(executor.digests)


def test_executor_detects_a_learner_with_one_different_bit():
    with pytest.raises(AssertionError, match="learner 2 incarnation 1 has"):
        run_paced(RebuildsOneBitOff)
