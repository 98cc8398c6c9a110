"""Markers of tests that need more than Python, and what is missing for them on this machine.

A marked test is skipped with the reason if something is missing. `python -m tests.programs` prints the list.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import cache

from atoll.chaos import netns
from benchmarks import wan
from tests.launch.local_slurm import why_not

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """Return the path of the browser for the tests, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def _missing_for_root() -> str | None:
    if os.geteuid() != 0:
        return "not root, and only root may mount disks and add network namespaces"
    if shutil.which("mount") is None:
        return "mount not found: install mount"
    return netns.unavailable_reason() or wan.unavailable_reason()


def _missing_for_browser() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return None if find_browser() else f"no browser found ({', '.join(BROWSERS)}): install chromium"


def _missing_for_ray() -> str | None:
    return None if importlib.util.find_spec("ray") else "ray is not installed"


FIXTURE_MARKERS = {
    "slurm_nodes": "needs_slurm",
    "browser": "needs_browser",
    "mounted": "needs_root",
    "small_disk": "needs_root",
}
"""Marker of the tests that use each fixture."""

MARKER_CHECKS = {
    "needs_root": _missing_for_root,
    "needs_browser": _missing_for_browser,
    "needs_slurm": why_not,
    "needs_ray": _missing_for_ray,
}


@cache
def find_missing(marker: str) -> str | None:
    """Return what is missing for tests with this marker, or None."""
    return MARKER_CHECKS[marker]()


def main() -> None:
    absent = {marker: reason for marker in MARKER_CHECKS if (reason := find_missing(marker)) is not None}
    for marker, reason in absent.items():
        print(f"tests marked {marker} are skipped: {reason}")
    if not absent:
        print("nothing is missing: every test runs")


if __name__ == "__main__":
    main()
