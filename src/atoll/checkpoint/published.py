"""The published model of a decoupled run, read from the syncer's store without disturbing whoever owns it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from atoll.core.protocol import ManifestRecord, MembersRecord
from atoll.store.run_settings import RunSettings
from atoll.store.snapshots import STORE, stores_of
from atoll.store.tensor_file import read_tensors
from atoll.store.version_store import END_RECEIVED, fragment_folder, read_record, read_value, versions_in
from atoll.tensors.plan import FragmentPlan


def run_settings(run: Path) -> RunSettings | None:
    """What the run was founded with; None where no learner has brought a model yet."""
    raw = read_value(run / STORE / "run.json")
    return RunSettings.from_json(raw) if raw is not None else None


def is_finished(run: Path) -> bool:
    """The syncer has made the final manifest durable: no version will change any more."""
    return (run / STORE / "manifest.json").exists()


def learners_without_end(run: Path) -> list[int]:
    """Return the learners of a finished run that may come back and have not received its end."""
    members = read_record(run / STORE / "members.json", MembersRecord)
    if members is None:
        return []
    received = read_value(run / STORE / END_RECEIVED) or {"learners": ()}
    gone = {*members.left, *members.lost, *received["learners"]}
    return [learner for learner, _ in members.incarnations if learner not in gone]


def published_versions(run: Path, plan: FragmentPlan) -> Iterator[int]:
    """Find the newest durable version of every fragment, one after the other, or those with which the run ended.

    A shard that was away at the end may hold a later one, which no learner has received.
    """
    manifest = read_record(run / STORE / "manifest.json", ManifestRecord)
    yield from manifest.versions if manifest is not None else (_newest(run, p) for p in range(len(plan.fragments)))


def published_fragments(run: Path, versions: Iterable[int] | None = None) -> Iterator[tuple[int, Tensor]]:
    """Read these versions of the fragments, or else the published ones, as flat tensors with their numbers."""
    for p, version in enumerate(published_versions(run, plan_of(run)) if versions is None else versions):
        yield p, _read(run, p, version)


def published_tensors(run: Path) -> dict[str, Tensor]:
    """Return the published tensors by name, in the shapes and dtypes of the run's plan."""
    return assembled(plan_of(run), published_fragments(run))


def assembled(plan: FragmentPlan, values: Iterable[tuple[int, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors by name, in their shapes and dtypes, from the flat fragments of a plan."""
    model = {info.name: torch.empty(info.shape) for info in plan.tensors if info.travels}
    for p, flat in values:
        for piece, begin, end in plan.spans(p):
            whole = model[piece.tensor]
            rows = (whole if plan.by_name[piece.tensor].shape else whole.unsqueeze(0))[piece.start : piece.stop]
            rows.copy_(flat[begin:end].view(rows.shape))
    return {name: value.to(getattr(torch, plan.by_name[name].dtype)) for name, value in model.items()}


def plan_of(run: Path) -> FragmentPlan:
    kept = run_settings(run)
    if kept is None or kept.plan is None:
        raise ValueError(f"{run} has no model yet: no learner has joined")
    return kept.plan


def _folder(run: Path, p: int) -> Path:
    folders = [fragment_folder(store, p) for store in stores_of(run)]
    return next((each for each in folders if each.is_dir()), folders[0])


def _newest(run: Path, p: int) -> int:
    folder = _folder(run, p)
    versions = versions_in(folder)
    if not versions:
        raise ValueError(f"{folder} has no version of its fragment: bring it back from a copy")
    return versions[-1]


def _read(run: Path, p: int, version: int) -> Tensor:
    path = _folder(run, p) / f"{version:09d}.safetensors"
    if not path.exists() and is_finished(run):
        raise ValueError(f"{path} is not there, and the run has ended with it: bring it back from a copy")
    return read_tensors(path)[1]["published"]
