"""Reference models of a run: the initial, the published and the final model."""

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
    """Build the initial model of the run, with the values of --init or of its seed."""
    model = build_model(model_config(settings), settings.seed)
    if (run / INIT_FILE).is_file():
        load_into_model(model, read_safetensors(run / INIT_FILE), str(run / INIT_FILE))
    return model


def published_model(run: Path, settings: JobSettings, versions: Iterable[int] | None = None) -> GPT:
    """Load the published model, or the model of these versions, one per fragment."""
    model = build_model(model_config(settings), settings.seed)
    view = ModelView(model, read_plan(run))
    for p, value in read_published_fragments(run, versions):
        view.write(p, value)
    return model


def load_model(run: Path) -> tuple[JobSettings, GPT]:
    """Load the settings and the final model of a run."""
    if not run.is_dir():
        raise ValueError(f"{run}: no such run directory")
    if not (run / CONFIG_FILE).is_file():
        raise ValueError(f"{run}: not a run directory of atoll train: it has no {CONFIG_FILE}")
    if not (run / MODEL_FILE).is_file():
        raise ValueError(f"{run} has no {MODEL_FILE} yet: finish the run with atoll train --out {run} --resume")
    settings = JobSettings.load(run / CONFIG_FILE)
    model = build_model(model_config(settings), settings.seed)
    load_into_model(model, read_safetensors(run / MODEL_FILE), str(run / MODEL_FILE))
    return settings, model
