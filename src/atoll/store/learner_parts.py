"""A learner's parts of snapshots, on its own disk: the state from which it restarts after all processes have exited.

    parts/learner-3/001000004.safetensors    learner 3's part of snapshot 1000004; the newest few parts are kept
    parts/learner-3/001000004.dcp            its shards, if the island has several ranks with a sharded model

A part is one tensor file (`tensor_file`), written atomically, with a digest over every byte and nothing pickled. Its
metadata is a JSON object; `_METADATA_FIELDS` has the names and types. The sharded tensors of the optimizer state are in
a folder next to the file. The ranks write it (`sharded_parts`) before the file, which lists its contents. The tensors:

| name | content |
|---|---|
| `model.007` | fragment 7 of the learner's parameters at the cut, flat, f32 |
| `inner.n` | tensor n of the inner optimizer's state, which `inner` of the metadata describes |
| `rng.cpu`, `rng.cuda.0` | state of torch's generators; `rank2.rng.cpu`: that of rank 2 of an island with several |
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from xxhash import xxh3_128_hexdigest

from atoll.core.protocol import SnapshotPart
from atoll.core.types import FragmentId, LearnerId, RunConfig
from atoll.files import TEMPORARY_SUFFIX, atomic_folder, make_folder, write_file
from atoll.store.tensor_file import encode_tensor_file, error_reason, read_tensors
from atoll.tensors import optimizer_state
from atoll.tensors.optimizers import Optimizers
from atoll.tensors.sharding import local_boxes

if TYPE_CHECKING:  # it loads torch.distributed.checkpoint, which most learners never need
    from atoll.store.sharded_parts import ShardedTensors, ShardIndex

PARTS_FOLDER = "parts"
MAX_PARTS = 4
"""Parts per learner. One more than a syncer keeps snapshots: the newest part may be of a snapshot that failed."""

MAX_PARTS_TRIED = 16
"""Maximum number of files that a search for optimizer state opens."""

FORMAT = 1
SHARDED_FORMAT = 2
"""Format of a part with shard files. Other parts have the first format, which older versions can read."""

_FOLDER_NAME = re.compile(r"learner-(\d{1,9})")
_PART_NAME = re.compile(r"(\d{9,18})\.safetensors")
_METADATA_FIELDS: dict[str, type] = {
    "format": int,
    "run": str,
    "model": str,  # digest of the plan's fingerprint
    "learner": int,
    "incarnation": int,
    "snapshot": int,
    "step": int,
    "trained": int,
    "versions": list,  # adopted version of each fragment
    "saved_at": float,  # Unix time
    "inner": dict,
    "extra": object,  # what the user's hook returned
}
_SHARDED_METADATA_FIELDS = _METADATA_FIELDS | {"shards": dict}


def fingerprint_digest(fingerprint: Sequence[str]) -> str:
    """
    >>> fingerprint_digest(("a 2x3 float32 weight",))
    '9b87a4ed1e7a8d04b5d0ae8dbfee8d2f'
    """
    return xxh3_128_hexdigest("\n".join(fingerprint).encode("utf-8"))


def part_path(run: Path, learner: LearnerId, snapshot: int) -> Path:
    return run / PARTS_FOLDER / f"learner-{learner}" / f"{snapshot:09d}.safetensors"


def shards_path(part: Path) -> Path:
    """Return the folder with the shard files of a part."""
    return part.with_suffix(".dcp")


def part_bytes(part: Path) -> int | None:
    """Return the size of a part with its shard files; None if it does not exist."""
    try:
        return sum(path.stat().st_size for path in [part, *shards_path(part).glob("*")])
    except OSError:
        return None


# --------------------------------------------------------------------------------------------------------------------
# Writing


class FragmentCopy(NamedTuple):
    """A fragment of the model in a buffer: complete after `wait`, free for other use after `release`."""

    fragment: FragmentId
    tensor: Tensor
    wait: Callable[[], None]
    release: Callable[[], None]


class PartCopy(NamedTuple):
    """Copy of a part's content at the step boundary. Training does not change it."""

    model: list[FragmentCopy]
    optimizer_state: optimizer_state.OptimizerStateCopy
    rng: dict[str, Tensor]
    extra: str  # JSON


def get_rng_states() -> dict[str, Tensor]:
    """Return the states of torch's random generators in this process."""
    rng = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for device, state in enumerate(torch.cuda.get_rng_state_all()):
            rng[f"rng.cuda.{device}"] = state
    return rng


