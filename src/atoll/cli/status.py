"""`atoll status`: how the syncer and the islands of a run are, as their engines know it."""

from __future__ import annotations

import typer

from atoll.cli.fleet_table import File, print_looks
from atoll.cli.output import ExitCode, JsonOption, print_json

EXAMPLE = "atoll status examples/islands.toml"


def run(file: File, as_json: JsonOption = False) -> None:
    """Show how the units of a run are: standing, restarts, and why.

    The exit code is 0 where nothing has failed. An engine that does not answer is no sign that its units are lost: they
    are shown as unknown, with what it says. What the run itself does is shown by atoll watch and atoll dash.
    """
    from atoll.launch.fleet import Fleet
    from atoll.launch.islands_file import IslandsFile

    read = IslandsFile.load(file)
    looks = Fleet(read).looks()
    wrong = any(look.is_wrong for look in looks)
    if as_json:
        units = [look.to_json() for look in looks]
        print_json({"run": read.run, "directory": str(read.directory), "well": not wrong, "units": units})
    else:
        print_looks(looks)
    if wrong:
        raise typer.Exit(ExitCode.FAILED)
