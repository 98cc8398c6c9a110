"""From the type of an event to the method that handles it: one look-up, and a subclass may override the method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Table = tuple[tuple[Any, str], ...]


_made: dict[tuple[type, Table], dict[Any, Callable[..., None]]] = {}


def handlers(cls: type, table: Table) -> dict[Any, Callable[..., None]]:
    """The methods of `cls` that `table` names. Made once per class: a simulated world starts many cores."""
    key = (cls, table)
    if key not in _made:
        _made[key] = {kind: getattr(cls, name) for kind, name in table}
    return _made[key]
