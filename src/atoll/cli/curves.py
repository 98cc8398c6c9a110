"""`atoll curves`: the curves of a run for TensorBoard, Weights & Biases or a spreadsheet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.output import JsonOption, complain, print_json

if TYPE_CHECKING:
    from atoll.dashboard.picture import RunPicture
    from atoll.dashboard.writers import Exporter, Writer

EXAMPLE = "atoll curves runs/first --tensorboard boards"


def run(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="DIR", help="Write an event file into DIR and the run's name."),
    ] = None,
    wandb: Annotated[
        Path | None,
        typer.Option(
            "--wandb", metavar="DIR", help="Write an offline run of Weights & Biases. Nothing leaves this machine."
        ),
    ] = None,
    table: Annotated[Path | None, typer.Option("--csv", metavar="DIR", help="Write a CSV file per curve.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run is over.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the curves of a run where other tools find them.

    Loss, throughput, goodput, bytes, contributions per merge, grace, norms, cosine and quantisation error: everything
    that atoll dash draws, from the same tapes and metrics. Works on a finished run, on one that trains, and on the
    tapes of atoll simulate. Tokens are the step, so runs of different speed lie over each other. A folder that holds
    curves already is refused.
    """
    if tensorboard is None and wandb is None and table is None:
        raise ValueError("say where to: --tensorboard DIR, --wandb DIR or --csv DIR")
    try:
        from atoll.dashboard.picture import RunPicture
        from atoll.dashboard.writers import export
    except ModuleNotFoundError as missing:
        raise ValueError(f"curves need {missing.name}: pip install 'atoll[train]'") from None
    picture = RunPicture(directory)
    writers = _writers(picture, directory, tensorboard, wandb, table)
    watch = _Watch(follow and not as_json)
    try:
        done = export(picture, writers, follow, watch)
    except KeyboardInterrupt:
        complain(f"stopped; {watch.points:,} points are written")
        raise
    if as_json:
        print_json({"curves": sorted(done.names), "points": done.points})
        return
    print(f"{done.points:,} points of {len(done.names)} curves are written.")
    if tensorboard is not None:
        print(f"Look at them: tensorboard --logdir {tensorboard}")


def _writers(
    picture: RunPicture, directory: Path, tensorboard: Path | None, wandb: Path | None, table: Path | None
) -> list[Writer]:
    """Folders first, so that nothing is begun where another option is wrong."""
    from atoll.dashboard.writers import CsvWriter, TensorBoardWriter, WandbWriter, new_folder

    name = directory.absolute().name
    of_board = new_folder(tensorboard / name, "--tensorboard") if tensorboard is not None else None
    of_table = new_folder(table, "--csv") if table is not None else None
    found: list[Writer] = []
    if of_table is not None:
        found.append(CsvWriter(of_table))
    if of_board is not None:
        found.append(TensorBoardWriter(of_board))
    if wandb is not None:
        wandb.mkdir(parents=True, exist_ok=True)  # every run gets a folder of its own there
        found.append(WandbWriter(wandb, directory, picture.files.config))
    return found


class _Watch:
    """Says how far it is when there is something to say and somebody follows."""

    def __init__(self, shown: bool) -> None:
        self.points = 0
        self._shown = shown

    def __call__(self, exporter: Exporter) -> None:
        import sys

        if self._shown and exporter.points != self.points and sys.stderr.isatty():
            print(f"\r{exporter.points:,} points", end="", file=sys.stderr, flush=True)
        self.points = exporter.points
