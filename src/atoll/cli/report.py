"""`atoll report` and `atoll curves`: show the results of runs, or export them to other tools."""

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
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directory of a run; give several to compare them.")
    ],
    html: Annotated[Path | None, Setting("Write one self-contained HTML page.", "FILE")] = None,
    check: Annotated[bool, Setting("Check every invariant over the tapes, as atoll check does.")] = True,
    as_json: JsonOption = False,
) -> Result:
    """Summarize runs: loss, goodput, events, and where time and tokens went.

    The HTML page has the curves, the timeline, the verdict of the checkers and the configuration. It needs no scripts
    and no other files, so it can be sent by mail. It can be made while the run is live.
    """
    from atoll.dashboard.report_page import render_report, summary_figures
    from atoll.files import write_text

    if len(runs) > MAX_RUNS:
        raise ValueError(f"{len(runs)} runs are too many for one page: give at most {MAX_RUNS}")
    names = _run_names(runs)
    reported = [_read_run(path, name, check, not as_json) for path, name in zip(runs, names, strict=True)]
    if html is not None:
        write_text(html, render_report(reported), durable=False)
    figures = {each.name: summary_figures(each) for each in reported}
    fields = {"runs": figures, "html": str(html) if html is not None else None}
    return Result(fields, partial(_show_report, figures, html))


def _run_names(runs: list[Path]) -> list[str]:
    """Return the directory names of the runs, or their full paths if names are not unique."""
    short = [path.resolve().name for path in runs]
    return short if len(set(short)) == len(short) else [str(path) for path in runs]


def _read_run(path: Path, name: str, check: bool, is_shown: bool) -> ReportedRun:
    from atoll.dashboard.report_page import ReportedRun
    from atoll.dashboard.run_history import RunHistory
    from atoll.sim.check_tapes import check_tapes
    from atoll.sim.checkers import create_checkers
    from atoll.tape.files import RunTapes

    history = RunHistory(path)
    with progress_bar(f"reading {name}", 1000, is_shown) as report:
        while history.update(0.25):
            report(round(1000 * (history.loading_progress() or 1.0)))
    if not check:
        return ReportedRun(name, history, None)
    tapes = RunTapes(path)
    with reading_progress(f"checking {name}", tapes) as watched:
        return ReportedRun(name, history, check_tapes(tapes, create_checkers(tapes.config), watched))


def _show_report(figures: dict[str, dict[str, str]], html: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold", show_header=len(figures) > 1)
    table.add_column("")
    for name in figures:
        table.add_column(name, justify="right" if len(figures) > 1 else "left")
    for figure in next(iter(figures.values())):
        table.add_row(figure, *(each[figure] for each in figures.values()))
    Console().print(table)
    if html is not None:
        print(f"The page is {html}.")


def run_curves(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
    tensorboard: Annotated[Path | None, Setting("Write a TensorBoard event file into DIR/RUN.", "DIR")] = None,
    wandb: Annotated[
        Path | None, Setting("Write an offline run of Weights & Biases. Nothing is uploaded.", "DIR")
    ] = None,
    table: Annotated[Path | None, Setting("Write one CSV file per curve.", "DIR", flag="csv")] = None,
    follow: Annotated[bool, Setting("Continue until the run ends.")] = False,
    as_json: JsonOption = False,
) -> Result:
    """Export the curves of a run to TensorBoard, Weights & Biases or CSV.

    Exports loss, throughput, goodput, bytes, contributions per merge, grace, norms, cosine and quantization error: all
    curves of atoll dash, from the same tapes and metrics. Works on a live run, on a finished one, and on the tapes of
    atoll simulate. The x-axis is tokens, so runs of different speed are comparable. A folder that already has curves
    is refused.
    """
    if tensorboard is None and wandb is None and table is None:
        raise ValueError("no format is given; give --tensorboard DIR, --wandb DIR or --csv DIR")
    try:
        from atoll.dashboard.run_history import RunHistory
        from atoll.dashboard.writers import export
    except ModuleNotFoundError as missing:
        raise ValueError(f"curves need {missing.name}: pip install 'atoll[train]'") from None
    history = RunHistory(directory)
    writers = _open_writers(history, directory, tensorboard, wandb, table)
    progress = ExportProgress(follow and not as_json)
    try:
        done = export(history, writers, follow, progress)
    except KeyboardInterrupt:
        print_to_stderr(f"stopped; {progress.points:,} points are written")
        raise
    lines = [f"{done.points:,} points of {len(done.names)} curves are written."]
    if tensorboard is not None:
        lines.append(f"Show them: tensorboard --logdir {tensorboard}")
    return Result({"curves": sorted(done.names), "points": done.points}, lines)


def _open_writers(
    history: RunHistory, directory: Path, tensorboard: Path | None, wandb: Path | None, table: Path | None
) -> list[Writer]:
    """Open the writers. Create the folders first, so that an invalid option leaves no half-written curves."""
    from atoll.dashboard.writers import CsvWriter, TensorBoardWriter, WandbWriter, create_empty_folder

    name = directory.absolute().name
    board_folder = create_empty_folder(tensorboard / name, "--tensorboard") if tensorboard is not None else None
    table_folder = create_empty_folder(table, "--csv") if table is not None else None
    writers: list[Writer] = []
    if table_folder is not None:
        writers.append(CsvWriter(table_folder))
    if board_folder is not None:
        writers.append(TensorBoardWriter(board_folder))
    if wandb is not None:
        wandb.mkdir(parents=True, exist_ok=True)  # each run gets its own folder in it
        writers.append(WandbWriter(wandb, directory, history.files.config))
    return writers


class ExportProgress:
    """Print the number of exported points to a terminal."""

    def __init__(self, is_shown: bool) -> None:
        self.points = 0
        self._is_shown = is_shown

    def __call__(self, exporter: Exporter) -> None:
        import sys

        if self._is_shown and exporter.points != self.points and sys.stderr.isatty():
            print(f"\r{exporter.points:,} points", end="", file=sys.stderr, flush=True)
        self.points = exporter.points
