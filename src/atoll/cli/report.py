"""`atoll report` and `atoll curves`: the results of a run, for people and for other tools."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.output import JsonOption, Result, print_to_stderr, progress_bar, reading_progress
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from atoll.dashboard.report_page import ReportedRun
    from atoll.dashboard.run_history import RunHistory
    from atoll.dashboard.writers import Exporter, Writer

MAX_RUNS = 8


def run_report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of runs; several are compared.")],
    html: Annotated[Path | None, Setting("Write one self-contained page there.", "FILE")] = None,
    check: Annotated[bool, Setting("Check every invariant over the tapes, as atoll check does.")] = True,
    as_json: JsonOption = False,
) -> Result:
    """Tell what came of a run: loss, goodput, what happened, where time and tokens went.

    The page has the curves, the timeline, the verdict of the checkers and the configuration, without scripts and
    without anything from elsewhere: fit to be sent by mail. It may be made while the run goes.
    """
    from atoll.dashboard.report_page import render_report, summary_figures
    from atoll.files import write_text

    if len(runs) > MAX_RUNS:
        raise ValueError(f"{len(runs)} runs are too many for one page: give at most {MAX_RUNS}")
    names = _run_names(runs)
    reported = [_read_run(path, name, check, not as_json) for path, name in zip(runs, names, strict=True)]
    if html is not None:
        write_text(html, render_report(reported), durable=False)
    told = {each.name: summary_figures(each) for each in reported}
    return Result({"runs": told, "html": str(html) if html is not None else None}, partial(_show_report, told, html))


def _run_names(runs: list[Path]) -> list[str]:
    """The last parts of their paths, or the whole paths where those are not told apart by them."""
    short = [path.resolve().name for path in runs]
    return short if len(set(short)) == len(short) else [str(path) for path in runs]


def _read_run(path: Path, name: str, check: bool, shown: bool) -> ReportedRun:
    from atoll.dashboard.report_page import ReportedRun
    from atoll.dashboard.run_history import RunHistory
    from atoll.sim.check_tapes import check_tapes
    from atoll.sim.checkers import create_checkers
    from atoll.tape.files import RunTapes

    picture = RunHistory(path)
    with progress_bar(f"reading {name}", 1000, shown) as tell:
        while picture.update(0.25):
            tell(round(1000 * (picture.loading_progress() or 1.0)))
    if not check:
        return ReportedRun(name, picture, None)
    tapes = RunTapes(path)
    with reading_progress(f"checking {name}", tapes) as watched:
        return ReportedRun(name, picture, check_tapes(tapes, create_checkers(tapes.config), watched))


def _show_report(told: dict[str, dict[str, str]], html: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold", show_header=len(told) > 1)
    table.add_column("")
    for name in told:
        table.add_column(name, justify="right" if len(told) > 1 else "left")
    for figure in next(iter(told.values())):
        table.add_row(figure, *(each[figure] for each in told.values()))
    Console().print(table)
    if html is not None:
        print(f"The page is {html}.")


def run_curves(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
    tensorboard: Annotated[Path | None, Setting("Write an event file into DIR and the run's name.", "DIR")] = None,
    wandb: Annotated[
        Path | None, Setting("Write an offline run of Weights & Biases. Nothing is uploaded.", "DIR")
    ] = None,
    table: Annotated[Path | None, Setting("Write a CSV file per curve.", "DIR", flag="csv")] = None,
    follow: Annotated[bool, Setting("Go on until the run is over.")] = False,
    as_json: JsonOption = False,
) -> Result:
    """Write the curves of a run where other tools find them.

    Loss, throughput, goodput, bytes, contributions per merge, grace, norms, cosine and quantisation error: everything
    that atoll dash draws, from the same tapes and metrics. Works on a finished run, on one that trains, and on the
    tapes of atoll simulate. Tokens are the step, so runs of different speed lie over each other. A folder that holds
    curves already is refused.
    """
    if tensorboard is None and wandb is None and table is None:
        raise ValueError("say where to: --tensorboard DIR, --wandb DIR or --csv DIR")
    try:
        from atoll.dashboard.run_history import RunHistory
        from atoll.dashboard.writers import export
    except ModuleNotFoundError as missing:
        raise ValueError(f"curves need {missing.name}: pip install 'atoll[train]'") from None
    picture = RunHistory(directory)
    writers = _open_writers(picture, directory, tensorboard, wandb, table)
    watch = ExportProgress(follow and not as_json)
    try:
        done = export(picture, writers, follow, watch)
    except KeyboardInterrupt:
        print_to_stderr(f"stopped; {watch.points:,} points are written")
        raise
    lines = [f"{done.points:,} points of {len(done.names)} curves are written."]
    if tensorboard is not None:
        lines.append(f"Look at them: tensorboard --logdir {tensorboard}")
    return Result({"curves": sorted(done.names), "points": done.points}, lines)


def _open_writers(
    picture: RunHistory, directory: Path, tensorboard: Path | None, wandb: Path | None, table: Path | None
) -> list[Writer]:
    """Folders first, so that nothing is begun where another option is wrong."""
    from atoll.dashboard.writers import CsvWriter, TensorBoardWriter, WandbWriter, create_empty_folder

    name = directory.absolute().name
    of_board = create_empty_folder(tensorboard / name, "--tensorboard") if tensorboard is not None else None
    of_table = create_empty_folder(table, "--csv") if table is not None else None
    found: list[Writer] = []
    if of_table is not None:
        found.append(CsvWriter(of_table))
    if of_board is not None:
        found.append(TensorBoardWriter(of_board))
    if wandb is not None:
        wandb.mkdir(parents=True, exist_ok=True)  # every run gets a folder of its own there
        found.append(WandbWriter(wandb, directory, picture.files.config))
    return found


class ExportProgress:
    """Says how far it is when there is something to say and somebody follows."""

    def __init__(self, shown: bool) -> None:
        self.points = 0
        self._shown = shown

    def __call__(self, exporter: Exporter) -> None:
        import sys

        if self._shown and exporter.points != self.points and sys.stderr.isatty():
            print(f"\r{exporter.points:,} points", end="", file=sys.stderr, flush=True)
        self.points = exporter.points
