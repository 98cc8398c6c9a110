"""The `atoll` command: a list of subcommands, and what happens when one of them goes wrong.

A command raises `ValueError` with a sentence and the fix when the user asked for something that cannot be done; that
sentence becomes one line on stderr and exit code 2. It raises `typer.Exit(ExitCode.FAILED)` when it did its work and
found something wrong. Anything else is our bug and shows its traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import typer

from atoll import __version__
from atoll.cli import (
    chaos,
    check,
    control,
    curves,
    dash,
    down,
    export,
    fragments,
    generate,
    import_checkpoint,
    keys,
    learner,
    ledger,
    logs,
    plan,
    replay,
    report,
    shard,
    simulate,
    snapshot,
    status,
    story,
    swarm,
    syncer,
    train,
    up,
    version,
    watch,
)
from atoll.cli.output import ExitCode, complain, flush_stdout, give_up_stdout, interruptible, open_streams

EXTRA_OF = {
    "accelerate": "transformers",
    "aiohttp": "train",
    "cryptography": "train",
    "lightning": "lightning",
    "matplotlib": "plot",
    "numpy": "train",
    "prometheus_client": "dash",
    "ray": "ray",
    "safetensors": "train",
    "tensorboard": "tensorboard",
    "torch": "train",
    "transformers": "transformers",
    "wandb": "wandb",
    "xxhash": "train",
}
"""Which extra of the package brings a module that is not always there."""


class CommandModule(Protocol):
    """Interface of a command module in `atoll.cli`."""

    EXAMPLE: str  # one command line, shown at the end of the help

    @property
    def run(self) -> Callable[..., None]: ...  # options as annotated parameters, help as docstring


@dataclass(slots=True)
class Session:
    """What the options before the subcommand chose. Made anew by each call of `main`."""

    traceback: bool = False


COMMANDS: dict[str, CommandModule] = {
    # in the order in which --help lists them
    "train": train,
    "up": up,
    "down": down,
    "status": status,
    "logs": logs,
    "syncer": syncer,
    "shard": shard,
    "learner": learner,
    "keys": keys,
    "dash": dash,
    "watch": watch,
    "report": report,
    "curves": curves,
    "snapshot": snapshot,
    "control": control,
    "generate": generate,
    "export": export,
    "import": import_checkpoint,
    "fragments": fragments,
    "chaos": chaos,
    "plan": plan,
    "simulate": simulate,
    "swarm": swarm,
    "check": check,
    "story": story,
    "ledger": ledger,
    "replay": replay,
    "version": version,
}


@interruptible
def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"atoll {__version__}")
        raise typer.Exit(ExitCode.OK)


def _before_any_command(
    context: typer.Context,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Decoupled DiLoCo: training on islands that never wait for each other."""
    context.obj.traceback = traceback


def build_app(commands: dict[str, CommandModule]) -> typer.Typer:
    """An application of these commands. Each help text ends with its example."""
    app = typer.Typer(
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # its panels print a value type behind every flag, as if the flag took one
    )
    app.callback(epilog="Example: atoll COMMAND --help")(_before_any_command)
    for name, module in commands.items():
        app.command(name, epilog=f"Example: {module.EXAMPLE}")(interruptible(module.run))
    return app


def main(argv: Sequence[str] | None = None, commands: dict[str, CommandModule] | None = None) -> int:
    """Run one command line and return its exit code. Both arguments are for tests."""
    open_streams()
    session = Session()
    app = build_app(COMMANDS if commands is None else commands)
    try:
        app(args=None if argv is None else list(argv), prog_name="atoll", obj=session)
        code = int(ExitCode.OK)
    except SystemExit as end:  # how Typer returns
        code = end.code if isinstance(end.code, int) else int(ExitCode.OK)
    except KeyboardInterrupt:  # before a command began
        complain("interrupted")
        return ExitCode.INTERRUPTED
    except (ValueError, OSError) as wrong:
        if session.traceback:
            raise
        complain(_sentence(wrong))
        return ExitCode.USAGE
    except ModuleNotFoundError as missing:
        name = (missing.name or "").partition(".")[0]
        if session.traceback or name not in EXTRA_OF:
            raise
        complain(f"this needs {name}, which is not installed: pip install 'atoll[{EXTRA_OF[name]}]'")
        return ExitCode.USAGE
    try:
        flush_stdout()
    except BrokenPipeError:  # help is printed outside any command
        give_up_stdout()
        return ExitCode.NO_READER
    except OSError as wrong:
        complain(_sentence(wrong))
        return ExitCode.USAGE
    return code


def _sentence(wrong: ValueError | OSError) -> str:
    if isinstance(wrong, OSError) and wrong.filename is not None:
        return f"{wrong.filename}: {wrong.strerror}"
    return str(wrong) or type(wrong).__name__
