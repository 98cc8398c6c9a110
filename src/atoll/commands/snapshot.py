"""`atoll snapshot`: a consistent snapshot of a run that trains, and the list of those there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.commands.output import ExitCode, JsonOption, complain, print_json
from atoll.commands.syncer import Token

EXAMPLE = "atoll snapshot runs/first"

ANSWER_S = 30.0
ADVICE = "take a snapshot while it does, or list those there are with --list"
LOOK_EVERY_S = 0.2


def run(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Directory of a run whose syncer runs on this machine.")
    ] = None,
    syncer: Annotated[
        str | None, typer.Option("--syncer", metavar="HOST:PORT", help="Ask the syncer there instead.")
    ] = None,
    token: Token = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Take none: list those that the directory has; nothing need run.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Take a snapshot of a whole run while it trains, and wait until it is durable.

    It holds every fragment and its outer optimizer as of one moment, and from each learner its parameters, its inner
    optimizer's state and its counters. Nobody waits for it. Runs take snapshots by themselves now and then
    (--snapshot-every), and keep the newest few. docs/recovery.md says what they are good for.
    """
    if listed:
        if run is None or syncer is not None:
            raise ValueError("say whose snapshots to list: atoll snapshot RUN --list")
        _show_list(run, as_json)
        return
    from atoll.commands.control import user_and_host

    show_taken(*find_syncer(run, syncer, token or None, ADVICE), user_and_host(), as_json)


def show_taken(address: str, token: str | None, who: str, as_json: bool) -> None:
    told = _taken(address, token, who)
    if as_json:
        print_json(told)
    elif told["state"] == "durable":
        for line in _lines(told):
            print(line)
    if told["state"] != "durable":
        complain(str(told["said"]))
        raise typer.Exit(ExitCode.FAILED)


def find_syncer(run: Path | None, syncer: str | None, token: str | None, advice: str) -> tuple[str, str | None]:
    """Address and token of the syncer of this run, or of the one that is named."""
    from atoll.net.learner import address
    from atoll.net.reaching import where

    if syncer is not None:
        if run is not None:
            raise ValueError("give a run's directory or --syncer, not both")
        return address(syncer), token
    if run is None:
        raise ValueError("say of which run: atoll snapshot RUN, or --syncer HOST:PORT")
    if not run.is_dir():
        raise ValueError(f"{run} is no directory of a run")
    found = where(run)
    if found is None:
        raise ValueError(f"no syncer runs on {run} here: {advice}")
    return found.address, token if token is not None else found.token


def _taken(address: str, token: str | None, who: str) -> dict[str, Any]:
    """Until it is durable or given up. How long that takes is the syncer's to say: it waits for no learner forever."""
    import time

    from atoll.net.reaching import ask

    number = ask(address, token, "POST", "/v1/snapshot", ANSWER_S, {"who": who})["snapshot"]
    while True:
        told: dict[str, Any] = ask(address, token, "GET", f"/v1/snapshot/{number}", ANSWER_S)
        if told["state"] != "being taken":
            return told
        time.sleep(LOOK_EVERY_S)


def _show_list(run: Path, as_json: bool) -> None:
    from atoll.net.snapshot_files import list_snapshots

    if not (run / "store").is_dir():
        raise ValueError(f"{run} is no directory of a run: it has no store")
    found = [info.to_json(run) for info in list_snapshots(run)]
    if as_json:
        print_json({"run": str(run), "snapshots": found})
        return
    if not found:
        print(f"{run} has no snapshot.")
    for told in found:
        for line in _lines(told):
            print(line)


def _lines(told: Mapping[str, Any]) -> Iterator[str]:
    from datetime import datetime

    moment = datetime.fromtimestamp(told["saved_at"]).astimezone().isoformat(sep=" ", timespec="seconds")
    head = f"snapshot {told['snapshot']}  {moment}  {_size(told['bytes'])}"
    if "problem" in told:
        yield f"{head}  DAMAGED: {told['problem']}"
        return
    versions = told["versions"]
    yield (
        f"{head}  {told['merges']:,} merges, versions {min(versions)} to {max(versions)} of {len(versions)} fragments,"
        f" {told['in_flight']} contributions in flight"
    )
    for part in told["parts"]:
        place = "elsewhere" if part["bytes"] is None else _size(part["bytes"])
        yield f"  learner {part['learner']}: step {part['step']:,}, {part['trained']:,} tokens, part {place}"
    for learner in told["left_out"]:
        yield f"  learner {learner}: left out"


def _size(count: int) -> str:
    """
    >>> _size(1234), _size(5_600_000)
    ('1.2 kB', '5.6 MB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
