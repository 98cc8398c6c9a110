"""torchtitan's Trainer on an island: a class before it, and nothing of torchtitan is imported here.

    class IslandTrainer(OnAnIsland, torchtitan.trainer.Trainer):
        atoll_schedule = staticmethod(cosine(warmup=0.01))

It looks at the trainer's `model_parts`, `optimizers`, `dataloader` and, where there are, `validator` and
`parallel_dims`, and puts itself around `train`, `batch_generator`, `forward_backward_step`, `train_step` and
`should_continue_training` (docs/torchtitan.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.integrations.batches import TokenCount
from atoll.integrations.data import go_to, place_of
from atoll.integrations.schedules import ProgressSchedule, Shape
from atoll.learner.api import Learner

Batches: TypeAlias = Iterator[tuple[dict[str, Tensor], Tensor]]

if TYPE_CHECKING:

    class _Trainer:
        """What of torchtitan's is used."""

        model_parts: list[torch.nn.Module]
        optimizers: Any
        dataloader: Any

        def train(self) -> None: ...

        def batch_generator(self, data_iterable: Any) -> Batches: ...

        def forward_backward_step(self, *args: Any, **kwargs: Any) -> Tensor: ...

        def train_step(self, data_iterator: Any) -> Any: ...

        def should_continue_training(self) -> bool: ...
else:
    _Trainer = object


class OnAnIsland(_Trainer):
    """Put it before torchtitan's Trainer. Two attributes may be set, in the class or before `train`.

    `atoll_settings`: arguments of `atoll.Learner`; what is not there is taken from the environment (ATOLL_SYNCER, ...).
    `atoll_schedule`: a rate by the progress of the run in place of torchtitan's schedule, which goes by own steps.
    """

    atoll_settings: Mapping[str, Any] = MappingProxyType({})
    atoll_schedule: Shape | None = None

    learner: Learner | None = None
    _rates: ProgressSchedule | None = None
    _counted: TokenCount | None = None  # of the batches since the last step
    _losses: Tensor | None = None  # sum over them
    _is_sum = False  # of tokens, and not a mean
    _is_in = False

    def train(self) -> None:
        try:
            super().train()
        except BaseException as wrong:
            self._leave(wrong)
            raise
        self._leave(None)

    def batch_generator(self, data_iterable: Any) -> Batches:
        """Joins: the trainer asks for its batches once, when its checkpoint is loaded and before the first of them."""
        self._join(data_iterable)
        self._counted = TokenCount()
        return self._counting(super().batch_generator(data_iterable), self._counted)

    def _counting(self, batches: Batches, counted: TokenCount) -> Batches:
        # Ranks of context parallelism read the same sequences, and all of them are asked.
        shared = getattr(getattr(self, "parallel_dims", None), "cp", 1)
        for inputs, labels in batches:
            counted.add({"labels": labels}, shared)
            yield inputs, labels

    def forward_backward_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().forward_backward_step(*args, **kwargs)
        # Newer trainers give the share of this batch in the mean over all ranks: here the sum is wanted.
        part = loss.detach() * kwargs.get("global_valid_tokens", 1)
        self._losses = part if self._losses is None else self._losses + part
        self._is_sum = "global_valid_tokens" in kwargs
        return loss

    def train_step(self, data_iterator: Any) -> Any:
        found = super().train_step(data_iterator)
        if self.learner is not None and self._is_in:
            assert self._counted is not None, "it has joined where it asks for batches"
            tokens, losses = self._counted.take(), self._losses
            self._losses = None
            if losses is not None and self._is_sum:
                losses = losses / tokens
            self.learner.step(tokens=tokens, loss=losses)
            if self._rates is not None:
                self._rates.set_now()
        return found

    def should_continue_training(self) -> bool:
        return not (self.learner is not None and self.learner.finished) and super().should_continue_training()

    # --------------------------------------------------------------------------------------------- joining, leaving

    def _join(self, loader: Any) -> None:
        model, optimizer = _one_of(self.model_parts, self.optimizers)
        settings = {"extra_state": lambda: place_of(loader)} if hasattr(loader, "load_state_dict") else {}
        self.learner = learner = Learner(model, optimizer, **(settings | dict(self.atoll_settings)))
        learner.__enter__()
        self._is_in = True
        if learner.restored_state is not None and "extra_state" not in self.atoll_settings and settings:
            go_to(loader, learner.restored_state)
        if self.atoll_schedule is not None:
            self._rates = ProgressSchedule(optimizer, _plain(self.atoll_schedule), learner)
        validator = getattr(self, "validator", None)
        if validator is not None:
            _show_published(validator, learner)

    def _leave(self, wrong: BaseException | None) -> None:
        if self.learner is not None and self._is_in:
            self._is_in = False
            self.learner.__exit__(None, wrong, None)


def _plain(shape: Shape) -> Shape:
    """A function in the body of a class becomes a method. One of progress alone was not meant to be one."""
    if isinstance(shape, MethodType) and len(inspect.signature(shape.__func__).parameters) == 1:
        found: Shape = shape.__func__
        return found
    return shape


def _one_of(parts: list[torch.nn.Module], optimizers: Any) -> tuple[torch.nn.Module, Optimizer]:
    """torchtitan's container has an optimizer for each part of the model, and is one itself, without any state."""
    held = list(getattr(optimizers, "optimizers", [optimizers]))
    if len(parts) != 1:
        raise ValueError(
            f"this rank has {len(parts)} parts of the model: stages of a pipeline cannot be an island yet; use FSDP and"
            " tensor parallelism, with pipeline_parallel_degree = 1"
        )
    if len(held) != 1:
        raise ValueError(
            f"the model has {len(held)} optimizers, and this trainer takes one: leave early_step_in_backward off, and"
            " use one optimizer with parameter groups"
        )
    return parts[0], held[0]


def _show_published(validator: Any, learner: Learner) -> None:
    own = validator.validate

    def validate(*args: Any, **kwargs: Any) -> Any:
        with learner.published():
            return own(*args, **kwargs)

    validator.validate = validate


__all__ = ["OnAnIsland"]
