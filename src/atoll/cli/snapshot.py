"""`atoll snapshot`: a consistent snapshot of a run that trains, and the list of those there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from atoll.cli.access_options import Ca, Keys, Token
from atoll.cli.output import ExitCode, JsonOption, complain, print_json

if TYPE_CHECKING:
    from atoll.transport.tls import ClientTls

EXAMPLE = "atoll snapshot runs/first"

ANSWER_S = 120.0
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
    keys: Keys = None,
    ca: Ca = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Take none: list those that the directory has; nothing need run.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Take a snapshot of a whole run while it trains, and wait until it is durable.

    It holds every fragment and its outer optimizer as of one moment, and from each learner its parameters, its inner
    optimizer's state and its counters; of a learner without a run directory only the counters. Training goes on
    meanwhile. Runs take snapshots by themselves now and then (--snapshot-every), and keep the newest few.
    docs/recovery.md says what they are good for.
    """
    if listed:
        if run is None or syncer is not None:
            raise ValueError("say whose snapshots to list: atoll snapshot RUN --list")
        _show_list(run, as_json)
        return
    from atoll.cli.control import user_and_host

    show_taken(find_syncer(run, syncer, token or None, ADVICE, keys, ca), user_and_host(), as_json)


def show_taken(found: Reachable, who: str, as_json: bool) -> None:
    told = _taken(found, who)
    if as_json:
        print_json(told)
    elif told["state"] == "durable":
        for line in _lines(told):
            print(line)
    if told["state"] != "durable":
        complain("; ".join([str(told["said"]), *told["left_out"]]))
        raise typer.Exit(ExitCode.FAILED)


class Reachable(NamedTuple):
    """How a syncer is asked."""

    address: str
    token: str | None
    tls: ClientTls | None

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        from atoll.transport.endpoint import ask

        return ask(self.address, self.token, method, path, ANSWER_S, body, self.tls)


def find_syncer(
    run: Path | None,
    syncer: str | None,
    token: str | None,
    advice: str,
    keys: Path | None = None,
    ca: Path | None = None,
) -> Reachable:
    """The syncer of this run, or the one that is named."""
    from atoll.transport.endpoint import address, place, read_address_file

    if syncer is not None:
        if run is not None:
            raise ValueError("give a run's directory or --syncer, not both")
        found_at = place(syncer, keys, ca)
        found_at.check()
        return Reachable(address(found_at.addresses), token, found_at.tls)
    if run is None:
        raise ValueError("say of which run: atoll snapshot RUN, or --syncer HOST:PORT")
    if not run.is_dir():
        raise ValueError(f"{run} is no directory of a run")
    found = read_address_file(run)
    if found is None:
        raise ValueError(f"no syncer runs on {run} here: {advice}")
    return Reachable(found.address, token if token is not None else found.token, found.tls)


def _taken(found: Reachable, who: str) -> dict[str, Any]:
    """Until it is durable or given up. How long that takes is the syncer's to say: it waits for no learner forever."""
    import time

    number = found.ask("POST", "/v1/snapshot", {"who": who})["snapshot"]
    while True:
        told: dict[str, Any] = found.ask("GET", f"/v1/snapshot/{number}")
        if told["state"] != "being taken":
            return told
        time.sleep(LOOK_EVERY_S)


def _show_list(run: Path, as_json: bool) -> None:
    from atoll.store.snapshots import list_snapshots

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
        place = "part elsewhere" if part["bytes"] is None else f"part {_size(part['bytes'])}"
        place = f"no part ({part['problem']})" if part["problem"] else place
        yield f"  learner {part['learner']}: step {part['step']:,}, {part['trained']:,} tokens, {place}"
    for learner in told["left_out"]:
        yield f"  learner {learner}: left out"
    if any(part["problem"] for part in told["parts"]):
        yield (
            "  Without their parts learners start from this snapshot with fresh inner state; to keep parts, give"
            " run_directory= to atoll.Learner."
        )


def _size(count: int) -> str:
    """
    >>> _size(1234), _size(5_600_000)
    ('1.2 kB', '5.6 MB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
