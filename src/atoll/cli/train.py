"""`atoll train`: run a complete training job on this machine, and summarize it."""

from __future__ import annotations

import secrets
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.dash import DashboardOptions, DashOption, DashPortOption, DashRulesOption, dashboard_process
from atoll.cli.options import LogFormatOption, child_log_format
from atoll.cli.output import ExitCode, JsonOption, Result, format_size, print_to_stderr
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.reference.job_settings import JobSettings
    from atoll.reference.report import JobReport, ProcessFault

NON_RUN_OPTIONS = {"dash", "dash_port", "rules", "log_format", "as_json"}
"""Options that are not settings of a run."""

RUNS_DIRECTORY = Path("runs")
DEFAULT_KILL = "3@0.4"
"""By default a decoupled run kills one learner, to show a new user how little that costs."""


# long: the options with their help
def run(
    ctx: typer.Context,
    out: Annotated[Path | None, Setting("Directory of the run. [default: first unused runs/METHOD-N]", "DIR")] = None,
    resume: Annotated[
        bool, Setting("Resume the run in --out with its own settings. Only --learners may change.")
    ] = False,
    restore: Annotated[
        str | None,
        Setting(
            "Start a new run in --out from snapshot N of another run, by default its newest, with its settings. Only "
            "learners, tokens and kills may change.",
            "RUN[@N]",
        ),
    ] = None,
    init: options.InitOption = None,
    method: Annotated[
        str,
        Setting(
            "decoupled, or a baseline on the same tokens: ddp exchanges gradients at every step, diloco the model "
            "every H steps, streaming one fragment at a time; single is one learner without exchange.",
            "NAME",
        ),
    ] = "decoupled",
    learners: Annotated[int | None, Setting("Number of learners, one process each. [default: 4]", "M")] = None,
    kill: Annotated[
        list[str] | None,
        Setting(
            "Kill learner 3 at 40 % of the run: 3@0.4; with a restart after 10 s: 3@0.4+10. Repeatable; none: no kill. "
            f"[default: {DEFAULT_KILL} with 3 or more learners]",
            "WHO@WHEN",
        ),
    ] = None,
    *,
    job: options.JobOptions,
    dash: DashOption = False,
    dash_port: DashPortOption = None,
    rules: DashRulesOption = None,
    log_format: LogFormatOption = "text",
    as_json: JsonOption = False,
) -> Result:
    """Train a small language model on islands that never wait for each other.

    Starts a syncer and M learners as processes, shows their progress, kills one learner and restarts it, and ends
    with a summary, a report and the model. The directory of the run contains the model, the report, tapes for check,
    story and replay, logs and metrics. Ctrl-C is safe: continue with --resume.
    """
    from atoll.logs import check_log_format
    from atoll.reference.child_processes import fork_server_context
    from atoll.store.run_settings import check_is_new_run

    check_log_format(log_format)
    page = DashboardOptions(dash, dash_port, rules)
    page.check()
    if resume and restore is not None:
        raise ValueError("--resume continues a run, --restore starts a new one: give only one of them")
    if resume:
        out = _check_resume(ctx, out)
    elif restore is not None:
        out = _check_restore(ctx, out)
    else:
        settings = options.make_job(
            {
                "method": method,
                "learners": learners,
                "kills": _choose_kills(kill, method, learners),
                **job,
            }
        )
        if init is not None and method != "decoupled":
            raise ValueError(f"--init has no effect with method {method}: it is for decoupled runs")
        out = out if out is not None else next_run_directory(RUNS_DIRECTORY, method)
        check_is_new_run(out)
    fork_server_context()  # the child loads torch while this process does
    with show_status("loading torch"):
        from atoll.reference.job import AlreadyFinishedError, JobFailedError

    try:
        with child_log_format(log_format), dashboard_process(page, out, secrets.token_urlsafe(16), True):
            if resume:
                settings, report = _resume_run(out, learners)
            elif restore is not None:
                settings, report = _restore_run(restore, out, learners, job["tokens"], kill)
            else:
                settings, report = _start_run(settings, out, init)
    except AlreadyFinishedError:
        return _finished_result(out)
    except JobFailedError as error:
        print_to_stderr(str(error))
        raise typer.Exit(ExitCode.FAILED) from None
    except KeyboardInterrupt:
        if method == "decoupled" and (out / "config.json").exists():
            print_to_stderr(f"stopped cleanly; resume with: atoll train --out {out} --resume")
        raise
    return Result(report.to_json, summary_lines(report, settings, out))


