"""Shard files of a learner's part: each rank of an island writes its shards of the optimizer state, and reads them.

    parts/learner-3/001000004.dcp/__2_0.distcp    rank 2's shards of the inner optimizer's state
    parts/learner-3/001000004.dcp/.metadata       for other tools

The files are those of `torch.distributed.checkpoint`, which also reshards them: an island that starts from them may
have any number of ranks. Its collectives are not used, because they would need another process group, and ranks already
have connections. Each rank writes on its own, and the leader, which knows all shards, makes the metadata.

The part's metadata has under `shards` an index with everything that is needed to read them: the sizes and digests of
files, and the offsets of each tensor's rows. `.metadata` is a pickle and is never read here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from xxhash import xxh3_128

from atoll.files import atomic_folder, link_or_copy
from atoll.store.tensor_file import DamageError
from atoll.tensors import optimizer_state
from atoll.tensors.sharding import Box, Boxes

_READ_CHUNK_BYTES = 2**22

ShardIndex = Mapping[str, Any]
"""`tensors`: name to `[dtype, shape]` of the whole tensor. `files`: name to bytes, digest and `chunks`. A chunk is
`[tensor, offset, shape, offset in the file, bytes]`."""


# --------------------------------------------------------------------------------------------------------------------
# Writing


class _CopySavePlanner(DefaultSavePlanner):
    """Save planner for the copy of a step boundary. Plans are made without it, to avoid its collectives."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index.fqn]


def write_rank_file(
    folder: Path, rank: int, copied: optimizer_state.OptimizerStateCopy, mine: Collection[str]
) -> ShardIndex:
    """Write this rank's shards durably and return their index. Raise OSError.

    Args:
        mine: Names of the parameters whose shards this rank writes.
    """
    copied.wait()
    names = optimizer_state.tensor_owners(copied.metadata)
    items = [
        _write_item(number, part, copied.tensors[number].dtype)
        for number, part in copied.parts.items()
        if names[number].parameter in mine
    ]
    index: dict[str, Any] = {"tensors": {}, "files": {}}
    if not items:
        return index
    try:
        writer = FileSystemWriter(folder, sync_files=True)
        written = writer.write_data(
            SavePlan(items, _StoragePrefix(f"__{rank}_")), _CopySavePlanner(copied.tensors)
        ).wait()
    except RuntimeError as error:  # torch.save raises "unexpected pos" if the disk is full
        raise _find_os_error(error, folder) from error
    for result in written:
        number, where = result.index.fqn, result.storage_data
        dtype = str(copied.tensors[number].dtype)
        index["tensors"][number] = [dtype.removeprefix("torch."), list(copied.parts[number].sizes)]
        box = copied.parts[number].box
        chunk = [number, list(box.offset), list(box.shape), where.offset, where.length]
        index["files"].setdefault(where.relative_path, {"chunks": []})["chunks"].append(chunk)
    for name, file in index["files"].items():
        file["bytes"], file["digest"] = file_digest(folder / name)
    return index


def _write_item(number: str, part: optimizer_state.StatePart, dtype: torch.dtype) -> WriteItem:
    offset, shape = torch.Size(part.box.offset), torch.Size(part.box.shape)
    data = TensorWriteData(ChunkStorageMetadata(offset, shape), TensorProperties(dtype), torch.Size(part.sizes))
    return WriteItem(MetadataIndex(number, offset), WriteItemType.SHARD, tensor_data=data)


def _find_os_error(error: RuntimeError, folder: Path) -> Exception:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return OSError(cause.errno, cause.strerror, str(folder))
        cause = cause.__cause__ or cause.__context__
    return error


def merge_indexes(indexes: Collection[ShardIndex]) -> ShardIndex:
    """Merge the indexes of all ranks. Raise ValueError if they do not cover every tensor."""
    tensors = {number: tensor for index in indexes for number, tensor in index["tensors"].items()}
    files = {name: file for index in indexes for name, file in index["files"].items()}
    for number, (_, sizes) in tensors.items():
        chunks = [chunk for file in files.values() for chunk in file["chunks"] if chunk[0] == number]
        if sum(math.prod(shape) for _, _, shape, _, _ in chunks) != math.prod(sizes):
            raise ValueError(f"the shards that the ranks wrote of tensor {number} do not cover it")
    return {"tensors": tensors, "files": files}


