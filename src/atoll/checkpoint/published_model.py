"""Read the published model of a decoupled run from the syncer's store, without locks: the syncer may be running."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from atoll.core.protocol import ManifestRecord, MembersRecord
from atoll.store.run_settings import RunSettings, check_run_format
from atoll.store.snapshots import STORE_FOLDER, list_stores
from atoll.store.tensor_file import read_tensors
from atoll.store.version_store import (
    END_RECEIVED_FILE,
    SETTINGS_FILE,
    fragment_folder,
    list_versions,
    read_record,
    read_value,
)
from atoll.tensors.plan import FragmentPlan


def read_run_settings(run: Path) -> RunSettings | None:
    """Return the stored settings of a run; None if no learner has uploaded a model yet.

    Raise RunFormatError for a run directory of another version of Atoll.
    """
    raw = read_value(run / STORE_FOLDER / SETTINGS_FILE)
    if raw is None:
        return None
    check_run_format(raw, run)
    return RunSettings.from_json(raw)


def is_run_finished(run: Path) -> bool:
    """Return whether the final manifest is durable: versions do not change any more."""
    return (run / STORE_FOLDER / "manifest.json").exists()


def learners_missing_end(run: Path) -> list[int]:
    """Return the learners of a finished run that may reconnect and have not yet acknowledged its end."""
    members = read_record(run / STORE_FOLDER / "members.json", MembersRecord)
    if members is None:
        return []
    received = read_value(run / STORE_FOLDER / END_RECEIVED_FILE) or {"learners": ()}
    finished = {*members.left, *members.lost, *received["learners"]}
    return [learner for learner, _ in members.incarnations if learner not in finished]


def read_published_versions(run: Path, plan: FragmentPlan) -> Iterator[int]:
    """Yield the newest durable version of each fragment, or the final versions of a finished run.

    The final versions come from the manifest: a shard that was unavailable at the end may hold a later version, which
    no learner has received.
    """
    manifest = read_record(run / STORE_FOLDER / "manifest.json", ManifestRecord)
    yield from (
        manifest.versions
        if manifest is not None
        else (_find_newest_version(run, p) for p in range(len(plan.fragments)))
    )


def read_published_fragments(run: Path, versions: Iterable[int] | None = None) -> Iterator[tuple[int, Tensor]]:
    """Yield each fragment's number and flat values, of these versions or else of the published ones."""
    for p, version in enumerate(read_published_versions(run, read_plan(run)) if versions is None else versions):
        yield p, _read_version(run, p, version)


def read_published_tensors(run: Path) -> dict[str, Tensor]:
    """Return the published tensors by name, in the shapes and dtypes of the run's plan."""
    return assemble_tensors(read_plan(run), read_published_fragments(run))


def assemble_tensors(plan: FragmentPlan, values: Iterable[tuple[int, Tensor]]) -> dict[str, Tensor]:
    """Return tensors by name, in the shapes and dtypes of the plan, from flat fragments with their numbers."""
    model = {info.name: torch.empty(info.shape) for info in plan.tensors if info.is_synced}
    for p, flat in values:
        for piece, begin, end in plan.spans(p):
            tensor = model[piece.tensor]
            rows = (tensor if plan.by_name[piece.tensor].shape else tensor.unsqueeze(0))[piece.start : piece.stop]
            rows.copy_(flat[begin:end].view(rows.shape))
    return {name: value.to(getattr(torch, plan.by_name[name].dtype)) for name, value in model.items()}


def read_plan(run: Path) -> FragmentPlan:
    settings = read_run_settings(run)
    if settings is None or settings.plan is None:
        raise ValueError(f"{run} has no model yet: no learner has joined")
    return settings.plan


def _find_fragment_folder(run: Path, p: int) -> Path:
    folders = [fragment_folder(store, p) for store in list_stores(run)]
    return next((each for each in folders if each.is_dir()), folders[0])


def _find_newest_version(run: Path, p: int) -> int:
    folder = _find_fragment_folder(run, p)
    versions = list_versions(folder)
    if not versions:
        raise ValueError(f"{folder} has no version of its fragment: restore it from a backup")
    return versions[-1]


def _read_version(run: Path, p: int, version: int) -> Tensor:
    path = _find_fragment_folder(run, p) / f"{version:09d}.safetensors"
    if not path.exists() and is_run_finished(run):
        raise ValueError(f"{path} is missing, and it is a final version of the run: restore it from a backup")
    return read_tensors(path)[1]["published"]
