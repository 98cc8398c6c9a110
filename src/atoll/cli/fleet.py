"""`atoll up`, `down`, `status` and `logs`: the syncer and the islands of a run that one file describes."""

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
    Path, typer.Argument(metavar="FILE", help="TOML with the syncer and the islands: docs/launchers.md.")
]

STATUS_COLOURS = {"running": "green", "failed": "red", "lost": "red", "unknown": "yellow", "waiting": "yellow"}


def status_table(statuses: Sequence[UnitReport]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("unit", "launcher", "state", "restarts", ""):
        table.add_column(title, justify="right" if title == "restarts" else "left", no_wrap=title in ("unit", "state"))
    for name, launcher, state, restarts, cause in statuses:
        shown = Text(state, style=STATUS_COLOURS.get(state, ""))
        counted = str(restarts) if state.is_active or state.is_finished else ""
        table.add_row(Text(name), Text(launcher), shown, counted, Text(cause))
    return table


def format_status(status: UnitReport) -> str:
    again = f", restarts: {status.restarts}" if status.restarts else ""
    cause = f" ({status.cause})" if status.cause else ""
    return f"{status.name}: {status.state}{again}{cause}"


def print_statuses(statuses: Sequence[UnitReport]) -> None:
    if not sys.stdout.isatty():
        for status in statuses:
            print(format_status(status))
        return
    from rich.console import Console

    Console().print(status_table(statuses))


@contextmanager
def live_statuses(quiet: bool) -> Iterator[Callable[[list[UnitReport]], None]]:
    """Yield a function that shows the status of all units, and is called again and again."""
    if quiet:
        yield lambda statuses: None
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(), auto_refresh=False) as live:
            yield lambda statuses: live.update(status_table(statuses), refresh=True)
    else:
        before: dict[str, tuple[str, int]] = {}

        def changes(statuses: list[UnitReport]) -> None:
            for status in statuses:
                now = status.state, status.restarts
                if before.get(status.name) != now:
                    before[status.name] = now
                    print(f"{time.strftime('%H:%M:%S')} {format_status(status)}", flush=True)

        yield changes


def run_up(
    file: FileArgument,
    units: Annotated[
        list[str] | None, typer.Argument(metavar="UNIT", help="Only these: syncer, an island. [default: all]")
    ] = None,
    detach: Annotated[bool, Setting("Return as soon as everything is started; it goes on.", short="-d")] = False,
    dry_run: Annotated[bool, Setting("Print what would be submitted, without secrets, and start nothing.")] = False,
    as_json: JsonOption = False,
) -> Result:
    """Bring up a run that a file describes, and follow it until its islands have ended.

    Everything is checked before anything is started. What runs already is left alone; what has failed, was stopped or
    has left a run that goes on is started again: the same command once more does no harm, and goes on with a run that
    was taken down. Ctrl-C ends the following only, the run goes on; come back with atoll up, status or logs, and stop
    it with atoll down.
    """
    from atoll.launch.fleet import Fleet
    from atoll.launch.islands_file import IslandsFile
    from atoll.launch.units import build_units, find_address_warning, load_token

    read = IslandsFile.load(file)
    fleet = Fleet(read)
    names = fleet.names(units or ())
    wanted = [unit for unit in build_units(read, load_token(read, create=False)) if unit.name in names]
    fleet.check(wanted)
    if warning := find_address_warning(read):
        print_to_stderr(warning)
    if dry_run:
        rendered = [
            {"name": unit.name, "launcher": unit.launcher, "submitted": fleet.launcher(unit.launcher).render(unit)}
            for unit in wanted
        ]
        fields = {"run": read.run, "directory": str(read.directory), "units": rendered}
        return Result(fields, ["\n\n".join(each["submitted"].rstrip("\n") for each in rendered)])
    with fleet.lock("atoll up"):  # two who make a token at once would not have the same
        token = load_token(read, create=True)
    wanted = [unit for unit in build_units(read, token) if unit.name in names]
    come_back = f"atoll status {file}, atoll logs {file} -f, atoll down {file}"
    try:
        started = fleet.up(wanted, UnitMessages(as_json))
        if detach:
            statuses = fleet.statuses()
        else:
            with live_statuses(quiet=as_json) as show:
                statuses = fleet.follow(show)
    except KeyboardInterrupt:
        print_to_stderr(f"detached; the run goes on: {come_back}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    lines = [f"It goes on by itself: {come_back}"] if detach else _end_lines(fleet, statuses)
    wrong = [status for status in statuses if status.is_problem]
    if wrong:
        names = [status.name for status in wrong]
        print_to_stderr(f"not well: {', '.join(names)}; what they printed: atoll logs {file} {names[0]}")

    def text() -> None:
        for line in lines:
            print(line)
        if wrong:
            print_statuses(wrong)

    return Result(
        {
            "run": read.run,
            "directory": str(read.directory),
            "started": started,
            "units": [status._asdict() for status in statuses],
        },
        text,
        ExitCode.FAILED if wrong else ExitCode.OK,
    )


def _end_lines(fleet: Fleet, statuses: list[UnitReport]) -> list[str]:
    from atoll.launch.launcher import is_island

    left = [each.name for each in statuses if not each.state.is_finished and not is_island(each.name)]
    if left:
        return [f"All islands have ended, and {', '.join(left)} goes on: atoll down {fleet.file.path}"]
    return [] if any(status.is_problem for status in statuses) else [f"The run in {fleet.file.directory} has ended."]


class UnitMessages:
    """Keeps what each unit was last said to do, and prints it unless the result is JSON."""

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
        typer.Argument(metavar="UNIT", help="Only these: an island, syncer. [default: all, the syncer last]"),
    ] = None,
    forget: Annotated[bool, Setting("Stop nothing; the named units are on a machine that is gone for good.")] = False,
    as_json: JsonOption = False,
) -> Result:
    """Stop a run that can go on later: atoll up on the same file goes on from its store.

    Islands are told by SIGTERM and have their notice to send what is not merged yet; what is left then is killed. The
    syncer is stopped after them. What is stopped already stays so. A unit whose machine or cluster does not answer any
    more is forgotten by its name with --forget, and can then be started elsewhere.
    """
    from atoll.launch.fleet import Fleet
    from atoll.launch.islands_file import IslandsFile

    read = IslandsFile.load(file)
    fleet = Fleet(read)
    names = fleet.names(units or ())
    if forget and not units:
        raise ValueError(f"which units are gone for good? Name them: atoll down {file} UNIT --forget")
    said = UnitMessages(as_json)
    is_down, lines = True, []
    if not fleet.read_units():
        said.messages |= dict.fromkeys(names, "was not started")
        lines = [f"Nothing of {file} was started."]
    else:
        is_down = fleet.forget(names, said) if forget else fleet.down(names, said)
    if not is_down:
        left = "not everything was forgotten" if forget else "not everything could be stopped"
        print_to_stderr(f"{left}; ask again with atoll down")
    fields = {"run": read.run, "directory": str(read.directory), "down": is_down, "units": said.messages}
    return Result(fields, lines, ExitCode.OK if is_down else ExitCode.FAILED)


