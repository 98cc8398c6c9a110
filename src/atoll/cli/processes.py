"""Work spread over processes, with one progress bar for all of it.

A task is a function that is given `tell`, to say which share of it is done, and returns a value that can be pickled.
Results come back in the order of the tasks, whoever was faster, so that they do not depend on the number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableSequence, Sequence
from functools import partial
from typing import Any, TypeVar

from atoll.cli.progress import progress

R = TypeVar("R")
Tell = Callable[[float], None]
Task = Callable[[Tell], R]

_UNITS = 1_000  # of the bar
_LOOK_S = 0.2  # how often the bar is brought up to date


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(
    title: str, tasks: Sequence[Task[R]], jobs: int, weights: Sequence[float] = (), shown: bool = True
) -> list[R]:
    """The results of all tasks. The first one that fails ends the rest; so does Ctrl-C.

    `weights` say how long each task takes beside the others, for the bar; all alike, if they are left out.
    """
    weights = weights or [1.0] * len(tasks)
    jobs = min(jobs, len(tasks))
    if jobs > 1:
        return _in_processes(title, tasks, jobs, weights, shown)
    shares = [0.0] * len(tasks)
    results: list[R] = []
    with progress(title, _UNITS, shown) as tell:
        for number, task in enumerate(tasks):

            def told(share: float, number: int = number) -> None:
                shares[number] = share
                tell(_done(weights, shares))

            results.append(task(told))
            told(1.0)
    return results


def _done(weights: Sequence[float], shares: Sequence[float]) -> int:
    return round(_UNITS * sum(w * s for w, s in zip(weights, shares, strict=True)) / sum(weights))


def _in_processes(
    title: str, tasks: Sequence[Task[Any]], jobs: int, weights: Sequence[float], shown: bool
) -> list[Any]:
    from concurrent.futures import FIRST_EXCEPTION, wait
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import RawArray

    from atoll.sim.swarm import forks

    shares = RawArray("d", len(tasks))  # each process writes the places of its own tasks
    try:
        with forks(jobs, _take, tasks, shares) as pool:
            # Submitted, and so forked, before the bar starts: its thread must not be copied into the processes.
            futures = [pool.submit(_do, number) for number in range(len(tasks))]
            with progress(title, _UNITS, shown) as tell:
                waiting = set(futures)
                while waiting:
                    done, waiting = wait(waiting, timeout=_LOOK_S, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    tell(_done(weights, shares))
            return [future.result() for future in futures]
    except BrokenProcessPool:
        raise OSError("a process of the simulation was killed, perhaps for lack of memory") from None


_tasks: Sequence[Task[Any]] = ()
_shares: MutableSequence[float] = []


def _take(tasks: Sequence[Task[Any]], shares: MutableSequence[float]) -> None:
    """In a new process: what it was forked with. A task is then named by its number, and need not be picklable."""
    global _tasks, _shares
    _tasks, _shares = tasks, shares


def _do(number: int) -> Any:
    result = _tasks[number](partial(_shares.__setitem__, number))
    _shares[number] = 1.0
    return result
