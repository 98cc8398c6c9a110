"""`atoll up`, `down`, `status` and `logs`: manage the syncer and the islands of a run that one file describes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.output import ExitCode, JsonOption, Result, print_to_stderr
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from rich.table import Table

    from atoll.launch.fleet import Fleet, UnitReport

FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="TOML file with the syncer and the islands; see docs/launchers.md.")
]

STATUS_COLORS = {"running": "green", "failed": "red", "lost": "red", "unknown": "yellow", "waiting": "yellow"}


def status_table(statuses: Sequence[UnitReport]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("unit", "launcher", "state", "restarts", ""):
        table.add_column(title, justify="right" if title == "restarts" else "left", no_wrap=title in ("unit", "state"))
    for name, launcher, state, restarts, cause in statuses:
        shown = Text(state, style=STATUS_COLORS.get(state, ""))
        counted = str(restarts) if state.is_active or state.is_finished else ""
        table.add_row(Text(name), Text(launcher), shown, counted, Text(cause))
    return table


def format_status(status: UnitReport) -> str:
    restarts = f", restarts: {status.restarts}" if status.restarts else ""
    cause = f" ({status.cause})" if status.cause else ""
    return f"{status.name}: {status.state}{restarts}{cause}"


def print_statuses(statuses: Sequence[UnitReport]) -> None:
    if not sys.stdout.isatty():
        for status in statuses:
            print(format_status(status))
        return
    from rich.console import Console

    Console().print(status_table(statuses))


@contextmanager
def live_statuses(quiet: bool) -> Iterator[Callable[[list[UnitReport]], None]]:
    """Yield a function that shows the status of all units. Call it with every new status."""
    if quiet:
        yield lambda statuses: None
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(), auto_refresh=False) as live:
            yield lambda statuses: live.update(status_table(statuses), refresh=True)
    else:
        last: dict[str, tuple[str, int]] = {}

        def print_changes(statuses: list[UnitReport]) -> None:
            for status in statuses:
                now = status.state, status.restarts
                if last.get(status.name) != now:
                    last[status.name] = now
                    print(f"{time.strftime('%H:%M:%S')} {format_status(status)}", flush=True)

        yield print_changes


def run_up(
    file: FileArgument,
    units: Annotated[
        list[str] | None,
        typer.Argument(metavar="UNIT", help="Start only these: syncer, or names of islands. [default: all]"),
    ] = None,
    detach: Annotated[bool, Setting("Exit as soon as all units are started; they keep running.", short="-d")] = False,
    dry_run: Annotated[bool, Setting("Print what would be submitted, without secrets, and start nothing.")] = False,
    as_json: JsonOption = False,
) -> Result:
    """Start a run that a file describes, and follow it until its islands have ended.

    All settings are checked before the first unit starts. The command is idempotent: running units are left alone;
    units that failed, were stopped or left an unfinished run are started again. It also resumes a run after atoll down.
    Ctrl-C ends the view, not the run: follow it again with atoll up, status or logs, and stop it with atoll down.
    """
    from atoll.launch.fleet import Fleet
    from atoll.launch.islands_file import IslandsFile
    from atoll.launch.units import build_units, find_address_warning, load_token

    islands = IslandsFile.load(file)
    fleet = Fleet(islands)
    names = fleet.names(units or ())
    selected = [unit for unit in build_units(islands, load_token(islands, create=False)) if unit.name in names]
    fleet.check(selected)
    if warning := find_address_warning(islands):
        print_to_stderr(warning)
    if dry_run:
        rendered = [
            {"name": unit.name, "launcher": unit.launcher, "submitted": fleet.launcher(unit.launcher).render(unit)}
            for unit in selected
        ]
        fields = {"run": islands.run, "directory": str(islands.directory), "units": rendered}
        return Result(fields, ["\n\n".join(each["submitted"].rstrip("\n") for each in rendered)])
    with fleet.lock("atoll up"):  # two processes at the same time would create two tokens
        token = load_token(islands, create=True)
    selected = [unit for unit in build_units(islands, token) if unit.name in names]
    next_commands = f"atoll status {file}, atoll logs {file} -f, atoll down {file}"
    try:
        started = fleet.up(selected, UnitMessages(as_json))
        if detach:
            statuses = fleet.statuses()
        else:
            with live_statuses(quiet=as_json) as show:
                statuses = fleet.follow(show)
    except KeyboardInterrupt:
        print_to_stderr(f"detached; the run continues: {next_commands}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    lines = [f"The run continues in the background: {next_commands}"] if detach else _end_lines(fleet, statuses)
    problems = [status for status in statuses if status.is_problem]
    if problems:
        names = [status.name for status in problems]
        print_to_stderr(f"units with problems: {', '.join(names)}; show their output: atoll logs {file} {names[0]}")

    def text() -> None:
        for line in lines:
            print(line)
        if problems:
            print_statuses(problems)

    return Result(
        {
            "run": islands.run,
            "directory": str(islands.directory),
            "started": started,
            "units": [status._asdict() for status in statuses],
        },
        text,
        ExitCode.FAILED if problems else ExitCode.OK,
    )


def _end_lines(fleet: Fleet, statuses: list[UnitReport]) -> list[str]:
    from atoll.launch.launcher import is_island

    left = [each.name for each in statuses if not each.state.is_finished and not is_island(each.name)]
    if left:
        return [f"All islands have ended; {', '.join(left)} still runs, stop it with: atoll down {fleet.file.path}"]
    return [] if any(status.is_problem for status in statuses) else [f"The run in {fleet.file.directory} has ended."]


class UnitMessages:
    """Store the last message about each unit, and print it unless the result is JSON."""

    def __init__(self, as_json: bool) -> None:
        self.messages: dict[str, str] = {}
        self._as_json = as_json

    def __call__(self, unit: str, message: str) -> None:
        self.messages[unit] = message
        if not self._as_json:
            print(f"{unit}: {message}", flush=True)


def run_down(
    file: FileArgument,
    units: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="UNIT", help="Stop only these: names of islands, or syncer. [default: all, the syncer last]"
        ),
    ] = None,
    forget: Annotated[bool, Setting("Stop nothing, but drop the named units, whose machine is lost for good.")] = False,
    as_json: JsonOption = False,
) -> Result:
    """Stop a run. atoll up on the same file resumes it from its store.

    Islands receive SIGTERM and have their notice period to upload unmerged work; then they are killed. The syncer is
    stopped last. Units that are already stopped stay stopped. If a machine or a cluster no longer answers, drop its
    units by name with --forget; they can then be started elsewhere.
    """
    from atoll.launch.fleet import Fleet
    from atoll.launch.islands_file import IslandsFile

    islands = IslandsFile.load(file)
    fleet = Fleet(islands)
    names = fleet.names(units or ())
    if forget and not units:
        raise ValueError(f"--forget needs the names of the lost units: atoll down {file} UNIT --forget")
    notify = UnitMessages(as_json)
    is_down, lines = True, []
    if not fleet.read_units():
        notify.messages |= dict.fromkeys(names, "was not started")
        lines = [f"No unit of {file} was started."]
    else:
        is_down = fleet.forget(names, notify) if forget else fleet.down(names, notify)
    if not is_down:
        problem = "some units could not be dropped" if forget else "some units could not be stopped"
        print_to_stderr(f"{problem}; try again with atoll down")
    fields = {"run": islands.run, "directory": str(islands.directory), "down": is_down, "units": notify.messages}
    return Result(fields, lines, ExitCode.OK if is_down else ExitCode.FAILED)


def run_status(file: FileArgument, as_json: JsonOption = False) -> Result:
    """Show the state of each unit of a run, its restarts and the cause.

    Exits with code 0 if no unit has failed. If a launcher does not answer, its units are shown as unknown with the
    launcher's error: they may still run. To see the training itself, use atoll watch or atoll dash.
    """
    from atoll.launch.fleet import Fleet
    from atoll.launch.islands_file import IslandsFile

    islands = IslandsFile.load(file)
    statuses = Fleet(islands).statuses()
    has_problem = any(status.is_problem for status in statuses)

    def fields() -> dict[str, object]:
        units = [status._asdict() for status in statuses]
        return {"run": islands.run, "directory": str(islands.directory), "well": not has_problem, "units": units}

    return Result(fields, partial(print_statuses, statuses), ExitCode.FAILED if has_problem else ExitCode.OK)


LOG_POLL_INTERVAL_S = 0.5


def run_logs(
    file: FileArgument,
    units: Annotated[list[str] | None, typer.Argument(metavar="UNIT", help="Show only these. [default: all]")] = None,
    follow: Annotated[bool, Setting("Follow the output until all units have ended.", short="-f")] = False,
    tail: Annotated[int | None, Setting("Start with the last N lines of each unit.", "N", min=0)] = None,
) -> None:
    """Show the output of the units of a run. Each line begins with the name of its unit.

    The output of a restarted unit follows the output of the start before it. A line with [atoll] between them names the
    cause of the restart. Ctrl-C ends the view, not the run.
    """
    from atoll.launch.fleet import POLL_INTERVAL_S, REMOTE_POLL_INTERVAL_S, Fleet, FleetLogs
    from atoll.launch.islands_file import IslandsFile
    from atoll.launch.launcher import UnitState

    fleet = Fleet(IslandsFile.load(file))
    names = fleet.names(units or ())
    if not fleet.read_units():
        raise ValueError(f"no unit of {file} was started yet; start them with: atoll up {file}")
    logs = FleetLogs(fleet, names, tail)
    width = max(map(len, names))

    def show(lines: Iterator[tuple[str, str]]) -> None:
        for unit, text in lines:
            sys.stdout.write(f"{unit:{width}} | {text}\n")

    ended, next_poll = not follow, 0.0
    while True:
        if not ended and time.monotonic() >= next_poll:
            statuses = fleet.statuses(names)
            ended = all(each.state.is_finished or each.state == UnitState.NOT_STARTED for each in statuses)
            is_local = all(each.launcher == "local" for each in statuses)
            next_poll = time.monotonic() + (POLL_INTERVAL_S if is_local else REMOTE_POLL_INTERVAL_S)
        show(logs.read_new())
        if ended:
            break
        sys.stdout.flush()
        time.sleep(LOG_POLL_INTERVAL_S)
    show(logs.read_unfinished())
    for unit, problem in logs.problems.items():
        print_to_stderr(f"cannot read the output of {unit}: {problem}")
    if logs.problems:
        raise typer.Exit(ExitCode.FAILED)
