"""The markers of tests that need more than Python, and what this machine lacks for each.

A marked test is skipped with the reason where something is missing. `python -m tests.programs` prints the list.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import cache

from atoll.chaos import netns
from benchmarks import wan
from tests.launch.own_slurm import why_not

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """Return the path of the browser that the tests start, if there is one."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def _root() -> str | None:
    if os.geteuid() != 0:
        return "not root, and only root may mount disks and add network namespaces"
    if shutil.which("mount") is None:
        return "mount not found: install mount"
    return netns.unavailable() or wan.unavailable()


def _browser() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return None if find_browser() else f"no browser found ({', '.join(BROWSERS)}): install chromium"


def _ray() -> str | None:
    return None if importlib.util.find_spec("ray") else "ray is not installed"


FIXTURES = {
    "slurm_nodes": "needs_slurm",
    "browser": "needs_browser",
    "mounted": "needs_root",
    "small_disk": "needs_root",
}
"""Tests that use such a fixture have its marker."""

MARKERS = {"needs_root": _root, "needs_browser": _browser, "needs_slurm": why_not, "needs_ray": _ray}


@cache
def missing(marker: str) -> str | None:
    """Return what this machine lacks for tests with this marker, or None."""
    return MARKERS[marker]()


def main() -> None:
    absent = {marker: reason for marker in MARKERS if (reason := missing(marker)) is not None}
    for marker, reason in absent.items():
        print(f"tests marked {marker} are skipped: {reason}")
    if not absent:
        print("nothing is missing: every test runs")


if __name__ == "__main__":
    main()
