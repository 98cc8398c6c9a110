"""`atoll report`: what came of a run, or of several compared, in the terminal or on a page to send."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.output import JsonOption, print_json
from atoll.cli.progress import progress, reading

if TYPE_CHECKING:
    from atoll.dashboard.report_page import Reported

EXAMPLE = "atoll report runs/first --html first.html"

MOST_RUNS = 8


def run(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of runs; several are compared.")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write one self-contained page there.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Check every invariant over the tapes, as atoll check does.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Tell what came of a run: loss, goodput, what happened, where time and tokens went.

    The page has the curves, the timeline, the verdict of the checkers and the configuration, without scripts and
    without anything from elsewhere: fit to be sent by mail. It may be made while the run goes.
    """
    from atoll.dashboard.report_page import headline, page
    from atoll.files import write_text

    if len(runs) > MOST_RUNS:
        raise ValueError(f"{len(runs)} runs are too many for one page: give at most {MOST_RUNS}")
    names = _names(runs)
    reported = [_read(path, name, check, not as_json) for path, name in zip(runs, names, strict=True)]
    if html is not None:
        write_text(html, page(reported), durable=False)
    told = {each.name: headline(each) for each in reported}
    if as_json:
        print_json({"runs": told, "html": str(html) if html is not None else None})
        return
    _show(told)
    if html is not None:
        print(f"The page is {html}.")


def _names(runs: list[Path]) -> list[str]:
    """The last parts of their paths, or the whole paths where those are not told apart by them."""
    short = [path.resolve().name for path in runs]
    return short if len(set(short)) == len(short) else [str(path) for path in runs]


def _read(path: Path, name: str, check: bool, shown: bool) -> Reported:
    from atoll.dashboard.picture import RunPicture
    from atoll.dashboard.report_page import Reported
    from atoll.sim.check_tapes import check_tapes
    from atoll.sim.checkers import all_checkers
    from atoll.tape.files import RunTapes

    picture = RunPicture(path)
    with progress(f"reading {name}", 1000, shown) as tell:
        while picture.grow(0.25):
            tell(round(1000 * (picture.loading() or 1.0)))
    if not check:
        return Reported(name, picture, None)
    tapes = RunTapes(path)
    with reading(f"checking {name}", tapes) as watched:
        return Reported(name, picture, check_tapes(tapes, all_checkers(tapes.config), watched))


def _show(told: dict[str, dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold", show_header=len(told) > 1)
    table.add_column("")
    for name in told:
        table.add_column(name, justify="right" if len(told) > 1 else "left")
    for figure in next(iter(told.values())):
        table.add_row(figure, *(each[figure] for each in told.values()))
    Console().print(table)
