"""Checks of the training loop of a script, at every call of `learner.step()`.

`LoopCheck` warns about two mistakes that raise no error: a call of `learner.step()` or `optimizer.step()` is missing,
or `learner.step()` is called after every micro-batch. A hook counts the steps of the optimizers. It cannot count
compiled steps, steps of optimizers that the learner was not given, and parameters that a script updates directly. So a
call of `learner.step()` counts as one without training only if no parameter has changed since the call before.

`ParameterCheck` refuses a model that has changed. The set of merged parameters is fixed at the join. A parameter that
is unfrozen, added or replaced later would be trained and never merged. One check of all parameters and modules takes
about 0.3 ms for 1,600 parameters in 1,100 modules, so it runs every 32 steps (10 us per step), and whenever the number
of the optimizer's parameters has changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.tensors.optimizers import Optimizers, as_optimizer_tuple
from atoll.tensors.plan import named_tensors
from atoll.tensors.sharding import is_sharded, local_tensor

MAX_UNREPORTED_STEPS = 128
"""Steps of one optimizer without a call of `learner.step()` before the warning. A GAN may train its critic 100 times
for one step of the generator."""

CALLS_BEFORE_WARNING = 16
"""Calls of `learner.step()` without an optimizer step before parameters are compared, and again before the warning: a
gradient scaler (fp16) skips about as many steps when training starts. The same number of consecutive calls with an
optimizer step resets the count."""

SAMPLE_VALUES = 1024
"""Values of each parameter that are compared."""

CHECK_INTERVAL_STEPS = 32
"""Steps between two checks of `ParameterCheck`."""

FROZEN_STEPS_BEFORE_WARNING = 100
"""Steps for which a parameter may be frozen without a warning: a script may train two halves of a model alternately."""


class LoopCheck:
    """Counter of optimizer steps between calls of `learner.step()`. It logs each kind of mistake once."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], is_finished: Callable[[], bool], log: logging.Logger
    ) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._is_finished = is_finished
        self._log = log
        self._steps = 0  # steps of all optimizers since the last call of learner.step()
        self._max_steps: float = MAX_UNREPORTED_STEPS * len(optimizers)  # steps without a call before the warning
        self._was_called = False
        self._idle_calls = 0  # calls of learner.step() without a counted optimizer step
        self._busy_calls = 0  # calls with a counted optimizer step, since the first idle call
        self._consecutive_busy_calls = 0
        self._unchanged_calls = 0  # idle calls since a parameter has changed
        self._sample: list[Tensor] | None = None
        self._checks_calls = True
        self._hooks = []
        for optimizer in optimizers:
            with suppress(AttributeError):  # a wrapper that has not called Optimizer.__init__ has no hooks
                self._hooks.append(optimizer.register_step_post_hook(self._count))

    def _count(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return  # in a compiled step a counter would cause a recompilation at each step
        self._steps += 1
        if self._steps == self._max_steps and not self._is_finished():
            self._max_steps = math.inf  # it is logged once
            self._log.warning(
                "learner.step() was not called during the last %d optimizer steps: the work of this learner is not"
                " merged; call learner.step(tokens=...) after every optimizer.step()",
                self._steps,
            )

    def begin_call(self) -> None:
        """Check at the start of `learner.step()`, before anything is copied or adopted."""
        self._was_called = True
        if self._steps:
            # A loop with many optimizer steps for each call does so on purpose: only a much longer gap is a mistake.
            self._max_steps = max(self._max_steps, 4 * self._steps)
            self._steps = 0
            if self._idle_calls:
                self._count_busy_call()
        elif self._checks_calls:
            self._idle_calls += 1
            self._consecutive_busy_calls = 0
            self._compare()

    def _count_busy_call(self) -> None:
        self._busy_calls += 1
        self._consecutive_busy_calls += 1
        if self._consecutive_busy_calls == CALLS_BEFORE_WARNING:
            self._idle_calls = self._busy_calls = self._unchanged_calls = 0
            self._sample = None

    def end_call(self) -> None:
        """Sample the parameters at the end of `learner.step()`: until the next call, only training changes them."""
        if self._checks_calls and self._idle_calls >= CALLS_BEFORE_WARNING:
            self._sample = self._take_sample()

    def _compare(self) -> None:
        if self._sample is None:
            return
        if not all(map(torch.equal, self._sample, self._take_sample())):
            self._checks_calls = False  # this loop trains in a way that the hook does not count
            self._sample = None
            return
        self._unchanged_calls += 1
        if self._unchanged_calls < CALLS_BEFORE_WARNING:
            return
        self._checks_calls = False
        self._sample = None
        if self._busy_calls:
            self._log.warning(
                "learner.step() was called %d times for %d optimizer steps: it looks like one call for every"
                " micro-batch, so that merges are scheduled too early; call it once after every optimizer.step(), with"
                " the tokens of all its micro-batches",
                self._idle_calls + self._busy_calls,
                self._busy_calls,
            )
        else:
            self._log.warning(
                "no parameter has changed during the last %d calls of learner.step(): optimizer.step() was not called"
                " on the optimizer that was given to atoll.Learner, or a gradient scaler skips every step; call"
                " learner.step() once after every optimizer.step(), not after every micro-batch",
                self._idle_calls,
            )

    @torch.no_grad()
    def _take_sample(self) -> list[Tensor]:
        samples = [local_tensor(parameter.detach()).reshape(-1)[:SAMPLE_VALUES] for parameter in self._parameters]
        return [values.clone() for values in samples]

    def close(self, ended_well: bool) -> None:
        """Remove the hooks. Warn if a loop, however short, has ended without any call."""
        for hook in self._hooks:
            hook.remove()
        if ended_well and self._steps and not self._was_called and not self._is_finished():
            self._log.warning(
                "the loop has ended after %d optimizer steps without a call of learner.step(): none of them was merged;"
                " call learner.step(tokens=...) after every optimizer.step()",
                self._steps,
            )


class ParameterCheck:
    """Check that the parameters of one model are those of the join. Only the training thread uses it."""

    def __init__(self, model: nn.Module, optimizers: Optimizers, log: logging.Logger) -> None:
        self._log = log
        self._model = model
        parameters = {name: each for name, each in named_tensors(model).items() if isinstance(each, nn.Parameter)}
        self._names = tuple(parameters)
        self._parameters = tuple(parameters.values())
        self._known = {id(each): each for each in self._parameters}
        self._trained_at_join = self._trained_now()
        self._optimizers = as_optimizer_tuple(optimizers)
        self._parameter_count = self._count()
        self._steps = 0
        self._steps_until_check = 0  # steps until the next check for frozen parameters
        self._is_logged = False
        self._frozen_for: dict[str, int] = {}  # consecutive steps since it was frozen

    def _check_objects(self) -> None:
        """Raise ValueError if the model trains a parameter that was not in it at the join.

        Objects are compared, not names: a module that was wrapped has other names, and its parameters are merged.
        """
        waiting: list[nn.Module | None] = [self._model]
        current: list[nn.Parameter | None] = []
        while waiting:
            module = waiting.pop()
            if module is not None:
                current += module._parameters.values()
                waiting += module._modules.values()
        new = {id(each): each for each in current if each is not None and id(each) not in self._known}
        if not any(each.requires_grad for each in new.values()):
            return
        known = dict(zip(self._names, self._parameters, strict=True))
        for name, each in named_tensors(self._model).items():
            if id(each) in new and each.requires_grad:
                before = known.get(name)
                if before is None or not is_sharded(before):
                    raise ValueError(_changed_message(name, "added" if before is None else "replaced"))
                assert isinstance(each, nn.Parameter)
                self._known[id(each)] = each  # FSDP2 replaces the sharded parameter by the gathered one

    def _trained_now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]

    def _count(self) -> int:
        return sum([len(group["params"]) for each in self._optimizers for group in each.param_groups])

    def check(self) -> None:
        """Check at every step. Raise ValueError if a parameter was unfrozen, added or replaced.

        A parameter that was frozen and stays frozen is logged once: no training is lost.
        """
        before, self._parameter_count = self._parameter_count, self._count()
        if self._steps % CHECK_INTERVAL_STEPS == 0 or self._parameter_count != before:
            self._check_objects()
        self._steps += 1
        if self._steps_until_check and self._parameter_count == before:
            self._steps_until_check -= 1
            return
        now, frozen_for = self._trained_now(), {}
        if now != self._trained_at_join:
            for name, is_trained, was_trained in zip(self._names, now, self._trained_at_join, strict=True):
                if is_trained and not was_trained:
                    raise ValueError(_frozen_message(name, "unfrozen", "would be trained only by this learner"))
                if was_trained and not is_trained:
                    frozen_for[name] = self._frozen_for.get(name, 0) + 1
                    if frozen_for[name] == FROZEN_STEPS_BEFORE_WARNING + 1 and not self._is_logged:
                        self._is_logged = True
                        self._log.warning("%s", _frozen_message(name, "frozen", "still changes with others"))
        self._frozen_for = frozen_for
        self._steps_until_check = 0 if frozen_for and not self._is_logged else CHECK_INTERVAL_STEPS - 1


def _changed_message(name: str, change: str) -> str:
    return (
        f"a parameter was {change} after the join: {name}. The set of merged parameters is fixed at the join, so it"
        " would be trained only by this learner: make all changes of the model before the Learner is made; to continue"
        " with the model as it is now, start a new run from its weights (atoll syncer --init)"
    )


def _frozen_message(name: str, change: str, effect: str) -> str:
    return (
        f"a parameter was {change} after the join: {name}. The set of merged parameters is fixed at the join, so it"
        f" {effect}: leave and join again with the parameters of the join, or train the other parameters in a new run"
        " (atoll syncer --init)"
    )
