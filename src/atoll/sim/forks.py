"""Processes for a sweep: forked, so that they share what is imported and given, and gone when the sweep is over."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from signal import SIG_BLOCK, SIG_IGN, SIG_SETMASK, SIG_UNBLOCK, SIGINT, pthread_sigmask, signal
from typing import Any


@contextmanager
def forks(processes: int, first: Callable[..., None] | None = None, *given: Any) -> Iterator[ProcessPoolExecutor]:
    """An executor whose processes have called `first(*given)`, which is inherited and need not be picklable.

    Whoever leaves early, by Ctrl-C or an error, does not wait for what is still being computed.
    """
    context = multiprocessing.get_context("fork")
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(first, given))
    try:
        with warnings.catch_warnings():
            # They compute and touch no lock that a thread of ours may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            # The first task forks. An interrupt that came in the middle of a fork would be lost in its hooks: it waits.
            mask = pthread_sigmask(SIG_BLOCK, {SIGINT})
            try:
                pool.submit(_nothing)
            finally:
                pthread_sigmask(SIG_SETMASK, mask)
            yield pool
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _nothing() -> None:
    """The first task."""


def _begin(first: Callable[..., None] | None, given: tuple[Any, ...]) -> None:
    signal(SIGINT, SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent answers it and ends us
    pthread_sigmask(SIG_UNBLOCK, {SIGINT})  # as it was before the fork
    if first is not None:
        first(*given)
