"""Inner state between islands, in files: neither who gives it nor who takes it holds all of it in memory.

An island of many ranks gives state that no rank of it could hold, and takes some that is as large. Both leave it in a
file whose memory is mapped, and which the kernel may write out: the leader of the giver lays out the safetensors file
first and lets every rank's rows come to their place in it, the taker's reads tensor after tensor and deals them out.
Where there is no room on disk it is held in memory.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from atoll.store.tensor_file import make_tensor_layout
from atoll.tensors import optimizer_state


class StateFile:
    """So many bytes, on disk or else in memory. The file has no name: it is gone with its process."""

    def __init__(self, size: int, folder: Path | None) -> None:
        self._handle: int | None = None
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk says so here, and not by a signal later
                self.view = memoryview(mmap.mmap(file.fileno(), size))
                self._handle = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._handle)
        except (OSError, AttributeError):  # not every system makes room beforehand
            self.view = memoryview(bytearray(size))

    def tensor(self, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Room for a tensor, in the file."""
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.view, dtype=dtype, count=count, offset=begin).reshape(shape)

    def read(self) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        """The metadata, and the tensors, each read when it is asked for. Trusts nothing: raises ValueError."""
        path = f"/proc/self/fd/{self._handle}" if self._handle is not None else ""
        if not os.path.exists(path):  # in memory, or on a system whose open files have no names either
            return optimizer_state.read(self.view)
        about = optimizer_state.read_metadata(self.view)
        try:
            file = safetensors.safe_open(path, "pt")
        except (safetensors.SafetensorError, OSError) as wrong:
            raise ValueError(f"the inner state is no safetensors file of ours: {wrong}") from None
        return about, _LazyTensors(file)


class _LazyTensors(Mapping[str, Tensor]):
    def __init__(self, file: Any) -> None:
        self._file = file
        self._names = frozenset(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except safetensors.SafetensorError as wrong:
            raise ValueError(f"tensor {name!r:.20} of the inner state cannot be read: {wrong}") from None
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)


def pack_to_file(taken: optimizer_state.OptimizerStateCopy, folder: Path | None) -> StateFile:
    """What `inner_state.pack_copy` makes, put together in the file. In an island of many ranks it waits for them."""
    taken.wait()
    kinds = {
        number: (tensor.dtype, taken.parts[number].sizes if number in taken.parts else tuple(tensor.shape))
        for number, tensor in taken.tensors.items()
    }
    head, begins, size = make_tensor_layout({"atoll": json.dumps(taken.metadata, separators=(",", ":"))}, kinds)
    file = StateFile(size, folder)
    file.view[: len(head)] = head
    rooms = {number: file.tensor(begins[number], *kind) for number, kind in kinds.items()}
    whole = optimizer_state.gather_state(taken, rooms)
    for number, tensor in whole.tensors.items():
        if tensor is not rooms[number]:
            rooms[number].copy_(tensor)
    return file
