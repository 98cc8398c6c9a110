"""Parameters that are permanently frozen, unfrozen, added or replaced after the join are detected."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from atoll.learner.loop_check import CHECK_INTERVAL_STEPS, FROZEN_STEPS_BEFORE_WARNING, ParameterCheck
from tests.learner.in_process import learner_of, train
from tests.learner.runs import Run, endless
from tests.learner.small_models import BATCH, work


def halves() -> tuple[nn.Sequential, ParameterCheck, torch.optim.Optimizer]:
    """Return a model of three layers, the first of them frozen, with its check and its optimizer."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    return model, ParameterCheck(model, optimizer, logging.getLogger("test")), optimizer


def steps(trained: ParameterCheck, count: int) -> None:
    for _ in range(count):
        trained.check()


def test_unfrozen_parameter_is_named_at_the_next_check(tmp_path):
    job = work("mixed", 1)
    with Run(tmp_path, endless()) as run, learner_of(run, job, 1) as learner:
        learner.step(tokens=BATCH, loss=job.step(0))
        job.model.get_submodule("frozen").requires_grad_(True)
        with pytest.raises(ValueError, match=r"was unfrozen after the join: frozen\.\w+\. .* leave and join again"):
            train(learner, job, CHECK_INTERVAL_STEPS)


def test_changed_optimizer_parameters_trigger_a_check_at_once():
    model, trained, optimizer = halves()
    trained.check()
    model[0].requires_grad_(True)
    trained.check()
    optimizer.add_param_group({"params": model[0].parameters()})
    with pytest.raises(ValueError, match=r"was unfrozen after the join: 0\.bias"):
        trained.check()


def test_permanently_frozen_parameter_is_logged_once(caplog):
    model, trained, _ = halves()
    trained.check()
    model[2].requires_grad_(False)
    steps(trained, CHECK_INTERVAL_STEPS + FROZEN_STEPS_BEFORE_WARNING)
    assert [record.message.partition(". ")[0] for record in caplog.records] == [
        "a parameter was frozen after the join: 2.bias"
    ]
    steps(trained, CHECK_INTERVAL_STEPS + 2 * FROZEN_STEPS_BEFORE_WARNING)
    assert len(caplog.records) == 1


def test_two_halves_may_be_trained_alternately(caplog):
    model, trained, _ = halves()
    for step in range(4 * FROZEN_STEPS_BEFORE_WARNING):
        model[1].requires_grad_(step % 6 != 0)
        model[2].requires_grad_(step % 6 == 0)
        trained.check()
    assert caplog.records == []
    model.requires_grad_(False)
    steps(trained, 2 * FROZEN_STEPS_BEFORE_WARNING)
    assert len(caplog.records) == 1


# --------------------------------------------------------------------------------------------------------------------
# Parameters that are added after the join


def test_parameter_added_after_joining_is_an_error(tmp_path):
    """The learner does not know the optimizer that trains it."""
    job = work("plain", 1)
    with Run(tmp_path, endless()) as run, learner_of(run, job, 1) as learner:
        learner.step(tokens=BATCH, loss=job.step(0))
        job.model.add_module("adapter", nn.Linear(4, 4))
        sentence = r"was added after the join: adapter\.bias\. .* before the Learner is made; .*atoll syncer --init"
        with pytest.raises(ValueError, match=sentence):
            train(learner, job, CHECK_INTERVAL_STEPS)


def test_parameter_replaced_after_joining_is_an_error(tmp_path):
    job = work("plain", 1)
    with Run(tmp_path, endless()) as run, learner_of(run, job, 1) as learner:
        learner.step(tokens=BATCH, loss=job.step(0))
        job.model.get_submodule("last").weight = nn.Parameter(torch.zeros(4, 24))
        with pytest.raises(ValueError, match=r"was replaced after the join: last\.weight\."):
            train(learner, job, CHECK_INTERVAL_STEPS)


def test_parameter_added_to_the_optimizer_is_found_at_the_next_step():
    model, trained, optimizer = halves()
    steps(trained, 2)
    model.append(nn.Linear(2, 2))
    optimizer.add_param_group({"params": model[3].parameters()})
    with pytest.raises(ValueError, match=r"was added after the join: 3\.bias"):
        trained.check()


def test_modules_may_be_wrapped_and_frozen_ones_added_after_joining(caplog):
    """Wrapping keeps the parameter objects. An added module is an error only when it is unfrozen."""
    model, trained, _ = halves()
    trained.check()
    model[2] = nn.Sequential(model[2])
    model.append(nn.Linear(2, 2).requires_grad_(False))
    steps(trained, 2 * CHECK_INTERVAL_STEPS)
    assert caplog.records == []
    model[3].requires_grad_(True)
    with pytest.raises(ValueError, match=r"was added after the join: 3\.bias"):
        steps(trained, CHECK_INTERVAL_STEPS)