def run_status(file: FileArgument, as_json: JsonOption = False) -> Result:
    """Show how the units of a run are: standing, restarts, and why.

    The exit code is 0 where nothing has failed. A launcher that does not answer is no sign that its units are lost: they
    are shown as unknown, with what it says. What the run itself does is shown by atoll watch and atoll dash.
    """
    from atoll.launch.fleet import Fleet
    from atoll.launch.islands_file import IslandsFile

    read = IslandsFile.load(file)
    statuses = Fleet(read).statuses()
    wrong = any(status.is_problem for status in statuses)

    def fields() -> dict[str, object]:
        units = [status._asdict() for status in statuses]
        return {"run": read.run, "directory": str(read.directory), "well": not wrong, "units": units}

    return Result(fields, partial(print_statuses, statuses), ExitCode.FAILED if wrong else ExitCode.OK)


LOG_POLL_INTERVAL_S = 0.5


def run_logs(
    file: FileArgument,
    units: Annotated[list[str] | None, typer.Argument(metavar="UNIT", help="Only these. [default: all]")] = None,
    follow: Annotated[
        bool, Setting("Go on with what is printed from now on, until all have ended.", short="-f")
    ] = False,
    tail: Annotated[int | None, Setting("Begin with the last N lines of each.", "N", min=0)] = None,
) -> None:
    """Show what the units of a run have printed, each line with the name of its unit before it.

    Starts of one unit come one after the other; a line of [atoll] between them says why there was another. Ctrl-C ends
    the reading only.
    """
    from atoll.launch.fleet import POLL_INTERVAL_S, REMOTE_POLL_INTERVAL_S, Fleet, FleetLogs
    from atoll.launch.islands_file import IslandsFile
    from atoll.launch.launcher import UnitState

    fleet = Fleet(IslandsFile.load(file))
    names = fleet.names(units or ())
    if not fleet.read_units():
        raise ValueError(f"nothing of {file} was started yet: atoll up {file}")
    logs = FleetLogs(fleet, names, tail)
    width = max(map(len, names))

    def show(lines: Iterator[tuple[str, str]]) -> None:
        for unit, text in lines:
            sys.stdout.write(f"{unit:{width}} | {text}\n")

    ended, next_look = not follow, 0.0
    while True:
        if not ended and time.monotonic() >= next_look:
            statuses = fleet.statuses(names)
            ended = all(each.state.is_finished or each.state == UnitState.NOT_STARTED for each in statuses)
            is_near = all(each.launcher == "local" for each in statuses)
            next_look = time.monotonic() + (POLL_INTERVAL_S if is_near else REMOTE_POLL_INTERVAL_S)
        show(logs.read_new())
        if ended:
            break
        sys.stdout.flush()
        time.sleep(LOG_POLL_INTERVAL_S)
    show(logs.read_unfinished())
    for unit, problem in logs.problems.items():
        print_to_stderr(f"what {unit} has printed cannot be read: {problem}")
    if logs.problems:
        raise typer.Exit(ExitCode.FAILED)
