"""Learning rates that follow the progress of the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atoll.integrations.schedules import StepScheduleAdapter, cosine, linear, progress_schedule


class LearnerStub:
    """The attributes of a learner that schedules read."""

    def __init__(self, progress: float, lr_scale: float = 1.0) -> None:
        self.progress = progress
        self.lr_scale = lr_scale


def adam(lr: float | torch.Tensor = 0.5) -> torch.optim.Optimizer:
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": layers[0].parameters()}, {"params": layers[1].parameters(), "lr": 0.25}]
    return torch.optim.AdamW(groups, lr=lr)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_rate_follows_the_run_and_not_local_steps() -> None:
    optimizer = adam()
    learner = LearnerStub(0.5, lr_scale=0.5)
    scheduler = progress_schedule(optimizer, linear(end=0.0))
    assert rates(optimizer) == [0.5, 0.25]
    scheduler.follow(learner)
    assert rates(optimizer) == [0.125, 0.0625]
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    assert rates(optimizer) == [0.125, 0.0625]
    learner.progress, learner.lr_scale = 0.75, 1.0
    scheduler.step()
    assert rates(optimizer) == scheduler.get_last_lr() == [0.125, 0.0625]
    learner.progress = 1.0
    scheduler.update_rates()
    assert rates(optimizer) == scheduler.get_last_lr() == [0.0, 0.0]


def test_checkpoint_neither_stores_nor_restores_a_rate() -> None:
    optimizer = adam()
    early = optimizer.state_dict()
    scheduler = progress_schedule(optimizer, linear(end=0.0), LearnerStub(0.5))
    assert scheduler.state_dict() == {}
    optimizer.load_state_dict(early)
    assert rates(optimizer) == [0.5, 0.25], "the checkpoint stores the rates of its own time"
    scheduler.load_state_dict({})
    assert rates(optimizer) == [0.25, 0.125]


def test_a_rate_that_is_a_tensor_stays_the_same_one() -> None:
    rate = torch.tensor(0.5)
    optimizer = adam(rate)
    progress_schedule(optimizer, linear(end=0.0)).follow(LearnerStub(0.5))
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


@pytest.mark.parametrize("made", [cosine, linear])
def test_shapes_rise_from_a_tenth_and_fall_to_their_end(made) -> None:
    shape = made(warmup=0.2, end=0.05)
    assert shape(0.0) == pytest.approx(0.1)
    assert shape(0.1) == pytest.approx(0.55)
    assert shape(0.2) == pytest.approx(1.0)
    assert shape(0.6) == pytest.approx(0.525)
    assert shape(1.0) == pytest.approx(0.05)
    with pytest.raises(ValueError, match="from 0 to below 1"):
        made(warmup=1.0)


def test_step_schedule_follows_the_progress_of_the_run() -> None:
    optimizer = adam()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n / 10 if n < 10 else 1.0 - (n - 10) / 90)
    learner = LearnerStub(0.0)
    followed = StepScheduleAdapter(schedule, learner, steps=100, warmup_steps=10)
    assert rates(optimizer) == [0.0, 0.0]
    for _ in range(30):
        optimizer.step()
        schedule.step()
    assert rates(optimizer) == [0.5, 0.25], "its own steps must only end the warm-up"
    learner.progress, learner.lr_scale = 0.55, 0.5
    followed.update_rates()
    assert rates(optimizer) == schedule.get_last_lr() == [0.125, 0.0625]
    followed.restore()
    optimizer.step()
    schedule.step()
    assert rates(optimizer)[0] == pytest.approx(0.5 * (1.0 - 21 / 90)), "it must follow its own count again"
