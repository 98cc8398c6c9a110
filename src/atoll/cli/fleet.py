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

from atoll.cli.output import ExitCode, JsonOption, Result, complain
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from rich.table import Table

    from atoll.launch.fleet import Fleet, UnitStatus

File = Annotated[Path, typer.Argument(metavar="FILE", help="TOML with the syncer and the islands: docs/engines.md.")]

COLOURS = {"running": "green", "failed": "red", "gone": "red", "unknown": "yellow", "waiting": "yellow"}


def table_of(statuses: Sequence[UnitStatus]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("unit", "engine", "standing", "restarts", ""):
        table.add_column(
            title, justify="right" if title == "restarts" else "left", no_wrap=title in ("unit", "standing")
        )
    for name, engine, standing, restarts, why in statuses:
        shown = Text(standing, style=COLOURS.get(standing, ""))
        counted = str(restarts) if standing.is_kept or standing.is_over else ""
        table.add_row(Text(name), Text(engine), shown, counted, Text(why))
    return table


def line_of(status: UnitStatus) -> str:
    again = f", restarts: {status.restarts}" if status.restarts else ""
    why = f" ({status.why})" if status.why else ""
    return f"{status.name}: {status.standing}{again}{why}"


def print_statuses(statuses: Sequence[UnitStatus]) -> None:
    if not sys.stdout.isatty():
        for status in statuses:
            print(line_of(status))
        return
    from rich.console import Console

    Console().print(table_of(statuses))


@contextmanager
def shown(quiet: bool) -> Iterator[Callable[[list[UnitStatus]], None]]:
    """Yield a function that shows the status of all units, and is called again and again."""
    if quiet:
        yield lambda statuses: None
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(), auto_refresh=False) as live:
            yield lambda statuses: live.update(table_of(statuses), refresh=True)
    else:
        before: dict[str, tuple[str, int]] = {}

        def changes(statuses: list[UnitStatus]) -> None:
            for status in statuses:
                now = status.standing, status.restarts
                if before.get(status.name) != now:
                    before[status.name] = now
                    print(f"{time.strftime('%H:%M:%S')} {line_of(status)}", flush=True)

        yield changes


def run_up(
    file: File,
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
    from atoll.launch.units import stays_here, token_of, units_of

    read = IslandsFile.load(file)
    fleet = Fleet(read)
    names = fleet.names(units or ())
    wanted = [unit for unit in units_of(read, token_of(read, make=False)) if unit.name in names]
    fleet.check(wanted)
    if warning := stays_here(read):
        complain(warning)
    if dry_run:
        rendered = [
            {"name": unit.name, "engine": unit.engine, "submitted": fleet.engine(unit.engine).render(unit)}
            for unit in wanted
        ]
        fields = {"run": read.run, "directory": str(read.directory), "units": rendered}
        return Result(fields, ["\n\n".join(each["submitted"].rstrip("\n") for each in rendered)])
    with fleet.alone("atoll up"):  # two who make a token at once would not have the same
        token = token_of(read, make=True)
    wanted = [unit for unit in units_of(read, token) if unit.name in names]
    come_back = f"atoll status {file}, atoll logs {file} -f, atoll down {file}"
    try:
        started = fleet.up(wanted, Said(as_json))
        if detach:
            statuses = fleet.statuses()
        else:
            with shown(quiet=as_json) as show:
                statuses = fleet.follow(show)
    except KeyboardInterrupt:
        complain(f"detached; the run goes on: {come_back}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    lines = [f"It goes on by itself: {come_back}"] if detach else _end_lines(fleet, statuses)
    wrong = [status for status in statuses if status.is_wrong]
    if wrong:
        names = [status.name for status in wrong]
        complain(f"not well: {', '.join(names)}; what they printed: atoll logs {file} {names[0]}")

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


def _end_lines(fleet: Fleet, statuses: list[UnitStatus]) -> list[str]:
    from atoll.launch.engine import is_island

    left = [each.name for each in statuses if not each.standing.is_over and not is_island(each.name)]
    if left:
        return [f"All islands have ended, and {', '.join(left)} goes on: atoll down {fleet.file.path}"]
    return [] if any(status.is_wrong for status in statuses) else [f"The run in {fleet.file.directory} has ended."]


class Said:
    """Keeps what each unit was last said to do, and prints it unless the result is JSON."""

    def __init__(self, as_json: bool) -> None:
        self.words: dict[str, str] = {}
        self._as_json = as_json

    def __call__(self, unit: str, words: str) -> None:
        self.words[unit] = words
        if not self._as_json:
            print(f"{unit}: {words}", flush=True)


def run_down(
    file: File,
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
    said = Said(as_json)
    is_down, lines = True, []
    if not fleet.known():
        said.words |= dict.fromkeys(names, "was not started")
        lines = [f"Nothing of {file} was started."]
    else:
        is_down = fleet.forget(names, said) if forget else fleet.down(names, said)
    if not is_down:
        left = "not everything was forgotten" if forget else "not everything could be stopped"
        complain(f"{left}; ask again with atoll down")
    fields = {"run": read.run, "directory": str(read.directory), "down": is_down, "units": said.words}
    return Result(fields, lines, ExitCode.OK if is_down else ExitCode.FAILED)


def run_status(file: File, as_json: JsonOption = False) -> Result:
    """Show how the units of a run are: standing, restarts, and why.

    The exit code is 0 where nothing has failed. An engine that does not answer is no sign that its units are lost: they
    are shown as unknown, with what it says. What the run itself does is shown by atoll watch and atoll dash.
    """
    from atoll.launch.fleet import Fleet
    from atoll.launch.islands_file import IslandsFile

    read = IslandsFile.load(file)
    statuses = Fleet(read).statuses()
    wrong = any(status.is_wrong for status in statuses)

    def fields() -> dict[str, object]:
        units = [status._asdict() for status in statuses]
        return {"run": read.run, "directory": str(read.directory), "well": not wrong, "units": units}

    return Result(fields, partial(print_statuses, statuses), ExitCode.FAILED if wrong else ExitCode.OK)


READ_S = 0.5


def run_logs(
    file: File,
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
    from atoll.launch.engine import UnitStanding
    from atoll.launch.fleet import POLL_INTERVAL_S, REMOTE_POLL_INTERVAL_S, Fleet, FleetLogs
    from atoll.launch.islands_file import IslandsFile

    fleet = Fleet(IslandsFile.load(file))
    names = fleet.names(units or ())
    if not fleet.known():
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
            ended = all(each.standing.is_over or each.standing == UnitStanding.NOT_STARTED for each in statuses)
            is_near = all(each.engine == "local" for each in statuses)
            next_look = time.monotonic() + (POLL_INTERVAL_S if is_near else REMOTE_POLL_INTERVAL_S)
        show(logs.new())
        if ended:
            break
        sys.stdout.flush()
        time.sleep(READ_S)
    show(logs.rest())
    for unit, problem in logs.problems.items():
        complain(f"what {unit} has printed cannot be read: {problem}")
    if logs.problems:
        raise typer.Exit(ExitCode.FAILED)
