"""Buffers are published as the mean of their values, in f32, and overwritten, in processes and in replay."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor, nn

from atoll.core.types import AcceptedContribution, RoundId
from atoll.island.fragments import FragmentTensors
from atoll.reference.tape_executor import ReplayLearner, StepInfo, TapeExecutor, initial_values
from atoll.tape.format import Actor
from atoll.tensors.codecs import get_codec
from atoll.tensors.model_view import ModelView
from atoll.tensors.plan import FragmentPlan, describe_tensors, make_plan
from atoll.tensors.row_sharding import shard_fragment
from atoll.tensors.settings import Numerics
from atoll.tensors.syncer_fragment import SyncerFragment
from tests.learner.in_process import learner_of
from tests.learner.runs import LIMIT_S, LearnerSpec, Run, config
from tests.learner.small_models import BATCH, Normed, work
from tests.reference import tiny
from tests.reference.lockstep import Lockstep

INT4 = Numerics(outer_lr=0.7, outer_momentum=0.9, up="int4", down="int4")


def variance(model: nn.Module) -> Tensor:
    return model.get_buffer("norm.running_var")


def plan_of(fragments: int = 3) -> FragmentPlan:
    return make_plan(describe_tensors(Normed()), fragments, "balanced")


def rescale(model: nn.Module, step: int) -> None:
    assert isinstance(model, Normed)
    model.scale = 100.0 if step % 5 < 3 else 0.01


def trainee(actor: Actor) -> ReplayLearner:
    job = work("normed", actor.learner)

    def take_step(info: StepInfo) -> None:
        if actor.learner == 1:  # its variance falls by orders of magnitude, also between copy and adoption
            rescale(job.model, info.step)
        job.step(info.step)

    return ReplayLearner(job.model, job.optimizer, take_step)


def executed(numerics: Numerics, adopt: str, overlap: int) -> tuple[TapeExecutor, Lockstep]:
    plan = plan_of()
    run = tiny.lockstep_config(plan, learners=2, every=4, overlap_steps=max(1, overlap), adopt=adopt, blend_alpha=0.5)
    execution = TapeExecutor(run, numerics, plan, initial_values(work("normed", 2).model, plan), trainee)
    return execution, Lockstep(run, tiny.tokens_by_learner(2), execution.apply, overlap=overlap)


# --------------------------------------------------------------------------------------------------------------------
# Merged values


@pytest.mark.parametrize("name", ["f32", "int4"])
@pytest.mark.parametrize("adopt", ["carry", "blend", "overwrite"])
def test_running_var_is_never_negative(adopt, name):
    execution, run = executed(Numerics(outer_lr=0.7, outer_momentum=0.9, up=name, down=name), adopt, overlap=2)
    for _ in range(40):
        run.step()
        for learner in execution.learners.values():
            assert bool((variance(learner.replay.model) > 0.0).all())
    assert run.syncer.state.merges > 20
    for learner in execution.learners.values():
        assert bool(learner.replay.model.eval()(torch.ones(4, 8)).isfinite().all())


def test_published_buffers_are_the_mean_of_the_contributed_values():
    """Without overlap and with equal tokens, the published value is the mean of two, with every outer optimizer."""
    execution, run = executed(INT4, "carry", overlap=0)
    plan, alone = execution.plan, [work("normed", 1), work("normed", 2)]
    with torch.no_grad():
        for job in alone:
            job.model.load_state_dict(work("normed", 2).model.state_dict())
    (p,) = [p for p in range(len(plan.fragments)) if plan.holds_buffers(p)]
    number = 0
    while not execution.syncer.versions[p]:
        run.step()
        rescale(alone[0].model, number)
        for job in alone:
            job.model(torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(job.seed * 1_000_003 + number)))
        number += 1
    found, means = execution.published()[p], [torch.empty(plan.numel(p)) for _ in alone]
    for job, mean in zip(alone, means, strict=True):
        ModelView(job.model, plan).read(p, mean)
    assert torch.allclose(found, (means[0] + means[1]) / 2, rtol=1e-6)
    for learner in execution.learners.values():
        own = torch.empty(plan.numel(p))
        learner.view.read(p, own)
        assert torch.equal(own, found)


def test_buffers_are_merged_to_their_mean_in_f32_and_restored_from_the_store():
    plan = plan_of()
    p = len(plan.fragments) - 1
    fragment = SyncerFragment(plan, p, INT4, 0, initial_values(Normed(), plan)[p] + 1e-3)
    round_id, generator = RoundId(p, 0, 1, 1), torch.Generator().manual_seed(1)
    for learner, tokens in ((1, 100), (2, 70), (3, 9)):
        data = get_codec("f32").encode(torch.rand(plan.numel(p), generator=generator))
        accepted = AcceptedContribution(learner, 1, 2, 2, tokens, 200, 0, float(tokens))
        fragment.accumulate(round_id, accepted, data, "f32")
    fragment.merge(round_id, 3, "int4")
    assert fragment.merged is not None
    assert fragment.merged.update is not None
    assert fragment.merged.codec == "f32"
    assert torch.equal(fragment.merged.update.view(torch.float32), fragment.merged.value)
    assert torch.equal(fragment.merged.value, fragment.outer_optimizer.value)
    stored = {name: tensor.clone() for name, tensor in fragment.stored_state(1).items()}
    assert torch.equal(fragment.restore_copy(1, stored).outer_optimizer.value, fragment.merged.value)


@pytest.mark.parametrize("rows", [False, True])
def test_buffers_are_sent_as_they_are_in_f32(rows):
    """Ignore the codec that the core has chosen, for the rows of a rank and for a learner of one process."""
    job, plan = work("normed", 1), plan_of()
    p = len(plan.fragments) - 1
    view = ModelView(job.model, plan)
    fragment = FragmentTensors(view, p, get_codec("bf16"), share=shard_fragment(plan, p, [{}, {}]) if rows else None)
    anchor = fragment.buffers.acquire()
    anchor.tensor.fill_(5.0)
    fragment.anchor = anchor
    job.step(0)
    copied = fragment.prepare_copy(RoundId(p, 0, 1, 1), "int4")
    fragment.copy(copied)
    assert copied.codec.name == "f32"
    expected = torch.empty(plan.numel(p))
    view.read(p, expected)
    if fragment.rows is not None:
        fragment.rows.encode_strips(fragment.rows.prepare_copy(copied), torch.empty(0), copied.codec)
        found = fragment.rows.strips(copied.serial).result().data
    else:
        sent: Future[Tensor] = Future()
        fragment.encode(copied, ContributionBuffer(sent))
        found = sent.result()
    assert torch.equal(found[: 4 * expected.numel()].view(torch.float32), expected)


class ContributionBuffer:
    """Receiver of the encoded bytes of a contribution."""

    size = 0

    def __init__(self, sent: Future[Tensor]) -> None:
        self._sent = sent

    def set_buffer(self, data: Tensor) -> None:
        self._data = data

    def mark_written(self, places: list[tuple[int, int]]) -> None:
        if not self._sent.done():
            self._sent.set_result(self._data)


# --------------------------------------------------------------------------------------------------------------------
# A run of processes


def test_learners_with_batch_norm_end_with_the_same_positive_variances(tmp_path):
    job = work("normed", 1)
    with Run(tmp_path, config(fragments=1, budget_merges=24, quorum=2), INT4) as run:
        (other,) = run.joined(LearnerSpec(2, model="normed"))
        with learner_of(run, job, 1) as learner:
            run.go(other)
            number, end = 0, time.monotonic() + LIMIT_S
            while not learner.finished:
                learner.step(tokens=BATCH, loss=job.step(number))
                assert bool((variance(job.model) > 0.0).all())
                assert time.monotonic() < end, run.logs()
                number += 1
        published = run.finish(other)
        run.assert_same(published, 2)
        run.assert_clean()
    assert torch.equal(published["norm.running_var"], variance(job.model))
    assert bool((published["norm.running_var"] > 0.0).all())
    assert "norm.num_batches_tracked" not in published
