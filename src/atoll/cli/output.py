"""Output that all commands share: `--json`, exit codes, error lines, progress bars, and tasks in several processes."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, ParamSpec, TypeVar

import typer

from atoll.core.settings import Setting

if TYPE_CHECKING:
    from atoll.tape.files import RunTapes
    from atoll.tape.format import Entry

    EntryTracker = Callable[[Iterable[Entry]], Iterator[Entry]]

JsonOption = Annotated[bool, Setting("Print one JSON object to stdout, for scripts.", flag="json")]

_P = ParamSpec("_P")


class ExitCode(IntEnum):
    """Exit code of the command."""

    OK = 0
    FAILED = 1  # the command did its work and found a problem, such as a violation or a difference
    USAGE = 2  # the request cannot be carried out; stderr has one line with the cause and the fix
    INTERRUPTED = 130  # Ctrl-C
    BROKEN_PIPE = 141  # the reader of stdout has exited, as in `atoll story run | head`


class Result(NamedTuple):
    """Result of a command, shown by `interruptible` as one JSON object with `--json`, and as text without."""

    fields: Mapping[str, object] | Callable[[], Mapping[str, object]]
    text: Iterable[str] | Callable[[], None]  # lines, or a function that prints
    code: ExitCode = ExitCode.OK

    def show(self, as_json: bool) -> None:
        if as_json:
            print_json(self.fields() if callable(self.fields) else self.fields)
        elif callable(self.text):
            self.text()
        else:
            for line in self.text:
                print(line)


def print_json(fields: Mapping[str, object]) -> None:
    """Print one JSON object on one line. Raise `ValueError` for infinities and NaN, which are not JSON."""
    sys.stdout.write(json.dumps(dict(fields), ensure_ascii=False, allow_nan=False) + "\n")


def print_to_stderr(message: str) -> None:
    """Print a message as one line to stderr. Line breaks become spaces."""
    print(f"atoll: {' '.join(message.split())}", file=sys.stderr)


def redirect_stdout_to_null() -> None:
    """Redirect stdout to the null device. Otherwise the interpreter reports an error when it flushes at exit."""
    try:
        stdout = sys.stdout.fileno()
    except (OSError, ValueError):  # not a real file, as in a test
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stdout)
    os.close(null)


def ensure_standard_streams() -> None:
    """Open the null device for a closed stdout or stderr, as with `>&-`. The next file would get its descriptor."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the process exits
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def flush_stdout() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        error.filename = "standard output"
        redirect_stdout_to_null()
        raise


def interruptible(run: Callable[_P, Result | None]) -> Callable[_P, None]:
    """Wrap a command: show its result, and turn Ctrl-C and a closed pipe into exit codes.

    Typer would turn both into its own exit codes before `main` sees them. Errors pass through.
    """

    @functools.wraps(run)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            result = run(*args, **kwargs)
            if result is not None:
                result.show(bool(kwargs.get("as_json")))
            flush_stdout()
        except KeyboardInterrupt:
            print_to_stderr("interrupted")
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        except BrokenPipeError:
            redirect_stdout_to_null()
            raise typer.Exit(ExitCode.BROKEN_PIPE) from None
        if result is not None and result.code:
            raise typer.Exit(result.code)

    return wrapped


def format_size(count: float) -> str:
    """
    >>> format_size(1_250_000), format_size(12)
    ('1.2 MB', '12 B')
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


MIN_PROGRESS_BYTES = 8 * 1024 * 1024
"""Minimum size of tapes for a progress bar: reading them takes a few seconds."""

_ENTRIES_PER_UPDATE = 512


@contextmanager
def progress_bar(title: str, total: int, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr, and yield a function that sets how much of `total` is done.

    Nothing is drawn if stderr is not a terminal or `is_shown` is false.
    """
    if not is_shown or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def reading_progress(title: str, tapes: RunTapes) -> AbstractContextManager[EntryTracker]:
    """Yield a function that passes entries through, while a bar shows how much of the tapes has been read."""
    return _entry_progress(title, tapes, tapes.size_bytes() >= MIN_PROGRESS_BYTES, _ENTRIES_PER_UPDATE)


