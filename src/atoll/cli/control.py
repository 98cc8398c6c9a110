"""`atoll control`: what an operator may ask of a run that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.access_options import Ca, Keys, Token
from atoll.cli.output import ExitCode, JsonOption, complain, print_json

EXAMPLE = "atoll control runs/first pause"

TAKES = {"pause": "", "resume": "", "drain": "the number of a learner", "quorum": "K", "grace": "gamma", "snapshot": ""}
"""What there is, and the value that each takes."""


def run(
    place: Annotated[
        str, typer.Argument(metavar="RUN", help="Directory of a run whose syncer runs on this machine, or HOST:PORT.")
    ],
    what: Annotated[str, typer.Argument(metavar="WHAT", help="pause, resume, drain N, quorum K, grace G or snapshot.")],
    value: Annotated[
        str | None, typer.Argument(metavar="VALUE", help="Which learner, which quorum or which grace margin.")
    ] = None,
    token: Token = None,
    keys: Keys = None,
    ca: Ca = None,
    who: Annotated[
        str | None, typer.Option("--who", metavar="NAME", help="Who asks, for the tape. [default: user@host]")
    ] = None,
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask before a learner is drained.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Pause and resume a run, ask a learner to leave, change quorum K or grace margin gamma.

    A paused run opens no round and its learners stand still at their next step boundary; a snapshot can be taken of it,
    and it can be finished. A drained learner leaves as if its own program had ended: the others go on, what it had not
    merged is trained by them, and nobody starts it again. All of it is on the tape with who asked; a pause, a quorum
    and a grace margin stay in force when the syncer is started again.
    """
    from atoll.cli.snapshot import find_syncer, show_taken
    from atoll.transport.endpoint import RequestRefusedError

    who = who if who is not None else user_and_host()
    wish = {"what": what, "value": _value(what, value), "who": who}
    here = None if ":" in place and not Path(place).is_dir() else Path(place)
    named = place if here is None else None
    found = find_syncer(here, named, token or None, "control it while it does", keys, ca)
    if what == "snapshot":
        show_taken(found, who, as_json)
        return
    if what == "drain" and not sure:
        _ask_first(f"Learner {value} will leave the run and is not started again. Go on?")
    try:
        told = found.ask("POST", "/v1/control", wish)
    except RequestRefusedError as refused:
        if refused.status not in (404, 409, 507):
            raise
        complain(str(refused))  # a good wish, at the wrong moment
        raise typer.Exit(ExitCode.FAILED) from None
    if as_json:
        print_json({**wish, "done": told["done"]})
    else:
        print(f"{told['done'][0].upper()}{told['done'][1:]}.")


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
