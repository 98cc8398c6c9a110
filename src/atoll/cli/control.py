"""`atoll control` and `atoll snapshot`: requests of an operator to the syncer of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from atoll.cli.options import CaOption, KeysOption, TokenOption
from atoll.cli.output import ExitCode, JsonOption, Result, format_size, print_to_stderr
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from atoll.transport.tls import ClientTls

REQUEST_TIMEOUT_S = 120.0
SNAPSHOT_ADVICE = "take a snapshot while it does, or list those there are with --list"
SNAPSHOT_POLL_INTERVAL_S = 0.2


def run_snapshot(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Directory of a run whose syncer runs on this machine.")
    ] = None,
    syncer: Annotated[str | None, Setting("Ask the syncer there instead.", "HOST:PORT")] = None,
    token: TokenOption = None,
    keys: KeysOption = None,
    ca: CaOption = None,
    list_only: Annotated[
        bool, Setting("Take none: list those in the directory; nothing need run.", flag="list")
    ] = False,
    as_json: JsonOption = False,
) -> Result:
    """Take a snapshot of a whole run while it trains, and wait until it is durable.

    It holds every fragment and its outer optimizer as of one moment, and from each learner its parameters, its inner
    optimizer's state and its counters; of a learner without a run directory only the counters. Training goes on
    meanwhile. Runs take snapshots by themselves now and then (--snapshot-every), and keep the newest few.
    docs/recovery.md says what they are good for.
    """
    if list_only:
        if run is None or syncer is not None:
            raise ValueError("say whose snapshots to list: atoll snapshot RUN --list")
        return _list_snapshots(run)
    return _take_snapshot(find_syncer(run, syncer, token or None, SNAPSHOT_ADVICE, keys, ca), user_and_host())


class SyncerAccess(NamedTuple):
    """How a syncer is asked."""

    address: str
    token: str | None
    tls: ClientTls | None

    def request(self, method: str, path: str, body: Any = None) -> Any:
        from atoll.transport.endpoint import send_request

        return send_request(self.address, self.token, method, path, REQUEST_TIMEOUT_S, body, self.tls)


def find_syncer(
    run: Path | None,
    syncer: str | None,
    token: str | None,
    advice: str,
    keys: Path | None = None,
    ca: Path | None = None,
) -> SyncerAccess:
    """The syncer of this run, or the one that is named."""
    from atoll.transport.endpoint import parse_address, parse_endpoint, read_address_file

    if syncer is not None:
        if run is not None:
            raise ValueError("give a run's directory or --syncer, not both")
        found_at = parse_endpoint(syncer, keys, ca)
        found_at.check()
        return SyncerAccess(parse_address(found_at.addresses), token, found_at.tls)
    if run is None:
        raise ValueError("say of which run: atoll snapshot RUN, or --syncer HOST:PORT")
    if not run.is_dir():
        raise ValueError(f"{run} is no directory of a run")
    found = read_address_file(run)
    if found is None:
        raise ValueError(f"no syncer runs on {run} here: {advice}")
    return SyncerAccess(found.address, token if token is not None else found.token, found.tls)


def _take_snapshot(found: SyncerAccess, who: str) -> Result:
    """Wait until it is durable or given up. The syncer limits the time: it does not wait for a learner forever."""
    import time

    number = found.request("POST", "/v1/snapshot", {"requested_by": who})["snapshot"]
    while (told := found.request("GET", f"/v1/snapshot/{number}"))["state"] == "being taken":
        time.sleep(SNAPSHOT_POLL_INTERVAL_S)
    if told["state"] == "durable":
        return Result(told, _snapshot_lines(told))
    print_to_stderr("; ".join([str(told["said"]), *told["left_out"]]))
    return Result(told, (), ExitCode.FAILED)


def _list_snapshots(run: Path) -> Result:
    from atoll.store.snapshots import list_snapshots

    if not (run / "store").is_dir():
        raise ValueError(f"{run} is no directory of a run: it has no store")
    found = [info.to_json(run) for info in list_snapshots(run)]
    lines = chain.from_iterable(map(_snapshot_lines, found)) if found else [f"{run} has no snapshot."]
    return Result({"run": str(run), "snapshots": found}, lines)


def _snapshot_lines(told: Mapping[str, Any]) -> Iterator[str]:
    from datetime import datetime

    moment = datetime.fromtimestamp(told["saved_at"]).astimezone().isoformat(sep=" ", timespec="seconds")
    head = f"snapshot {told['snapshot']}  {moment}  {format_size(told['bytes'])}"
    if "problem" in told:
        yield f"{head}  DAMAGED: {told['problem']}"
        return
    versions = told["versions"]
    yield (
        f"{head}  {told['merges']:,} merges, versions {min(versions)} to {max(versions)} of {len(versions)} fragments,"
        f" {told['in_flight']} contributions in flight"
    )
    for part in told["parts"]:
        place = "part elsewhere" if part["bytes"] is None else f"part {format_size(part['bytes'])}"
        place = f"no part ({part['problem']})" if part["problem"] else place
        yield f"  learner {part['learner']}: step {part['step']:,}, {part['trained']:,} tokens, {place}"
    for learner in told["left_out"]:
        yield f"  learner {learner}: left out"
    if any(part["problem"] for part in told["parts"]):
        yield (
            "  Without their parts learners start from this snapshot with fresh inner state; to keep parts, give"
            " run_directory= to atoll.Learner."
        )


CONTROL_VALUES = {
    "pause": "",
    "resume": "",
    "drain": "the number of a learner",
    "quorum": "K",
    "grace": "gamma",
    "snapshot": "",
}
"""What there is, and the value that each takes."""


def run_control(
    target: Annotated[
        str, typer.Argument(metavar="RUN", help="Directory of a run whose syncer runs on this machine, or HOST:PORT.")
    ],
    what: Annotated[str, typer.Argument(metavar="WHAT", help="pause, resume, drain N, quorum K, grace G or snapshot.")],
    value: Annotated[str | None, typer.Argument(metavar="VALUE", help="A learner, a quorum or a grace margin.")] = None,
    token: TokenOption = None,
    keys: KeysOption = None,
    ca: CaOption = None,
    who: Annotated[str | None, Setting("Who asks, for the tape. [default: user@host]", "NAME")] = None,
    is_confirmed: Annotated[bool, Setting("Do not ask before a learner is drained.", flag="yes")] = False,
    as_json: JsonOption = False,
) -> Result:
    """Pause and resume a run, ask a learner to leave, change quorum K or grace margin gamma.

    A paused run opens no round and its learners stand still at their next step boundary; a snapshot can be taken of it,
    and it can be finished. A drained learner leaves as if its own program had ended: the others go on, what it had not
    merged is trained by them, and nobody starts it again. All of it is on the tape with who asked; a pause, a quorum
    and a grace margin stay in force when the syncer is started again.
    """
    from atoll.transport.endpoint import RequestRefusedError

    who = who if who is not None else user_and_host()
    body = {"kind": what, "value": _parse_value(what, value), "requested_by": who}
    here = None if ":" in target and not Path(target).is_dir() else Path(target)
    named = target if here is None else None
    found = find_syncer(here, named, token or None, "control it while it does", keys, ca)
    if what == "snapshot":
        return _take_snapshot(found, who)
    if what == "drain" and not is_confirmed:
        _confirm(f"Learner {value} will leave the run and is not started again. Go on?")
    try:
        told = found.request("POST", "/v1/control", body)
    except RequestRefusedError as refused:
        if refused.status not in (404, 409, 507):
            raise
        print_to_stderr(str(refused))  # a valid request at the wrong moment
        raise typer.Exit(ExitCode.FAILED) from None
    return Result({**body, "done": told["done"]}, [f"{told['done'][0].upper()}{told['done'][1:]}."])


def _parse_value(what: str, value: str | None) -> float | None:
    """What the syncer is told; it knows best whether that can be."""
    if what not in CONTROL_VALUES:
        raise ValueError(f"there is no control {what!r}; give one of {', '.join(CONTROL_VALUES)}")
    if not CONTROL_VALUES[what]:
        if value is not None:
            raise ValueError(f"{what} takes no value, got {value!r}")
        return None
    if value is None:
        raise ValueError(
            f"{what} takes {CONTROL_VALUES[what]}, as in: atoll control RUN {what} {'0.5' if what == 'grace' else 2}"
        )
    try:
        return float(value) if what == "grace" else int(value)
    except ValueError:
        raise ValueError(f"{what} takes {CONTROL_VALUES[what]}, got {value!r}") from None


def _confirm(question: str) -> None:
    import sys

    if not sys.stdin.isatty():
        raise ValueError("nobody is at a terminal to be asked whether this is meant: give --yes")
    if not typer.confirm(question, err=True):
        raise typer.Exit(ExitCode.FAILED)


def user_and_host() -> str:
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
