"""`atoll dash` and `atoll watch`: a run in the browser and in the terminal. Also `--dash` of other commands."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from atoll.cli import options
from atoll.cli.options import TokenOption
from atoll.cli.output import JsonOption, Result, print_to_stderr, progress_bar
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from atoll.dashboard.run_history import RunHistory

DashOption = Annotated[
    bool, Setting("Show the run on a page in the browser while it goes, as atoll dash does.", flag="dash")
]
DashPortOption = Annotated[int | None, options.port_setting("Of that page. [default: free one from 7410]", "dash-port")]

RulesOption = Annotated[
    Path | None, Setting("TOML with limits for alerts; docs/dash.md has them.", "FILE", flag="rules")
]
DashRulesOption = Annotated[Path | None, Setting("With --dash: TOML with limits for its alerts.", "FILE", flag="rules")]

SHUTDOWN_TIMEOUT_S = 5.0


class DashboardOptions(NamedTuple):
    """What was said of it on a command line."""

    is_enabled: bool
    port: int | None = None
    rules: Path | None = None

    def check(self) -> None:
        """Before anything is begun: whoever waits for alerts of an hour must not learn of a slip in them then."""
        from atoll.dashboard.alerts import AlertRules

        for name, value in (("--dash-port", self.port), ("--rules", self.rules)):
            if value is not None and not self.is_enabled:
                raise ValueError(f"{name} means nothing without --dash")
        if self.rules is not None:
            AlertRules.load(self.rules)

    def arguments(self) -> list[str]:
        given = (("--port", self.port), ("--rules", self.rules))
        return [word for name, value in given if value is not None for word in (name, str(value))]


@contextmanager
def dashboard_process(
    options: DashboardOptions, run: Path, token: str | None, own_token: bool = False
) -> Iterator[None]:
    """A page that cannot be shown is no reason not to train: it is told, and the job goes on.

    `own_token`: the token is for this page alone, and may stand in a log; that of a run may not.
    """
    if not options.is_enabled:
        yield
        return
    command = [sys.executable, "-m", "atoll", "dash", str(run), "--wait", "--while-stdin", *options.arguments()]
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
            print_to_stderr("the page cannot be shown; the run goes on without it")
        yield
    finally:
        page.stdin.close()  # it ends with that; so it does when this process is killed
        try:
            page.wait(SHUTDOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            page.kill()
            page.wait()
        page.stdout.close()


def run_dash(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN [RUN]", help="Directory of a run; a second one is shown beside it.")
    ],
    host: Annotated[str, Setting("Listen there; others need a token, and TLS.", "HOST")] = "127.0.0.1",
    port: Annotated[int | None, options.port_setting("[default: the first free one from 7410]")] = None,
    token: TokenOption = None,
    keys: Annotated[Path | None, Setting("TLS with this key, of atoll keys init; for other machines.", "DIR")] = None,
    plain_text: Annotated[bool, Setting("Show it to others without TLS: everybody on the way can read it.")] = False,
    rules: RulesOption = None,
    wait: Annotated[bool, Setting("The run may begin later: its directory need not hold tapes yet.")] = False,
    while_stdin: Annotated[bool, Setting(hidden=True)] = False,
    own_token: Annotated[bool, Setting(hidden=True)] = False,
    open_browser: Annotated[bool, Setting("Open the page in the browser of this machine.", flag="open")] = False,
) -> None:
    """Show a run in the browser: islands, rounds, curves, books and stories, now or at any moment before.

    Reads the tapes and metrics of the run's directory and never disturbs it. Works on a run that trains, on a finished
    one and on the tapes of atoll simulate. Without a token it only shows, and only to this machine. With the token of
    the run (--token, ATOLL_TOKEN) it can also pause, resume and change it. Ctrl-C ends the page, not the run.
    """
    if len(runs) > 2:
        raise ValueError(f"{len(runs)} runs are too many for one page: give one, or two to compare")
    try:
        from atoll.dashboard.server import serve
    except ModuleNotFoundError as missing:
        raise ValueError(f"the page needs {missing.name}: pip install 'atoll[dash]'") from None
    serve(runs, host, port, token or None, rules, wait, while_stdin, own_token, open_browser, keys, plain_text)


WATCH_INTERVAL_S = 1.0
PLAIN_WATCH_INTERVAL_S = 10.0


def run_watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run: live, finished or simulated.")],
    at: Annotated[float | None, Setting("Show the run as it was then, and end.", "SECONDS")] = None,
    rules: RulesOption = None,
    once: Annotated[bool, Setting("Show it as it is now, and end.")] = False,
    as_json: JsonOption = False,
) -> Result:
    """Watch a run in the terminal: islands, rounds, books and alerts, from its tapes, without disturbing it.

    Ends with the run, or by Ctrl-C, which ends the watching only. Where stdout is no terminal it prints a line now and
    then. With --json it prints the picture once, in the shape of docs/dash.md.
    """
    from atoll.dashboard.alerts import AlertRules
    from atoll.dashboard.run_history import RunHistory
    from atoll.dashboard.view import view_at

    picture = RunHistory(run, AlertRules.load(rules) if rules is not None else None)
    _read_all(picture)
    return Result(partial(view_at, picture, at), partial(_print_view, picture, at, once))


def _read_all(picture: RunHistory) -> None:
    """Read what there is, with a bar where it takes long."""
    shown = sys.stderr.isatty()
    with progress_bar("reading", 1000, shown) as tell:
        while picture.update(0.25):
            tell(round(1000 * (picture.loading_progress() or 1.0)))


def _view_fields(picture: RunHistory, at: float | None = None) -> dict[str, Any]:
    from atoll.dashboard.view import view_at

    return {"title": picture.run.resolve().name, **view_at(picture, at)}


def _print_view(picture: RunHistory, at: float | None, once: bool) -> None:
    from rich.console import Console

    from atoll.dashboard.terminal import LiveView, render
    from atoll.dashboard.view import view_at

    if at is not None or once or not view_at(picture)["live"]:
        console = Console()
        console.print(render(_view_fields(picture, at), console.width, picture.state_spans))
        return
    shown = _view_fields(picture)
    with LiveView(sys.stdout, PLAIN_WATCH_INTERVAL_S, transient=False) as view:
        view.show(shown, picture.state_spans)
        while shown["live"]:
            time.sleep(WATCH_INTERVAL_S)
            while picture.update(0.5):
                pass
            shown = _view_fields(picture)
            view.show(shown, picture.state_spans, None if shown["live"] else math.inf)  # how it ended is always shown
