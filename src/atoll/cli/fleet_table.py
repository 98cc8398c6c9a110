"""How the units of a run are shown: a table that changes where there is a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from atoll.launch.fleet import Look

File = Annotated[Path, typer.Argument(metavar="FILE", help="TOML with the syncer and the islands: docs/engines.md.")]

COLOURS = {"running": "green", "failed": "red", "gone": "red", "unknown": "yellow", "waiting": "yellow"}


def table_of(looks: Sequence[Look]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("unit", "engine", "standing", "restarts", ""):
        table.add_column(
            title, justify="right" if title == "restarts" else "left", no_wrap=title in ("unit", "standing")
        )
    for look in looks:
        restarts = str(look.status.restarts) if look.status is not None else ""
        standing = Text(look.standing, style=COLOURS.get(look.standing, ""))
        table.add_row(Text(look.name), Text(look.engine), standing, restarts, Text(look.why))
    return table


def line_of(look: Look) -> str:
    restarts = look.status.restarts if look.status is not None else 0
    again = f", restarts: {restarts}" if restarts else ""
    why = f" ({look.why})" if look.why else ""
    return f"{look.name}: {look.standing}{again}{why}"


def print_looks(looks: Sequence[Look]) -> None:
    if not sys.stdout.isatty():
        for look in looks:
            print(line_of(look))
        return
    from rich.console import Console

    Console().print(table_of(looks))


@contextmanager
def shown(quiet: bool) -> Iterator[Callable[[list[Look]], None]]:
    """Yields a function that is given how everybody is, again and again."""
    if quiet:
        yield lambda looks: None
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(), auto_refresh=False) as live:
            yield lambda looks: live.update(table_of(looks), refresh=True)
    else:
        before: dict[str, tuple[str, int]] = {}

        def changes(looks: list[Look]) -> None:
            for look in looks:
                now = look.standing, look.status.restarts if look.status is not None else 0
                if before.get(look.name) != now:
                    before[look.name] = now
                    print(f"{time.strftime('%H:%M:%S')} {line_of(look)}", flush=True)

        yield changes