def retraining_progress(tapes: RunTapes) -> AbstractContextManager[EntryTracker]:
    """Like `reading_progress`, for entries that are trained again: short tapes take long, too."""
    return _entry_progress("training again", tapes, True, 16)


@contextmanager
def _entry_progress(title: str, tapes: RunTapes, is_shown: bool, every: int) -> Iterator[EntryTracker]:
    with progress_bar(title, tapes.size_bytes(), is_shown) as report:

        def track(entries: Iterable[Entry]) -> Iterator[Entry]:
            for number, entry in enumerate(entries):
                if number % every == 0:
                    report(tapes.bytes_read())
                yield entry

        yield track


R = TypeVar("R")
ReportProgress = Callable[[float], None]
Task = Callable[[ReportProgress], R]

_PROGRESS_STEPS = 1_000  # resolution of the bar
_PROGRESS_INTERVAL_S = 0.2  # interval between updates of the bar


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_tasks(
    title: str, tasks: Sequence[Task[R]], jobs: int, weights: Sequence[float] = (), is_shown: bool = True
) -> list[R]:
    """Run tasks in several processes and return their results in order.

    The first task that fails ends the others, and its exception is raised. Ctrl-C ends all tasks.

    Args:
        title: Title of the progress bar.
        tasks: Functions that take a function to report their progress, from 0 to 1.
        jobs: Maximum number of processes. With 1 the tasks run in this process.
        weights: Relative durations of the tasks, for the progress bar; empty: all equal.
        is_shown: Show the progress bar.
    """
    weights = weights or [1.0] * len(tasks)
    jobs = min(jobs, len(tasks))
    if jobs > 1:
        return _run_in_processes(title, tasks, jobs, weights, is_shown)
    shares = [0.0] * len(tasks)
    results: list[R] = []
    with progress_bar(title, _PROGRESS_STEPS, is_shown) as report:
        for number, task in enumerate(tasks):

            def report_share(share: float, number: int = number) -> None:
                shares[number] = share
                report(_weighted_progress(weights, shares))

            results.append(task(report_share))
            report_share(1.0)
    return results


def _weighted_progress(weights: Sequence[float], shares: Sequence[float]) -> int:
    return round(_PROGRESS_STEPS * sum(w * s for w, s in zip(weights, shares, strict=True)) / sum(weights))


def _run_in_processes(
    title: str, tasks: Sequence[Task[Any]], jobs: int, weights: Sequence[float], is_shown: bool
) -> list[Any]:
    from concurrent.futures import FIRST_EXCEPTION, wait
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import RawArray

    from atoll.sim.swarm import process_pool

    shares = RawArray("d", len(tasks))  # each process writes the elements of its own tasks
    try:
        with process_pool(jobs, _init_worker, tasks, shares) as pool:
            # Submit the tasks, and so fork the processes, before the thread of the bar starts: forks must not copy it.
            futures = [pool.submit(_run_task, number) for number in range(len(tasks))]
            with progress_bar(title, _PROGRESS_STEPS, is_shown) as report:
                waiting = set(futures)
                while waiting:
                    done, waiting = wait(waiting, timeout=_PROGRESS_INTERVAL_S, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    report(_weighted_progress(weights, shares))
            return [future.result() for future in futures]
    except BrokenProcessPool:
        raise OSError(
            "a process of the simulation was killed, perhaps because memory ran out; try fewer --jobs"
        ) from None


_tasks: Sequence[Task[Any]] = ()
_shares: MutableSequence[float] = []


def _init_worker(tasks: Sequence[Task[Any]], shares: MutableSequence[float]) -> None:
    """Store the tasks in a new process. They are inherited by fork, so they need not be picklable."""
    global _tasks, _shares
    _tasks, _shares = tasks, shares


def _run_task(number: int) -> Any:
    result = _tasks[number](partial(_shares.__setitem__, number))
    _shares[number] = 1.0
    return result
