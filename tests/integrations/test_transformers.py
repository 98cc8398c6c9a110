"""`AtollCallback`: a transformers.Trainer as a learner, including its evaluations and checkpoints."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

import atoll
from atoll.integrations import transformers as integration
from atoll.integrations.transformers import AtollCallback
from atoll.tensors.plan import named_tensors
from tests.integrations.small_texts import LENGTH, arguments, gpt2, texts, trainer
from tests.learner.runs import LIMIT_S, Run, config, endless
from tests.learner.test_published import are_published, same

pytestmark = pytest.mark.usefixtures("no_leaked_threads", "one_thread")

ROOT = Path(__file__).resolve().parents[2]


def callback(run: Run, number: int | None = 1, **settings: Any) -> AtollCallback:
    return AtollCallback(run.address, learner=number, run_directory=run.directory, join_timeout_s=LIMIT_S, **settings)


def values(model: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_tensors(model).items()}


class Watch(TrainerCallback):
    """Callback that calls a function with the model and the state at each of the named events."""

    def __init__(self, **functions: Any) -> None:
        self._functions = functions

    def __getattribute__(self, name: str) -> Any:
        functions = object.__getattribute__(self, "_functions") if not name.startswith("_") else {}
        if name in functions:
            return lambda args, state, control, **kwargs: functions[name](kwargs["model"], state)
        return object.__getattribute__(self, name)


# --------------------------------------------------------------------------------------------------------------------
# Training


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_trainer_trains_to_the_end_of_the_run_and_every_token_in_a_loss_is_counted(tmp_path, accumulated):
    """10 batches of an epoch are not a multiple of 3: the last step of an epoch has one batch."""
    with Run(tmp_path / "run", config(budget_merges=9)) as run:
        atoll_ = callback(run)
        steps: list[int] = []
        watch = Watch(on_step_end=lambda model, state: steps.append(atoll_.learner.stats().tokens))
        island = trainer(
            tmp_path,
            atoll_,
            watch,
            data=texts(40, shown=7),
            gradient_accumulation_steps=accumulated,
            lr_scheduler_type="linear",
        )
        done = island.train()
        assert atoll_.learner.finished
        assert done.global_step < 1000, "it did not end with the budget of the run"
        batches = [min(accumulated, 10 - at) for at in range(0, 10, accumulated)]
        expected = [batches[at % len(batches)] * 4 * 7 for at in range(len(steps))]
        total = 0
        for at, tokens in enumerate(steps[:-1]):  # the last one came after the end of the run
            total += expected[at]
            assert tokens == total, f"step {at + 1}"
        assert run.syncer.expect("ended") is True
        published = load_file(tmp_path / "run/published.safetensors")
        assert same(published, values(island.model))
        assert island.model.lm_head.weight is island.model.transformer.wte.weight, "the head is no longer tied"


def weights_after(folder: Path, callbacks: list[Any], **changes: Any) -> dict[str, Tensor]:
    settings = {
        "bf16": True,
        "max_grad_norm": 0.3,
        "gradient_accumulation_steps": 2,
        "weight_decay": 0.1,
        "max_steps": 7,
    }
    island = trainer(folder, *callbacks, **(settings | changes))
    island.train()
    return values(island.model)


@pytest.mark.long
def test_training_without_merges_is_bitwise_the_same(tmp_path):
    """The callback must not affect mixed precision, clipping, accumulation, weight decay and the schedule."""
    with Run(tmp_path / "run", endless(quorum=2)) as run:
        alone = weights_after(tmp_path, [], lr_scheduler_type="cosine", warmup_steps=2)
        with_atoll = weights_after(
            tmp_path, [callback(run, follow_progress=False)], lr_scheduler_type="cosine", warmup_steps=2
        )
        assert same(alone, with_atoll)
        other = weights_after(tmp_path, [], lr_scheduler_type="cosine", warmup_steps=2, max_grad_norm=0.2)
        assert not same(alone, other), "the comparison does not detect another clipping"


def test_schedule_follows_the_progress_of_the_run(tmp_path):
    """The Trainer could take 100,000 steps. By its own count the cosine schedule would not move."""
    rates: list[tuple[float, float]] = []
    with Run(tmp_path / "run", config(budget_merges=12)) as run:
        atoll_ = callback(run)

        def record(model: Any, state: Any) -> None:
            if not atoll_.learner.finished:
                rates.append((atoll_.learner.progress, island.optimizer.param_groups[0]["lr"]))

        watch = Watch(on_step_begin=record)
        island = trainer(tmp_path, atoll_, watch, lr_scheduler_type="cosine", warmup_steps=2)
        island.train()
    assert rates[:2] == [(0.0, 0.0), (0.0, 0.5e-2)], "the warm-up must count own steps"
    assert any(0.2 < progress < 0.8 for progress, _ in rates)
    for progress, rate in rates[2:]:
        share = max(0.0, round(progress * 100_000) - 2) / (100_000 - 2)
        assert rate == pytest.approx(1e-2 * 0.5 * (1 + math.cos(math.pi * share)))


def test_step_without_counted_tokens_is_refused(tmp_path):
    class Odd(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model.transformer(inputs["input_ids"])[0].square().mean()

    with Run(tmp_path / "run", endless()) as run, callback(run) as atoll_:
        island = Odd(gpt2(), arguments(tmp_path), train_dataset=texts(64), callbacks=[atoll_])
        with pytest.raises(ValueError, match="without a call of the model's forward"):
            island.train()


def test_unknown_setting_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match=r"no setting 'join_timeout'; use one of .*join_timeout_s"):
        AtollCallback("head:7400", join_timeout=3)


def test_callback_has_no_argument_that_the_trainer_has():
    own = set(inspect.signature(AtollCallback.__init__).parameters) | set(inspect.signature(atoll.Learner).parameters)
    theirs = {field.name for field in dataclasses.fields(TrainingArguments)} | set(
        inspect.signature(Trainer).parameters
    )
    assert theirs & (own - {"self", "model", "optimizer"}) == set()


# --------------------------------------------------------------------------------------------------------------------
# Evaluation, checkpoints and continued training


class ShowsNothing(AtollCallback):
    """Planted bug: evaluation uses the learner's own weights."""

    def _swap_in_published(self, control: Any) -> None: ...


