"""Transfer optimizer state between islands in memory-mapped files, so that no process holds all of it in memory.

The state of an island of many ranks may be larger than the memory of one rank. Sender and receiver keep it in a mapped
file, which the kernel may write to disk. The sender's leader lays out the safetensors file first, and every rank's rows
are received at their offset. The receiver's leader reads one tensor after the other and distributes it to its ranks.
If the disk is full, the state is kept in memory.
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
    """Buffer of `size` bytes, in an unlinked file or, if that fails, in memory. It is freed when the process exits."""

    def __init__(self, size: int, folder: Path | None) -> None:
        self._handle: int | None = None
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a signal later
                self.view = memoryview(mmap.mmap(file.fileno(), size))
                self._handle = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._handle)
        except (OSError, AttributeError):  # not every system can allocate in advance
            self.view = memoryview(bytearray(size))

    def tensor(self, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor in the memory of the file, at offset `begin`."""
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.view, dtype=dtype, count=count, offset=begin).reshape(shape)

    def read(self) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        """Return the metadata and the tensors, which are read on access. Raise ValueError if they are invalid."""
        path = f"/proc/self/fd/{self._handle}" if self._handle is not None else ""
        if not os.path.exists(path):  # the buffer is in memory, or the system has no paths of open files
            return optimizer_state.read(self.view)
        metadata = optimizer_state.read_metadata(self.view)
        try:
            file = safetensors.safe_open(path, "pt")
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"the optimizer state is not a safetensors file written by Atoll: {error}") from None
        return metadata, _LazyTensors(file)


class _LazyTensors(Mapping[str, Tensor]):
    def __init__(self, file: Any) -> None:
        self._file = file
        self._names = frozenset(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except safetensors.SafetensorError as error:
            raise ValueError(f"tensor {name!r:.20} of the optimizer state cannot be read: {error}") from None
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)


def pack_to_file(copied: optimizer_state.OptimizerStateCopy, folder: Path | None) -> StateFile:
    """Pack a copy into a file, as `optimizer_state.pack_copy` does. With several ranks, wait for the others."""
    copied.wait()
    kinds = {
        number: (tensor.dtype, copied.parts[number].sizes if number in copied.parts else tuple(tensor.shape))
        for number, tensor in copied.tensors.items()
    }
    head, begins, size = make_tensor_layout({"atoll": json.dumps(copied.metadata, separators=(",", ":"))}, kinds)
    file = StateFile(size, folder)
    file.view[: len(head)] = head
    targets = {number: file.tensor(begins[number], *kind) for number, kind in kinds.items()}
    whole = optimizer_state.gather_state(copied, targets)
    for number, tensor in whole.tensors.items():
        if tensor is not targets[number]:
            targets[number].copy_(tensor)
    return file