def _start_run(settings: JobSettings, out: Path, init: Path | None) -> tuple[JobSettings, JobReport]:
    from dataclasses import replace

    from atoll.dashboard.terminal import LiveView
    from atoll.reference.data import Corpus
    from atoll.reference.job import start_job
    from atoll.reference.loop import model_config

    model_config(settings)  # raises for an unknown model before any file is written
    corpus = Corpus.load(settings.data)
    settings = replace(settings, vocabulary=max(settings.vocabulary, corpus.vocabulary))
    return settings, start_job(settings, out, LiveView(), corpus, _read_init(settings, init))


def _read_init(settings: JobSettings, init: Path | None) -> Mapping[str, Tensor] | None:
    """Return the values of --init. Raise `ValueError` if they do not fit the model, before any file is written."""
    if init is None:
        return None
    from atoll.checkpoint.formats import read_checkpoint
    from atoll.checkpoint.model_file import load_into_model
    from atoll.reference.loop import model_config
    from atoll.reference.models import build_model

    values = read_checkpoint(init).tensors
    load_into_model(build_model(model_config(settings), settings.seed), values, str(init))
    return values


def _resume_run(out: Path, learners: int | None) -> tuple[JobSettings, JobReport]:
    from atoll.dashboard.terminal import LiveView
    from atoll.reference.job import resume_job
    from atoll.reference.job_settings import JobSettings
    from atoll.store.run_settings import CONFIG_FILE

    report = resume_job(out, LiveView(), learners)
    return JobSettings.load(out / CONFIG_FILE), report


def _restore_run(
    source: str, out: Path, learners: int | None, tokens: str | None, kill: list[str] | None
) -> tuple[JobSettings, JobReport]:
    from atoll.dashboard.terminal import LiveView
    from atoll.reference.job import restore_job
    from atoll.reference.job_settings import JobSettings, PlannedKill, parse_count
    from atoll.store.run_settings import CONFIG_FILE

    changes: dict[str, Any] = {"kills": tuple(PlannedKill.parse(each) for each in kill or () if each != "none")}
    if tokens is not None:
        changes["tokens"] = parse_count("--tokens", tokens)
    report = restore_job(source, out, LiveView(), learners, changes)
    return JobSettings.load(out / CONFIG_FILE), report


def _choose_kills(kill: list[str] | None, method: str, learners: int | None) -> list[str]:
    if kill is None:
        has_default = method == "decoupled" and (learners is None or learners >= 3)
        return [DEFAULT_KILL] if has_default else []
    return [each for each in kill if each != "none"]


def _check_resume(ctx: typer.Context, out: Path | None) -> Path:
    """Return the directory of the run to resume. Raise `ValueError` for options that would be ignored."""
    if out is None:
        raise ValueError("--resume needs the directory of the run: --out runs/first --resume")
    options.reject_options_with_resume(ctx, {"out", "resume", "learners", *NON_RUN_OPTIONS})
    return out


def _check_restore(ctx: typer.Context, out: Path | None) -> Path:
    from atoll.store.run_settings import check_is_new_run

    allowed = {"out", "restore", "learners", "tokens", "kill", *NON_RUN_OPTIONS}
    options.reject_options_with_resume(ctx, allowed, "--restore")
    out = out if out is not None else next_run_directory(RUNS_DIRECTORY, "decoupled")
    check_is_new_run(out)
    return out


