"""A learner's parts of snapshots, on its own disk: what it would need after everybody has died.

    parts/learner-3/001000004.safetensors    learner 3's part of snapshot 1000004; the newest few
    parts/learner-3/001000004.dcp            beside it, where an island of many ranks has dealt out its model

A part is one file of tensors (`durable`), whole or not there, with a digest over every byte and nothing pickled. Its
note is a JSON object; `_NOTE_FIELDS` has the names and types. What is dealt out of the inner state is in a folder
beside the file, written by the ranks (`sharded_parts`) before the file is, which says what belongs to it. The tensors:

| name | what |
|---|---|
| `model.007` | fragment 7 as the learner's parameters stood at the cut, flat, f32 |
| `inner.n` | tensor n of the inner optimizer's state, whose metadata is `inner` of the note |
| `rng.cpu`, `rng.cuda.0` | state of torch's generators; `rank2.rng.cpu` that of rank 2 of an island of several |
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
    from atoll.store.sharded_parts import ShardedTensors, ShardedTensorsNote

PARTS_FOLDER = "parts"
MAX_PARTS = 4
"""Parts of one learner. One more than a syncer keeps snapshots: the newest part may be of one that never came about."""

MAX_PARTS_TRIED = 16
"""Files that a search for inner state opens before it gives up."""

FORMAT = 1
SHARDED_FORMAT = 2
"""With files of ranks beside it. A part that has none is of the first format, which older readers know."""

_FOLDER_NAME = re.compile(r"learner-(\d{1,9})")
_PART_NAME = re.compile(r"(\d{9,18})\.safetensors")
_NOTE_FIELDS: dict[str, type] = {
    "format": int,
    "run": str,
    "model": str,  # digest of the fingerprint
    "learner": int,
    "incarnation": int,
    "snapshot": int,
    "step": int,
    "trained": int,
    "versions": list,  # adopted, by fragment
    "saved_at": float,  # seconds of the Unix epoch
    "inner": dict,
    "extra": object,  # what the user's hook returned
}
_SHARDED_NOTE_FIELDS = _NOTE_FIELDS | {"shards": dict}


def fingerprint_digest(fingerprint: Sequence[str]) -> str:
    """
    >>> fingerprint_digest(("a 2x3 float32 weight",))
    '9b87a4ed1e7a8d04b5d0ae8dbfee8d2f'
    """
    return xxh3_128_hexdigest("\n".join(fingerprint).encode("utf-8"))


def part_path(run: Path, learner: LearnerId, snapshot: int) -> Path:
    return run / PARTS_FOLDER / f"learner-{learner}" / f"{snapshot:09d}.safetensors"


def shards_path(part: Path) -> Path:
    """Where the files of ranks are that belong to a part."""
    return part.with_suffix(".dcp")


def part_bytes(part: Path) -> int | None:
    """With the files of ranks. None: it is not here."""
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
    """A part as it was copied at the step boundary: shared with nothing that still moves."""

    model: list[FragmentCopy]
    optimizer_state: optimizer_state.OptimizerStateCopy
    rng: dict[str, Tensor]
    extra: str  # JSON


def get_rng_states() -> dict[str, Tensor]:
    """Torch's generators of this process."""
    rng = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for device, state in enumerate(torch.cuda.get_rng_state_all()):
            rng[f"rng.cuda.{device}"] = state
    return rng


def write_part(
    run: Path, config: RunConfig, learner: LearnerId, incarnation: int, part: SnapshotPart, taken: PartCopy
) -> Path:
    """In the background: make it durable, then remove the oldest. Raises OSError with the file's name."""
    try:
        tensors: dict[str, Tensor] = dict(taken.rng)
        for copy in taken.model:
            copy.wait()
            tensors[f"model.{copy.fragment:03d}"] = copy.tensor
        path = part_path(run, learner, part.snapshot)
        make_folder(path.parent)
        _remove_old_parts(
            path.parent, keep=MAX_PARTS - 1
        )  # before: on a disk that is nearly full the old one makes the room
        inner, shards = _write_rank_files(path, taken.optimizer_state)
        inner = optimizer_state.gather_state(inner)
        tensors |= {f"inner.{name}": tensor for name, tensor in inner.tensors.items()} | inner.other_ranks_tensors
        note = {
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
            "extra": json.loads(taken.extra),
        }
        if shards is not None:
            note["shards"] = shards
        write_file(path, encode_tensor_file(json.dumps(note, separators=(",", ":")), tensors))
        return path
    finally:
        for copy in taken.model:
            copy.release()


