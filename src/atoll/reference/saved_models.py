"""The reference model of a run: as it began, as it was last published, and as the run left it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from atoll.checkpoint.model_file import MODEL_FILE, load_into_model, read_safetensors
from atoll.checkpoint.published_model import read_plan, read_published_fragments
from atoll.reference.job_settings import JobSettings
from atoll.reference.loop import model_config
from atoll.reference.models import GPT, build_model
from atoll.store.run_settings import CONFIG_FILE
from atoll.syncer.initial_model import INIT_FILE
from atoll.tensors.model_view import ModelView


def initial_model(settings: JobSettings, run: Path) -> GPT:
    """Build the model that the run began with: the values of --init, or those of its seed."""
    model = build_model(model_config(settings), settings.seed)
    if (run / INIT_FILE).is_file():
        load_into_model(model, read_safetensors(run / INIT_FILE), str(run / INIT_FILE))
    return model


def published_model(run: Path, settings: JobSettings, versions: Iterable[int] | None = None) -> GPT:
    """Load these versions of the fragments, or else the published ones, into a model of the job's shape."""
    model = build_model(model_config(settings), settings.seed)
    view = ModelView(model, read_plan(run))
    for p, value in read_published_fragments(run, versions):
        view.write(p, value)
    return model


def load_model(run: Path) -> tuple[JobSettings, GPT]:
    """Load the model that a run left, built by its own settings."""
    if not run.is_dir():
        raise ValueError(f"{run}: no such run directory")
    if not (run / CONFIG_FILE).is_file():
        raise ValueError(f"{run}: not a run directory of atoll train, it has no {CONFIG_FILE}")
    if not (run / MODEL_FILE).is_file():
        raise ValueError(f"{run} has no {MODEL_FILE} yet: finish the run with atoll train --out {run} --resume")
    settings = JobSettings.load(run / CONFIG_FILE)
    model = build_model(model_config(settings), settings.seed)
    load_into_model(model, read_safetensors(run / MODEL_FILE), str(run / MODEL_FILE))
    return settings, model
