"""`atoll control` and `atoll snapshot`: send an operator's request to the syncer of a run."""

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
SNAPSHOT_ADVICE = "take snapshots while it runs, or list the existing ones with --list"
SNAPSHOT_POLL_INTERVAL_S = 0.2


def run_snapshot(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Directory of a run whose syncer runs on this machine.")
    ] = None,
    syncer: Annotated[str | None, Setting("Address of the syncer, instead of RUN.", "HOST:PORT")] = None,
    token: TokenOption = None,
    keys: KeysOption = None,
    ca: CaOption = None,
    list_only: Annotated[
        bool, Setting("List the snapshots in the directory and take none. No syncer has to run.", flag="list")
    ] = False,
    as_json: JsonOption = False,
) -> Result:
    """Take a snapshot of a whole run while it trains, and wait until it is durable.

    A snapshot is a consistent cut. It contains every fragment with its outer optimizer, and the parameters, optimizer
    state and counters of each learner. For a learner without a run directory it contains the counters only. Training
    continues meanwhile. Runs also take snapshots automatically (--snapshot-every), and keep the newest ones.
    See docs/recovery.md.
    """
    if list_only:
        if run is None or syncer is not None:
            raise ValueError("--list needs the directory of a run: atoll snapshot RUN --list")
        return _list_snapshots(run)
    return _take_snapshot(find_syncer(run, syncer, token or None, SNAPSHOT_ADVICE, keys, ca), user_and_host())


class SyncerAccess(NamedTuple):
    """Address and credentials of a syncer."""

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
    """Return access to the syncer of a run on this machine, or to the syncer at an address.

    Args:
        run: Directory of a run whose syncer runs on this machine, or None.
        syncer: Address of the syncer, or None.
        token: Token for the syncer; by default the one that a syncer on this machine has written.
        advice: End of the error message if no syncer runs there.
        keys: Directory of a key, for TLS.
        ca: Certificate authority, for TLS without a key.
    """
    from atoll.transport.endpoint import parse_address, parse_endpoint, read_address_file

    if syncer is not None:
        if run is not None:
            raise ValueError("give the directory of a run or --syncer, not both")
        endpoint = parse_endpoint(syncer, keys, ca)
        endpoint.check()
        return SyncerAccess(parse_address(endpoint.addresses), token, endpoint.tls)
    if run is None:
        raise ValueError("no run is given; give its directory, as in: atoll snapshot RUN, or --syncer HOST:PORT")
    if not run.is_dir():
        raise ValueError(f"{run} is not the directory of a run")
    found = read_address_file(run)
    if found is None:
        raise ValueError(f"no syncer of {run} runs on this machine: {advice}")
    return SyncerAccess(found.address, token if token is not None else found.token, found.tls)


def _take_snapshot(syncer: SyncerAccess, requested_by: str) -> Result:
    """Request a snapshot and wait until it is durable or aborted. The syncer limits how long it waits for learners."""
    import time

    number = syncer.request("POST", "/v1/snapshot", {"requested_by": requested_by})["snapshot"]
    while (status := syncer.request("GET", f"/v1/snapshot/{number}"))["state"] == "being taken":
        time.sleep(SNAPSHOT_POLL_INTERVAL_S)
    if status["state"] == "durable":
        return Result(status, _snapshot_lines(status))
    print_to_stderr("; ".join([str(status["said"]), *status["left_out"]]))
    return Result(status, (), ExitCode.FAILED)


def _list_snapshots(run: Path) -> Result:
    from atoll.store.snapshots import list_snapshots

    if not (run / "store").is_dir():
        raise ValueError(f"{run} is not the directory of a run: it has no store")
    snapshots = [info.to_json(run) for info in list_snapshots(run)]
    lines = chain.from_iterable(map(_snapshot_lines, snapshots)) if snapshots else [f"{run} has no snapshot."]
    return Result({"run": str(run), "snapshots": snapshots}, lines)