def write_dcp_metadata(folder: Path, shards: ShardIndex) -> None:
    """Write the metadata. Call it after all ranks have written their files."""
    results = [WriteResult(index, info.length, info) for index, info in _storage_infos(shards).items()]
    FileSystemWriter(folder, sync_files=True).finish(Metadata(_tensor_metadata(shards)), [results])


# --------------------------------------------------------------------------------------------------------------------
# Reading


def _tensor_metadata(shards: ShardIndex) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        number: TensorStorageMetadata(TensorProperties(getattr(torch, dtype)), torch.Size(sizes), [])
        for number, (dtype, sizes) in shards["tensors"].items()
    }
    for file in shards["files"].values():
        for number, offset, shape, _, _ in file["chunks"]:
            metadata[number].chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)))
    return metadata


def _storage_infos(shards: ShardIndex) -> dict[MetadataIndex, _StorageInfo]:
    return {
        MetadataIndex(number, offset): _StorageInfo(name, begin, length)
        for name, file in shards["files"].items()
        for number, offset, _, begin, length in file["chunks"]
    }


class _BoxLoadPlanner(DefaultLoadPlanner):
    """Load plan for plain tensors, each of them a box of a whole tensor."""

    def __init__(self, boxes: Mapping[str, Box]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = boxes

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        plan = LoadPlan([])
        for number, box in self._boxes.items():
            chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
            tensor_metadata: Any = self.metadata.state_dict_metadata[number]
            items = create_read_items_for_chunk_list(number, tensor_metadata, [chunk])
            if sum(math.prod(item.lengths) for item in items) != box.numel:
                raise DamageError(f"a part of tensor {number} is missing from its files")
            plan.items += items
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor: Tensor = self.state_dict[index.fqn]
        return tensor


class _VerifyingReader(FileSystemReader):
    """Storage reader that takes the layout from the part's metadata and verifies the digest of each file."""

    def __init__(self, folder: Path, shards: ShardIndex, checked: set[str]) -> None:
        super().__init__(folder)
        self._folder = folder
        self._shards = shards
        self._checked = checked

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(_tensor_metadata(self._shards), storage_data=_storage_infos(self._shards))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        needed = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        for name in sorted(needed - self._checked):
            check_file(self._folder, name, self._shards)
            self._checked.add(name)
        return super().read_data(plan, planner)


class ShardedTensors:
    """The sharded tensors of a part, on disk."""

    def __init__(self, folder: Path, index: ShardIndex) -> None:
        self.folder = folder
        self.index = index
        self._checked: set[str] = set()  # files whose digests were verified

    def load(self, boxes: Mapping[str, Box | None]) -> dict[str, Tensor]:
        """Load a box of each of these tensors; None for the whole tensor. Raise OSError, or ValueError for damage."""
        regions, state = {}, {}
        for number, box in boxes.items():
            dtype, sizes = self.index["tensors"][number]
            regions[number] = box if box is not None else Box((0,) * len(sizes), tuple(sizes))
            state[number] = torch.empty(regions[number].shape, dtype=getattr(torch, dtype))
        reader, planner = _VerifyingReader(self.folder, self.index, self._checked), _BoxLoadPlanner(regions)
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        return state

    def verify_digests(self) -> None:
        """Verify the digests of all files. Raise DamageError."""
        for name in self.index["files"]:
            check_file(self.folder, name, self.index)
            self._checked.add(name)

    def check_sizes(self) -> None:
        """Check that all files exist with their sizes, without reading them. Raise DamageError."""
        for name, file in self.index["files"].items():
            _check_size(self.folder / name, file["bytes"])


def load_for_rank(
    metadata: Mapping[str, Any], unsharded: Mapping[str, Tensor], shards: ShardedTensors, boxes: Boxes
) -> dict[str, Tensor]:
    """Return the parts of all state tensors for a rank with these boxes, from `unsharded` and from the shard files."""
    try:
        names = optimizer_state.tensor_owners(metadata)
        sizes = {number: tuple(metadata["parameters"][name]["shape"]) for number, (name, _) in names.items()}
        regions = {
            number: optimizer_state.part_box(
                tuple(shape), names[number].is_complex, sizes[number], boxes.get(names[number].parameter)
            )
            for number, (_, shape) in shards.index["tensors"].items()
        }
        loaded = {
            number: optimizer_state.extract_part(
                tensor, names[number].is_complex, sizes[number], boxes.get(names[number][0])
            )
            for number, tensor in unsharded.items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the metadata of the optimizer state lacks {error}") from None
    return loaded | shards.load(regions)


class LazyWholeTensors(Mapping[str, Tensor]):
    """Tensors by number. Those in shard files are read at each access, so that only one is in memory at a time."""

    def __init__(self, unsharded: Mapping[str, Tensor], shards: ShardedTensors) -> None:
        self._unsharded = unsharded
        self._shards = shards

    def __getitem__(self, number: str) -> Tensor:
        if number in self._unsharded:
            return self._unsharded[number]
        if number not in self._shards.index["tensors"]:
            raise KeyError(number)
        return self._shards.load({number: None})[number]

    def __iter__(self) -> Iterator[str]:
        yield from self._unsharded
        yield from self._shards.index["tensors"]

    def __len__(self) -> int:
        return len(self._unsharded) + len(self._shards.index["tensors"])


def check_index(index: Any) -> ShardIndex:
    """Validate an index that was read from a file. Raise ValueError if `write_rank_file` would not write it."""
    try:
        for dtype, sizes in index["tensors"].values():
            if not isinstance(getattr(torch, dtype), torch.dtype) or not all(type(size) is int for size in sizes):
                raise ValueError("invalid dtype or shape of a tensor")
        for name, file in index["files"].items():
            if os.path.basename(name) != name or type(file["bytes"]) is not int or type(file["digest"]) is not str:
                raise ValueError(f"invalid file {name!r:.60}")
            for number, offset, shape, begin, length in file["chunks"]:
                sizes = index["tensors"][number][1]
                if len(offset) != len(sizes) or len(shape) != len(sizes) or not 0 <= begin <= begin + length:
                    raise ValueError(f"invalid rows of tensor {number!r:.20}")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"its index of shard files is invalid: {error}") from None
    checked: ShardIndex = index
    return checked


# --------------------------------------------------------------------------------------------------------------------
# Files


def file_digest(path: Path) -> tuple[int, str]:
    """Return the size of a file and its digest."""
    state, size, piece = xxh3_128(), 0, bytearray(_READ_CHUNK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            state.update(memoryview(piece)[:count])
            size += count
    return size, state.hexdigest()


def check_file(folder: Path, name: str, shards: ShardIndex) -> None:
    file = shards["files"][name]
    _check_size(folder / name, file["bytes"])
    if file_digest(folder / name) != (file["bytes"], file["digest"]):
        raise DamageError(f"the digest of {name} does not match: it was damaged or changed after it was written")


def _check_size(path: Path, size: int) -> None:
    try:
        actual = path.stat().st_size
    except FileNotFoundError:
        raise DamageError(f"{path.parent.name}/{path.name}, a shard file of one of its ranks, is missing") from None
    if actual != size:
        raise DamageError(f"{path.parent.name}/{path.name} has {actual} of {size} bytes: it was truncated or replaced")


def link_shard_files(source: ShardedTensors, target: Path) -> None:
    """Link all files into a new folder, atomically. Raise DamageError if one is damaged."""
    source.verify_digests()
    with atomic_folder(target) as folder:
        for path in sorted(source.folder.iterdir()):
            link_or_copy(path, folder / path.name)
