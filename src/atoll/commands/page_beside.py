"""`--dash`: the page of `atoll dash` in a process of its own beside a job, for as long as the job lasts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from atoll.commands.output import complain

Dash = Annotated[
    bool, typer.Option("--dash", help="Show the run on a page in the browser while it goes, as atoll dash does.")
]
DashPort = Annotated[
    int | None,
    typer.Option("--dash-port", metavar="PORT", min=0, max=65535, help="Of that page. [default: free one from 7410]"),
]

ENDS_S = 5.0


@contextmanager
def page_beside(
    wanted: bool, run: Path, port: int | None, token: str | None, own_token: bool = False
) -> Iterator[None]:
    """A page that cannot be shown is no reason not to train: it is told, and the job goes on.

    `own_token`: the token is for this page alone, and may stand in a log; that of a run may not.
    """
    if not wanted:
        if port is not None:
            raise ValueError("--dash-port means nothing without --dash")
        yield
        return
    command = [sys.executable, "-m", "atoll", "dash", str(run), "--wait", "--while-stdin"]
    if own_token:
        command.append("--own-token")
    if port is not None:
        command += ["--port", str(port)]
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
