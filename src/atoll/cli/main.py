"""The `atoll` command: the table of its subcommands, and the handling of their errors.

A command raises `ValueError` with the cause and the fix if the request of the user cannot be carried out. The message
becomes one line on stderr, with exit code 2. A command raises `typer.Exit(ExitCode.FAILED)` if it did its work and
found a problem. Any other exception is a bug in Atoll and shows its traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from atoll import __version__
from atoll.cli import (
    chaos,
    check,
    control,
    dash,
    fleet,
    fragments,
    keys,
    learner,
    ledger,
    models,
    plan,
    replay,
    report,
    simulate,
    swarm,
    syncer,
    train,
)
from atoll.cli.options import expand_options
from atoll.cli.output import (
    ExitCode,
    JsonOption,
    Result,
    ensure_standard_streams,
    flush_stdout,
    interruptible,
    print_to_stderr,
    redirect_stdout_to_null,
)

MODULE_EXTRAS = {
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
"""Extra of the package that installs each optional module."""


class Command(NamedTuple):
    """A subcommand: its function, with options as annotated parameters and help as docstring, and one example."""

    run: Callable[..., Result | None]
    example: str  # shown at the end of the help


@dataclass(slots=True)
class GlobalOptions:
    """Values of the options before the subcommand. Each call of `main` creates a new one."""

    traceback: bool = False


def _run_version(as_json: JsonOption = False) -> Result:
    """Show the versions of Atoll and of Python."""
    import platform

    python = platform.python_version()
    return Result({"atoll": __version__, "python": python}, [f"atoll {__version__} on Python {python}"])


COMMANDS = {
    # in the order in which --help lists them
    "train": Command(train.run, "atoll train --out runs/first"),
    "up": Command(fleet.run_up, "atoll up examples/islands.toml"),
    "down": Command(fleet.run_down, "atoll down examples/islands.toml"),
    "status": Command(fleet.run_status, "atoll status examples/islands.toml"),
    "logs": Command(fleet.run_logs, "atoll logs examples/islands.toml -f --tail 20"),
    "syncer": Command(syncer.run_syncer, "atoll syncer --host 0.0.0.0 --keys keys/syncer --out runs/two-hosts"),
    "shard": Command(syncer.run_shard, "atoll shard --syncer head:7400 --shard 0 --shards 4 --out shards/0"),
    "learner": Command(learner.run, "atoll learner --syncer head:7400 --keys keys/far"),
    "keys": Command(keys.run, "atoll keys init keys --host head"),
    "dash": Command(dash.run_dash, "atoll dash runs/first"),
    "watch": Command(dash.run_watch, "atoll watch runs/first"),
    "report": Command(report.run_report, "atoll report runs/first --html first.html"),
    "curves": Command(report.run_curves, "atoll curves runs/first --tensorboard boards"),
    "snapshot": Command(control.run_snapshot, "atoll snapshot runs/first"),
    "control": Command(control.run_control, "atoll control runs/first pause"),
    "generate": Command(models.run_generate, 'atoll generate runs/first "def main():"'),
    "export": Command(models.run_export, "atoll export runs/first --to dcp --out first-dcp"),
    "import": Command(models.run_import, "atoll import first-dcp --out start.safetensors"),
    "fragments": Command(fragments.run, "atoll fragments 1m --fragments 24 --plan rows"),
    "chaos": Command(chaos.run, "atoll chaos kill-one --duration 30s"),
    "plan": Command(plan.run, "atoll plan --params 5e9 --step-time 1s --sites 8 --rate 2gbit"),
    "simulate": Command(simulate.run, "atoll simulate --learners 8 --chips 1200000 --days 30 --seed 0"),
    "swarm": Command(swarm.run, "atoll swarm --seeds 5000"),
    "check": Command(check.run_check, "atoll check runs/first"),
    "story": Command(check.run_story, "atoll story runs/first --learner 3"),
    "ledger": Command(ledger.run, "atoll ledger runs/first"),
    "replay": Command(replay.run, "atoll replay runs/first"),
    "version": Command(_run_version, "atoll version --json"),
}


@interruptible
def _show_version(is_given: bool) -> None:
    if is_given:
        print(f"atoll {__version__}")
        raise typer.Exit(ExitCode.OK)


def _handle_global_options(
    context: typer.Context,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Decoupled DiLoCo: fault-tolerant training on islands that never wait for each other."""
    context.obj.traceback = traceback


_TYPER_OPTIONS: dict[str, Any] = {
    "add_completion": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # its panels print a value type after every flag, as if the flag took a value
}


def build_command(name: str, command: Command) -> Any:
    """Return the parser of one subcommand. Its help ends with the example."""
    app = typer.Typer(**_TYPER_OPTIONS)
    app.command(name, epilog=f"Example: {command.example}")(interruptible(expand_options(command.run)))
    return typer.main.get_command(app)


def build_app(commands: Mapping[str, Command]) -> Any:
    """Return the parser of all subcommands. Subcommands are built when used, because options take long to build."""

    class Subcommands(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(commands)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return build_command(cmd_name, commands[cmd_name]) if cmd_name in commands else None

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            width = formatter.width - 6 - max(map(len, commands))
            summaries = {name: (each.run.__doc__ or "").partition("\n\n")[0] for name, each in commands.items()}
            with formatter.section("Commands"):
                formatter.write_dl(
                    [(name, shorten(text, width, placeholder="...")) for name, text in summaries.items()]
                )

    app = typer.Typer(no_args_is_help=True, **_TYPER_OPTIONS)
    app.callback(cls=Subcommands, epilog="Example: atoll COMMAND --help")(_handle_global_options)
    return typer.main.get_command(app)


def main(argv: Sequence[str] | None = None, commands: Mapping[str, Command] = COMMANDS) -> int:
    """Run one command line and return its exit code. Both arguments are for tests."""
    ensure_standard_streams()
    global_options = GlobalOptions()
    app = build_app(commands)
    try:
        app(args=None if argv is None else list(argv), prog_name="atoll", obj=global_options)
        code = int(ExitCode.OK)
    except SystemExit as end:  # Typer raises this to exit
        code = end.code if isinstance(end.code, int) else int(ExitCode.OK)
    except KeyboardInterrupt:  # before a command started
        print_to_stderr("interrupted")
        return ExitCode.INTERRUPTED
    except (ValueError, OSError) as error:
        if global_options.traceback:
            raise
        print_to_stderr(_error_message(error))
        return ExitCode.USAGE
    except ModuleNotFoundError as missing:
        name = (missing.name or "").partition(".")[0]
        if global_options.traceback or name not in MODULE_EXTRAS:
            raise
        print_to_stderr(f"this needs {name}, which is not installed: pip install 'atoll[{MODULE_EXTRAS[name]}]'")
        return ExitCode.USAGE
    try:
        flush_stdout()
    except BrokenPipeError:  # help is printed outside of any command
        redirect_stdout_to_null()
        return ExitCode.BROKEN_PIPE
    except OSError as error:
        print_to_stderr(_error_message(error))
        return ExitCode.USAGE
    return code


def _error_message(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
