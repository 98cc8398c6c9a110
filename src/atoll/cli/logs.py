"""`atoll logs`: what the syncer and the islands of a run have printed."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from atoll.cli.fleet_table import File
from atoll.cli.output import ExitCode, complain

EXAMPLE = "atoll logs examples/islands.toml -f --tail 20"

READ_S = 0.5


def run(
    file: File,
    units: Annotated[list[str] | None, typer.Argument(metavar="UNIT", help="Only these. [default: all]")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is printed from now on, until all have ended.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", metavar="N", min=0, help="Begin with the last N lines of each.")
    ] = None,
) -> None:
    """Show what the units of a run have printed, each line with the name of its unit before it.

    Starts of one unit come one after the other; a line of [atoll] between them says why there was another. Ctrl-C ends
    the reading only.
    """
    from atoll.launch.fleet import LOOK_FAR_S, LOOK_S, NOT_STARTED, Fleet, FleetLogs, PrintedLine
    from atoll.launch.islands_file import IslandsFile

    fleet = Fleet(IslandsFile.load(file))
    names = fleet.names(units or ())
    if not fleet.known():
        raise ValueError(f"nothing of {file} was started yet: atoll up {file}")
    logs = FleetLogs(fleet, names, tail)
    width = max(map(len, names))

    def show(line: PrintedLine) -> None:
        sys.stdout.write(f"{line.unit:{width}} | {line.text}\n")

    ended, next_look = not follow, 0.0
    while True:
        if not ended and time.monotonic() >= next_look:
            looks = fleet.looks(names)
            ended = all(look.is_over or look.standing == NOT_STARTED for look in looks)
            is_near = all(look.engine == "local" for look in looks)
            next_look = time.monotonic() + (LOOK_S if is_near else LOOK_FAR_S)
        for line in logs.new():
            show(line)
        if ended:
            break
        sys.stdout.flush()
        time.sleep(READ_S)
    for line in logs.rest():
        show(line)
    for unit, problem in logs.problems.items():
        complain(f"what {unit} has printed cannot be read: {problem}")
    if logs.problems:
        raise typer.Exit(ExitCode.FAILED)
