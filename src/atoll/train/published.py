"""The published model of a decoupled run, read from the syncer's store without disturbing whoever owns it."""

from __future__ import annotations

import re
from pathlib import Path

from atoll.ml.model import ModelView
from atoll.net.durable import read_file, read_small_file, read_tensor_file
from atoll.net.run_settings import RunSettings
from atoll.train.job_settings import JobSettings
from atoll.train.loop import model_config
from atoll.train.models import GPT, build

STORE = "store"

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
    """The newest durable version of every fragment, in a model of the job's shape."""
    kept = run_settings(run)
    if kept is None or kept.plan is None:
        raise ValueError(f"{run} has no model yet: no learner has joined")
    model = build(model_config(settings), settings.seed)
    view = ModelView(model, kept.plan)
    for p in range(len(kept.plan.fragments)):
        folder = run / STORE / "fragments" / f"{p:03d}"
        names = [name for name in (each.name for each in folder.iterdir()) if _VERSION.fullmatch(name)]
        if not names:
            raise ValueError(f"{folder} has no version of its fragment: bring it back from a copy")
        _, tensors = read_tensor_file(read_file(folder / max(names)))
        view.write(p, tensors["published"])
    return model
