"""`atoll dash` and `atoll watch`: show a run in the browser or in the terminal. Also `--dash` of other commands."""

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
    bool, Setting("Show the run on a page in the browser while it trains, as atoll dash does.", flag="dash")
]
DashPortOption = Annotated[
    int | None, options.port_setting("Port of that page. [default: first free one from 7410]", "dash-port")
]

RulesOption = Annotated[
    Path | None, Setting("TOML file with limits for alerts; see docs/dash.md.", "FILE", flag="rules")
]
DashRulesOption = Annotated[
    Path | None, Setting("With --dash: TOML file with limits for its alerts.", "FILE", flag="rules")
]

SHUTDOWN_TIMEOUT_S = 5.0


class DashboardOptions(NamedTuple):
    """Options of the dashboard page of another command."""

    is_enabled: bool
    port: int | None = None
    rules: Path | None = None

    def check(self) -> None:
        """Raise `ValueError` for invalid options. Called before the run starts."""
        from atoll.dashboard.alerts import AlertRules

        for name, value in (("--dash-port", self.port), ("--rules", self.rules)):
            if value is not None and not self.is_enabled:
                raise ValueError(f"{name} has no effect without --dash")
        if self.rules is not None:
            AlertRules.load(self.rules)

    def arguments(self) -> list[str]:
        given = (("--port", self.port), ("--rules", self.rules))
        return [argument for name, value in given if value is not None for argument in (name, str(value))]


@contextmanager
def dashboard_process(
    options: DashboardOptions, run: Path, token: str | None, own_token: bool = False
) -> Iterator[None]:
    """Serve the dashboard of a run in a child process. If it cannot start, print that and continue.

    Args:
        options: Options of the page; nothing is started unless it is enabled.
        run: Directory of the run.
        token: Token for requests of the operator on the page.
        own_token: The token is for this page only, and may be printed to a log. The token of a run may not.
    """
    if not options.is_enabled:
        yield
        return
    command = [sys.executable, "-m", "atoll", "dash", str(run), "--wait", "--while-stdin", *options.arguments()]
    if own_token:
        command.append("--own-token")
    # The token is in the environment: other users can read a command line.
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
            print_to_stderr("cannot start the dashboard page; the run continues without it")
        yield
    finally:
        page.stdin.close()  # the child exits when its stdin closes, even if this process is killed
        try:
            page.wait(SHUTDOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            page.kill()
            page.wait()
        page.stdout.close()


def run_dash(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN [RUN]", help="Directory of a run; a second one is shown for comparison."),
    ],
    host: Annotated[
        str, Setting("Address to listen on; beyond this machine it needs a token and TLS.", "HOST")
    ] = "127.0.0.1",
    port: Annotated[int | None, options.port_setting("Port to listen on. [default: first free one from 7410]")] = None,
    token: TokenOption = None,
    keys: Annotated[
        Path | None, Setting("Use TLS with the key that atoll keys init made; for other machines.", "DIR")
    ] = None,
    plain_text: Annotated[
        bool, Setting("Serve other machines without TLS: everyone on the network can read it.")
    ] = False,
    rules: RulesOption = None,
    wait: Annotated[bool, Setting("Wait for the run to start: its directory may have no tapes yet.")] = False,
    while_stdin: Annotated[bool, Setting(hidden=True)] = False,
    own_token: Annotated[bool, Setting(hidden=True)] = False,
    open_browser: Annotated[bool, Setting("Open the page in a browser on this machine.", flag="open")] = False,
) -> None:
    """Show a run in the browser: learners, rounds, curves, ledger and stories, now or at any earlier time.

    Reads the tapes and metrics of the run's directory, and never slows the run down. Works on a live run, on a finished
    one and on the tapes of atoll simulate. Without a token the page is read-only and for this machine only. With the
    token of the run (--token, ATOLL_TOKEN) it can also pause, resume and change the run. Ctrl-C ends the page, not the
    run.
    """
    if len(runs) > 2:
        raise ValueError(f"{len(runs)} runs are too many for one page: give one, or two for a comparison")
    try:
        from atoll.dashboard.server import serve
    except ModuleNotFoundError as missing:
        raise ValueError(f"the page needs {missing.name}: pip install 'atoll[dash]'") from None
    serve(runs, host, port, token or None, rules, wait, while_stdin, own_token, open_browser, keys, plain_text)


WATCH_INTERVAL_S = 1.0
PLAIN_WATCH_INTERVAL_S = 10.0


def run_watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run: live, finished or simulated.")],
    at: Annotated[float | None, Setting("Show the run at this time, and exit.", "SECONDS")] = None,
    rules: RulesOption = None,
    once: Annotated[bool, Setting("Show the run once, and exit.")] = False,
    as_json: JsonOption = False,
) -> Result:
    """Watch a run in the terminal: learners, rounds, ledger and alerts, from its tapes.

    Exits when the run ends. Ctrl-C ends the view, not the run. If stdout is not a terminal, it prints a line every few
    seconds. With --json it prints the view once, in the format of docs/dash.md.
    """
    from atoll.dashboard.alerts import AlertRules
    from atoll.dashboard.run_history import RunHistory
    from atoll.dashboard.view import view_at

    history = RunHistory(run, AlertRules.load(rules) if rules is not None else None)
    _read_all(history)
    return Result(partial(view_at, history, at), partial(_print_view, history, at, once))


def _read_all(history: RunHistory) -> None:
    """Read the tapes up to their end, with a progress bar on a terminal."""
    is_shown = sys.stderr.isatty()
    with progress_bar("reading", 1000, is_shown) as report:
        while history.update(0.25):
            report(round(1000 * (history.loading_progress() or 1.0)))


def _view_fields(history: RunHistory, at: float | None = None) -> dict[str, Any]:
    from atoll.dashboard.view import view_at

    return {"title": history.run.resolve().name, **view_at(history, at)}


def _print_view(history: RunHistory, at: float | None, once: bool) -> None:
    from rich.console import Console

    from atoll.dashboard.terminal import LiveView, render
    from atoll.dashboard.view import view_at

    if at is not None or once or not view_at(history)["live"]:
        console = Console()
        console.print(render(_view_fields(history, at), console.width, history.state_spans))
        return
    shown = _view_fields(history)
    with LiveView(sys.stdout, PLAIN_WATCH_INTERVAL_S, transient=False) as view:
        view.show(shown, history.state_spans)
        while shown["live"]:
            time.sleep(WATCH_INTERVAL_S)
            while history.update(0.5):
                pass
            shown = _view_fields(history)
            view.show(shown, history.state_spans, None if shown["live"] else math.inf)  # the last state is always shown
