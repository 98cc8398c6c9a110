"""Which settings each suite runs, most informative first. Suites share runs: a setting is executed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.quality_lab.setting import PARAMETERS, Setting, make

LARGER: dict[str, Any] = {"mixed": True}
"""From 0.36M parameters on matrix products run in bf16, in every method."""


def both(**given: Any) -> Setting:
    """Return decoupled with both moments averaged at every merge."""
    return make(**{"moments": "both", "moments_codec": "bf16", **given})


def data_parallel(**given: Any) -> Setting:
    return make("data-parallel", **given)


def tune_100k() -> list[Setting]:
    few: dict[str, Any] = {"text": "library", "seeds": "0,1"}
    return [
        data_parallel(lr=0.006, **few),
        make(lr=0.004, **few),
        both(lr=0.004, **few),
        both(lr=0.006, **few),
        data_parallel(lr=0.009, **few),
        make(lr=0.006, **few),
        both(lr=0.009, **few),
        data_parallel(lr=0.004, **few),
    ]


SUITES: dict[str, Callable[[], list[Setting]]] = {"tune-100k": tune_100k}

__all__ = ["PARAMETERS", "SUITES"]