@contextmanager
def show_status(text: str) -> Iterator[None]:
    """Show a text with a spinner on a terminal."""
    import sys

    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def next_run_directory(runs: Path, method: str) -> Path:
    """Return the first of METHOD-1, METHOD-2, ... that does not exist."""
    number = 1
    while (runs / f"{method}-{number}").exists():
        number += 1
    return runs / f"{method}-{number}"


def _finished_result(out: Path) -> Result:
    import json

    path = out / "report.json"
    return Result(
        lambda: json.loads(path.read_text(encoding="utf-8")),
        [
            f"The run in {out} is finished; its report is {path}.",
            f'Generate text: atoll generate {out} "def main():"',
        ],
    )


TEXT_WIDTH = 100


def summary_lines(report: JobReport, settings: JobSettings, run: Path) -> Iterator[str]:
    """Yield the summary of a job as wrapped paragraphs with empty lines between them."""
    paragraphs = [" ".join(_training_sentences(report, settings))]
    paragraphs += [" ".join(_fault_sentences(report, fault)) for fault in report.faults]
    if report.method == "decoupled":
        paragraphs.append(" ".join(_token_sentences(report)))
    paragraphs.append(" ".join(_traffic_sentences(report, settings)))
    for paragraph in paragraphs:
        yield textwrap.fill(paragraph, TEXT_WIDTH)
        yield ""
    yield from _next_commands(report, run)


def _training_sentences(report: JobReport, settings: JobSettings) -> Iterator[str]:
    from atoll.dashboard.terminal import format_duration

    learners = "one learner" if report.learners == 1 else f"{report.learners} learners"
    yield (
        f"A model of {report.parameters:,} parameters was trained on {report.tokens.trained:,} tokens by {learners}"
        f" in {format_duration(report.wall_s)},"
        f" {report.tokens.trained / max(report.wall_s, 1e-9):,.0f} tokens per second."
    )
    yield (
        f"On {report.eval_tokens:,} tokens of held-out text, which no learner trained on, its loss fell from"
        f" {report.eval_loss_before:.3f} to {report.eval_loss:.3f}."
    )
    if report.paced is not None:
        yield f"Steps were paced: each took at least {_format_step_time(report.paced.step_time_s)} at speed 1."


def _fault_sentences(report: JobReport, fault: ProcessFault) -> Iterator[str]:
    from atoll.dashboard.terminal import format_duration

    name = fault.who.capitalize()
    event = "was killed on purpose" if fault.planned else f"exited unexpectedly ({fault.what})"
    yield f"{name} {event} after {format_duration(max(0.0, fault.at_s or 0.0))}."
    if _is_absent(fault):
        yield "It did not train again before the run ended. Its unmerged work is lost."
    if fault.away_s is None:
        return
    yield (
        f"It trained again {fault.away_s:.1f} s later: model from the syncer,"
        f" {fault.came_back_with or 'nothing else'}. Its unmerged samples were leased again."
    )
    if fault.others_step_s_before is not None and fault.others_step_s_during is not None:
        before, during = fault.others_step_s_before, fault.others_step_s_during
        took = f"their steps took {_format_step_time(before)} before and {_format_step_time(during)} while it was down"
        if during > 1.1 * before:
            yield f"The others did not wait for it, but {took}: check for other load on this machine."
        elif during < 0.95 * before and report.paced is None:
            yield f"The others did not wait for it and had more of the cores: {took}."
        else:
            yield f"The others did not wait for it: {took}."


def _is_absent(fault: ProcessFault) -> bool:
    """Return whether a learner exited and did not train again before the end of the run."""
    return fault.who.startswith("learner") and fault.away_s is None