@pytest.mark.parametrize("kind", [AtollCallback, ShowsNothing])
def test_published_model_is_evaluated_and_saved_and_training_continues_with_its_own(tmp_path, kind):
    seen: list[bool] = []
    data = texts(8, seed=5)
    with Run(tmp_path / "run", endless()) as run:
        atoll_ = kind(run.address, learner=1, run_directory=run.directory, join_timeout_s=LIMIT_S)

        def evaluated(model: Any, state: Any) -> None:
            seen.append(are_published(run.directory, values(model)))

        def saved(model: Any, state: Any) -> None:
            model_file = tmp_path / f"checkpoint-{state.global_step}" / "model.safetensors"
            found = load_file(model_file)
            found["lm_head.weight"] = found.pop("transformer.wte.weight")
            seen.append(are_published(run.directory, found))

        watch = Watch(on_prediction_step=evaluated, on_save=saved)
        steps = {"eval_strategy": "steps", "eval_steps": 10, "save_strategy": "steps", "save_steps": 15}
        island = trainer(tmp_path, atoll_, watch, evaluated=data, per_device_eval_batch_size=8, max_steps=60, **steps)
        island.train()
        assert len(seen) == 10
        assert all(seen) is (kind is AtollCallback), seen
        assert not are_published(run.directory, values(island.model)), "its own weights are not restored"
        assert not atoll_.learner.finished, "the run ended before the steps of the Trainer"
        run.until(run.learner(1, standing="left"), "it has left")


