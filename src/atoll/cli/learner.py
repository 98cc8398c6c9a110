"""`atoll learner`: one island of a run whose syncer is somewhere else."""

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


def run(  # long: its options
    syncer: Annotated[
        str, Setting("Address of atoll syncer; with standbys: A:PORT,B:PORT.", "HOST:PORT", envvar="ATOLL_SYNCER")
    ],
    token: TokenOption = None,
    keys: KeysOption = None,
    ca: CaOption = None,
    number: Annotated[
        int | None,
        Setting(
            "Number of this island, from 1. Give it again to come back as the same one. [default: the next free one]",
            "N",
            flag="learner",
            min=1,
            envvar="ATOLL_LEARNER",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Setting(
            "Directory for this island's tape and metrics. [default: runs/ and the run's name]",
            "DIR",
            envvar="ATOLL_RUN_DIRECTORY",
        ),
    ] = None,
    data: Annotated[Path | None, Setting("Where the run's data is on this machine.", "PATH")] = None,
    threads: Annotated[int | None, Setting("Threads of torch. [default: 1]", "N", min=1)] = None,
    *,
    link: options.LinkOptions,
    notice: Annotated[
        float | None,
        Setting(
            "From SIGTERM until this machine is gone: in this time what is not merged yet is merged. "
            "[default: SIGTERM leaves at once]",
            "SECONDS",
            envvar="ATOLL_NOTICE_S",
        ),
    ] = None,
    log_format: LogFormatOption = "text",
    as_json: JsonOption = False,
) -> Result:
    """Train as one island of a run: the syncer says what, and gives the model.

    The island dials out, so it may be behind a router. It never waits for others: while the syncer cannot be reached it
    trains on, and what it trained is merged later. Ctrl-C leaves the run, the others go on; come back with the same
    --learner and --out. With --notice the first SIGTERM says that this machine is taken away: the island ends its step,
    has all that it trained merged, and leaves with exit code 0. Which samples it trains on is leased to it: any number
    of islands may come, at any time, and what one of them leaves untrained is given to others. To another machine it
    speaks TLS: with --keys, or with --ca and the token.
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
    token = token or None  # an empty variable is no token
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
    watch = LearnerProgress(log_format, is_shown=not as_json, has_preemption_notice=notice is not None)
    try:
        with sigterm_as_interrupt(watch.handles_preemption):
            is_over = train_learner(settings, number, syncer, token, directory, watch, keys, ca, notice)
    except AtollError as wrong:
        print_to_stderr(str(wrong))
        raise typer.Exit(ExitCode.FAILED) from None
    except KeyboardInterrupt:
        if watch.learner:
            print_to_stderr(f"left the run; come back with: --learner {watch.learner} --out {directory}")
        raise
    fields = {"learner": watch.learner, "steps": watch.steps, "tokens": watch.tokens, "drained": not is_over}
    what = "The run is over." if is_over else "This island was asked to leave; the run goes on."
    lost = "" if is_over else f" Of those, {watch.unmerged:,} are not merged everywhere."
    return Result(
        {**fields, "unmerged": watch.unmerged, "directory": str(directory)},
        [f"{what} Learner {watch.learner} took {watch.steps:,} steps here, {watch.tokens:,} tokens.{lost}"],
    )


class LearnerProgress:
    """Says on stderr how the island is getting on, now and then."""

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
        """Is a SIGTERM that comes now the learner's business? Not while it joins, and not a second one."""
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
