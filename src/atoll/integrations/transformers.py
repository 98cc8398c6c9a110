"""A callback that makes `transformers.Trainer` a learner."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from os import PathLike
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from atoll.integrations.batches import TokenCounter, count_tokens
from atoll.integrations.schedules import ProgressSchedule, StepScheduleAdapter
from atoll.integrations.settings import check_settings
from atoll.learner.api import Learner
from atoll.tensors.optimizers import was_step_skipped

log = logging.getLogger("atoll.transformers")


class AtollCallback(TrainerCallback):
    """Callback that makes a `transformers.Trainer` a learner of a run.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[AtollCallback(syncer="head:7400")])
        trainer.train()

    The learner joins when training begins, and the model takes the published values. One step of the optimizer is one
    step of the learner, with the tokens of all its micro-batches. Training stops when the run is over. A Trainer that
    has taken its `max_steps` leaves earlier, and the other learners continue. The Trainer evaluates and saves the
    published model (`Learner.published`), and trains its own. Its schedule follows the progress of the run, unless
    `follow_progress` is False: `max_steps` then is only its length.

    `tokens` counts a batch, from the arguments of the model's `forward`. The other arguments are those of
    `atoll.Learner`. Missing ones are read from the environment (ATOLL_SYNCER and others). Pass this callback last: an
    evaluation that a later callback requests uses the model that is trained.

    An exception or Ctrl-C that ends the process leaves the run. In a process that continues, such as a notebook, write
    `with AtollCallback(...) as atoll:` around `train()`, which leaves at once.
    """

    def __init__(
        self,
        syncer: str | None = None,
        token: str | None = None,
        *,
        keys: str | PathLike[str] | None = None,
        learner: int | None = None,
        run_directory: str | PathLike[str] | None = None,
        tokens: Callable[[Any], int] = count_tokens,
        follow_progress: bool = True,
        **settings: Any,
    ) -> None:
        check_settings(settings)
        self._settings = settings | {"keys": keys, "learner": learner, "run_directory": run_directory}
        self._syncer_arguments = (syncer, token)
        self._follow_progress = follow_progress
        self._learner: Learner | None = None
        self._is_joined = False
        self._hook: RemovableHandle | None = None
        self._schedule: StepScheduleAdapter | ProgressSchedule | None = None
        self._published_scope = ExitStack()  # open while the Trainer evaluates and saves published values
        self._tokens = TokenCounter(tokens)
        self._losses: list[Tensor] = []
        self._losses_are_shares = False  # the loss of a micro-batch is its share of one mean, not a mean

    @property
    def learner(self) -> Learner:
        """The learner of the current or the last training."""
        if self._learner is None:
            raise ValueError("there is no learner yet: it joins when the Trainer begins to train")
        return self._learner

    # ---------------------------------------------------------------------------------------------- joining and leaving

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._leave(RuntimeError("another training began"))  # leave an earlier training that an exception has ended
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        self._learner = Learner(model, optimizer, *self._syncer_arguments, **self._settings)
        self._learner.__enter__()
        self._is_joined = True
        atexit.register(self._leave_at_exit)
        count = torch.compiler.disable(self._count)  # type: ignore[no-untyped-call]
        self._hook = model.register_forward_hook(count, with_kwargs=True)
        self._reset_counts()
        self._attach_schedule(args, state, kwargs["lr_scheduler"])
        control.should_training_stop = self._learner.finished

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            # The Trainer has just loaded the best model, over the published values if the last action was an
            # evaluation.
            self.learner.published_values.keep_loaded()
        self._leave(None)

    def __enter__(self) -> AtollCallback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    def _leave_at_exit(self) -> None:
        """Leave a training that an uncaught exception or the end of the process has ended."""
        self._leave(getattr(sys, "last_value", None) or SystemExit("the process ends"))

    def _leave(self, error: BaseException | None) -> None:
        if not self._is_joined:
            return
        self._is_joined = False
        atexit.unregister(self._leave_at_exit)
        self._published_scope.close()
        if self._hook is not None:
            self._hook.remove()
        if isinstance(self._schedule, StepScheduleAdapter):
            self._schedule.restore()
        self._schedule = None
        self.learner.__exit__(None, error, None)

    # --------------------------------------------------------------------------------------------------------- training

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Count a forward pass of the training. A step has one for each accumulated micro-batch."""
        if not (module.training and torch.is_grad_enabled()):
            return
        batch = kwargs if any(isinstance(value, Tensor) for value in kwargs.values()) else args
        self._tokens.add(batch)
        loss = output.get("loss") if isinstance(output, dict) else None
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())
            self._losses_are_shares = kwargs.get("num_items_in_batch") is not None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._published_scope.close()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report the step, before the Trainer logs, evaluates and saves."""
        if not self._is_joined:
            return
        tokens, loss = self._tokens.pop_total(), self._mean_loss(args)
        self._reset_counts()
        optimizer: Optimizer = kwargs["optimizer"]
        if not was_step_skipped(optimizer):
            if not tokens:
                raise ValueError(
                    "a step was taken without a call of the model's forward, so its tokens were not counted: call the "
                    "model itself in compute_loss, and not one of its parts"
                )
            self.learner.step(tokens, loss)
            if self._schedule is not None:
                self._schedule.update_rates()
        if self.learner.finished:
            self._leave(None)  # the model has the final values; the Trainer may still load its best model over them
            control.should_training_stop = True
        self._swap_in_published(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._published_scope.close()
        self._swap_in_published(control)

    def _swap_in_published(self, control: TrainerControl) -> None:
        if self._is_joined and (control.should_evaluate or control.should_save):
            self._published_scope.enter_context(self.learner.published())

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._published_scope.close()

    def _mean_loss(self, args: TrainingArguments) -> Tensor | None:
        if not self._losses:
            return None
        total = torch.stack(self._losses).sum()
        if not self._losses_are_shares:
            return total / len(self._losses)
        everywhere = args.average_tokens_across_devices and args.world_size > 1
        return total * args.world_size if everywhere else total

    def _reset_counts(self) -> None:
        self._tokens.reset()
        self._losses = []

    def _attach_schedule(self, args: TrainingArguments, state: TrainerState, scheduler: Any) -> None:
        scheduler = getattr(scheduler, "scheduler", scheduler)  # unwrap accelerate's scheduler
        if isinstance(scheduler, ProgressSchedule):
            scheduler.follow(self.learner)
            self._schedule = scheduler
        elif not self._follow_progress:
            return
        elif isinstance(scheduler, LambdaLR):
            warmup_steps = args.get_warmup_steps(state.max_steps)
            self._schedule = StepScheduleAdapter(scheduler, self.learner, state.max_steps, warmup_steps)
        else:
            log.warning("%s follows the steps of this learner, not the run's progress", type(scheduler).__name__)


__all__ = ["AtollCallback"]
