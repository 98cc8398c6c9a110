"""Whether a unit has ended well, whichever engine kept it: islands and their syncer may be with different ones."""

from __future__ import annotations

import contextlib
from pathlib import Path

_ENDED = '"standing": "ended"'
LAST_WORDS = (("keeper.json", _ENDED), ("ray.json", _ENDED), ("slurm/state", "standing=ended\n"))
"""Where each engine writes how a unit is, in the directory of that unit."""


def has_ended(directory: Path) -> bool:
    for name, words in LAST_WORDS:
        with contextlib.suppress(OSError):
            if words in (directory / name).read_text(encoding="utf-8", errors="replace"):
                return True
    return False


__all__ = ["has_ended"]
