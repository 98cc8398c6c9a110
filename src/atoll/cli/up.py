"""`atoll up`: the syncer and the islands of a run, from one file, on whichever engines it names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.fleet_table import File, print_looks, shown
from atoll.cli.output import ExitCode, JsonOption, complain, print_json

if TYPE_CHECKING:
    from atoll.launch.fleet import Fleet, Look
    from atoll.launch.units import Placed

EXAMPLE = "atoll up examples/islands.toml"


def run(
    file: File,
    units: Annotated[
        list[str] | None, typer.Argument(metavar="UNIT", help="Only these: syncer, an island. [default: all]")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return as soon as everything is started; it goes on.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be submitted, without secrets, and start nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring up a run that a file describes, and follow it until its islands have ended.

    Everything is checked before anything is started. What runs already is left alone; what has failed, was stopped or
    has left a run that goes on is started again: the same command once more does no harm, and goes on with a run that
    was taken down. Ctrl-C ends the following only, the run goes on; come back with atoll up, status or logs, and stop
    it with atoll down.
    """
    from atoll.launch.fleet import Fleet
    from atoll.launch.islands_file import IslandsFile
    from atoll.launch.units import stays_here, token_of, units_of

    read = IslandsFile.load(file)
    fleet = Fleet(read)
    names = fleet.names(units or ())
    placed = [each for each in units_of(read, token_of(read, make=False)) if each.unit.name in names]
    fleet.check(placed)
    if warning := stays_here(read):
        complain(warning)
    if dry_run:
        _show(fleet, placed, as_json)
        return
    with fleet.alone("atoll up"):  # two who make a token at once would not have the same
        token = token_of(read, make=True)
    placed = [each for each in units_of(read, token) if each.unit.name in names]
    said: dict[str, str] = {}

    def say(unit: str, words: str) -> None:
        said[unit] = words
        if not as_json:
            print(f"{unit}: {words}", flush=True)

    come_back = f"atoll status {file}, atoll logs {file} -f, atoll down {file}"
    try:
        started = fleet.up(placed, say)
        if detach:
            looks = fleet.looks()
        else:
            with shown(quiet=as_json) as show:
                looks = fleet.follow(show)
    except KeyboardInterrupt:
        complain(f"detached; the run goes on: {come_back}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    if as_json:
        shown_units = [look.to_json() for look in looks]
        print_json({"run": read.run, "directory": str(read.directory), "started": started, "units": shown_units})
    elif detach:
        print(f"It goes on by itself: {come_back}")
    else:
        _tell_end(fleet, looks)
    wrong = [look for look in looks if look.is_wrong]
    if wrong:
        if not as_json:
            print_looks(wrong)
        names = [look.name for look in wrong]
        complain(f"not well: {', '.join(names)}; what they printed: atoll logs {file} {names[0]}")
        raise typer.Exit(ExitCode.FAILED)


def _tell_end(fleet: Fleet, looks: list[Look]) -> None:
    left = [look.name for look in looks if not look.is_over and not look.is_island]
    if left:
        print(f"All islands have ended, and {', '.join(left)} goes on: atoll down {fleet.file.path}")
    elif not any(look.is_wrong for look in looks):
        print(f"The run in {fleet.file.directory} has ended.")


def _show(fleet: Fleet, placed: list[Placed], as_json: bool) -> None:
    if as_json:
        rendered = [{"name": each.unit.name, "engine": each.engine, "submitted": fleet.render(each)} for each in placed]
        print_json({"run": fleet.file.run, "directory": str(fleet.file.directory), "units": rendered})
        return
    for place, each in enumerate(placed):
        if place:
            print()
        print(fleet.render(each).rstrip("\n"))
