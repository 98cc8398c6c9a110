"""A callback that makes Lightning's Trainer a learner.

    trainer = Trainer(max_epochs=-1, callbacks=[AtollCallback("head:7400")])
    trainer.fit(module, loader)

The learner joins when training starts. The strategy has then set up model and optimizer, and a checkpoint of Lightning
has been loaded. From then on the run determines the model.
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
    except ImportError:  # the older name of the package
        from pytorch_lightning import Callback, LightningModule, Trainer
        from pytorch_lightning.utilities import CombinedLoader
        from pytorch_lightning.utilities.exceptions import SIGTERMException

FLAT_BUFFER_STRATEGIES = {"FSDPStrategy", "DeepSpeedStrategy"}
"""Strategies with flat parameter buffers, in which the values of one parameter cannot be located."""

USER_STATE, LOADER_POSITIONS, BATCHES_READ = "own", "places", "read"
"""Keys of the callback's state in a part of a snapshot: the user's state, the position of each loader, and the number
of batches of the epoch that were read."""


class LightningCallback(Callback):
    """Callback that makes this trainer a learner.

    `syncer` and `settings` are arguments of `atoll.Learner` (token, keys, learner, run_directory and so on). Missing
    ones are read from the environment. `tokens` counts the tokens of a batch. All other options are the trainer's: with
    `max_epochs=-1` the budget of the run ends the training.

    - Each optimizer step is a step of the learner, with the tokens and the mean loss of all its batches.
    - Schedules made by `progress_schedule` follow the run. The end of the run, or a drain, stops the trainer.
    - Validation uses the published model, and checkpoints contain it (docs/lightning.md describes the loading of
    checkpoints).
    - The positions of stateful loaders are stored in snapshots of the run.
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
        self._losses: list[Tensor] = []  # of the same batches
        self._steps = 0  # optimizer steps that the trainer has counted
        self._last_grad_scale: float | None = None  # scale of gradients after the last step (fp16)
        self._positions_restored = False  # the loaders have resumed at stored positions
        self._batches_read: int | None = None  # of the resumed epoch, until the first batch arrives
        self._prefetched_positions: list[Any] = []  # positions after each batch that was read and is not trained yet
        self._published_scope: contextlib.ExitStack | None = None  # open while the model has the published values

    @property
    def learner(self) -> Learner:
        """The learner, from the start of training on. It remains after the end, for its statistics."""
        if self._learner is None:
            raise ValueError("the learner has not joined yet: it joins when Trainer.fit starts to train")
        return self._learner

    def take(self, count: int) -> tuple[int, ...]:
        """Return `learner.take`, so that `leased_batches(dataset, callback, batch_size)` is a loader for
        `Trainer.fit`."""
        return self.learner.take(count)

    # ----------------------------------------------------------------------------------------------------- joining

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizer = _find_optimizer(trainer)
        extra_state = self._settings.get("extra_state")
        settings = self._settings | {"extra_state": lambda: self._extra_state(trainer, extra_state)}
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
            self._reset_counts()  # gradients overflowed and the step was skipped, but the trainer has counted it
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
        scope, self._published_scope = self._published_scope, None
        if scope is not None:
            scope.close()

    def _patch_checkpoints(self, trainer: Trainer, learner: Learner) -> None:
        """Let checkpoints contain the model that was validated.

        The callback hook is not called for checkpoints of weights only, so the method of the strategy is replaced. It
        stays replaced after the end of training: ModelCheckpoint comes last, and may save then, or after an exception.
        """
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

    # ------------------------------------------------------------------------------------------- positions of loaders

    def _extra_state(self, trainer: Trainer, user_state: Callable[[], Any] | None) -> dict[str, Any]:
        positions = self._prefetched_positions[0] if self._prefetched_positions else _loader_positions(trainer)
        read = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        stored = user_state() if user_state is not None else None
        return {USER_STATE: stored, LOADER_POSITIONS: positions, BATCHES_READ: read}

    def _restore_positions(self, trainer: Trainer, restored: Any) -> None:
        """Restore the loaders. The trainer has already begun to read at their old positions."""
        fetcher = trainer.fit_loop._data_fetcher
        loaders = _loaders(trainer)
        positions = restored[LOADER_POSITIONS] if isinstance(restored, dict) and LOADER_POSITIONS in restored else []
        if len(positions) == len(loaders) and any(position is not None for position in positions):
            for loader, position in zip(loaders, positions, strict=True):
                if position is not None:
                    restore_position(loader, position)
            self._positions_restored = True
            if trainer.num_training_batches != float("inf"):
                self._batches_read = (
                    restored.get(BATCHES_READ, 0) % trainer.num_training_batches or None
                )  # 0 after the last batch
            if fetcher is not None:
                iter(fetcher)
        # A trainer that does not know the number of batches reads one ahead, so the loader's position is too far.
        ahead = len(getattr(fetcher, "batches", ()))
        self._prefetched_positions = (
            [_loader_positions(trainer)] * ahead if any(_is_stateful(loader) for loader in loaders) else []
        )

    def _resume_batch_count(self, trainer: Trainer, read: int) -> None:
        """Set the trainer's batch count in a resumed epoch, of which the loader yields only the rest.

        The trainer would count from the first batch and wait for a full epoch. Then the last step of the epoch would
        never be taken, and its gradients would be lost.
        """
        fetcher, progress = trainer.fit_loop._data_fetcher, trainer.fit_loop.epoch_loop.batch_progress
        progress.current.ready = read + 1
        for stage in ("started", "processed", "completed"):
            setattr(progress.current, stage, read)
        if fetcher is not None and fetcher.length is not None:
            fetcher.fetched = read + 1
            progress.is_last_batch = fetcher.done = fetcher.fetched >= fetcher.length

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Advance the epoch of resumed datasets, because Lightning does not number their epochs."""
        if pl_module.automatic_optimization:
            self._reset_counts()  # the next epoch zeroes gradients without a step
        if self._positions_restored:
            for loader in _loaders(trainer):
                advance_epoch(loader)

    @property
    def restored_state(self) -> Any:
        """Return value of `extra_state` in the part from which this learner has started, or None."""
        state = self.learner.restored_state
        return state.get(USER_STATE) if isinstance(state, dict) else None

    # ----------------------------------------------------------------------------------------------------- leaving

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # SIGTERM becomes an exception in the trainer, perhaps before the batch that steps. It is not a failure: with a
        # preemption notice (`notice_s`) the unmerged work is merged before the learner leaves.
        self._leave(None if isinstance(exception, SIGTERMException) else exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave(None)
        self._unpatch_checkpoints(trainer)

    def _leave(self, error: BaseException | None) -> None:
        if not self._is_joined:
            return
        self._is_joined = False
        self._restore_own_values()
        self.learner.__exit__(None, error, None)


def _find_optimizer(trainer: Trainer) -> Optimizer:
    """Return the plain optimizer, not the wrapper of `LightningModule.optimizers()`, which counts steps."""
    strategy = type(trainer.strategy)
    if any(parent.__name__ in FLAT_BUFFER_STRATEGIES for parent in strategy.__mro__):
        raise ValueError(
            f"{strategy.__name__} stores parameters in its own flat buffers, which cannot be merged with other"
            ' learners: use strategy="ddp", or ModelParallelStrategy with fully_shard in configure_model'
        )
    if len(trainer.optimizers) != 1:
        raise ValueError(
            f"this module has {len(trainer.optimizers)} optimizers, and the callback takes one: return one optimizer,"
            " with a parameter group for each of them, from configure_optimizers"
        )
    optimizer: Optimizer = trainer.optimizers[0]
    return optimizer


def _grad_scale(trainer: Trainer) -> float | None:
    """Return the factor by which fp16 gradients are scaled against underflow. An overflow reduces it."""
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
