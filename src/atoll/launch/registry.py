"""Engines by name. One is imported when it is asked for: whoever runs islands under Slurm needs no Ray."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import cast

from atoll.launch.engine import Engine

ENGINES = {
    "local": ("atoll.launch.local", "LocalEngine"),
    "ray": ("atoll.launch.ray_cluster", "RayEngine"),
    "slurm": ("atoll.launch.slurm", "SlurmEngine"),
}

EXAMPLES = {"kubernetes": "examples/kubernetes.yaml", "skypilot": "examples/skypilot.yaml"}
"""Systems for which Atoll has an example file instead of an engine."""

BY_PLACE = frozenset({"ray", "slurm"})
"""They choose the machine: it may be another one than this."""

_EXTRAS = {"ray": "ray"}


def check_name(name: str) -> None:
    """ValueError with the nearest name, or with the example file of a system that has no engine."""
    if name in EXAMPLES:
        raise ValueError(
            f"Atoll has no engine for {name}: adapt {EXAMPLES[name]}, and start it with the tools of {name}"
            " (docs/kubernetes.md)"
        )
    if name not in ENGINES:
        near = difflib.get_close_matches(name, ENGINES, 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no engine {name!r}: there are {', '.join(ENGINES)}{meant}")


def engine(name: str) -> Engine:
    """ValueError where there is no such engine, or what it needs is not installed."""
    check_name(name)
    module, of_class = ENGINES[name]
    try:
        made = getattr(import_module(module), of_class)()
    except ModuleNotFoundError as missing:
        needed = (missing.name or "").partition(".")[0]
        if needed not in _EXTRAS:
            raise
        extra = f"pip install 'atoll[{_EXTRAS[needed]}]'"
        raise ValueError(f"engine {name} needs {needed}, which is not installed: {extra}") from None
    return cast(Engine, made)


__all__ = ["BY_PLACE", "ENGINES", "EXAMPLES", "check_name", "engine"]
