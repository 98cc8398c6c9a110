"""`atoll train`: a whole training job on this machine."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import job_options as options
from atoll.cli.log_format import LogFormat, of_children
from atoll.cli.output import ExitCode, JsonOption, complain, print_json
from atoll.cli.page_beside import Dash, DashPort, Page, PageRules, page_beside

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.reference.job_settings import JobSettings
    from atoll.reference.report import JobReport

EXAMPLE = "atoll train --out runs/first"

BESIDE = {"dash", "dash_port", "rules", "log_format", "as_json"}
"""Options that are no settings of a run."""

RUNS = Path("runs")
SHOWN_KILL = "3@0.4"
"""Without an option a decoupled run loses a learner on the way, so that a newcomer sees what that costs: little."""


# long: the list of options, with what each one means
def run(
    context: typer.Context,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Directory of the run. [default: the first free runs/METHOD-N]"),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in --out, by its own settings; only --learners may change."),
    ] = False,
    restore: Annotated[
        str | None,
        typer.Option(
            "--restore",
            metavar="RUN[@N]",
            help="Start a new run in --out from snapshot N of another, or its newest, by its settings; only learners, "
            "tokens and kills may be given anew.",
        ),
    ] = None,
    init: options.Init = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            metavar="NAME",
            help="decoupled; or a baseline on the same tokens: ddp exchanges gradients at every step, diloco the "
            "model every H steps, streaming a fragment at a time, single trains alone.",
        ),
    ] = "decoupled",
    learners: Annotated[
        int | None, typer.Option("--learners", metavar="M", help="Islands, one process each. [default: 4]")
    ] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(
            "--kill",
            metavar="WHO@WHEN",
            help="Kill learner 3 at 40 % of the run: 3@0.4; 3@0.4+10 keeps it away for 10 s. Repeatable; none: "
            f"nobody. [default: {SHOWN_KILL} where there are 3 learners]",
        ),
    ] = None,
    tokens: options.Tokens = None,
    model: options.Model = None,
    experts: options.Experts = None,
    context_tokens: options.Context = None,
    data: options.Data = None,
    batch: options.Batch = None,
    seed: options.Seed = 0,
    inner: options.Inner = None,
    lr: options.Lr = None,
    beta2: options.Beta2 = None,
    max_rate: options.MaxRate = None,
    streams: options.Streams = None,
    step_time: options.StepTime = None,
    speeds: options.Speeds = None,
    shards: options.Shards = None,
    fragments: options.Fragments = None,
    every: options.Every = None,
    tau: options.Tau = None,
    quorum: options.Quorum = None,
    grace: options.Grace = None,
    snapshot_every: options.SnapshotEvery = None,
    adopt: options.Adopt = None,
    merge: options.Merge = None,
    norm_clip: options.NormClip = None,
    plan: options.Plan = None,
    outer: options.Outer = None,
    outer_lr: options.OuterLr = None,
    outer_momentum: options.OuterMomentum = None,
    outer_ramp: options.OuterRamp = None,
    outer_breadth: options.OuterBreadth = None,
    up: options.Up = None,
    down: options.Down = None,
    eval_tokens: options.EvalTokens = None,
    dash: Dash = False,
    dash_port: DashPort = None,
    rules: PageRules = None,
    log_format: LogFormat = "text",
    as_json: JsonOption = False,
) -> None:
    """Train a small language model on islands that never wait for each other.

    Starts a syncer and M learners as real processes, shows them as they go, kills one of them on the way and starts it
    again, and ends with a summary, a report and the model. Everything stays in the run's directory: the model, the
    report, tapes for check, story and replay, logs and metrics. Ctrl-C is safe: --resume goes on later.
    """
    from atoll.logs import check_format
    from atoll.reference.children import processes
    from atoll.store.run_settings import check_new

    check_format(log_format)
    page = Page(dash, dash_port, rules)
    page.check()
    if resume and restore is not None:
        raise ValueError("--resume goes on with a run, --restore starts a new one: give one of them")
    if resume:
        out = _to_resume(context, out)
    elif restore is not None:
        out = _to_restore(context, out)
    else:
        settings = options.make_settings(
            {
                "method": method,
                "learners": learners,
                "kills": _kills(kill, method, learners),
                "seed": seed,
                **{name: context.params[name] for name in options.SHARED},
            }
        )
        if init is not None and method != "decoupled":
            raise ValueError(f"--init means nothing to {method}: it is for decoupled runs")
        out = out if out is not None else next_run(RUNS, method)
        check_new(out)
    processes()  # torch is loaded there while it is loaded here
    with waiting_for("torch is loaded"):
        from atoll.reference.job import AlreadyFinished, JobFailed

    try:
        with of_children(log_format), page_beside(page, out, secrets.token_urlsafe(16), True):
            if resume:
                settings, report = _resumed(out, learners)
            elif restore is not None:
                settings, report = _restored(restore, out, learners, tokens, kill)
            else:
                settings, report = _started(settings, out, init)
    except AlreadyFinished:
        _show_finished(out, as_json)
        return
    except JobFailed as failed:
        complain(str(failed))
        raise typer.Exit(ExitCode.FAILED) from None
    except KeyboardInterrupt:
        if method == "decoupled" and (out / "config.json").exists():
            complain(f"stopped in order; go on with: atoll train --out {out} --resume")
        raise
    _show(report, settings, out, as_json)


def _started(settings: JobSettings, out: Path, init: Path | None) -> tuple[JobSettings, JobReport]:
    from dataclasses import replace

    from atoll.dashboard.terminal import LiveView
    from atoll.reference.data import Text
    from atoll.reference.job import start_job
    from atoll.reference.loop import model_config

    model_config(settings)  # an unknown model is told before anything is written
    corpus = Text.load(settings.data)
    settings = replace(settings, vocabulary=max(settings.vocabulary, corpus.vocabulary))
    return settings, start_job(settings, out, LiveView(), corpus, _read_init(settings, init))


def _read_init(settings: JobSettings, init: Path | None) -> Mapping[str, Tensor] | None:
    """What --init names. That it is of another model is told before anything is written."""
    if init is None:
        return None
    from atoll.checkpoint.formats import read_checkpoint
    from atoll.checkpoint.model_file import fill
    from atoll.reference.loop import model_config
    from atoll.reference.models import build

    values = read_checkpoint(init).tensors
    fill(build(model_config(settings), settings.seed), values, str(init))
    return values


def _resumed(out: Path, learners: int | None) -> tuple[JobSettings, JobReport]:
    from atoll.dashboard.terminal import LiveView
    from atoll.reference.job import resume_job
    from atoll.reference.job_settings import JobSettings
    from atoll.store.run_settings import CONFIG

    report = resume_job(out, LiveView(), learners)
    return JobSettings.load(out / CONFIG), report


def _restored(
    source: str, out: Path, learners: int | None, tokens: str | None, kill: list[str] | None
) -> tuple[JobSettings, JobReport]:
    from atoll.dashboard.terminal import LiveView
    from atoll.reference.job import restore_job
    from atoll.reference.job_settings import JobSettings, Kill
    from atoll.store.run_settings import CONFIG

    changes: dict[str, Any] = {"kills": tuple(Kill.parse(each) for each in kill or () if each != "none")}
    if tokens is not None:
        changes["tokens"] = options.read_count("--tokens", tokens)
    report = restore_job(source, out, LiveView(), learners, changes)
    return JobSettings.load(out / CONFIG), report


def _kills(kill: list[str] | None, method: str, learners: int | None) -> list[str]:
    if kill is None:
        shown = method == "decoupled" and (learners is None or learners >= 3)
        return [SHOWN_KILL] if shown else []
    return [each for each in kill if each != "none"]


def _to_resume(context: typer.Context, out: Path | None) -> Path:
    """The run to go on with. Refuses what would be ignored: it has settings of its own."""
    if out is None:
        raise ValueError("say which run to go on with: --out runs/first --resume")
    options.refuse_with_resume(context, {"out", "resume", "learners", *BESIDE})
    return out


def _to_restore(context: typer.Context, out: Path | None) -> Path:
    from atoll.store.run_settings import check_new

    allowed = {"out", "restore", "learners", "tokens", "kill", *BESIDE}
    options.refuse_with_resume(context, allowed, "--restore")
    out = out if out is not None else next_run(RUNS, "decoupled")
    check_new(out)
    return out


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Tell a person who watches that something is under way."""
    import sys

    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


def next_run(runs: Path, method: str) -> Path:
    """The first directory of its kind that is not there yet."""
    number = 1
    while (runs / f"{method}-{number}").exists():
        number += 1
    return runs / f"{method}-{number}"


def _show(report: JobReport, settings: JobSettings, out: Path, as_json: bool) -> None:
    from atoll.cli.train_summary import summary

    if as_json:
        print_json(report.to_json())
        return
    for paragraph in summary(report, settings, out):
        print(paragraph)


def _show_finished(out: Path, as_json: bool) -> None:
    import json

    path = out / "report.json"
    if as_json:
        print_json(json.loads(path.read_text(encoding="utf-8")))
        return
    print(f"The run in {out} is finished; its report is {path}.")
    print(f'Ask its model: atoll generate {out} "def main():"')
