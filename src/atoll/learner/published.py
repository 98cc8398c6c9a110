"""The published model for a while, in the middle of training: to evaluate it, or to write it to a file.

What a learner trains is ahead of what is published by the steps that nobody has merged yet. Inside of the block the
model has the values that were last adopted; afterwards it goes on with its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from atoll.island.fragments import FragmentTensors
from atoll.island.topology import fsdp_modules, reshard
from atoll.learner.preemption import Interrupts
from atoll.tensors.plan import named_tensors
from atoll.tensors.sharding import local_of


class PublishedValues:
    """Of one model. Only the training thread uses it."""

    def __init__(self, model: nn.Module, interrupts: Interrupts) -> None:
        self._model = model
        self._interrupts = interrupts
        self._are_shown = False
        self._is_kept = False

    def check_step(self) -> None:
        if self._are_shown:
            raise ValueError("step inside of published(): train outside of it, there the model has its own values")

    @contextmanager
    def shown(self, fragments: Sequence[FragmentTensors]) -> Iterator[None]:
        if not fragments or any(fragment.adopted is None for fragment in fragments):
            raise ValueError("published() before this learner has joined: enter `with atoll.Learner(...)` first")
        if self._are_shown:
            raise ValueError("published() inside of published(): the model has the published values already")
        reshard(fsdp_modules(self._model))
        own = _copied(self._model, {name for fragment in fragments for name in fragment.tensor_names})
        self._are_shown, self._is_kept = True, False
        try:
            with self._interrupts:
                for fragment in fragments:
                    assert fragment.adopted is not None
                    fragment.adopt("overwrite", fragment.adopted, None, 0.0)
            yield
        finally:
            with self._interrupts:
                reshard(fsdp_modules(self._model))
                if not self._is_kept:
                    _put_back(self._model, own)
                self._are_shown = False

    def keep(self) -> None:
        """Inside of the block: what the model has by its end stays, as somebody has loaded another one into it."""
        self._is_kept = True


@torch.no_grad()
def _copied(model: nn.Module, travel: AbstractSet[str]) -> dict[str, Tensor]:
    """What of a model is shown otherwise, in host memory, to the last bit of its own dtype. Fragments would not do:
    they are f32, and parameters may be f64.

    That is what was found to travel at the join, whatever requires a gradient now. Buffers may change while they are
    shown, those that stay at home too.
    """
    return {
        name: local_of(tensor.detach()).to("cpu", copy=True)
        for name, tensor in named_tensors(model).items()
        if name in travel or not isinstance(tensor, nn.Parameter)
    }


@torch.no_grad()
def _put_back(model: nn.Module, own: dict[str, Tensor]) -> None:
    """Tensors are looked up anew: a module may have put another one in the place of a buffer."""
    now = named_tensors(model)
    for name, value in own.items():
        local_of(now[name].detach()).copy_(value)
