"""Export the model of a run, and import a model into a new run: safetensors, torch.distributed.checkpoint, torch.save.

An export has the published values, under the names of the model's modules. An import reads a file or directory of any
of these formats and writes one safetensors file, from which a run can start (`--init`).
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
    "--to transformers needs --config, the configuration of the model of transformers that your islands train;"
    " transformers has no architecture for the model of atoll train: it has learned positions, RMSNorm before each"
    " part, no biases, and a squared ReLU without a gate, and no text decoder of transformers 5.22 has all of these"
)


class ExportedModel(NamedTuple):
    """Tensors of a run's model, with a description of its source."""

    tensors: dict[str, Tensor]
    description: str

    @property
    def digest(self) -> str:
        return tensors_digest(self.tensors)


# --------------------------------------------------------------------------------------------------------------------
# Export


def read_run_model(run: Path, snapshot: int | None = None) -> ExportedModel:
    """Read the model of a snapshot, else the final model, or the newest published one of an unfinished run."""
    if not run.is_dir():
        raise ValueError(f"{run}: no such run directory")
    if snapshot is not None:
        return _read_snapshot_model(run, snapshot)
    if (run / MODEL_FILE).is_file():
        return ExportedModel(read_safetensors(run / MODEL_FILE), "the final model")
    for attempts_left in reversed(range(MAX_READ_ATTEMPTS)):
        try:
            found = read_published_tensors(run)
            break
        except FileNotFoundError:  # the syncer has deleted an old version in between
            if not attempts_left:
                raise
    return ExportedModel(found, "the newest published version of each fragment; the run is not finished")


def _read_snapshot_model(run: Path, number: int) -> ExportedModel:
    numbers = [info.number for info in list_snapshots(run) if info.record is not None]
    if number not in numbers:
        available = ", ".join(map(str, numbers)) or "none"
        raise ValueError(
            f"{run} has no complete snapshot {number}; it has {available}: see atoll snapshot {run} --list"
        )
    plan = read_plan(run)
    paths = [snapshot_version_path(run, number, p) for p in range(len(plan.fragments))]
    values = ((p, read_tensors(path)[1]["published"]) for p, path in enumerate(paths))
    return ExportedModel(assemble_tensors(plan, values), f"snapshot {number}")


def export_model(model: ExportedModel, to: str, out: Path) -> None:
    """Write a model to a new path. Raise ValueError if the path exists."""
    if to not in EXPORT_FORMATS:
        raise ValueError(f"unknown format {to!r}; use one of {', '.join(EXPORT_FORMATS)}")
    if to == "transformers":
        raise ValueError(TRANSFORMERS_NEEDS_CONFIG)
    if out.exists() and not (to == "dcp" and out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not overwritten: choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    if to == "safetensors":
        write_tensors(model.tensors, out)
    else:
        from torch.distributed.checkpoint.state_dict_saver import save

        with _single_process():
            save(dict(model.tensors), checkpoint_id=out, no_dist=True)


@contextmanager
def _single_process() -> Iterator[None]:
    """Suppress torch's warning that it assumes a single process, which is correct here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


# --------------------------------------------------------------------------------------------------------------------
# Import


class ImportedModel(NamedTuple):
    tensors: dict[str, Tensor]  # sorted by name
    skipped: tuple[str, ...]  # integer tensors such as counters and masks, which stay local


def read_checkpoint(path: Path, prefix: str = "", renames: Sequence[str] = ()) -> ImportedModel:
    """Read the model in a file or directory.

    Args:
        prefix: Read only names with this prefix, and remove it.
        renames: Each is NEW=OLD.
    """
    if not path.exists():
        raise ValueError(f"{path}: no such checkpoint")
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
            f"{path} contains neither {MODEL_FILE}, {INDEX_FILE} nor {DCP_METADATA_FILE}: give a file, a directory of"
            " torch.distributed.checkpoint, or one with such a file"
        )
    renamed = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
    for each in renames:
        new, equals, old = each.partition("=")
        if not equals or old not in renamed or new in renamed:
            raise ValueError(f"--rename {each!r}: give NEW=OLD with an existing OLD and an unused NEW")
        renamed[new] = renamed.pop(old)
    model = {name: renamed[name] for name in sorted(renamed) if _is_model_tensor(renamed[name])}
    if not model:
        below = f" with prefix {prefix!r}" if prefix else ""
        raise ValueError(f"{path} has no parameters{below}; it has {', '.join(sorted(found)[:3]) or 'nothing'} ...")
    return ImportedModel(model, tuple(sorted(set(renamed) - set(model))))


def _is_model_tensor(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _read_sharded_safetensors(folder: Path) -> dict[str, Tensor]:
    """Read a model in several files, as written by transformers. Only files within the folder are opened."""
    try:
        names = sorted(set(json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{folder / INDEX_FILE} has no weight_map of names and files") from None
    if invalid := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise ValueError(f"{folder / INDEX_FILE} names {invalid[0]!r}, which is not a file in that directory")
    return {name: value for each in names for name, value in read_safetensors(folder / each).items()}


def _read_torch(path: Path) -> dict[str, Tensor]:
    """Read a file of `torch.save(model.state_dict(), path)`. Only tensors are read, no code is executed."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch raises many types for invalid bytes
        first = str(error).partition("\n")[0]
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

    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    found: dict[str, Tensor] = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in sorted(metadata.items())
        if isinstance(each, TensorStorageMetadata)
    }
    with _single_process():
        load(found, checkpoint_id=folder, no_dist=True)
    return found
