"""What every command shares: the `--json` option, one JSON object on stdout, one line on stderr, the exit codes."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Annotated, ParamSpec

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, for scripts.")]

_P = ParamSpec("_P")


class ExitCode(IntEnum):
    """What the shell is told."""

    OK = 0
    FAILED = 1  # the command did its work and found something wrong: a violation, a difference
    USAGE = 2  # the user asked for something that cannot be done; stderr has one line that says what
    INTERRUPTED = 130  # Ctrl-C
    NO_READER = 141  # whoever read our output has gone, as in `atoll story run | head`


def print_json(fields: Mapping[str, object]) -> None:
    """Print one object on one line.

    Infinities and NaN are not JSON and many readers choke on them: they are refused here, before a script sees them.
    """
    sys.stdout.write(json.dumps(dict(fields), ensure_ascii=False, allow_nan=False) + "\n")


def complain(sentence: str) -> None:
    """One line on stderr, whatever the sentence holds. Never anything on stdout, which may be feeding a script."""
    print(f"atoll: {' '.join(sentence.split())}", file=sys.stderr)


def give_up_stdout() -> None:
    """Point stdout at nothing after its reader has gone, or the interpreter complains when it flushes at exit."""
    try:
        stdout = sys.stdout.fileno()
    except (OSError, ValueError):  # not a real file, as under a test runner
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stdout)
    os.close(nothing)


def open_streams() -> None:
    """Where the shell has closed a stream, as by `>&-`, Python has None, and the next file would take its number."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def flush_stdout() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as wrong:
        wrong.filename = "standard output"
        give_up_stdout()
        raise


def interruptible(run: Callable[_P, None]) -> Callable[_P, None]:
    """Wrap a command: Ctrl-C ends in one line, a reader that went away ends in silence.

    Typer would turn both into exit codes before `main` could tell them from anything else. Errors pass through.
    """

    @functools.wraps(run)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            run(*args, **kwargs)
            flush_stdout()
        except KeyboardInterrupt:
            complain("interrupted")
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        except BrokenPipeError:
            give_up_stdout()
            raise typer.Exit(ExitCode.NO_READER) from None

    return wrapped
