"""Work spread over processes, with one progress bar for all of it.

A task is a function that is given `tell`, to say which share of it is done, and returns a value that can be pickled.
Results come back in the order of the tasks, whoever was faster, so that they do not depend on the number of processes.
"""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from atoll.commands.progress import progress

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

R = TypeVar("R")
Tell = Callable[[float], None]
Task = Callable[[Tell], R]

_UNITS = 1_000  # of the bar


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(
    title: str, tasks: Sequence[Task[R]], jobs: int, weights: Sequence[float] = (), shown: bool = True
) -> list[R]:
    """The results of all tasks. The first one that fails ends the rest; so does Ctrl-C.

    `weights` say how long each task takes beside the others, for the bar; all alike, if they are left out.
    """
    bar = _Bar(weights or [1.0] * len(tasks))
    jobs = min(jobs, len(tasks))
    if jobs > 1:
        return _Crew(tasks, jobs, bar).run(title, shown)
    results: list[R] = []
    with progress(title, _UNITS, shown) as tell:
        for number, task in enumerate(tasks):
            results.append(task(partial(bar.share, tell, number)))
            bar.share(tell, number, 1.0)
    return results


class _Bar:
    """How much of all tasks is done."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights
        self._shares = [0.0] * len(weights)

    def share(self, tell: Callable[[int], None], number: int, share: float) -> None:
        self._shares[number] = share
        done = sum(weight * part for weight, part in zip(self._weights, self._shares, strict=True))
        tell(round(_UNITS * done / sum(self._weights)))


class _Crew:
    """Processes that are forked with all tasks in memory and are told by number which one to do next."""

    def __init__(self, tasks: Sequence[Task[Any]], jobs: int, bar: _Bar) -> None:
        import multiprocessing

        context = multiprocessing.get_context("fork")
        self._tasks = tasks
        self._ends: list[Connection] = []
        self._processes = []
        self._results: dict[int, Any] = {}
        self._bar = bar
        # All of them start before the bar does: its thread must not be copied into them.
        for _ in range(jobs):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(tasks, theirs, [*self._ends, ours]), daemon=True)
            with warnings.catch_warnings():
                # They compute and write to a pipe, and touch no lock that some thread of ours may hold.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, title: str, shown: bool) -> list[Any]:
        from multiprocessing.connection import wait

        waiting = iter(range(len(self._tasks)))
        try:
            with progress(title, _UNITS, shown) as tell:
                for end in self._ends:
                    self._send_next(end, waiting)
                while len(self._results) < len(self._tasks):
                    ready = wait(self._ends)
                    for end in self._ends:
                        if end in ready:
                            self._hear(end, waiting, tell)
        finally:
            for process in self._processes:
                process.terminate()
            for process in self._processes:
                process.join()
        return [self._results[number] for number in range(len(self._tasks))]

    def _send_next(self, end: Connection, waiting: Iterable[int]) -> None:
        number = next(iter(waiting), None)
        if number is not None:
            end.send(number)

    def _hear(self, end: Connection, waiting: Iterable[int], tell: Callable[[int], None]) -> None:
        try:
            kind, number, value = end.recv()
        except EOFError:
            raise OSError("a process of the simulation was killed, perhaps for lack of memory") from None
        if kind == "failed":
            raise value
        if kind == "share":
            self._bar.share(tell, number, value)
            return
        self._results[number] = value
        self._bar.share(tell, number, 1.0)
        self._send_next(end, waiting)


def _serve(tasks: Sequence[Task[Any]], end: Connection, not_ours: list[Connection]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in not_ours:
        other.close()  # or we would keep a dead parent's pipe open
    with suppress(EOFError, BrokenPipeError):
        while True:
            number = end.recv()
            try:
                end.send(("done", number, tasks[number](_teller(end, number))))
            except Exception as wrong:
                wrong.add_note(traceback.format_exc())
                end.send(("failed", number, wrong))


def _teller(end: Connection, number: int) -> Tell:
    return lambda share: end.send(("share", number, share))
