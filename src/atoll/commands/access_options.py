"""Options by which commands are let in: the token, the keys, the authority."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
