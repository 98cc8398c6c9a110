"""Models on their way out of a run and into another: safetensors, torch.distributed.checkpoint, torch.save.

Out goes what is published, under the names that the model's own modules have. In comes any file or directory of these
kinds; what becomes of it is one safetensors file, which a run is founded with (`--init`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.checkpoint.model_file import MODEL_FILE, read_safetensors, tensors_digest, write_tensors
from atoll.checkpoint.published_model import assemble_tensors, read_plan, read_published_tensors
from atoll.store.snapshots import list_snapshots, snapshot_version_path
from atoll.store.tensor_file import read_tensors

EXPORT_FORMATS = ("safetensors", "dcp", "transformers")
INDEX_FILE = "model.safetensors.index.json"
DCP_METADATA_FILE = ".metadata"
MAX_READ_ATTEMPTS = 5

TRANSFORMERS_NEEDS_CONFIG = (
    "--to transformers wants --config, the configuration of the model of transformers that your islands train;"
    " transformers has no architecture for the model of atoll train: it has learned positions, RMSNorm before each"
    " part, no biases, and a squared ReLU without a gate, and no text decoder of transformers 5.22 has all of these"
)


class ExportedModel(NamedTuple):
    """A model of a run, by name, and which one it is, in words."""

    tensors: dict[str, Tensor]
    description: str

    @property
    def digest(self) -> str:
        return tensors_digest(self.tensors)


# --------------------------------------------------------------------------------------------------------------------
# Out


def read_run_model(run: Path, snapshot: int | None = None) -> ExportedModel:
    """The final model, or the newest published one of a run that goes on, or that of a snapshot."""
    if not run.is_dir():
        raise ValueError(f"{run}: no such run directory")
    if snapshot is not None:
        return _read_snapshot_model(run, snapshot)
    if (run / MODEL_FILE).is_file():
        return ExportedModel(read_safetensors(run / MODEL_FILE), "the final model")
    for left in reversed(range(MAX_READ_ATTEMPTS)):
        try:
            found = read_published_tensors(run)
            break
        except FileNotFoundError:  # the syncer has removed an old version between two looks
            if not left:
                raise
    return ExportedModel(found, "the newest published version of each fragment; the run is not over")


def _read_snapshot_model(run: Path, number: int) -> ExportedModel:
    there = [info.number for info in list_snapshots(run) if info.record is not None]
    if number not in there:
        known = ", ".join(map(str, there)) or "none"
        raise ValueError(f"{run} has no whole snapshot {number}; it has {known}: see atoll snapshot {run} --list")
    plan = read_plan(run)
    paths = [snapshot_version_path(run, number, p) for p in range(len(plan.fragments))]
    values = ((p, read_tensors(path)[1]["published"]) for p, path in enumerate(paths))
    return ExportedModel(assemble_tensors(plan, values), f"snapshot {number}")


def export_model(model: ExportedModel, to: str, out: Path) -> None:
    """Write it where nothing is yet."""
    if to not in EXPORT_FORMATS:
        raise ValueError(f"there is no format {to!r}; give one of {', '.join(EXPORT_FORMATS)}")
    if to == "transformers":
        raise ValueError(TRANSFORMERS_NEEDS_CONFIG)
    if out.exists() and not (to == "dcp" and out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} is there already, and nothing is written over: give another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    if to == "safetensors":
        write_tensors(model.tensors, out)
    else:
        from torch.distributed.checkpoint.state_dict_saver import save

        with _single_process():
            save(dict(model.tensors), checkpoint_id=out, no_dist=True)


@contextmanager
def _single_process() -> Iterator[None]:
    """torch says at each use that it assumes one process. It is one, and was told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


# --------------------------------------------------------------------------------------------------------------------
# In


class ImportedModel(NamedTuple):
    tensors: dict[str, Tensor]  # sorted by name
    skipped: tuple[str, ...]  # counters and masks: whole numbers stay local, and are no part of a run's model


def read_checkpoint(path: Path, prefix: str = "", renames: Sequence[str] = ()) -> ImportedModel:
    """The model in a file or directory. With `prefix` only what is below it, without it; a rename is NEW=OLD."""
    if not path.exists():
        raise ValueError(f"{path}: there is no such checkpoint")
    found: Mapping[str, Tensor]
    if path.is_file():
        found = read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    elif (path / DCP_METADATA_FILE).is_file():
        found = _read_dcp(path)
    elif (path / INDEX_FILE).is_file():
        found = _read_sharded_safetensors(path)
    elif (path / MODEL_FILE).is_file():
        found = read_safetensors(path / MODEL_FILE)
    else:
        raise ValueError(
            f"{path} holds neither {MODEL_FILE}, {INDEX_FILE} nor {DCP_METADATA_FILE}: give a file, a directory of"
            " torch.distributed.checkpoint, or one with such a file"
        )
    named = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
    for each in renames:
        new, equals, old = each.partition("=")
        if not equals or old not in named or new in named:
            raise ValueError(f"--rename {each!r}: give NEW=OLD, of which the checkpoint has OLD and not NEW")
        named[new] = named.pop(old)
    model = {name: named[name] for name in sorted(named) if _is_model_tensor(named[name])}
    if not model:
        below = f" below {prefix!r}" if prefix else ""
        raise ValueError(f"{path} holds no parameters{below}; it has {', '.join(sorted(found)[:3]) or 'nothing'} ...")
    return ImportedModel(model, tuple(sorted(set(named) - set(model))))


def _is_model_tensor(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _read_sharded_safetensors(folder: Path) -> dict[str, Tensor]:
    """A model in several files, as transformers writes it. Only files within the folder are opened."""
    try:
        names = sorted(set(json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{folder / INDEX_FILE} has no weight_map of names and files") from None
    if odd := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise ValueError(f"{folder / INDEX_FILE} names {odd[0]!r}, which is no file of that directory")
    return {name: value for each in names for name, value in read_safetensors(folder / each).items()}


def _read_torch(path: Path) -> dict[str, Tensor]:
    """What `torch.save(model.state_dict(), path)` wrote. Only tensors are read: nothing in it is executed."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as wrong:  # on bytes that are no checkpoint torch stumbles in many ways
        first = str(wrong).partition("\n")[0]
        raise ValueError(f"{path} is neither safetensors nor tensors of torch.save: {first}") from None
    return _flatten("", found)


def _flatten(name: str, value: object) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value}
    if not isinstance(value, Mapping):
        return {}
    return {
        k: v for key, part in value.items() for k, v in _flatten(f"{name}.{key}" if name else str(key), part).items()
    }


def _read_dcp(folder: Path) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    kept = FileSystemReader(folder).read_metadata().state_dict_metadata
    found: dict[str, Tensor] = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in sorted(kept.items())
        if isinstance(each, TensorStorageMetadata)
    }
    with _single_process():
        load(found, checkpoint_id=folder, no_dist=True)
    return found
