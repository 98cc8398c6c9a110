"""Lightning's Trainer on an island: one callback.

    trainer = Trainer(max_epochs=-1, callbacks=[AtollCallback("head:7400")])
    trainer.fit(module, loader)

It joins when training starts, with everything in place: the strategy has set up model and optimizer, and a checkpoint
of Lightning's has been loaded. From then on the run says what the model is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.integrations.batches import TokenCounter, count_tokens
from atoll.integrations.data import advance_epoch, loader_position, restore_position
from atoll.integrations.schedules import ProgressSchedule
from atoll.integrations.settings import check_settings
from atoll.learner.api import Learner

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities import CombinedLoader
    from lightning.pytorch.utilities.exceptions import SIGTERMException
else:
    try:
        from lightning.pytorch import Callback, LightningModule, Trainer
        from lightning.pytorch.utilities import CombinedLoader
        from lightning.pytorch.utilities.exceptions import SIGTERMException
    except ImportError:  # the same under its older name
        from pytorch_lightning import Callback, LightningModule, Trainer
        from pytorch_lightning.utilities import CombinedLoader
        from pytorch_lightning.utilities.exceptions import SIGTERMException

FLAT_BUFFER_STRATEGIES = {"FSDPStrategy", "DeepSpeedStrategy"}
"""Strategies that keep parameters in flat buffers of their own, from which nobody can tell what is whose."""

USER_STATE, LOADER_POSITIONS, BATCHES_READ = "own", "places", "read"
"""What the callback keeps in a part of a snapshot: what the user asked for, the place of each loader, and how many
batches of the epoch were read by then."""


class LightningCallback(Callback):
    """Makes an island of this trainer.

    `syncer` and `settings` are those of `atoll.Learner` (token, keys, learner, run_directory and so on); what is not
    given is taken from the environment, as there. `tokens` counts those of a batch. Everything else is the trainer's:
    with `max_epochs=-1` there the budget of the run ends the training.

    - Each optimizer step is a step of the island, with the tokens and the mean loss of all batches that it had.
    - Schedules made by `progress_schedule` follow the run. The end of the run, or an operator's wish, stops the trainer.
    - Validation sees the published model, and checkpoints hold it (docs/lightning.md: what wins when one is loaded).
    - Loaders that know their place keep it through snapshots of the run.
    """

    def __init__(
        self, syncer: str | None = None, *, tokens: Callable[[Any], int] = count_tokens, **settings: Any
    ) -> None:
        check_settings(settings)
        self._settings: dict[str, Any] = {"syncer": syncer} | settings
        self._learner: Learner | None = None
        self._is_joined = False
        self._schedules: list[ProgressSchedule] = []
        self._tokens = TokenCounter(tokens)  # of the batches since the last optimizer step
        self._losses: list[Tensor] = []  # of the same
        self._steps = 0  # of the optimizer, by the trainer's count
        self._last_grad_scale: float | None = None  # of gradients, after the last step (fp16)
        self._positions_restored = False  # the places of loaders
        self._batches_read: int | None = None  # of the epoch in which it goes on, until the first batch is here
        self._prefetched_positions: list[
            Any
        ] = []  # places after the batches that the trainer has read and not yet trained
        self._published_scope: contextlib.ExitStack | None = None  # while the model has the published values

    @property
    def learner(self) -> Learner:
        """From the start of training on; it stays after the end, for its figures."""
        if self._learner is None:
            raise ValueError("the island has not joined yet: it does when Trainer.fit starts to train")
        return self._learner

    def take(self, count: int) -> tuple[int, ...]:
        """As `learner.take`, so that `leased_batches(dataset, callback, batch_size)` is a loader for `Trainer.fit`."""
        return self.learner.take(count)

    # ----------------------------------------------------------------------------------------------------- joining

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizer = _find_optimizer(trainer)
        asked = self._settings.get("extra_state")
        settings = self._settings | {"extra_state": lambda: self._extra_state(trainer, asked)}
        self._learner = learner = Learner(pl_module, optimizer, **settings)
        learner.__enter__()
        self._is_joined = True
        self._steps = trainer.global_step
        self._last_grad_scale = _grad_scale(trainer)
        self._reset_counts()
        self._positions_restored, self._batches_read = False, None
        self._restore_positions(trainer, learner.restored_state)
        schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
        self._schedules = [each for each in schedulers if isinstance(each, ProgressSchedule)]
        for schedule in self._schedules:
            schedule.follow(learner)
        self._patch_checkpoints(trainer, learner)
        if learner.finished:
            trainer.should_stop = True

    # ---------------------------------------------------------------------------------------------------- training

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._batches_read is not None:
            self._resume_batch_count(trainer, self._batches_read)
            self._batches_read = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_joined:
            self._count(pl_module, trainer, outputs, batch)
            if trainer.global_step != self._steps:  # otherwise gradients are accumulated
                self._step(trainer)
            if self._prefetched_positions:
                self._prefetched_positions = [*self._prefetched_positions[1:], _loader_positions(trainer)]

    def _count(self, module: LightningModule, trainer: Trainer, outputs: Any, batch: Any) -> None:
        self._tokens.add(batch)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # Lightning has divided it by the number of batches that it accumulates.
            parts = trainer.accumulate_grad_batches if module.automatic_optimization else 1
            self._losses.append(loss.detach().reshape(()) * parts)

    def _step(self, trainer: Trainer) -> None:
        learner = self.learner
        self._steps = trainer.global_step
        before, self._last_grad_scale = self._last_grad_scale, _grad_scale(trainer)
        if before is not None and self._last_grad_scale is not None and self._last_grad_scale < before:
            self._reset_counts()  # gradients have overflowed, and the step was left out: the trainer counts it all the same
            return
        tokens, losses = self._tokens.pop_total(), self._losses
        self._reset_counts()
        learner.step(tokens=tokens, loss=torch.stack(losses).mean() if losses else None)
        for schedule in self._schedules:
            schedule.update_rates()
        if learner.finished:
            trainer.should_stop = True

    def _reset_counts(self) -> None:
        self._tokens.reset()
        self._losses = []

    # -------------------------------------------------------------------------------------- the published model

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_joined and self._published_scope is None:
            self._published_scope = contextlib.ExitStack()
            self._published_scope.enter_context(self.learner.published())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore_own_values()

    def _restore_own_values(self) -> None:
        shown, self._published_scope = self._published_scope, None
        if shown is not None:
            shown.close()

    def _patch_checkpoints(self, trainer: Trainer, learner: Learner) -> None:
        """Checkpoints are to hold the model that was validated. The hook for callbacks is not called for those of
        weights only, so it is the strategy that gives another state. It does so beyond the end of training too:
        ModelCheckpoint comes last, and may save then, or after an exception."""
        self._unpatch_checkpoints(trainer)
        plain: Callable[[], dict[str, Any]] = trainer.strategy.lightning_module_state_dict

        def published() -> dict[str, Any]:
            if self._published_scope is not None:
                return plain()
            with learner.published():
                return {name: value.clone() if hasattr(value, "clone") else value for name, value in plain().items()}

        trainer.strategy.lightning_module_state_dict = published

    def _unpatch_checkpoints(self, trainer: Trainer) -> None:
        vars(trainer.strategy).pop("lightning_module_state_dict", None)

    # ---------------------------------------------------------------------------------------------- places of data

    def _extra_state(self, trainer: Trainer, asked: Callable[[], Any] | None) -> dict[str, Any]:
        places = self._prefetched_positions[0] if self._prefetched_positions else _loader_positions(trainer)
        read = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return {USER_STATE: asked() if asked is not None else None, LOADER_POSITIONS: places, BATCHES_READ: read}

    def _restore_positions(self, trainer: Trainer, restored: Any) -> None:
        """The trainer has begun to read already, at the place where the loaders were before."""
        fetcher = trainer.fit_loop._data_fetcher
        loaders = _loaders(trainer)
        places = restored[LOADER_POSITIONS] if isinstance(restored, dict) and LOADER_POSITIONS in restored else []
        if len(places) == len(loaders) and any(place is not None for place in places):
            for loader, place in zip(loaders, places, strict=True):
                if place is not None:
                    restore_position(loader, place)
            self._positions_restored = True
            if trainer.num_training_batches != float("inf"):
                self._batches_read = (
                    restored.get(BATCHES_READ, 0) % trainer.num_training_batches or None
                )  # after all of them: 0
            if fetcher is not None:
                iter(fetcher)
        # A trainer that does not know the number of batches reads one ahead: the loader's place is that of the future.
        ahead = len(getattr(fetcher, "batches", ()))
        self._prefetched_positions = (
            [_loader_positions(trainer)] * ahead if any(_is_stateful(loader) for loader in loaders) else []
        )

    def _resume_batch_count(self, trainer: Trainer, read: int) -> None:
        """Of its epoch the loader has only the rest. The trainer takes this batch for the first one, and would wait for
        as many as an epoch has: the last step of it would never be taken, and its gradients be thrown away."""
        fetcher, progress = trainer.fit_loop._data_fetcher, trainer.fit_loop.epoch_loop.batch_progress
        progress.current.ready = read + 1
        for stage in ("started", "processed", "completed"):
            setattr(progress.current, stage, read)
        if fetcher is not None and fetcher.length is not None:
            fetcher.fetched = read + 1
            progress.is_last_batch = fetcher.done = fetcher.fetched >= fetcher.length

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning does not number the epochs of datasets. One that went to a place needs it."""
        if pl_module.automatic_optimization:
            self._reset_counts()  # gradients of which no step was made by now are set to zero by the next epoch
        if self._positions_restored:
            for loader in _loaders(trainer):
                advance_epoch(loader)

    @property
    def restored_state(self) -> Any:
        """What `extra_state` had returned for the part from which this island has started, if it has."""
        kept = self.learner.restored_state
        return kept.get(USER_STATE) if isinstance(kept, dict) else None

    # ----------------------------------------------------------------------------------------------------- leaving

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Of SIGTERM the trainer makes an exception, perhaps before the batch that steps. That is no failure: where it
        # is a notice (`notice_s`), what was trained is merged before the island goes.
        self._leave(None if isinstance(exception, SIGTERMException) else exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave(None)
        self._unpatch_checkpoints(trainer)

    def _leave(self, wrong: BaseException | None) -> None:
        if not self._is_joined:
            return
        self._is_joined = False
        self._restore_own_values()
        self.learner.__exit__(None, wrong, None)


def _find_optimizer(trainer: Trainer) -> Optimizer:
    """The plain one: what `LightningModule.optimizers()` gives counts steps for the trainer."""
    strategy = type(trainer.strategy)
    if any(parent.__name__ in FLAT_BUFFER_STRATEGIES for parent in strategy.__mro__):
        raise ValueError(
            f"{strategy.__name__} puts parameters into flat buffers of its own, which cannot be shared with other"
            ' islands: use strategy="ddp", or ModelParallelStrategy with fully_shard in configure_model'
        )
    if len(trainer.optimizers) != 1:
        raise ValueError(
            f"this module has {len(trainer.optimizers)} optimizers, and the callback takes one: return one optimizer,"
            " with a parameter group for each of them, from configure_optimizers"
        )
    optimizer: Optimizer = trainer.optimizers[0]
    return optimizer


def _grad_scale(trainer: Trainer) -> float | None:
    """What gradients of fp16 are scaled by, so that they do not vanish: an overflow makes it smaller."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else None


def _loaders(trainer: Trainer) -> list[Any]:
    return list(CombinedLoader(trainer.train_dataloader, "sequential").flattened)


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _loader_positions(trainer: Trainer) -> list[Any]:
    return [loader_position(loader) if _is_stateful(loader) else None for loader in _loaders(trainer)]


AtollCallback = LightningCallback

__all__ = ["AtollCallback", "LightningCallback"]
