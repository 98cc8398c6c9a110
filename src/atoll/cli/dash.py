"""`atoll dash`: a page in the browser that shows a run, live or finished, or two side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.access_options import Token, port_option
from atoll.cli.page_beside import RulesFile

EXAMPLE = "atoll dash runs/first"


def run(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN [RUN]", help="Directory of a run; a second one is shown beside it.")
    ],
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="Listen there; others need a token, and TLS.")
    ] = "127.0.0.1",
    port: Annotated[int | None, port_option("--port", "[default: the first free one from 7410]")] = None,
    token: Token = None,
    keys: Annotated[
        Path | None,
        typer.Option("--keys", metavar="DIR", help="TLS with this key, of atoll keys init; for others than this host."),
    ] = None,
    plain_text: Annotated[
        bool, typer.Option("--plain-text", help="Show it to others without TLS: everybody on the way can read it.")
    ] = False,
    rules: RulesFile = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="The run may begin later: its directory need not hold tapes yet.")
    ] = False,
    while_stdin: Annotated[bool, typer.Option("--while-stdin", hidden=True)] = False,
    own_token: Annotated[bool, typer.Option("--own-token", hidden=True)] = False,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser of this machine.")] = False,
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
