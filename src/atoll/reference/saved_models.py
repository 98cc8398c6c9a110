"""The reference model of a run: as it began, as it was last published, and as the run left it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from atoll.checkpoint.model_file import MODEL, fill, read_safetensors
from atoll.checkpoint.published import plan_of, published_fragments
from atoll.reference.job_settings import JobSettings
from atoll.reference.loop import model_config
from atoll.reference.models import GPT, build
from atoll.store.run_settings import CONFIG
from atoll.syncer.initial_model import INIT
from atoll.tensors.model_view import ModelView


def first_model(settings: JobSettings, run: Path) -> GPT:
    """Build the model that the run began with: the values of --init, or those of its seed."""
    model = build(model_config(settings), settings.seed)
    if (run / INIT).is_file():
        fill(model, read_safetensors(run / INIT), str(run / INIT))
    return model


def published_model(run: Path, settings: JobSettings, versions: Iterable[int] | None = None) -> GPT:
    """Load these versions of the fragments, or else the published ones, into a model of the job's shape."""
    model = build(model_config(settings), settings.seed)
    view = ModelView(model, plan_of(run))
    for p, value in published_fragments(run, versions):
        view.write(p, value)
    return model


def load_model(run: Path) -> tuple[JobSettings, GPT]:
    """Load the model that a run left, built by its own settings."""
    if not run.is_dir():
        raise ValueError(f"{run}: no such run directory")
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run}: not a run directory of atoll train, it has no {CONFIG}")
    if not (run / MODEL).is_file():
        raise ValueError(f"{run} has no {MODEL} yet: finish the run with atoll train --out {run} --resume")
    settings = JobSettings.load(run / CONFIG)
    model = build(model_config(settings), settings.seed)
    fill(model, read_safetensors(run / MODEL), str(run / MODEL))
    return settings, model
