"""`atoll watch`: what `atoll dash` shows, in a terminal."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.output import JsonOption, print_json
from atoll.cli.page_beside import RulesFile
from atoll.cli.progress import progress

if TYPE_CHECKING:
    from atoll.dashboard.picture import RunPicture

EXAMPLE = "atoll watch runs/first"

POLL_INTERVAL_S = 1.0
PLAIN_INTERVAL_S = 10.0


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
    else:
        _show_live(picture)


def _catch_up(picture: RunPicture) -> None:
    """Read what there is, with a bar where it takes long."""
    shown = sys.stderr.isatty()
    with progress("reading", 1000, shown) as tell:
        while picture.grow(0.25):
            tell(round(1000 * (picture.loading() or 1.0)))


def _shown(picture: RunPicture, at: float | None = None) -> dict[str, Any]:
    from atoll.dashboard.view import picture_at

    return {"title": picture.run.resolve().name, **picture_at(picture, at)}


def _show_once(picture: RunPicture, at: float | None) -> None:
    from rich.console import Console

    from atoll.dashboard.terminal import rendered

    console = Console()
    console.print(rendered(_shown(picture, at), console.width, picture.bands))


def _show_live(picture: RunPicture) -> None:
    from atoll.dashboard.terminal import LiveView

    shown = _shown(picture)
    with LiveView(sys.stdout, PLAIN_INTERVAL_S, transient=False) as view:
        view.show(shown, picture.bands)
        while shown["live"]:
            time.sleep(POLL_INTERVAL_S)
            while picture.grow(0.5):
                pass
            shown = _shown(picture)
            view.show(shown, picture.bands, None if shown["live"] else math.inf)  # how it ended is always shown
