"""The published model in the middle of training: to evaluate it, or to write it to a file.

A learner's own values are ahead of the published ones by its unmerged steps. Inside the block the model has the values
that were adopted last; afterwards it has its own again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from atoll.island.fragments import FragmentTensors
from atoll.island.topology import fsdp_modules, reshard
from atoll.learner.preemption import DeferredSignals
from atoll.tensors.plan import named_tensors
from atoll.tensors.sharding import local_tensor


class PublishedValues:
    """Swaps the published values of one model in and out. Only the training thread uses it."""

    def __init__(self, model: nn.Module, signals: DeferredSignals) -> None:
        self._model = model
        self._signals = signals
        self._is_active = False
        self._keeps_loaded = False

    def check_step(self) -> None:
        if self._is_active:
            raise ValueError("step inside of published(): train outside of it, where the model has its own values")

    @contextmanager
    def swap_in(self, fragments: Sequence[FragmentTensors]) -> Iterator[None]:
        if not fragments or any(fragment.adopted is None for fragment in fragments):
            raise ValueError("published() before this learner has joined: enter `with atoll.Learner(...)` first")
        if self._is_active:
            raise ValueError("published() inside of published(): the model has the published values already")
        reshard(fsdp_modules(self._model))
        own = _copy_own_values(self._model, {name for fragment in fragments for name in fragment.tensor_names})
        self._is_active, self._keeps_loaded = True, False
        try:
            with self._signals:
                for fragment in fragments:
                    assert fragment.adopted is not None
                    fragment.adopt("overwrite", fragment.adopted, None, 0.0)
            yield
        finally:
            with self._signals:
                reshard(fsdp_modules(self._model))
                if not self._keeps_loaded:
                    _restore_own_values(self._model, own)
                self._is_active = False

    def keep_loaded(self) -> None:
        """Keep the current values at the end of the block, because another model was loaded into it."""
        self._keeps_loaded = True


@torch.no_grad()
def _copy_own_values(model: nn.Module, merged_names: AbstractSet[str]) -> dict[str, Tensor]:
    """Return copies of the values that are replaced, in host memory and in their own dtype.

    Fragments are not enough: they are f32, and parameters may be f64. The merged tensors were fixed at the join, even
    if `requires_grad` has changed since. All buffers are copied, because an evaluation may change any of them.
    """
    return {
        name: local_tensor(tensor.detach()).to("cpu", copy=True)
        for name, tensor in named_tensors(model).items()
        if name in merged_names or not isinstance(tensor, nn.Parameter)
    }


@torch.no_grad()
def _restore_own_values(model: nn.Module, own: dict[str, Tensor]) -> None:
    """Write the values back. Tensors are looked up again, because a module may have replaced a buffer."""
    now = named_tensors(model)
    for name, value in own.items():
        local_tensor(now[name].detach()).copy_(value)
