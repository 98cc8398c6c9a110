"""`atoll learner`: train as one learner of a run whose syncer runs elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.options import CaOption, KeysOption, LogFormatOption, TokenOption, print_log_line
from atoll.cli.output import ExitCode, JsonOption, Result, print_to_stderr
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from atoll.learner.api import Learner
    from atoll.reference.loop import InnerStep

PROGRESS_INTERVAL_S = 5.0


def run(  # long: the options with their help
    syncer: Annotated[
        str, Setting("Address of atoll syncer; with standbys: A:PORT,B:PORT.", "HOST:PORT", envvar="ATOLL_SYNCER")
    ],
    token: TokenOption = None,
    keys: KeysOption = None,
    ca: CaOption = None,
    number: Annotated[
        int | None,
        Setting(
            "Number of this learner, from 1. Give the same number after a restart. [default: next free one]",
            "N",
            flag="learner",
            min=1,
            envvar="ATOLL_LEARNER",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Setting(
            "Directory for the tape and metrics of this learner. [default: runs/ and the name of the run]",
            "DIR",
            envvar="ATOLL_RUN_DIRECTORY",
        ),
    ] = None,
    data: Annotated[Path | None, Setting("Path of the run's data on this machine.", "PATH")] = None,
    threads: Annotated[int | None, Setting("Number of torch threads. [default: 1]", "N", min=1)] = None,
    *,
    link: options.LinkOptions,
    notice: Annotated[
        float | None,
        Setting(
            "Time from SIGTERM until this machine is preempted, used to merge unmerged work. "
            "[default: leave at once on SIGTERM]",
            "SECONDS",
            envvar="ATOLL_NOTICE_S",
        ),
    ] = None,
    log_format: LogFormatOption = "text",
    as_json: JsonOption = False,
) -> Result:
    """Train as one learner of a run. The syncer sends the settings of the job and the model.

    The learner opens the connection, so it may be behind a router. It never waits for others: while the syncer is
    unreachable it continues to train, and its work is merged later. Ctrl-C leaves the run, and the other learners
    continue; rejoin with the same --learner and --out. With --notice the first SIGTERM is a preemption notice: the
    learner ends its step, has all of its work merged, and exits with code 0. Its samples are leased to it: any number
    of learners may join at any time, and unfinished samples of one are leased to others. Connections to another machine
    use TLS: with --keys, or with --ca and the token.
    """
    import logging
    from dataclasses import replace

    from atoll.errors import AtollError
    from atoll.learner.preemption import check_notice_s
    from atoll.logs import check_log_format, configure_logging
    from atoll.reference.child_processes import sigterm_as_interrupt
    from atoll.reference.learner_main import request_job, train_learner
    from atoll.transport.endpoint import parse_endpoint

    check_notice_s(notice)
    token = token or None  # an empty environment variable means no token
    if check_log_format(log_format) == "json":
        configure_logging(log_format, logging.INFO)
    job = request_job(
        parse_endpoint(syncer, keys, ca), token, lambda: print_to_stderr(f"waiting for a syncer at {syncer}")
    )
    path = None if data is None else str(data.absolute())
    given = {**link, "data": path, "threads": threads}
    changes = {name: value for name, value in given.items() if value is not None}
    settings = replace(job.settings, **changes)
    directory = out if out is not None else Path("runs") / job.run_id
    directory.mkdir(parents=True, exist_ok=True)
    progress = LearnerProgress(log_format, is_shown=not as_json, has_preemption_notice=notice is not None)
    try:
        with sigterm_as_interrupt(progress.handles_preemption):
            is_over = train_learner(settings, number, syncer, token, directory, progress, keys, ca, notice)
    except AtollError as error:
        print_to_stderr(str(error))
        raise typer.Exit(ExitCode.FAILED) from None
    except KeyboardInterrupt:
        if progress.learner:
            print_to_stderr(f"left the run; rejoin with: --learner {progress.learner} --out {directory}")
        raise
    fields = {"learner": progress.learner, "steps": progress.steps, "tokens": progress.tokens, "drained": not is_over}
    outcome = "The run is over." if is_over else "This learner was drained; the run continues."
    lost = "" if is_over else f" Of those, {progress.unmerged:,} are not merged in every fragment."
    return Result(
        {**fields, "unmerged": progress.unmerged, "directory": str(directory)},
        [f"{outcome} Learner {progress.learner} took {progress.steps:,} steps here, {progress.tokens:,} tokens.{lost}"],
    )


class LearnerProgress:
    """Print the progress of the learner to stderr every few seconds."""

    def __init__(self, log_format: str, is_shown: bool, has_preemption_notice: bool) -> None:
        self._log_format = log_format
        self._has_preemption_notice = has_preemption_notice
        self.preempted_at: float | None = None
        self.unmerged = 0
        self.learner = 0
        self.steps = 0
        self.tokens = 0
        self._is_shown = is_shown
        self._reported_at = float("-inf")

    def handles_preemption(self) -> bool:
        """Return whether a SIGTERM now is a preemption notice. It is not one before the first step or when repeated."""
        import time

        from atoll.learner.preemption import DUPLICATE_SIGNAL_S

        if not self._has_preemption_notice or not self.steps:
            return False
        now = time.monotonic()
        self.preempted_at = self.preempted_at if self.preempted_at is not None else now
        return now - self.preempted_at <= DUPLICATE_SIGNAL_S

    def __call__(self, link: Learner, step: InnerStep) -> None:
        import time

        self.learner = link.id
        self.steps += 1
        self.tokens += step.tokens
        self.unmerged = link.stats().unmerged_tokens
        now = time.monotonic()
        if not self._is_shown or now - self._reported_at < PROGRESS_INTERVAL_S:
            return
        self._reported_at = now
        print_log_line(
            self._log_format,
            f"learner {link.id}: {100.0 * link.progress:3.0f} % of the run | step {self.steps:,} | loss {step.loss:.3f}"
            f" | {step.tokens / max(step.step_s, 1e-9):,.0f} tokens/s | link {link.stats().link}",
        )
