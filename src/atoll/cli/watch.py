"""`atoll watch`: what `atoll dash` shows, in a terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.output import JsonOption, print_json
from atoll.cli.page_beside import RulesFile
from atoll.cli.progress import progress

if TYPE_CHECKING:
    from atoll.dashboard.picture import RunPicture

EXAMPLE = "atoll watch runs/first"

LOOK_S = 1.0
PLAIN_S = 10.0


def run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run: live, finished or simulated.")],
    at: Annotated[
        float | None, typer.Option("--at", metavar="SECONDS", help="Show the run as it was then, and end.")
    ] = None,
    rules: RulesFile = None,
    once: Annotated[bool, typer.Option("--once", help="Show it as it is now, and end.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch a run in the terminal: islands, rounds, books and alerts, from its tapes, without disturbing it.

    Ends with the run, or by Ctrl-C, which ends the watching only. Where stdout is no terminal it prints a line now and
    then. With --json it prints the picture once, in the shape of docs/dash.md.
    """
    from atoll.dashboard.alerts import Rules
    from atoll.dashboard.picture import RunPicture
    from atoll.dashboard.view import picture_at

    picture = RunPicture(run, Rules.load(rules) if rules is not None else None)
    _catch_up(picture)
    if as_json:
        print_json(picture_at(picture, at))
    elif at is not None or once or not picture_at(picture)["live"]:
        _show_once(picture, at)
    elif sys.stdout.isatty():
        _show_live(picture)
    else:
        _show_lines(picture)


def _catch_up(picture: RunPicture) -> None:
    """Read what there is, with a bar where it takes long."""
    shown = sys.stderr.isatty()
    with progress("reading", 1000, shown) as tell:
        while picture.grow(0.25):
            tell(round(1000 * (picture.loading() or 1.0)))


def _show_once(picture: RunPicture, at: float | None) -> None:
    from rich.console import Console

    from atoll.dashboard.terminal import rendered
    from atoll.dashboard.view import picture_at

    console = Console()
    console.print(rendered(picture, picture_at(picture, at), console.width))


def _show_live(picture: RunPicture) -> None:
    from rich.console import Console
    from rich.live import Live

    from atoll.dashboard.terminal import rendered
    from atoll.dashboard.view import picture_at

    console = Console()
    shown = picture_at(picture)
    with Live(rendered(picture, shown, console.width), console=console, auto_refresh=False) as live:
        while shown["live"]:
            time.sleep(LOOK_S)
            while picture.grow(0.5):
                pass
            shown = picture_at(picture)
            live.update(rendered(picture, shown, console.width), refresh=True)


def _show_lines(picture: RunPicture) -> None:
    from atoll.dashboard.terminal import plain
    from atoll.dashboard.view import picture_at

    while True:
        shown = picture_at(picture)
        print(plain(shown), flush=True)
        until = time.monotonic() + PLAIN_S
        while shown["live"] and time.monotonic() < until:
            time.sleep(LOOK_S)
            while picture.grow(0.5):
                pass
            shown = picture_at(picture)
        if not shown["live"]:
            print(plain(shown), flush=True)
            return