def write_part(
    run: Path, config: RunConfig, learner: LearnerId, incarnation: int, part: SnapshotPart, copied: PartCopy
) -> Path:
    """Write a part durably, and remove the oldest ones. Call it in a background thread. Raise OSError."""
    try:
        tensors: dict[str, Tensor] = dict(copied.rng)
        for copy in copied.model:
            copy.wait()
            tensors[f"model.{copy.fragment:03d}"] = copy.tensor
        path = part_path(run, learner, part.snapshot)
        make_folder(path.parent)
        _remove_old_parts(path.parent, keep=MAX_PARTS - 1)  # before writing, because the disk may be nearly full
        inner, shards = _write_rank_files(path, copied.optimizer_state)
        inner = optimizer_state.gather_state(inner)
        tensors |= {f"inner.{name}": tensor for name, tensor in inner.tensors.items()} | inner.other_ranks_tensors
        metadata = {
            "format": FORMAT if shards is None else SHARDED_FORMAT,
            "run": config.run_id,
            "model": fingerprint_digest(config.fingerprint),
            "learner": learner,
            "incarnation": incarnation,
            "snapshot": part.snapshot,
            "step": part.step,
            "trained": part.trained,
            "versions": list(part.versions),
            "saved_at": time.time(),
            "inner": inner.metadata,
            "extra": json.loads(copied.extra),
        }
        if shards is not None:
            metadata["shards"] = shards
        write_file(path, encode_tensor_file(json.dumps(metadata, separators=(",", ":")), tensors))
        return path
    finally:
        for copy in copied.model:
            copy.release()


def _write_rank_files(
    path: Path, copied: optimizer_state.OptimizerStateCopy
) -> tuple[optimizer_state.OptimizerStateCopy, ShardIndex | None]:
    """Let all ranks write their shards; return the other tensors, and the index of the shard files.

    The index is None if nothing is sharded, or if not all ranks have access to this folder. Everything must be gathered
    at this rank then.
    """
    if copied.write_shards is None or not copied.parts:
        return copied, None
    from atoll.store import sharded_parts

    try:
        with atomic_folder(shards_path(path)) as folder:
            indexes = copied.write_shards(copied, folder)
            if indexes is None:
                raise _NotSharedError
            shards = sharded_parts.merge_indexes(indexes)
            sharded_parts.write_dcp_metadata(folder, shards)
    except _NotSharedError:
        return copied, None
    left = {number: tensor for number, tensor in copied.tensors.items() if number not in copied.parts}
    return copied._replace(tensors=left, parts={}, write_shards=None), shards


class _NotSharedError(Exception):
    """Not all ranks have access to the folder of the parts."""


def _remove_old_parts(folder: Path, keep: int) -> None:
    """Remove all but the newest parts, and unfinished files of a killed process. Stop at the first error."""
    listed = _list_numbered(folder, _PART_NAME)
    current = {shards_path(path) for _, path in listed[-keep:]}
    old = [path for _, path in listed[:-keep]]  # removed before their shard files, which are useless alone
    for path in [*folder.glob(f".*{TEMPORARY_SUFFIX}"), *old, *(set(folder.glob("*.dcp")) - current)]:
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError:
            return


# --------------------------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True, slots=True)
class LearnerPart:
    """A complete part that was read and verified."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    shards: ShardedTensors | None = None  # tensors in the shard files

    @property
    def learner(self) -> int:
        return int(self.metadata["learner"])

    @property
    def snapshot(self) -> int:
        return int(self.metadata["snapshot"])

    @property
    def extra(self) -> Any:
        return self.metadata["extra"]

    def optimizer_tensors(self) -> Mapping[str, Tensor]:
        """Return the whole tensors of the optimizer state. Sharded ones are read on access."""
        unsharded = self.local_optimizer_tensors()
        if self.shards is None:
            return unsharded
        from atoll.store.sharded_parts import LazyWholeTensors

        return LazyWholeTensors(unsharded, self.shards)

    def local_optimizer_tensors(self) -> dict[str, Tensor]:
        return {name.removeprefix("inner."): t for name, t in self.tensors.items() if name.startswith("inner.")}

    def prepare(self, optimizers: Optimizers, model: nn.Module) -> optimizer_state.PreparedState:
        """Prepare the part's optimizer state for these optimizers. Raise ValueError if it does not fit.

        Only the shards of this process are read.
        """
        inner = self.metadata["inner"]
        if self.shards is None:
            return optimizer_state.prepare(inner, self.local_optimizer_tensors(), optimizers, model)
        from atoll.store.sharded_parts import load_for_rank

        tensors = load_for_rank(inner, self.local_optimizer_tensors(), self.shards, local_boxes(model))
        return optimizer_state.prepare(inner, tensors, optimizers, model, is_local_part=True)

    def rng_states(self, rank: int) -> dict[str, Tensor]:
        """Return the random generator states of one rank; empty if the island had fewer ranks."""
        begin = f"rank{rank}." if rank else ""
        names = [name.removeprefix(begin) for name in self.tensors if name.startswith(f"{begin}rng.")]
        return {name: self.tensors[begin + name] for name in names}


def set_rng_states(states: Mapping[str, Tensor]) -> None:
    """Set torch's random generators to these states. Generators of other devices do not change."""
    if "rng.cpu" in states:
        torch.set_rng_state(states["rng.cpu"])
    if torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            state = states.get(f"rng.cuda.{device}")
            if state is not None:
                torch.cuda.set_rng_state(state, device)


