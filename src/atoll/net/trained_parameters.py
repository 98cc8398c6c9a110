"""What of a model trains was settled at the join: it travels. What is unfrozen later would be trained and never travel.

To look at every parameter costs a microsecond for about ten of them, so that it is done now and then, and whenever
the optimizer has got other ones.
"""

from __future__ import annotations

import logging

from torch import nn
from torch.optim import Optimizer

from atoll.ml.plan import named_tensors

EVERY = 32
"""Steps between two looks."""

PERSISTS = 100
"""Steps for which a parameter may be frozen without a word: who trains two halves of a model in turn freezes one."""


class TrainedParameters:
    """Of one model. Only the training thread uses it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, log: logging.Logger) -> None:
        self._log = log
        found = {name: each for name, each in named_tensors(model).items() if isinstance(each, nn.Parameter)}
        self._names = tuple(found)
        self._parameters = tuple(found.values())
        self._at_the_join = self._now()
        self._optimizer = optimizer
        self._held = self._count()
        self._left = 0  # steps until it looks
        self._is_said = False
        self._frozen_for: dict[str, int] = {}  # steps in a row, of those that were not at the join

    def _now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]

    def _count(self) -> int:
        return sum([len(group["params"]) for group in self._optimizer.param_groups])

    def check(self) -> None:
        """At every step. ValueError where something was unfrozen; what was frozen and stays so is said once, as nothing
        is lost by it."""
        if self._left and self._count() == self._held:
            self._left -= 1
            return
        self._held = self._count()
        now, frozen_for = self._now(), {}
        if now != self._at_the_join:
            for name, is_trained, was_trained in zip(self._names, now, self._at_the_join, strict=True):
                if is_trained and not was_trained:
                    raise ValueError(_sentence(name, "unfrozen", "would be trained here alone"))
                if was_trained and not is_trained:
                    frozen_for[name] = self._frozen_for.get(name, 0) + 1
                    if frozen_for[name] == PERSISTS + 1 and not self._is_said:
                        self._is_said = True
                        self._log.warning("%s", _sentence(name, "frozen", "goes on with what others train"))
        self._frozen_for = frozen_for
        self._left = 0 if frozen_for and not self._is_said else EVERY - 1


def _sentence(name: str, what: str, then: str) -> str:
    return (
        f"a parameter was {what} after the join: {name}. What travels was settled then, and it {then}: leave and"
        " join anew as it was, or train the other parameters in a new run (atoll syncer --init)"
    )


__all__ = ["EVERY", "PERSISTS", "TrainedParameters"]
