"""The published model of a decoupled run, read from the syncer's store without disturbing whoever owns it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from atoll.core.protocol import ManifestRecord
from atoll.core.tape import decode
from atoll.ml.model import ModelView
from atoll.ml.plan import FragmentPlan
from atoll.net.durable import read_file, read_small_file, read_tensor_file, small_file_text
from atoll.net.run_settings import RunSettings
from atoll.net.snapshot_files import STORE, stores_of
from atoll.train.job_settings import JobSettings
from atoll.train.loop import model_config
from atoll.train.models import GPT, build

_VERSION = re.compile(r"(\d+)\.safetensors")


def run_settings(run: Path) -> RunSettings | None:
    """What the run was founded with; None where no learner has brought a model yet."""
    path = run / STORE / "run.json"
    if not path.exists():
        return None
    return RunSettings.from_json(read_small_file(path.read_bytes()))


def is_finished(run: Path) -> bool:
    """The syncer has made the final manifest durable: no version will change any more."""
    return (run / STORE / "manifest.json").exists()


def published_model(run: Path, settings: JobSettings) -> GPT:
    """The newest durable version of every fragment, or the final one, in a model of the job's shape."""
    plan = plan_of(run)
    model = build(model_config(settings), settings.seed)
    view = ModelView(model, plan)
    for p, value in _values(run, plan):
        view.write(p, value)
    return model


def published_tensors(run: Path) -> dict[str, Tensor]:
    """The same by name, in the shapes and dtypes of the run's plan, whatever model it is that was trained."""
    plan = plan_of(run)
    return assembled(plan, _values(run, plan))


def assembled(plan: FragmentPlan, values: Iterable[tuple[int, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors by name, in their shapes and dtypes, from the flat fragments of a plan."""
    model = {}
    for info in plan.tensors:
        if info.travels:
            pair = (2,) if info.dtype.startswith("complex") else ()
            model[info.name] = torch.empty(*info.shape, *pair)
    for p, flat in values:
        for piece, begin, end in plan.spans(p):
            whole = model[piece.tensor]
            rows = (whole if plan.by_name[piece.tensor].shape else whole.unsqueeze(0))[piece.start : piece.stop]
            rows.copy_(flat[begin:end].view(rows.shape))
    for name, value in model.items():
        dtype = plan.by_name[name].dtype
        complete = torch.view_as_complex(value) if dtype.startswith("complex") else value
        model[name] = complete.to(getattr(torch, dtype))
    return model


def plan_of(run: Path) -> FragmentPlan:
    kept = run_settings(run)
    if kept is None or kept.plan is None:
        raise ValueError(f"{run} has no model yet: no learner has joined")
    return kept.plan


def _values(run: Path, plan: FragmentPlan) -> Iterator[tuple[int, Tensor]]:
    """Of every fragment its newest version; of a run that is over the one with which it ended. A shard that was away at
    the end may hold a later one, which nobody has seen."""
    final = _final(run)
    for p in range(len(plan.fragments)):
        yield p, _newest(run, p) if final is None else _version(run, p, final[p])


def _final(run: Path) -> tuple[int, ...] | None:
    if not is_finished(run):
        return None
    manifest = decode(small_file_text((run / STORE / "manifest.json").read_bytes()))
    assert isinstance(manifest, ManifestRecord)
    return manifest.versions


def _folder(run: Path, p: int) -> Path:
    folders = [store / "fragments" / f"{p:03d}" for store in stores_of(run)]
    return next((each for each in folders if each.is_dir()), folders[0])


def _newest(run: Path, p: int) -> Tensor:
    folder = _folder(run, p)
    names = [name for name in (each.name for each in folder.iterdir()) if _VERSION.fullmatch(name)]
    if not names:
        raise ValueError(f"{folder} has no version of its fragment: bring it back from a copy")
    return _read(folder / max(names))


def _version(run: Path, p: int, version: int) -> Tensor:
    path = _folder(run, p) / f"{version:09d}.safetensors"
    if not path.exists():
        raise ValueError(f"{path} is not there, and the run has ended with it: bring it back from a copy")
    return _read(path)


def _read(path: Path) -> Tensor:
    _, tensors = read_tensor_file(read_file(path))
    return tensors["published"]
