"""torchtitan's Trainer as a learner.

torchtitan is not installed here. A stand-in has the same methods, called in the same order with the same arguments.
"""

from __future__ import annotations

import pickle
import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from atoll.integrations.schedules import linear
from atoll.integrations.torchtitan import AtollTrainerMixin, _unbound_curve
from atoll.store.learner_parts import list_parts, part_path, read_part
from tests.integrations.reading_islands import PartRequest
from tests.learner.runs import LIMIT_S, Run, config, endless

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

WORDS, LENGTH, BATCH, IGNORED = 16, 6, 4, -100


class Loader(StatefulDataLoader):
    """Loader whose state is a pickle for each rank that reads data, as in torchtitan."""

    def state_dict(self) -> dict[str, Any]:
        return {"dp_rank_0": pickle.dumps(super().state_dict()), "world_size": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(pickle.loads(state_dict["dp_rank_0"]))


class Optimizers(Optimizer):
    """One optimizer for each part of the model. It is itself an optimizer, whose state stays empty."""

    def __init__(self, parts: list[nn.Module], in_backward: bool = False) -> None:
        groups = [list(part.parameters()) for part in parts]
        if in_backward:
            groups = [[parameter] for part in parts for parameter in part.parameters()]
        self.optimizers = [torch.optim.AdamW(each, lr=0.05) for each in groups]
        super().__init__([parameter for each in groups for parameter in each], {"lr": 0.05})

    def step(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)


class Rates:
    def __init__(self, optimizers: Optimizers) -> None:
        make = torch.optim.lr_scheduler.LambdaLR
        self.schedulers = [make(optimizer, lambda step: 1.0 / (1 + step)) for optimizer in optimizers.optimizers]

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()


class Checkpointer:
    """Checkpointer that loads `stored` into the model."""

    def __init__(self, trainer: StandIn) -> None:
        self.trainer = trainer
        self.stored: dict[str, Tensor] | None = None
        self.saved: list[int] = []

    def load(self, step: int) -> None:
        if self.stored is not None:
            self.trainer.model_parts[0].load_state_dict(self.stored)

    def save(self, step: int, last_step: bool = False) -> None:
        self.saved.append(step)

    def maybe_wait_for_staging(self) -> None: ...


class Validator:
    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def should_validate(self, step: int) -> bool:
        return step % 3 == 0

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        self.seen.append(values(model_parts[0]))


class StandIn:
    gradient_accumulation_steps = 2

    def __init__(self, parts: int = 1, steps: int = 20_000, in_backward: bool = False) -> None:
        self.config = SimpleNamespace(training=SimpleNamespace(steps=steps), checkpoint=SimpleNamespace(load_step=-1))
        self.parallel_dims = SimpleNamespace(cp=1)
        self.model_parts: list[nn.Module] = [
            nn.Sequential(nn.Embedding(WORDS, 12), nn.Linear(12, WORDS)) for _ in range(parts)
        ]
        self.optimizers = Optimizers(self.model_parts, in_backward)
        self.lr_schedulers = Rates(self.optimizers)
        torch.manual_seed(1)
        self.dataloader = Loader(range(1_000_000), batch_size=BATCH, shuffle=True, collate_fn=torch.tensor)
        self.checkpointer = Checkpointer(self)
        self.validator = Validator()
        self.step = 0
        self.read: list[list[int]] = []
        self.losses: list[float] = []
        self.tokens = 0

    def batch_generator(self, data_iterable: Any) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for rows in data_iterable:
            self.read.append(rows.tolist())
            words = (rows[:, None] + torch.arange(LENGTH + 1)) % WORDS
            labels = words[:, 1:].clone()
            labels[0, :2] = IGNORED
            self.tokens += int((labels != IGNORED).sum())
            yield {"input": words[:, :-1]}, labels

    def forward_backward_step(
        self, *, input_dict: dict[str, Tensor], labels: Tensor, global_valid_tokens: Tensor
    ) -> Tensor:
        scores = self.model_parts[0](input_dict["input"]).flatten(0, 1)
        loss = cross_entropy(scores, labels.flatten(), reduction="sum", ignore_index=IGNORED) / global_valid_tokens
        loss.backward()
        return loss

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        self.optimizers.zero_grad()
        batches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        valid = sum((labels != IGNORED).sum() for _, labels in batches)
        losses = [
            self.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=valid)  # type: ignore[arg-type]
            for inputs, labels in batches
        ]
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        self.losses.append(float(torch.stack(losses).detach().sum()))

    def train(self) -> None:
        self.checkpointer.load(step=self.config.checkpoint.load_step)
        data_iterator = self.batch_generator(self.dataloader)
        while self.should_continue_training():
            self.step += 1
            self.train_step(data_iterator)
            self.checkpointer.save(self.step, last_step=self.step == self.config.training.steps)
            if self.validator.should_validate(self.step):
                self.validator.validate(self.model_parts, self.step)

    def should_continue_training(self) -> bool:
        return bool(self.step < self.config.training.steps)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class RecordingTrainer(AtollTrainerMixin, StandIn):
    """Trainer that records the state of the learner after each step."""

    atoll_schedule = staticmethod(linear(end=0.5))
    fails_at = 0

    def __init__(self, run: Run, **settings: Any) -> None:
        super().__init__(**settings)
        self.atoll_settings = {"syncer": run.address, "learner": 1, "join_timeout_s": LIMIT_S}
        self.reported: list[float] = []
        self.rates: list[tuple[float, float]] = []
        self.own: list[dict[str, Tensor]] = []
        self.published: list[dict[str, Tensor]] = []

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        if self.step == self.fails_at:
            raise ArithmeticError("an error in the user's model")
        learner = self.learner
        assert learner is not None
        loss = learner._background.last_loss
        assert isinstance(loss, Tensor)
        self.reported.append(float(loss))
        rate = self.optimizers.optimizers[0].param_groups[0]["lr"]
        self.rates.append((rate, 0.05 * linear(end=0.5)(learner.progress) * learner.lr_scale))
        if self.validator.should_validate(self.step):
            self.own.append(values(self.model_parts[0]))
            with learner.published():
                self.published.append(values(self.model_parts[0]))