def _write_rank_files(
    path: Path, taken: optimizer_state.OptimizerStateCopy
) -> tuple[optimizer_state.OptimizerStateCopy, ShardedTensorsNote | None]:
    """Let all ranks write what is sharded; return the rest of it, and the note of the files.

    None: nothing is sharded, or not all ranks see this folder, and everything has to be gathered here.
    """
    if taken.write_shards is None or not taken.parts:
        return taken, None
    from atoll.store import sharded_parts

    try:
        with atomic_folder(shards_path(path)) as folder:
            notes = taken.write_shards(taken, folder)
            if notes is None:
                raise _NotSharedError
            shards = sharded_parts.merge_notes(notes)
            sharded_parts.write_dcp_metadata(folder, shards)
    except _NotSharedError:
        return taken, None
    left = {number: tensor for number, tensor in taken.tensors.items() if number not in taken.parts}
    return taken._replace(tensors=left, parts={}, write_shards=None), shards


class _NotSharedError(Exception):
    """Not all ranks see the folder of the parts."""


def _remove_old_parts(folder: Path, keep: int) -> None:
    """Remove all but the newest, and what a killed process left half-written. After an error the rest stays for now."""
    listed = _list_numbered(folder, _PART_NAME)
    kept = {shards_path(path) for _, path in listed[-keep:]}
    old = [path for _, path in listed[:-keep]]  # before the files of their ranks, which alone are of no use
    for path in [*folder.glob(f".*{TEMPORARY_SUFFIX}"), *old, *(set(folder.glob("*.dcp")) - kept)]:
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
    """A part that was read whole and found undamaged."""

    path: Path
    note: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    shards: ShardedTensors | None = None  # what is in files of ranks beside it

    @property
    def learner(self) -> int:
        return int(self.note["learner"])

    @property
    def snapshot(self) -> int:
        return int(self.note["snapshot"])

    @property
    def extra(self) -> Any:
        return self.note["extra"]

    def optimizer_tensors(self) -> Mapping[str, Tensor]:
        """Whole. Those that are in files of ranks are read when they are asked for."""
        here = self.local_optimizer_tensors()
        if self.shards is None:
            return here
        from atoll.store.sharded_parts import LazyWholeTensors

        return LazyWholeTensors(here, self.shards)

    def local_optimizer_tensors(self) -> dict[str, Tensor]:
        return {name.removeprefix("inner."): t for name, t in self.tensors.items() if name.startswith("inner.")}

    def prepare(self, optimizers: Optimizers, model: nn.Module) -> optimizer_state.PreparedState:
        """Return its inner state for these optimizers. Reads only what this process holds. Raises ValueError where it
        does not fit."""
        about = self.note["inner"]
        if self.shards is None:
            return optimizer_state.prepare(about, self.local_optimizer_tensors(), optimizers, model)
        from atoll.store.sharded_parts import load_for_rank

        tensors = load_for_rank(about, self.local_optimizer_tensors(), self.shards, local_boxes(model))
        return optimizer_state.prepare(about, tensors, optimizers, model, is_local_part=True)

    def rng_states(self, rank: int) -> dict[str, Tensor]:
        """Generators of one rank of the island; empty where the island had fewer ranks then."""
        begin = f"rank{rank}." if rank else ""
        names = [name.removeprefix(begin) for name in self.tensors if name.startswith(f"{begin}rng.")]
        return {name: self.tensors[begin + name] for name in names}


