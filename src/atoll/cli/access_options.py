"""Options of commands that listen or connect: the port, the token, the keys, the authority."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def port_option(flag: str, help: str) -> Any:
    """Declare an option for a TCP port. All commands refuse the same numbers."""
    return typer.Option(flag, metavar="PORT", callback=_check_port, help=help)


def _check_port(port: int | None) -> int | None:
    if port is not None and not 0 <= port <= 65535:
        raise typer.BadParameter(f"{port} is not a port; give a number from 0 to 65535 (0: a free port)")
    return port


Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="ATOLL_TOKEN",
        metavar="SECRET",
        help="What learners must know to take part. Better in the environment: others can read a command line.",
    ),
]

Keys = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        envvar="ATOLL_KEYS",
        metavar="DIR",
        help="TLS with this key, as atoll keys add has made it: the directory of one key.",
    ),
]

Ca = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        metavar="FILE",
        help="TLS, with the token and without a key: the authority of the syncer's certificate, in PEM. "
        "https://HOST:PORT alone trusts those of this system.",
    ),
]
