"""Job of `atoll train`: on one machine, from an empty directory or an interrupted run to a model and its report.

runs/first/
  config.json          settings of the job
  init.safetensors     initial model, if --init was given
  store/               durable versions, written by the syncer
  tapes/               events and effects of every process
  logs/, metrics/      one file per process
  parts/               optimizer state that each learner saved for the newest snapshots
  syncer.json          address and token of the syncer while it runs
  faults.jsonl         processes that exited before the end of the run
  model.safetensors    the final published model
  report.json
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.checkpoint.model_file import MODEL_FILE, model_digest, write_tensors
from atoll.checkpoint.published_model import is_run_finished, read_run_settings
from atoll.checkpoint.restore import parse_restore_source, restore_run
from atoll.dashboard.terminal import LiveView
from atoll.launch.supervisor import signal_name
from atoll.reference.baselines import RENDEZVOUS_FILE, train_baseline
from atoll.reference.child_processes import (
    EXIT_OK,
    ChildProcess,
    JobFailedError,
    fork_server_context,
    sigterm_as_interrupt,
    terminate_all,
    wait_for_any,
)
from atoll.reference.data import Corpus
from atoll.reference.evaluation import PeriodicEvaluation, held_out_loss
from atoll.reference.job_progress import GoodputMeter, JobProgress, job_view, training_count
from atoll.reference.job_settings import JobSettings
from atoll.reference.loop import newest_metrics
from atoll.reference.models import parameter_count
from atoll.reference.report import REPORT, JobReport, ModelEvaluation, baseline_report, decoupled_report
from atoll.reference.saved_models import initial_model, load_model, published_model
from atoll.store.run_settings import CONFIG_FILE, check_is_new_run
from atoll.syncer.initial_model import INIT_FILE
from atoll.tensors.plan import named_tensors

POLL_INTERVAL_S = 0.25
SHUTDOWN_TIMEOUT_S = 8.0


__all__ = [
    "AlreadyFinishedError",
    "JobFailedError",
    "evaluate_run",
    "finish_job",
    "job_title",
    "restore_job",
    "resume_job",
    "start_job",
]


class AlreadyFinishedError(Exception):
    """Raised when the run is already finished and has a report."""


def start_job(
    settings: JobSettings, run: Path, view: LiveView, corpus: Corpus, init: Mapping[str, Tensor] | None = None
) -> JobReport:
    """Start a new run and return its report when it has finished.

    Args:
        run: the run directory, which must not exist or must be empty.
        init: initial values by tensor name, instead of values drawn from the seed.
    """
    check_is_new_run(run)
    run.mkdir(parents=True, exist_ok=True)
    if init is not None:
        write_tensors(init, run / INIT_FILE)
    settings.save(run / CONFIG_FILE)
    return _run_job(settings, run, view, corpus)


def resume_job(run: Path, view: LiveView, learners: int | None = None) -> JobReport:
    """Resume an interrupted run with its own settings and return its report.

    Args:
        learners: number of learners from now on. None: as before.
    """
    if not (run / CONFIG_FILE).is_file():
        raise ValueError(f"{run} is not a run of atoll train: it has no {CONFIG_FILE}; omit --resume to start a run")
    settings = JobSettings.load(run / CONFIG_FILE)
    if (run / REPORT).is_file() and (run / MODEL_FILE).is_file():
        raise AlreadyFinishedError
    if settings.method != "decoupled":
        raise ValueError(
            f"a run of {settings.method} cannot be resumed: this method has no checkpoints; remove {run} and start it"
            " again"
        )
    if learners is not None and learners != settings.learners:
        settings = with_learners(settings, learners)
        settings.save(run / CONFIG_FILE)
    return _run_job(settings, run, view, Corpus.load(settings.data))


def restore_job(source: str, run: Path, view: LiveView, learners: int | None, changes: dict[str, Any]) -> JobReport:
    """Start a new run from a snapshot of another run and return its report.

    Args:
        source: run directory of the other run, with `@N` for its snapshot N.
        learners: number of learners. None: as in the other run.
        changes: settings that differ from those of the other run, by field of `JobSettings`.
    """
    from atoll.reference.supervisor import new_run_id, run_settings_for

    snapshot = parse_restore_source(source)
    settings = JobSettings.load(snapshot.run / CONFIG_FILE)
    if learners is not None:
        settings = with_learners(settings, learners)
    settings = replace(settings, **changes)
    restore_run(snapshot, run, run_settings_for(settings, new_run_id(run)), view.print_line)
    return _run_job(settings, run, view, Corpus.load(settings.data))


def with_learners(settings: JobSettings, learners: int) -> JobSettings:
    """Return the same job with another number of learners, without the kills of learners that no longer exist."""
    speeds = (*settings.speeds, *[1.0] * learners)[:learners] if settings.speeds else ()
    kills = tuple(kill for kill in settings.kills if kill.learner <= learners)
    return replace(settings, learners=learners, speeds=speeds, kills=kills)


def _run_job(settings: JobSettings, run: Path, view: LiveView, corpus: Corpus) -> JobReport:
    with sigterm_as_interrupt(), view:
        if settings.method != "decoupled":
            _train_baseline(settings, run, view, job_title(settings, corpus))
        elif not is_run_finished(run):
            from atoll.reference.supervisor import Supervisor

            evaluations = PeriodicEvaluation(settings, run, corpus)
            Supervisor(settings, run, view, job_title(settings, corpus), evaluations=evaluations).train()
    view.print_line("The run is finished; evaluating its model on held-out text.")
    return finish_job(settings, run, corpus)


def job_title(settings: JobSettings, corpus: Corpus) -> str:
    """Return the title of the terminal view, for example "decoupled, 4 learners, model 1m, ..."."""
    learners = "1 learner" if settings.learners == 1 else f"{settings.learners} learners"
    return f"{settings.method}, {learners}, model {settings.model}, {settings.tokens:,} tokens of {corpus.name}"


# --------------------------------------------------------------------------------------------------------------------
# The end of every job


def finish_job(settings: JobSettings, run: Path, corpus: Corpus) -> JobReport:
    """Write the final model, evaluate it and write the report. If interrupted, it can be called again."""
    torch.set_num_threads(1)  # with several threads the order of sums, and so their last bits, would differ
    if settings.method == "decoupled":
        write_tensors(named_tensors(published_model(run, settings)), run / MODEL_FILE)
    evaluation = evaluate_run(run, corpus)
    if settings.method != "decoupled":
        report = baseline_report(run, settings, evaluation)
    else:
        run_settings = read_run_settings(run)
        assert run_settings is not None
        report = decoupled_report(run, settings, evaluation, run_settings.founded_at)
    report.save(run)
    return report


def evaluate_run(run: Path, corpus: Corpus) -> ModelEvaluation:
    """Evaluate the initial and the final model of a run on held-out text."""
    settings, model = load_model(run)
    context = model.config.context
    before = held_out_loss(initial_model(settings, run), corpus, context, settings.eval_tokens)
    after = held_out_loss(model, corpus, context, settings.eval_tokens)
    return ModelEvaluation(after.loss, after.tokens, before.loss, model_digest(model), parameter_count(model))


# --------------------------------------------------------------------------------------------------------------------
# Baselines


def _train_baseline(settings: JobSettings, run: Path, view: LiveView, title: str) -> None:
    """Run all processes of a baseline. If one of them fails, stop the others and raise `JobFailedError`."""
    (run / RENDEZVOUS_FILE).unlink(missing_ok=True)
    context = fork_server_context()
    learners = range(1, settings.learners + 1)
    children = {n: ChildProcess(f"learner {n}", run, train_baseline, (settings, n, run)) for n in learners}
    progress = JobProgress(title, settings.learners)
    meter = GoodputMeter(settings.learners)
    started_at = time.monotonic()
    running = dict(children)
    try:
        for child in children.values():
            child.start(context)
        while running:
            wait_for_any(list(running.values()), POLL_INTERVAL_S)
            for number, child in list(running.items()):
                code = child.poll_exit_code()
                if code is None:
                    continue
                del running[number]
                if code != EXIT_OK:
                    raise JobFailedError(
                        f"{child.name} exited ({signal_name(code)}), and {settings.method} cannot continue without it;"
                        f" its log {child.log} ends with: {child.last_log_line()}"
                    )
            status = _baseline_status(settings, run)
            progress.elapsed_s = time.monotonic() - started_at
            progress.goodput = meter.update(progress.elapsed_s, training_count(status))
            view.show(job_view(status, progress))
    finally:
        terminate_all(list(children.values()), SHUTDOWN_TIMEOUT_S)
        (run / RENDEZVOUS_FILE).unlink(missing_ok=True)


def _baseline_status(settings: JobSettings, run: Path) -> dict[str, Any]:
    """Return a status like that of the syncer, from the newest metrics line of each process."""
    learners = []
    trained = 0
    for number in range(1, settings.learners + 1):
        line = newest_metrics(run, number)
        if line is None:
            continue
        done = "end" in line
        trained += line["end"]["tokens"] if done else line["tokens"]
        learners.append(
            {
                "learner": number,
                "standing": "left" if done else "live",
                "step": line["end"]["steps"] if done else line["step"],
                "loss": line.get("loss"),
                "tokens_per_s": line.get("tokens_per_s"),
                "link": "gloo" if settings.learners > 1 else "",
            }
        )
    return {"progress": min(1.0, trained / settings.tokens), "learners": learners}
