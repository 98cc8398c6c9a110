"""`--dash`: the page of `atoll dash` in a process of its own beside a job, for as long as the job lasts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from atoll.cli.access_options import port_option
from atoll.cli.output import complain

Dash = Annotated[
    bool, typer.Option("--dash", help="Show the run on a page in the browser while it goes, as atoll dash does.")
]
DashPort = Annotated[int | None, port_option("--dash-port", "Of that page. [default: free one from 7410]")]

RulesFile = Annotated[
    Path | None, typer.Option("--rules", metavar="FILE", help="TOML with limits for alerts; docs/dash.md has them.")
]
PageRules = Annotated[
    Path | None, typer.Option("--rules", metavar="FILE", help="With --dash: TOML with limits for its alerts.")
]

ENDS_S = 5.0


class Page(NamedTuple):
    """What was said of it on a command line."""

    wanted: bool
    port: int | None = None
    rules: Path | None = None

    def check(self) -> None:
        """Before anything is begun: whoever waits for alerts of an hour must not learn of a slip in them then."""
        from atoll.dashboard.alerts import Rules

        for name, value in (("--dash-port", self.port), ("--rules", self.rules)):
            if value is not None and not self.wanted:
                raise ValueError(f"{name} means nothing without --dash")
        if self.rules is not None:
            Rules.load(self.rules)

    def words(self) -> list[str]:
        given = (("--port", self.port), ("--rules", self.rules))
        return [word for name, value in given if value is not None for word in (name, str(value))]


@contextmanager
def page_beside(page_wanted: Page, run: Path, token: str | None, own_token: bool = False) -> Iterator[None]:
    """A page that cannot be shown is no reason not to train: it is told, and the job goes on.

    `own_token`: the token is for this page alone, and may stand in a log; that of a run may not.
    """
    if not page_wanted.wanted:
        yield
        return
    command = [sys.executable, "-m", "atoll", "dash", str(run), "--wait", "--while-stdin", *page_wanted.words()]
    if own_token:
        command.append("--own-token")
    # The token is in the environment: others can read a command line.
    environment = {name: value for name, value in os.environ.items() if name != "ATOLL_TOKEN"}
    if token is not None:
        environment["ATOLL_TOKEN"] = token
    page = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, start_new_session=True
    )
    assert page.stdin is not None and page.stdout is not None
    try:
        first = page.stdout.readline().strip()
        if first:
            if not own_token and not sys.stderr.isatty():
                first = first.partition("#")[0]
            print(first, file=sys.stderr, flush=True)
        else:
            complain("the page cannot be shown; the run goes on without it")
        yield
    finally:
        page.stdin.close()  # it ends with that; so it does when this process is killed
        try:
            page.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            page.kill()
            page.wait()
        page.stdout.close()