# The model with the highest loss counts as the best, so that the best is not the last.
BEST: dict[str, Any] = {
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
    "save_only_model": True,
}


@pytest.mark.parametrize("saved", ["epoch", "best"])
def test_best_model_stays_when_training_ends_with_an_evaluation(tmp_path, saved):
    """After its last epoch the Trainer evaluates, loads the best model and ends."""
    with Run(tmp_path / "run", endless()) as run:
        steps = {"eval_strategy": "epoch", "save_strategy": saved, "num_train_epochs": 3, "max_steps": -1}
        island = trainer(tmp_path, callback(run), data=texts(12), evaluated=texts(8, seed=5), **steps, **BEST)
        island.train()
        best = Path(str(island.state.best_model_checkpoint))
        assert best.name == "checkpoint-3", "not the checkpoint of the first epoch"
        loaded = load_file(best / "model.safetensors")["transformer.wte.weight"]
        assert torch.equal(loaded, island.model.lm_head.weight.detach())


@pytest.mark.long
def test_the_best_model_that_the_trainer_loads_at_the_end_stays(tmp_path):
    with Run(tmp_path / "run", config(budget_merges=12)) as run:
        steps = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        island = trainer(tmp_path, callback(run), evaluated=texts(8, seed=5), **steps, **BEST)
        island.train()
        best = load_file(Path(str(island.state.best_model_checkpoint)) / "model.safetensors")
        assert torch.equal(best["transformer.wte.weight"], island.model.lm_head.weight.detach())
        assert run.syncer.expect("ended") is True
        final = load_file(tmp_path / "run/published.safetensors")
        assert not torch.equal(best["transformer.wte.weight"], final["lm_head.weight"]), (
            "the best model equals the final one"
        )


class UntilMerged(TrainerCallback):
    """Save a checkpoint and end the training when the run has this many merges, however fast steps are."""

    def __init__(self, run: Run, merges: int) -> None:
        self._run, self._merges = run, merges

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_save = self._run.status()["merges"] >= self._merges


@pytest.mark.long
def test_a_trainer_that_resumes_takes_the_model_of_the_run_and_all_else_of_its_checkpoint(tmp_path):
    """No learner is left to send optimizer state, and this learner stores no parts."""
    with Run(tmp_path / "run", endless()) as run:

        def island(number: int, merges: int, *watch: Any) -> Any:
            atoll_ = AtollCallback(run.address, learner=number, join_timeout_s=LIMIT_S)
            return trainer(tmp_path / str(number), UntilMerged(run, merges), atoll_, *watch, model=gpt2(number))

        steps = island(1, 6).train().global_step
        run.until(run.learner(1, standing="left"), "it has left")
        island(2, 12).train()  # the run goes on meanwhile
        run.until(run.learner(2, standing="left"), "it has left")
        seen: list[Any] = []

        def record(model: Any, state: Any) -> None:
            moments = {float(each["step"]) for each in resumed.optimizer.state.values()}
            seen.append((state.global_step, moments, are_published(run.directory, values(model))))

        resumed = island(1, 18, Watch(on_train_begin=record))
        done = resumed.train(resume_from_checkpoint=True)
        assert seen == [(steps, {float(steps)}, True)]
        assert done.global_step > steps
        checkpoint = load_file(tmp_path / f"1/checkpoint-{steps}/model.safetensors")
        assert not are_published(run.directory, checkpoint | {"lm_head.weight": checkpoint["transformer.wte.weight"]})


# --------------------------------------------------------------------------------------------------------------------
# Unplanned ends


