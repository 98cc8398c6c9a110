"""`atoll control` and `atoll snapshot`: requests of an operator to the syncer of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from atoll.cli.options import Ca, Keys, Token
from atoll.cli.output import ExitCode, JsonOption, Result, complain, size_text
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from atoll.transport.tls import ClientTls

ANSWER_S = 120.0
ADVICE = "take a snapshot while it does, or list those there are with --list"
POLL_INTERVAL_S = 0.2


def run_snapshot(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Directory of a run whose syncer runs on this machine.")
    ] = None,
    syncer: Annotated[str | None, Setting("Ask the syncer there instead.", "HOST:PORT")] = None,
    token: Token = None,
    keys: Keys = None,
    ca: Ca = None,
    listed: Annotated[bool, Setting("Take none: list those in the directory; nothing need run.", flag="list")] = False,
    as_json: JsonOption = False,
) -> Result:
    """Take a snapshot of a whole run while it trains, and wait until it is durable.

    It holds every fragment and its outer optimizer as of one moment, and from each learner its parameters, its inner
    optimizer's state and its counters; of a learner without a run directory only the counters. Training goes on
    meanwhile. Runs take snapshots by themselves now and then (--snapshot-every), and keep the newest few.
    docs/recovery.md says what they are good for.
    """
    if listed:
        if run is None or syncer is not None:
            raise ValueError("say whose snapshots to list: atoll snapshot RUN --list")
        return _listed(run)
    return _taken(find_syncer(run, syncer, token or None, ADVICE, keys, ca), user_and_host())


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


def _taken(found: Reachable, who: str) -> Result:
    """Wait until it is durable or given up. The syncer limits the time: it does not wait for a learner forever."""
    import time

    number = found.ask("POST", "/v1/snapshot", {"who": who})["snapshot"]
    while (told := found.ask("GET", f"/v1/snapshot/{number}"))["state"] == "being taken":
        time.sleep(POLL_INTERVAL_S)
    if told["state"] == "durable":
        return Result(told, _lines(told))
    complain("; ".join([str(told["said"]), *told["left_out"]]))
    return Result(told, (), ExitCode.FAILED)


def _listed(run: Path) -> Result:
    from atoll.store.snapshots import list_snapshots

    if not (run / "store").is_dir():
        raise ValueError(f"{run} is no directory of a run: it has no store")
    found = [info.to_json(run) for info in list_snapshots(run)]
    lines = chain.from_iterable(map(_lines, found)) if found else [f"{run} has no snapshot."]
    return Result({"run": str(run), "snapshots": found}, lines)


def _lines(told: Mapping[str, Any]) -> Iterator[str]:
    from datetime import datetime

    moment = datetime.fromtimestamp(told["saved_at"]).astimezone().isoformat(sep=" ", timespec="seconds")
    head = f"snapshot {told['snapshot']}  {moment}  {size_text(told['bytes'])}"
    if "problem" in told:
        yield f"{head}  DAMAGED: {told['problem']}"
        return
    versions = told["versions"]
    yield (
        f"{head}  {told['merges']:,} merges, versions {min(versions)} to {max(versions)} of {len(versions)} fragments,"
        f" {told['in_flight']} contributions in flight"
    )
    for part in told["parts"]:
        place = "part elsewhere" if part["bytes"] is None else f"part {size_text(part['bytes'])}"
        place = f"no part ({part['problem']})" if part["problem"] else place
        yield f"  learner {part['learner']}: step {part['step']:,}, {part['trained']:,} tokens, {place}"
    for learner in told["left_out"]:
        yield f"  learner {learner}: left out"
    if any(part["problem"] for part in told["parts"]):
        yield (
            "  Without their parts learners start from this snapshot with fresh inner state; to keep parts, give"
            " run_directory= to atoll.Learner."
        )


TAKES = {"pause": "", "resume": "", "drain": "the number of a learner", "quorum": "K", "grace": "gamma", "snapshot": ""}
"""What there is, and the value that each takes."""


def run_control(
    place: Annotated[
        str, typer.Argument(metavar="RUN", help="Directory of a run whose syncer runs on this machine, or HOST:PORT.")
    ],
    what: Annotated[str, typer.Argument(metavar="WHAT", help="pause, resume, drain N, quorum K, grace G or snapshot.")],
    value: Annotated[str | None, typer.Argument(metavar="VALUE", help="A learner, a quorum or a grace margin.")] = None,
    token: Token = None,
    keys: Keys = None,
    ca: Ca = None,
    who: Annotated[str | None, Setting("Who asks, for the tape. [default: user@host]", "NAME")] = None,
    sure: Annotated[bool, Setting("Do not ask before a learner is drained.", flag="yes")] = False,
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
    wish = {"what": what, "value": _value(what, value), "who": who}
    here = None if ":" in place and not Path(place).is_dir() else Path(place)
    named = place if here is None else None
    found = find_syncer(here, named, token or None, "control it while it does", keys, ca)
    if what == "snapshot":
        return _taken(found, who)
    if what == "drain" and not sure:
        _ask_first(f"Learner {value} will leave the run and is not started again. Go on?")
    try:
        told = found.ask("POST", "/v1/control", wish)
    except RequestRefusedError as refused:
        if refused.status not in (404, 409, 507):
            raise
        complain(str(refused))  # a good wish, at the wrong moment
        raise typer.Exit(ExitCode.FAILED) from None
    return Result({**wish, "done": told["done"]}, [f"{told['done'][0].upper()}{told['done'][1:]}."])


def _value(what: str, value: str | None) -> float | None:
    """What the syncer is told; it knows best whether that can be."""
    if what not in TAKES:
        raise ValueError(f"there is no control {what!r}; give one of {', '.join(TAKES)}")
    if not TAKES[what]:
        if value is not None:
            raise ValueError(f"{what} takes no value, got {value!r}")
        return None
    if value is None:
        raise ValueError(
            f"{what} takes {TAKES[what]}, as in: atoll control RUN {what} {'0.5' if what == 'grace' else 2}"
        )
    try:
        return float(value) if what == "grace" else int(value)
    except ValueError:
        raise ValueError(f"{what} takes {TAKES[what]}, got {value!r}") from None


def _ask_first(question: str) -> None:
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
