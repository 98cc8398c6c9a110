"""A progress bar on stderr, for work that is long and watched by a person."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.tape.files import RunTapes
    from atoll.tape.format import Entry

    Watched = Callable[[Iterable[Entry]], Iterator[Entry]]

LONG_BYTES = 8 * 1024 * 1024
"""Tapes of this size take a few seconds to read."""

_ENTRIES_PER_LOOK = 512


@contextmanager
def progress(title: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that is told how much of `total` is done. Nothing is drawn where nobody watches."""
    if not shown or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def reading(title: str, tapes: RunTapes) -> AbstractContextManager[Watched]:
    """Yields a function through which entries are read while the bar shows how much of the tapes is behind us."""
    return _watching(title, tapes, tapes.size_bytes() >= LONG_BYTES, _ENTRIES_PER_LOOK)


def training_again(tapes: RunTapes) -> AbstractContextManager[Watched]:
    """The same, where an entry may be an inner step: it is long, however short the tapes are."""
    return _watching("training again", tapes, True, 16)


@contextmanager
def _watching(title: str, tapes: RunTapes, shown: bool, every: int) -> Iterator[Watched]:
    with progress(title, tapes.size_bytes(), shown) as tell:

        def watched(entries: Iterable[Entry]) -> Iterator[Entry]:
            for number, entry in enumerate(entries):
                if number % every == 0:
                    tell(tapes.bytes_read())
                yield entry

        yield watched
