"""Loops that forget a call, or make one too many, are warned about once; correct loops of every kind are not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from atoll.learner.loop_check import CALLS_BEFORE_WARNING, MAX_UNREPORTED_STEPS, LoopCheck
from tests.learner.in_process import learner_of
from tests.learner.runs import Run, endless
from tests.learner.small_models import BATCH, Work, work

ENOUGH = 2 * MAX_UNREPORTED_STEPS
FORGOTTEN = "learner.step() was not called during the last"
NEVER = "the loop has ended after"
PER_MICRO_BATCH = "it looks like one call for every micro-batch"
UNTRAINED = "no parameter has changed during the last"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    known = (FORGOTTEN, NEVER, PER_MICRO_BATCH, UNTRAINED)
    return [words for record in caplog.records for words in known if words in record.getMessage()]


# --------------------------------------------------------------------------------------------------------------------
# Through a learner


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with Run(tmp_path_factory.mktemp("run"), endless()) as started:
        yield started


def backward(job: Work, number: int) -> Tensor:
    x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(number))
    loss: Tensor = job.model(x).square().mean()
    loss.backward()
    return loss.detach()


def test_a_loop_that_forgets_learner_step_is_warned(run, caplog):
    job = work()
    learner = learner_of(run, job, 1)
    hooks = dict(job.optimizer._optimizer_step_post_hooks)
    with learner:
        for number in range(MAX_UNREPORTED_STEPS + 1):
            job.step(number)
    assert warnings(caplog) == [FORGOTTEN, NEVER]
    assert job.optimizer._optimizer_step_post_hooks == hooks, "a hook was left at the optimizer"


def test_a_short_loop_that_forgets_learner_step_is_warned_at_its_end(run, caplog):
    job = work()
    with learner_of(run, job, 2):
        job.step(0)
    assert warnings(caplog) == [NEVER]


def test_a_loop_that_calls_learner_step_per_micro_batch_is_warned(run, caplog):
    job = work()
    with learner_of(run, job, 3) as learner:
        for number in range(8 * CALLS_BEFORE_WARNING):
            learner.step(tokens=BATCH, loss=backward(job, number))
            if number % 2:
                job.optimizer.step()
                job.optimizer.zero_grad()
    assert warnings(caplog) == [PER_MICRO_BATCH]


def test_a_loop_that_never_calls_optimizer_step_is_warned(run, caplog):
    job = work()
    with learner_of(run, job, 4) as learner:
        for number in range(8 * CALLS_BEFORE_WARNING):
            job.optimizer.zero_grad()
            learner.step(tokens=BATCH, loss=backward(job, number))
    assert warnings(caplog) == [UNTRAINED]


def test_a_correct_loop_that_trains_on_after_the_end_is_not_warned(tmp_path, caplog):
    job = work()
    with Run(tmp_path) as run, learner_of(run, job, 1) as learner:
        while not learner.finished:
            learner.step(tokens=BATCH, loss=job.step(0))
        for number in range(MAX_UNREPORTED_STEPS + 1):
            job.step(number)
    assert warnings(caplog) == []


# --------------------------------------------------------------------------------------------------------------------
# Loops of every kind, without a run


class Loop:
    """Two halves of a model, each with its own optimizer, and the check of a learner that has one or both of them."""

    def __init__(self, chosen: Sequence[str] = ("one", "two"), make: Callable[..., Optimizer] = AdamW) -> None:
        self.model = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
        self.optimizers = {name: make(half.parameters(), lr=0.1) for name, half in self.model.items()}
        self.one, self.two = self.optimizers["one"], self.optimizers["two"]
        passed = [self.optimizers[name] for name in chosen]
        self.check = LoopCheck(self.model, passed, lambda: False, logging.getLogger("test"))

    def backward(self) -> Tensor:
        x = torch.ones(2, 3)
        loss: Tensor = sum((half(x).square().mean() for half in self.model.values()), torch.zeros(()))
        loss.backward()
        return loss

    def train(self, name: str) -> None:
        self.backward()
        self.optimizers[name].step()
        self.model.zero_grad()

    def report(self) -> None:
        self.check.begin_call()
        self.check.end_call()


@contextmanager
def loop(chosen: Sequence[str] = ("one",), make: Callable[..., Optimizer] = AdamW) -> Iterator[Loop]:
    script = Loop(chosen, make)
    yield script
    script.check.close(ended_well=True)


def test_gradient_accumulation_with_one_call_for_each_optimizer_step_is_not_warned(caplog):
    with loop() as script:
        for number in range(ENOUGH):
            script.backward()
            if number % 4 == 3:
                script.one.step()
                script.report()
    assert warnings(caplog) == []


@pytest.mark.parametrize("accumulated", [2, 3, 8, 100])
def test_a_call_for_every_micro_batch_is_warned_once(caplog, accumulated):
    with loop() as script:
        for number in range(ENOUGH):
            script.backward()
            if number % accumulated == accumulated - 1:
                script.one.step()
            script.report()
    assert warnings(caplog) == [PER_MICRO_BATCH if accumulated < CALLS_BEFORE_WARNING else UNTRAINED]


def test_steps_that_a_gradient_scaler_skips_are_not_warned(caplog):
    with loop() as script:
        for number in range(ENOUGH):
            script.backward()
            is_skipped = number < 20 or number % 50 == 0
            if not is_skipped:
                script.one.step()
            script.report()
    assert warnings(caplog) == []


def test_a_gradient_scaler_that_skips_every_step_from_some_point_on_is_warned(caplog):
    with loop() as script:
        for number in range(ENOUGH):
            if number < 4 * CALLS_BEFORE_WARNING:
                script.train("one")
            script.report()
    assert warnings(caplog) == [UNTRAINED]


def test_several_optimizers_that_take_turns_are_not_warned(caplog):
    with loop(("one", "two")) as script:
        for number in range(ENOUGH):
            script.train("one" if number % 5 else "two")
            script.report()
    assert warnings(caplog) == []


def test_a_critic_that_takes_a_hundred_steps_for_one_of_the_generator_is_not_warned(caplog):
    with loop(("one", "two")) as script:
        for _ in range(5):
            for _ in range(100):
                script.one.step()
            script.train("two")
            script.report()
    assert warnings(caplog) == []


def test_steps_of_an_optimizer_unknown_to_the_learner_are_not_warned(caplog):
    with loop(("one",)) as script:
        for number in range(ENOUGH):
            script.train("two" if number % 3 else "one")
            script.report()
    assert warnings(caplog) == []


def test_parameters_that_a_script_updates_by_hand_are_not_warned(caplog):
    with loop() as script:
        for _ in range(ENOUGH):
            script.backward()
            for parameter in script.model.parameters():
                parameter.data -= 0.1 * parameter.grad  # type: ignore[operator]
            script.report()
    assert warnings(caplog) == []


def test_lbfgs_with_many_evaluations_in_one_step_is_not_warned(caplog):
    def closure() -> Tensor:
        script.one.zero_grad()
        return script.backward()

    with loop(make=torch.optim.LBFGS) as script:
        for _ in range(4 * CALLS_BEFORE_WARNING):
            script.one.step(closure)  # type: ignore[arg-type]
            script.report()
    assert warnings(caplog) == []


def test_a_wrapper_without_hooks_is_not_warned(caplog):
    class Both(Optimizer):
        """Wrapper that does not call Optimizer.__init__."""

        def __init__(self, inner: Sequence[Optimizer]) -> None:
            self.inner = inner
            self.param_groups = [group for each in inner for group in each.param_groups]

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for each in self.inner:
                each.step()

    model = nn.Linear(2, 2)
    both = Both([SGD([model.weight], lr=0.1), SGD([model.bias], lr=0.1)])
    check = LoopCheck(model, [both], lambda: False, logging.getLogger("test"))
    for _ in range(4 * CALLS_BEFORE_WARNING):
        model(torch.ones(1, 2)).sum().backward()
        both.step()
        check.begin_call()
        check.end_call()
    check.close(ended_well=True)
    assert warnings(caplog) == []


def test_many_optimizer_steps_for_each_call_are_warned_at_most_once(caplog):
    with loop() as script:
        for _ in range(3):
            for _ in range(2 * MAX_UNREPORTED_STEPS):
                script.train("one")
            script.report()
    assert warnings(caplog) == [FORGOTTEN]


def test_a_later_part_of_the_loop_that_forgets_learner_step_is_warned(caplog):
    with loop() as script:
        for _ in range(10):
            script.train("one")
            script.report()
        for _ in range(MAX_UNREPORTED_STEPS):
            script.train("one")
    assert warnings(caplog) == [FORGOTTEN]
