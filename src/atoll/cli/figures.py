"""Tables, numbers and plots of the commands that simulate and plan."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
MIN_WIDTH = 80
"""Width of tables if stdout is a pipe, which has no width."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error. Rich would exit with code 1, which means that the command found a problem."""
        raise BrokenPipeError


def make_console() -> Console:
    console = _Console(highlight=False, soft_wrap=False)
    return console if console.width >= MIN_WIDTH or console.is_terminal else _Console(highlight=False, width=MIN_WIDTH)


def format_percent(share: float) -> str:
    """
    >>> format_percent(0.98765), format_percent(0.99995), format_percent(0.0)
    ('98.8', '99.995', '0.0')
    """
    near = min(abs(1.0 - share), abs(share))
    decimals = 1 if near >= 0.005 or near == 0.0 else 2 if near >= 0.0005 else 3
    return f"{100.0 * share:.{decimals}f}"


def format_amount(count: float) -> str:
    """
    >>> format_amount(2_930_000_000_000), format_amount(1_234), format_amount(12.4)
    ('2.93 trillion', '1,234', '12')
    """
    for size, name in ((1e15, "quadrillion"), (1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            decimals = 2 if count < 10 * size else 1 if count < 100 * size else 0
            return f"{count / size:.{decimals}f} {name}"
    return f"{count:,.0f}"


def check_plot(path: Path) -> None:
    """Raise `ValueError` if this plot cannot be written. Called before the simulation."""
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise ValueError(
            f"cannot plot to {path}; end its name with {', '.join(PLOT_SUFFIXES[:-1])} or {PLOT_SUFFIXES[-1]}"
        )
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib of the extra 'plot': pip install 'atoll[plot]'")
    folder = path.parent
    if not folder.is_dir():
        raise ValueError(f"cannot write {path}: there is no directory {folder}; create it first")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"no permission to write {path}; choose another file")


@contextmanager
def draw_figure(path: Path, **layout: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its panels, and write them to the file. Equal figures give equal files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    is_svg = path.suffix.lower() == ".svg"
    with pyplot.rc_context(settings | ({"svg.hashsalt": "atoll"} if is_svg else {})):
        figure, panels = pyplot.subplots(**layout)
        yield figure, panels
        figure.savefig(path, dpi=160, metadata={"Date": None} if is_svg else None)
        pyplot.close(figure)