def set_rng_states(states: Mapping[str, Tensor]) -> None:
    """Torch draws on as the process would have; devices that are not here keep their own."""
    if "rng.cpu" in states:
        torch.set_rng_state(states["rng.cpu"])
    if torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            state = states.get(f"rng.cuda.{device}")
            if state is not None:
                torch.cuda.set_rng_state(state, device)


def read_part(path: Path) -> LearnerPart:
    """Raises OSError, or ValueError with what is wrong with the file."""
    text, tensors = read_tensors(path)
    note = json.loads(text)
    fields = (
        {FORMAT: _NOTE_FIELDS, SHARDED_FORMAT: _SHARDED_NOTE_FIELDS}.get(note.get("format"))
        if _is_valid_note(note)
        else None
    )
    if fields is None or note.keys() != fields.keys():
        raise ValueError("not the part of a learner, or of another version of Atoll")
    for name, kind in fields.items():
        if not isinstance(note[name], kind) or (isinstance(note[name], bool) and kind is int):
            raise ValueError(f"holds {note[name]!r:.60} as {name}")
    if fields is _NOTE_FIELDS:
        return LearnerPart(path, note, tensors)
    from atoll.store.sharded_parts import ShardedTensors, check_note

    shards = ShardedTensors(shards_path(path), check_note(note["shards"]))
    shards.check_sizes()
    return LearnerPart(path, note, tensors, shards)


def _is_valid_note(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("format")) is int


def list_parts(run: Path) -> dict[LearnerId, list[int]]:
    """Snapshots of which each learner has a part here, oldest first. Nothing is read."""
    found = {
        learner: _list_numbered(folder, _PART_NAME)
        for learner, folder in _list_numbered(run / PARTS_FOLDER, _FOLDER_NAME)
    }
    return {learner: [number for number, _ in parts] for learner, parts in found.items() if parts}


def find_optimizer_state(
    run: Path,
    config: RunConfig,
    learner: LearnerId,
    optimizers: Optimizers,
    model: nn.Module,
    log: Callable[[str], None],
    check_other_ranks: Callable[[LearnerPart], None] = lambda part: None,
) -> tuple[LearnerPart, optimizer_state.PreparedState] | None:
    """The newest part of this run that is whole and fits: the learner's own, or else another's. None: there is none.

    What is damaged or does not fit is said, and the next older one is tried. `others`: the other ranks of the island,
    who may have something to say against it as well.
    """
    wanted = fingerprint_digest(config.fingerprint)
    for tried, path in enumerate(_candidates(run, learner)):
        if tried >= MAX_PARTS_TRIED:
            log(f"none of the newest {MAX_PARTS_TRIED} parts in {run / PARTS_FOLDER} is of use")
            return None
        try:
            part = read_part(path)
            if part.note["run"] != config.run_id:
                raise ValueError(f"belongs to the run {part.note['run']!r:.100}, this is {config.run_id!r}")
            if part.note["model"] != wanted:
                raise ValueError("is of another model")
            prepared = part.prepare(optimizers, model)
            check_other_ranks(part)
            return part, prepared
        except (OSError, ValueError) as error:
            log(f"{path}: {error_reason(error)}; trying an older one")
    return None


def _candidates(run: Path, learner: LearnerId) -> Iterator[Path]:
    """Its own, newest first; then those of others, the newest snapshot first, in the order of their numbers."""
    listed = {
        number: _list_numbered(folder, _PART_NAME)
        for number, folder in _list_numbered(run / PARTS_FOLDER, _FOLDER_NAME)
    }
    yield from (path for _, path in reversed(listed.pop(learner, [])))
    others = [(-snapshot, number, path) for number, parts in listed.items() for snapshot, path in parts]
    yield from (path for _, _, path in sorted(others))


def _list_numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Return the entries of a folder whose names match, in the order of their numbers; none where it is missing."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((int(match[1]), folder / match[0]) for match in map(pattern.fullmatch, names) if match)
