"""`atoll down`: stop the islands and the syncer of a run that `atoll up` has started."""

from __future__ import annotations

from typing import Annotated

import typer

from atoll.cli.fleet_table import File
from atoll.cli.output import ExitCode, JsonOption, complain, print_json

EXAMPLE = "atoll down examples/islands.toml"


def run(
    file: File,
    units: Annotated[
        list[str] | None,
        typer.Argument(metavar="UNIT", help="Only these: an island, syncer. [default: all, the syncer last]"),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Stop nothing; the named units are on a machine that is gone for good.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop a run that can go on later: atoll up on the same file goes on from its store.

    Islands are told by SIGTERM and have their notice to send what is not merged yet; what is left then is killed. The
    syncer is stopped after them. What is stopped already stays so. A unit whose machine or cluster does not answer any
    more is forgotten by its name with --forget, and can then be started elsewhere.
    """
    from atoll.launch.fleet import Fleet
    from atoll.launch.islands_file import IslandsFile

    read = IslandsFile.load(file)
    fleet = Fleet(read)
    names = fleet.names(units or ())
    if forget and not units:
        raise ValueError(f"which units are gone for good? Name them: atoll down {file} UNIT --forget")
    said: dict[str, str] = {}

    def say(unit: str, words: str) -> None:
        said[unit] = words
        if not as_json:
            print(f"{unit}: {words}", flush=True)

    if not fleet.known():
        said = dict.fromkeys(names, "was not started")
        is_down = True
        if not as_json:
            print(f"Nothing of {file} was started.")
    else:
        is_down = fleet.forget(names, say) if forget else fleet.down(names, say)
    if as_json:
        print_json({"run": read.run, "directory": str(read.directory), "down": is_down, "units": said})
    if not is_down:
        left = "not everything was forgotten" if forget else "not everything could be stopped"
        complain(f"{left}; ask again with atoll down")
        raise typer.Exit(ExitCode.FAILED)