def _snapshot_lines(fields: Mapping[str, Any]) -> Iterator[str]:
    from datetime import datetime

    moment = datetime.fromtimestamp(fields["saved_at"]).astimezone().isoformat(sep=" ", timespec="seconds")
    head = f"snapshot {fields['snapshot']}  {moment}  {format_size(fields['bytes'])}"
    if "problem" in fields:
        yield f"{head}  DAMAGED: {fields['problem']}"
        return
    versions = fields["versions"]
    yield (
        f"{head}  {fields['merges']:,} merges, versions {min(versions)} to {max(versions)} of {len(versions)}"
        f" fragments, {fields['in_flight']} contributions in flight"
    )
    for part in fields["parts"]:
        size = "part on another machine" if part["bytes"] is None else f"part {format_size(part['bytes'])}"
        size = f"no part ({part['problem']})" if part["problem"] else size
        yield f"  learner {part['learner']}: step {part['step']:,}, {part['trained']:,} tokens, {size}"
    for learner in fields["left_out"]:
        yield f"  learner {learner}: left out"
    if any(part["problem"] for part in fields["parts"]):
        yield (
            "  Learners without a part start from this snapshot with fresh optimizer state; to save parts, give"
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
"""Description of the value of each control. Empty: the control takes no value."""


def run_control(
    target: Annotated[
        str, typer.Argument(metavar="RUN", help="Directory of a run whose syncer runs on this machine, or HOST:PORT.")
    ],
    action: Annotated[
        str, typer.Argument(metavar="WHAT", help="pause, resume, drain N, quorum K, grace G or snapshot.")
    ],
    value: Annotated[
        str | None, typer.Argument(metavar="VALUE", help="A learner, the quorum or the grace margin.")
    ] = None,
    token: TokenOption = None,
    keys: KeysOption = None,
    ca: CaOption = None,
    who: Annotated[str | None, Setting("Name of the operator, for the tape. [default: user@host]", "NAME")] = None,
    is_confirmed: Annotated[bool, Setting("Drain a learner without a question.", flag="yes")] = False,
    as_json: JsonOption = False,
) -> Result:
    """Pause and resume a run, drain a learner, change quorum K or grace margin gamma.

    A paused run opens no round, and its learners stop at their next step boundary. It can still take a snapshot and
    finish. A drained learner leaves as if its own program had ended: the others continue, its unmerged samples are
    leased to them, and it is not restarted. The tape has every request with the name of the operator. A pause, a quorum
    and a grace margin survive a restart of the syncer.
    """
    from atoll.transport.endpoint import RequestRefusedError

    operator = who if who is not None else user_and_host()
    body = {"kind": action, "value": _parse_value(action, value), "requested_by": operator}
    run = None if ":" in target and not Path(target).is_dir() else Path(target)
    address = target if run is None else None
    syncer = find_syncer(run, address, token or None, "control the run while its syncer runs", keys, ca)
    if action == "snapshot":
        return _take_snapshot(syncer, operator)
    if action == "drain" and not is_confirmed:
        _confirm(f"Learner {value} will leave the run and is not restarted. Continue?")
    try:
        reply = syncer.request("POST", "/v1/control", body)
    except RequestRefusedError as refused:
        if refused.status not in (404, 409, 507):
            raise
        print_to_stderr(str(refused))  # a valid request that the current state of the run does not allow
        raise typer.Exit(ExitCode.FAILED) from None
    return Result({**body, "done": reply["done"]}, [f"{reply['done'][0].upper()}{reply['done'][1:]}."])


def _parse_value(action: str, value: str | None) -> float | None:
    """Return the value as a number. The syncer checks whether it is allowed."""
    if action not in CONTROL_VALUES:
        raise ValueError(f"unknown control {action!r}; give one of {', '.join(CONTROL_VALUES)}")
    if not CONTROL_VALUES[action]:
        if value is not None:
            raise ValueError(f"{action} takes no value, got {value!r}")
        return None
    if value is None:
        raise ValueError(
            f"{action} takes {CONTROL_VALUES[action]}, as in:"
            f" atoll control RUN {action} {'0.5' if action == 'grace' else 2}"
        )
    try:
        return float(value) if action == "grace" else int(value)
    except ValueError:
        raise ValueError(f"{action} takes {CONTROL_VALUES[action]}, got {value!r}") from None


def _confirm(question: str) -> None:
    import sys

    if not sys.stdin.isatty():
        raise ValueError("draining a learner needs a confirmation, and stdin is not a terminal: give --yes")
    if not typer.confirm(question, err=True):
        raise typer.Exit(ExitCode.FAILED)


def user_and_host() -> str:
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
