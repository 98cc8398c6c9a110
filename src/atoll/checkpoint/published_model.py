"""The published model of a decoupled run, read from the syncer's store without disturbing whoever owns it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from atoll.core.protocol import ManifestRecord, MembersRecord
from atoll.store.run_settings import RunSettings
from atoll.store.snapshots import STORE_FOLDER, list_stores
from atoll.store.tensor_file import read_tensors
from atoll.store.version_store import END_RECEIVED_FILE, fragment_folder, list_versions, read_record, read_value
from atoll.tensors.plan import FragmentPlan


def read_run_settings(run: Path) -> RunSettings | None:
    """What the run was founded with; None where no learner has brought a model yet."""
    raw = read_value(run / STORE_FOLDER / "run.json")
    return RunSettings.from_json(raw) if raw is not None else None


def is_run_finished(run: Path) -> bool:
    """The syncer has made the final manifest durable: no version will change any more."""
    return (run / STORE_FOLDER / "manifest.json").exists()


def learners_missing_end(run: Path) -> list[int]:
    """Return the learners of a finished run that may come back and have not received its end."""
    members = read_record(run / STORE_FOLDER / "members.json", MembersRecord)
    if members is None:
        return []
    received = read_value(run / STORE_FOLDER / END_RECEIVED_FILE) or {"learners": ()}
    gone = {*members.left, *members.lost, *received["learners"]}
    return [learner for learner, _ in members.incarnations if learner not in gone]


def read_published_versions(run: Path, plan: FragmentPlan) -> Iterator[int]:
    """Find the newest durable version of every fragment, one after the other, or those with which the run ended.

    A shard that was away at the end may hold a later one, which no learner has received.
    """
    manifest = read_record(run / STORE_FOLDER / "manifest.json", ManifestRecord)
    yield from (
        manifest.versions
        if manifest is not None
        else (_find_newest_version(run, p) for p in range(len(plan.fragments)))
    )


def read_published_fragments(run: Path, versions: Iterable[int] | None = None) -> Iterator[tuple[int, Tensor]]:
    """Read these versions of the fragments, or else the published ones, as flat tensors with their numbers."""
    for p, version in enumerate(read_published_versions(run, read_plan(run)) if versions is None else versions):
        yield p, _read_version(run, p, version)


def read_published_tensors(run: Path) -> dict[str, Tensor]:
    """Return the published tensors by name, in the shapes and dtypes of the run's plan."""
    return assemble_tensors(read_plan(run), read_published_fragments(run))


def assemble_tensors(plan: FragmentPlan, values: Iterable[tuple[int, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors by name, in their shapes and dtypes, from the flat fragments of a plan."""
    model = {info.name: torch.empty(info.shape) for info in plan.tensors if info.is_synced}
    for p, flat in values:
        for piece, begin, end in plan.spans(p):
            whole = model[piece.tensor]
            rows = (whole if plan.by_name[piece.tensor].shape else whole.unsqueeze(0))[piece.start : piece.stop]
            rows.copy_(flat[begin:end].view(rows.shape))
    return {name: value.to(getattr(torch, plan.by_name[name].dtype)) for name, value in model.items()}


def read_plan(run: Path) -> FragmentPlan:
    kept = read_run_settings(run)
    if kept is None or kept.plan is None:
        raise ValueError(f"{run} has no model yet: no learner has joined")
    return kept.plan


def _find_fragment_folder(run: Path, p: int) -> Path:
    folders = [fragment_folder(store, p) for store in list_stores(run)]
    return next((each for each in folders if each.is_dir()), folders[0])


def _find_newest_version(run: Path, p: int) -> int:
    folder = _find_fragment_folder(run, p)
    versions = list_versions(folder)
    if not versions:
        raise ValueError(f"{folder} has no version of its fragment: bring it back from a copy")
    return versions[-1]


def _read_version(run: Path, p: int, version: int) -> Tensor:
    path = _find_fragment_folder(run, p) / f"{version:09d}.safetensors"
    if not path.exists() and is_run_finished(run):
        raise ValueError(f"{path} is not there, and the run has ended with it: bring it back from a copy")
    return read_tensors(path)[1]["published"]