def test_a_trainer_of_that_shape_trains_until_the_run_is_over(tmp_path):
    with Run(tmp_path, config(budget_merges=24)) as run:
        trainer = RecordingTrainer(run)
        trainer.train()
        learner = trainer.learner
        assert learner is not None
        assert learner.finished
        stats = learner.stats()
        assert run.syncer.expect("ended") is True
        assert same(values(trainer.model_parts[0]), load_file(tmp_path / "published.safetensors"))
    assert trainer.step > 8
    assert trainer.step - stats.steps in (0, 1), (
        "only the step at which the learner finds the end of the run is not counted"
    )
    assert 0 <= trainer.tokens - stats.tokens <= 2 * BATCH * LENGTH, "tokens of some labels in the loss are missing"
    assert trainer.reported[: stats.steps] == pytest.approx(trainer.losses[: stats.steps], abs=1e-5)
    assert all(rate == pytest.approx(expected) for rate, expected in trainer.rates)
    assert trainer.rates[-1][0] < 0.04, "its own schedule would be far below"
    assert trainer.checkpointer.saved == list(range(1, trainer.step + 1))
    seen = trainer.validator.seen
    assert len(seen) == len(trainer.published) > 2
    assert all(same(one, other) for one, other in zip(seen, trainer.published, strict=True))
    assert not all(same(one, other) for one, other in zip(seen, trainer.own, strict=True))
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("atoll")] == []


class StoppingAfterSnapshot(RecordingTrainer):
    """Trainer that requests a snapshot and stops a few steps later."""

    def __init__(self, run: Run, **settings: Any) -> None:
        super().__init__(run, **settings)
        self.has_part = PartRequest(run)
        self.last = 0
        self.atoll_settings = {**self.atoll_settings, "run_directory": run.directory}

    def should_continue_training(self) -> bool:
        if self.step > 4 and not self.last and self.has_part():
            self.last = self.step + 2
        return (self.step == 0 or self.step != self.last) and super().should_continue_training()


class Forgetful(StoppingAfterSnapshot):
    """Planted bug: its data starts anew."""

    def __init__(self, run: Run, **settings: Any) -> None:
        super().__init__(run, **settings)
        self.atoll_settings = {**self.atoll_settings, "extra_state": lambda: None}


@pytest.mark.parametrize("kind", [StoppingAfterSnapshot, Forgetful])
def test_run_overrides_a_checkpoint_and_data_resumes(tmp_path, kind):
    with Run(tmp_path, endless()) as run:
        first = kind(run)
        first.train()
        number = list_parts(tmp_path)[1][-1]
        steps = read_part(part_path(tmp_path, 1, number)).metadata["step"]
        resumed = kind(run, steps=3)
        resumed.checkpointer.stored = {name: torch.zeros_like(v) for name, v in values(resumed.model_parts[0]).items()}
        resumed.fails_at = 1
        with pytest.raises(ArithmeticError):
            resumed.train()
        assert len(run.log_lines(run.syncer, "its loop ended with ArithmeticError")) == 1
    assert not any(bool((tensor == 0).all()) for tensor in values(resumed.model_parts[0]).values()), (
        "the checkpoint replaced the model of the run"
    )
    assert (resumed.read[0] == first.read[2 * steps]) is (kind is StoppingAfterSnapshot), "two batches for each step"
    assert (resumed.read[0] == first.read[0]) is (kind is Forgetful)


def test_unsupported_trainers_are_refused(tmp_path):
    with Run(tmp_path, endless()) as run:
        with pytest.raises(ValueError, match="has 2 parts of the model: pipeline stages are not supported yet"):
            RecordingTrainer(run, parts=2).train()
        with pytest.raises(ValueError, match="has 3 optimizers, but the learner takes one here: leave early_step"):
            RecordingTrainer(run, in_backward=True).train()


class Plain(AtollTrainerMixin):
    atoll_schedule = linear(end=0.5)  # type: ignore[assignment]  # also works without staticmethod


class Method(AtollTrainerMixin):
    def atoll_schedule(self, progress: float) -> float:
        return 1.0 - 0.5 * progress


@pytest.mark.parametrize("kind", [RecordingTrainer, Plain, Method])
def test_schedule_may_be_a_function_or_staticmethod_of_the_class(kind):
    trainer = object.__new__(kind)
    assert _unbound_curve(trainer.atoll_schedule)(1.0) == 0.5