def read_part(path: Path) -> LearnerPart:
    """Read and verify a part. Raise OSError, or ValueError with the problem of the file."""
    text, tensors = read_tensors(path)
    metadata = json.loads(text)
    fields = (
        {FORMAT: _METADATA_FIELDS, SHARDED_FORMAT: _SHARDED_METADATA_FIELDS}.get(metadata.get("format"))
        if _is_valid_metadata(metadata)
        else None
    )
    if fields is None or metadata.keys() != fields.keys():
        raise ValueError("not a part of a learner, or written by another version of Atoll")
    for name, kind in fields.items():
        if not isinstance(metadata[name], kind) or (isinstance(metadata[name], bool) and kind is int):
            raise ValueError(f"invalid {name}: {metadata[name]!r:.60}")
    if fields is _METADATA_FIELDS:
        return LearnerPart(path, metadata, tensors)
    from atoll.store.sharded_parts import ShardedTensors, check_index

    shards = ShardedTensors(shards_path(path), check_index(metadata["shards"]))
    shards.check_sizes()
    return LearnerPart(path, metadata, tensors, shards)


def _is_valid_metadata(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("format")) is int


def list_parts(run: Path) -> dict[LearnerId, list[int]]:
    """Return the snapshots of which each learner has a part in this run, oldest first, without reading the parts."""
    parts_by_learner = {
        learner: _list_numbered(folder, _PART_NAME)
        for learner, folder in _list_numbered(run / PARTS_FOLDER, _FOLDER_NAME)
    }
    return {learner: [number for number, _ in parts] for learner, parts in parts_by_learner.items() if parts}


def find_optimizer_state(
    run: Path,
    config: RunConfig,
    learner: LearnerId,
    optimizers: Optimizers,
    model: nn.Module,
    log: Callable[[str], None],
    check_other_ranks: Callable[[LearnerPart], None] = lambda part: None,
) -> tuple[LearnerPart, optimizer_state.PreparedState] | None:
    """Find the newest valid part of this run that fits: the learner's own, else another learner's, else None.

    A part that is damaged or does not fit is logged, and the next older one is tried.

    Args:
        check_other_ranks: Raises ValueError if the part does not fit at another rank of the island.
    """
    model_digest = fingerprint_digest(config.fingerprint)
    for tried, path in enumerate(_list_candidates(run, learner)):
        if tried >= MAX_PARTS_TRIED:
            log(f"none of the newest {MAX_PARTS_TRIED} parts in {run / PARTS_FOLDER} is usable")
            return None
        try:
            part = read_part(path)
            if part.metadata["run"] != config.run_id:
                raise ValueError(f"belongs to the run {part.metadata['run']!r:.100}, this is {config.run_id!r}")
            if part.metadata["model"] != model_digest:
                raise ValueError("is of another model")
            prepared = part.prepare(optimizers, model)
            check_other_ranks(part)
            return part, prepared
        except (OSError, ValueError) as error:
            log(f"{path}: {error_reason(error)}; trying an older one")
    return None


def _list_candidates(run: Path, learner: LearnerId) -> Iterator[Path]:
    """Yield the learner's own parts, newest first; then those of other learners, newest snapshot first."""
    listed = {
        number: _list_numbered(folder, _PART_NAME)
        for number, folder in _list_numbered(run / PARTS_FOLDER, _FOLDER_NAME)
    }
    yield from (path for _, path in reversed(listed.pop(learner, [])))
    others = [(-snapshot, number, path) for number, parts in listed.items() for snapshot, path in parts]
    yield from (path for _, _, path in sorted(others))


def _list_numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Return the entries of a folder whose names match, sorted by their numbers; empty if there is no folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((int(match[1]), folder / match[0]) for match in map(pattern.fullmatch, names) if match)
