"""What is frozen or unfrozen after the join is noticed, unless it is for a while."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from atoll.net.trained_parameters import EVERY, PERSISTS, TrainedParameters
from tests.net.in_process import learner_of, train
from tests.net.runs import Run, endless
from tests.net.small_models import BATCH, work


def halves() -> tuple[nn.Sequential, TrainedParameters, torch.optim.Optimizer]:
    """The first of three layers is frozen."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    return model, TrainedParameters(model, optimizer, logging.getLogger("test")), optimizer


def steps(trained: TrainedParameters, count: int) -> None:
    for _ in range(count):
        trained.check()


def test_a_learner_says_at_its_next_look_what_was_unfrozen(tmp_path):
    job = work("mixed", 1)
    with Run(tmp_path, endless()) as run, learner_of(run, job, 1) as learner:
        learner.step(tokens=BATCH, loss=job.step(0))
        job.model.get_submodule("frozen").requires_grad_(True)
        with pytest.raises(ValueError, match=r"was unfrozen after the join: frozen\.\w+\. .* leave and join anew"):
            train(learner, job, EVERY)


def test_an_optimizer_with_other_parameters_has_it_look_at_once():
    model, trained, optimizer = halves()
    trained.check()
    model[0].requires_grad_(True)
    trained.check()
    optimizer.add_param_group({"params": model[0].parameters()})
    with pytest.raises(ValueError, match=r"was unfrozen after the join: 0\.bias"):
        trained.check()


def test_what_is_frozen_for_good_is_said_once(caplog):
    model, trained, _ = halves()
    trained.check()
    model[2].requires_grad_(False)
    steps(trained, EVERY + PERSISTS)
    assert [record.message.partition(". ")[0] for record in caplog.records] == [
        "a parameter was frozen after the join: 2.bias"
    ]
    steps(trained, EVERY + 2 * PERSISTS)
    assert len(caplog.records) == 1


def test_two_halves_may_be_trained_in_turn(caplog):
    model, trained, _ = halves()
    for turn in range(4 * PERSISTS):
        model[1].requires_grad_(turn % 6 != 0)
        model[2].requires_grad_(turn % 6 == 0)
        trained.check()
    assert caplog.records == []
    model.requires_grad_(False)
    steps(trained, 2 * PERSISTS)
    assert len(caplog.records) == 1
