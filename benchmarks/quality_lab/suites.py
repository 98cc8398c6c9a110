"""Which settings each suite runs, most informative first. Suites share runs: a setting is executed once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks.quality_lab.setting import PARAMETERS, Setting, make

LARGER: dict[str, Any] = {"mixed": True}
"""From 0.36M parameters on matrix products run in bf16, in every method."""


def both(**given: Any) -> Setting:
    """Return decoupled with both moments averaged at every merge and taken over as they are."""
    return make(**{"moments": "both", "moments_codec": "bf16", "moments_adopt": "overwrite", **given})


def data_parallel(**given: Any) -> Setting:
    return make("data-parallel", **given)


TUNING: dict[str, Any] = {"text": "library", "seeds": "0,1"}
REPORTING: dict[str, Any] = {"text": "packages", "seeds": "0,1,2"}


def tune_100k() -> list[Setting]:
    return [
        data_parallel(lr=0.006, **TUNING),
        make(lr=0.004, **TUNING),
        both(lr=0.004, moments_adopt="carry", **TUNING),
        both(lr=0.006, moments_adopt="carry", **TUNING),
        data_parallel(lr=0.009, **TUNING),
    ]


def tune_100k_more() -> list[Setting]:
    return [data_parallel(lr=0.004, **TUNING), make(lr=0.006, **TUNING), both(lr=0.006, **TUNING)]


def report_100k() -> list[Setting]:
    return [
        data_parallel(lr=0.006, **REPORTING),
        make(lr=0.004, **REPORTING),
        both(lr=0.004, **REPORTING),
    ]


def headline() -> list[Setting]:
    """The runs of `report-100k` with five seeds."""
    return [*report_100k(), *(dataclasses.replace(setting, seeds="3,4") for setting in report_100k())]


def levers_adopt() -> list[Setting]:
    """Overwrite instead of carry, against `tune-100k`."""
    return [both(**TUNING)]


def levers_moments() -> list[Setting]:
    """Moments, each variant alone, against `both` of `tune-100k`."""
    int4: dict[str, Any] = {"moments_codec": "int4", "up": "int4", "down": "int4"}
    return [
        both(**int4, **TUNING),
        both(moments_every=3, **TUNING),
        make(h=12, up="int4", down="int4", **TUNING),
        both(speeds="1:1:0.5:0.5", **TUNING),
    ]


def levers_moments_more() -> list[Setting]:
    return [
        both(moments_every=2, **TUNING),
        both(moments="second", **TUNING),
        both(moments="first", **TUNING),
    ]


def report_360k() -> list[Setting]:
    larger: dict[str, Any] = {"size": "360k", "text": "packages", **LARGER}
    return [
        run(lr=lr, seeds=seed, **larger)
        for seed in ("0", "1", "2")
        for run, lr in ((data_parallel, 0.005), (both, 0.0035), (make, 0.0035))
    ]


def report_1m() -> list[Setting]:
    larger: dict[str, Any] = {"size": "1m", "text": "packages", "seeds": "0", "tokens": 4 * PARAMETERS["1m"], **LARGER}
    return [run(lr=0.003, **larger) for run in (data_parallel, both, make)]


def learners_100k() -> list[Setting]:
    """M = 8, 2 and 1 with the same global batch, one seed."""
    one: dict[str, Any] = {"text": "packages", "seeds": "0"}
    return [run(learners=m, **one) for m in (8, 2, 1) for run in (both, make)]


GAINS: tuple[dict[str, Any], ...] = ({}, {"gain": 1.0, "outer_cap": 1.5})
"""The fixed outer step, and one whose effective gain is held and whose size is capped."""


def outer_360k() -> list[Setting]:
    """Outer steps at 2 tokens per parameter, with long rounds and with eight learners."""
    short: dict[str, Any] = {
        "size": "360k", "text": "library", "seeds": "0", "tokens": 2 * PARAMETERS["360k"], "lr": 0.0035, **LARGER
    }  # fmt: skip
    places: tuple[dict[str, Any], ...] = ({"h": 24}, {"h": 96}, {"learners": 8})
    return [make(**short, **place, **gain) for place in places for gain in GAINS]


def outer_5m() -> list[Setting]:
    """The size at which the fixed outer step is known to diverge, a fifth of a token per parameter."""
    short: dict[str, Any] = {"size": "5m", "text": "library", "seeds": "0", "tokens": 1_000_000, "lr": 0.002, **LARGER}
    return [*(make(**short, **gain) for gain in GAINS), data_parallel(**short)]


SUITES: dict[str, Callable[[], list[Setting]]] = {
    "tune-100k": tune_100k,
    "tune-100k-more": tune_100k_more,
    "report-100k": report_100k,
    "headline": headline,
    "report-360k": report_360k,
    "report-1m": report_1m,
    "levers-adopt": levers_adopt,
    "levers-moments": levers_moments,
    "levers-moments-more": levers_moments_more,
    "outer-5m": outer_5m,
    "learners-100k": learners_100k,
    "outer-360k": outer_360k,
}
