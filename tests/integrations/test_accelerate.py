"""accelerate: a Learner accepts prepared objects, and micro-batches are not counted as steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file
from torch.optim import AdamW
from torch.utils.data import DataLoader

from atoll.integrations.accelerate import AcceleratedLearner
from atoll.integrations.batches import count_tokens
from atoll.learner.api import Learner
from atoll.tensors import optimizer_state
from atoll.tensors.optimizers import unwrap_optimizer
from atoll.tensors.plan import named_tensors
from tests.integrations.small_texts import gpt2, texts
from tests.learner.runs import LIMIT_S, Run, config, endless
from tests.learner.test_published import same

pytestmark = pytest.mark.usefixtures("no_leaked_threads", "one_thread", "accelerate_anew")

SHOWN = (12, 7, 5)
"""Lengths of the texts by batch. They make the token counts of successive steps differ."""


@pytest.fixture
def accelerate_anew() -> Iterator[None]:
    """Reset accelerate before and after a test: its settings are global to the process."""
    _forget_settings()
    yield
    _forget_settings()


def _forget_settings() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


class Prepared:
    """Model, optimizer and loader of a script, prepared by accelerate."""

    def __init__(self, accumulated: int = 1, seed: int = 1) -> None:
        self.accelerator = Accelerator(gradient_accumulation_steps=accumulated, cpu=True, mixed_precision="bf16")
        data: Any = [each for at in range(12) for each in texts(4, seed * 100 + at, SHOWN[at % 3])]
        model, loader = gpt2(seed), DataLoader(data, batch_size=4)
        prepared: Any = self.accelerator.prepare(model, AdamW(model.parameters(), lr=1e-2), loader)
        self.model, self.optimizer, self.loader = prepared

    def batches(self, epochs: int = 100) -> Iterator[tuple[Any, torch.Tensor]]:
        for _ in range(epochs):
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch).loss
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                yield batch, loss


def run_settings(run: Run) -> dict[str, Any]:
    return {"syncer": run.address, "run_directory": run.directory, "join_timeout_s": LIMIT_S}


def test_a_learner_takes_prepared_objects_and_trains_to_the_end(tmp_path):
    job = Prepared()
    with Run(tmp_path, config(budget_merges=9)) as run:
        with Learner(job.model, job.optimizer, **run_settings(run)) as learner:
            for batch, loss in job.batches():
                learner.step(tokens=count_tokens(batch), loss=loss)
                if learner.finished:
                    break
        assert learner.finished
        assert run.syncer.expect("ended") is True
        published = load_file(tmp_path / "published.safetensors")
        assert same(published, {name: each.detach() for name, each in named_tensors(job.model).items()})


def test_optimizer_state_is_that_of_the_wrapped_optimizer():
    """Learners with and without accelerate can exchange their optimizer state."""
    job = Prepared()
    next(job.batches())
    assert type(job.optimizer).__name__ == "AcceleratedOptimizer"
    own = unwrap_optimizer(job.optimizer)
    assert type(own) is AdamW
    assert unwrap_optimizer(own) is own
    plain = gpt2(2)
    other = AdamW(plain.parameters(), lr=1e-2)
    optimizer_state.unpack(optimizer_state.pack(own, job.model), other, plain)
    assert {float(state["step"]) for state in other.state.values()} == {1.0}
    with pytest.raises(ValueError, match="AcceleratedOptimizer"):  # without unwrapping
        optimizer_state.unpack(optimizer_state.pack(job.optimizer, job.model), other, plain)


def test_loop_that_reports_a_micro_batch_as_a_step_is_refused(tmp_path):
    """The first micro-batch is refused, before anything is reported."""
    job = Prepared(accumulated=3)
    with Run(tmp_path, endless()) as run, Learner(job.model, job.optimizer, **run_settings(run)) as learner:
        batch, loss = next(job.batches())
        with pytest.raises(ValueError, match=r"this was a micro-batch.*AcceleratedLearner"):
            learner.step(tokens=count_tokens(batch), loss=loss)
        assert learner.stats().steps == learner.stats().tokens == 0


def test_tokens_of_all_micro_batches_are_reported_as_one_step(tmp_path):
    """12 batches of an epoch make steps of 5, 5 and 2: with accelerate the optimizer steps at the end of the data."""
    job = Prepared(accumulated=5)
    report: list[tuple[int, int]] = []
    with (
        Run(tmp_path, endless()) as run,
        AcceleratedLearner(job.accelerator, job.model, job.optimizer, **run_settings(run)) as learner,
    ):
        for batch, loss in job.batches(epochs=2):
            learner.step(tokens=count_tokens(batch), loss=loss)
            report.append((learner.stats().steps, learner.stats().tokens))
    counted = [4 * SHOWN[at % 3] for at in range(12)]
    expected, steps, tokens, pending = [], 0, 0, 0
    for at in range(24):
        pending += counted[at % 12]
        if at % 12 in (4, 9, 11):
            steps, tokens, pending = steps + 1, tokens + pending, 0
        expected.append((steps, tokens))
    assert report == expected
    assert steps == 6


def test_skipped_step_is_not_reported(tmp_path):
    """accelerate skips a step whose fp16 gradients overflow, so its tokens do not count."""
    job = Prepared()
    report = []
    with (
        Run(tmp_path, endless()) as run,
        AcceleratedLearner(job.accelerator, job.model, job.optimizer, **run_settings(run)) as learner,
    ):
        for number, (batch, loss) in enumerate(job.batches(epochs=1)):
            job.optimizer._is_overflow = number == 1
            learner.step(tokens=torch.tensor(count_tokens(batch)), loss=loss)  # a number that may be on a device
            report.append(learner.stats().tokens)
    assert report[:3] == [48, 48, 48 + 20], "the second batch has 28"