def _token_sentences(report: JobReport) -> Iterator[str]:
    tokens = report.tokens
    trained = max(tokens.trained, 1)
    absent = " and ".join(dict.fromkeys(fault.who for fault in report.faults if _is_absent(fault)))
    merged = f"Of the {tokens.trained:,} tokens {_format_share(tokens.merged / trained)} are merged into the model"
    pending = _format_share(tokens.pending / trained)
    lost = f"{_format_share(tokens.dropped / trained)} were lost" + (
        " with a process that ended" if tokens.dropped else ""
    )
    if absent:
        yield f"{merged}, and {lost}." if tokens.dropped else f"{merged}."
        yield (
            f"{pending} are in no version: trained during the last merges, or lost with {absent}, which did not come"
            " back."
        )
    else:
        yield f"{merged}, {pending} were trained during the last merges, and {lost}."
    if report.contributions_per_merge is not None and report.effective_h is not None:
        yield (
            f"There were {report.rounds:,} merges of one fragment each, on average of"
            f" {report.contributions_per_merge:.1f} of {report.learners} learners."
            f" Each fragment was merged every {report.effective_h:.0f} steps."
        )
    yield (
        f"Goodput was {_format_share(report.goodput)}: the share of the learners' time spent in steps."
        f" Uptime was {_format_share(report.uptime)}: the share of the time in which at least one learner trained."
    )


def _traffic_sentences(report: JobReport, settings: JobSettings) -> Iterator[str]:
    from atoll.reference.baselines import ring_bytes

    moved = report.bytes.up + report.bytes.down
    if report.learners == 1 and not moved:
        yield "A single learner exchanges no data."
        return
    yield (
        f"The learners sent {format_size(report.bytes.up)} and received {format_size(report.bytes.down)},"
        f" {report.bytes.per_token:.1f} bytes per token."
    )
    if report.method != "ddp" and report.learners > 1:
        steps = report.steps / report.learners  # of each learner, if all had taken the same number
        parallel = 2 * report.learners * steps * ring_bytes(report.parameters, report.learners)
        yield (
            f"Data-parallel training on the same tokens would have moved {format_size(parallel)},"
            f" {parallel / moved:.0f} times as much, and every step would have waited for it."
        )
    if report.method != "decoupled":
        waited_s = sum(island.waited_s for island in report.islands) / report.learners
        yield f"Each learner waited {waited_s:.1f} s for the others; goodput was {_format_share(report.goodput)}."


def _next_commands(report: JobReport, run: Path) -> Iterator[str]:
    yield f"The results are in {run}: model.safetensors, report.json, tapes, logs, metrics. Try next:"
    commands = {f'atoll generate {run} "def main():"': "generate text with the model"}
    if report.method == "decoupled":
        learner = next((fault.who.split()[-1] for fault in report.faults if fault.who.startswith("learner")), "1")
        commands[f"atoll dash {run}"] = "show the run in the browser"
        commands[f"atoll check {run}"] = "check every invariant of the protocol over the tapes"
        commands[f"atoll story {run} --learner {learner}"] = "show what happened to one learner"
        commands[f"atoll ledger {run}"] = "show which learner trained which samples, and where they were merged"
        commands[f"atoll replay {run}"] = "train the model again from the tapes, to the same bits"
    width = max(map(len, commands))
    for command, meaning in commands.items():
        yield f"  {command:<{width}}   {meaning}"


def _format_step_time(seconds: float) -> str:
    return f"{1000.0 * seconds:.0f} ms" if seconds < 10.0 else f"{seconds:.0f} s"


def _format_share(share: float) -> str:
    """
    >>> _format_share(0.5), _format_share(0.9999), _format_share(0.0)
    ('50.0 %', '99.99 %', '0 %')
    """
    if share in (0.0, 1.0):
        return f"{100.0 * share:.0f} %"
    near = min(share, 1.0 - share)
    return f"{100.0 * share:.{1 if near >= 0.005 else 2}f} %"