def test_an_exception_leaves_the_run_at_once_in_a_with_block(tmp_path):
    def fail(model: Any, state: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt

    with Run(tmp_path / "run", endless()) as run:
        with pytest.raises(KeyboardInterrupt), callback(run) as atoll_:
            trainer(tmp_path, atoll_, Watch(on_step_begin=fail)).train()
        run.until(run.learner(1, standing="left"), "it has left")
        assert run.log_lines(run.syncer, "its loop ended with KeyboardInterrupt")


ENDS = """
import sys
from pathlib import Path
from tests.integrations.small_texts import trainer
from tests.integrations.test_transformers import AtollCallback, Watch

def fail(model, state):
    if state.global_step == 3:
        raise ArithmeticError("an error in a callback of the user")

trainer(Path(sys.argv[1]), AtollCallback(), Watch(on_step_begin=fail)).train()
"""


@pytest.mark.long
def test_an_exception_that_ends_the_process_leaves_the_run(tmp_path):
    """The script has no `with` block and takes all settings from the environment."""
    with Run(tmp_path / "run", endless()) as run:
        environment = os.environ | {"ATOLL_SYNCER": run.address, "ATOLL_LEARNER": "1", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        done = subprocess.run(
            [sys.executable, "-c", ENDS, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        assert "an error in a callback of the user" in done.stderr
        run.until(run.learner(1, standing="left"), "it has left")
        assert run.log_lines(run.syncer, "its loop ended with ArithmeticError")


def test_trainer_stops_with_the_final_model_when_an_operator_ends_the_run(tmp_path):
    with Run(tmp_path / "run", endless()) as run:
        atoll_ = callback(run)
        end_run = Watch(on_step_end=lambda model, state: run.end() if state.global_step == 5 else None)
        island = trainer(tmp_path, atoll_, end_run)
        done = island.train()
        assert atoll_.learner.finished
        assert done.global_step < 10_000
        assert run.syncer.expect("ended") is True
        assert same(load_file(tmp_path / "run/published.safetensors"), values(island.model))


@pytest.mark.long
def test_finished_run_provides_its_model_and_nothing_is_trained(tmp_path, monkeypatch):
    class JoinsAtTheEnd(atoll.Learner):
        def __enter__(self) -> atoll.Learner:
            super().__enter__()
            run.end()
            while not self.finished:
                self.step(1)
            return self

    monkeypatch.setattr(integration, "Learner", JoinsAtTheEnd)
    starts: list[tuple[bool, int]] = []
    with Run(tmp_path / "run", endless()) as run:
        late = callback(run)
        record = RecordControl(
            lambda control: starts.append((control.should_training_stop, late.learner.stats().steps))
        )
        island = trainer(tmp_path, late, record, max_steps=50)
        done = island.train()
        assert starts == [(True, late.learner.stats().steps)]
        assert done.global_step <= 1, "the Trainer checks the flag after its first step"
        assert run.syncer.expect("ended") is True
        assert same(load_file(tmp_path / "run/published.safetensors"), values(island.model))


class RecordControl(TrainerCallback):
    """Record the control flags that a Trainer gets at its start."""

    def __init__(self, record: Any) -> None:
        self._record = record

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record(control)


def test_skipped_step_is_not_reported(tmp_path):
    """The step is skipped, as on an overflow of fp16 gradients."""
    with Run(tmp_path / "run", endless()) as run:
        atoll_ = callback(run)

        def overflow(model: Any, state: Any) -> None:
            island.optimizer._is_overflow = state.global_step == 1  # in the second step

        island = trainer(tmp_path, atoll_, Watch(on_optimizer_step=overflow), max_steps=4)
        island.train()
        assert atoll_.learner.stats().steps == 3
        assert atoll_.learner.stats().tokens == 3 * 4 * LENGTH


def test_tokens_may_be_counted_by_a_custom_function(tmp_path):
    with Run(tmp_path / "run", endless()) as run:
        atoll_ = callback(run, tokens=lambda batch: 2 * batch["input_ids"].numel())
        trainer(tmp_path, atoll_, max_steps=3).train()
        assert atoll_.learner.stats().tokens == 3 * 2 * 4 * LENGTH
