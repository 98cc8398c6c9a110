"""`--log-format`, shared by the commands whose processes keep logs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

LogFormat = Annotated[
    str,
    typer.Option(
        "--log-format",
        envvar="ATOLL_LOG_FORMAT",
        metavar="text|json",
        help="Logs for people, or a JSON object per line that names run, learner, incarnation, fragment and version.",
    ),
]


@contextmanager
def of_children(log_format: str) -> Iterator[None]:
    """Processes that are started meanwhile write their logs so."""
    from atoll.logs import VARIABLE

    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = log_format
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def say(log_format: str, sentence: str) -> None:
    """One line on stderr between those of the log, and in its format."""
    if log_format != "json":
        print(sentence, file=sys.stderr, flush=True)
        return
    import logging

    logging.getLogger("atoll.command").info("%s", sentence)
