"""Atoll: Decoupled DiLoCo, fault-tolerant training of one PyTorch model on islands that never wait for each other.

`atoll.Learner` and `atoll.LearnerStats` are loaded on first use, so that tools without tensors start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.errors import AtollError as AtollError
    from atoll.errors import BackgroundFailedError as BackgroundFailedError
    from atoll.errors import IslandBrokenError as IslandBrokenError
    from atoll.errors import JoinTimeoutError as JoinTimeoutError
    from atoll.errors import KeysRefusedError as KeysRefusedError
    from atoll.errors import LearnerRefusedError as LearnerRefusedError
    from atoll.errors import SyncerUnreachableError as SyncerUnreachableError
    from atoll.island.stats import LearnerStats as LearnerStats
    from atoll.learner.api import Learner as Learner

try:  # a file, because reading the metadata of the package takes 40 ms
    from atoll._version import version as __version__
except ImportError:  # run from the sources without a build
    __version__ = "0+unknown"

__all__ = [
    "AtollError",
    "BackgroundFailedError",
    "IslandBrokenError",
    "JoinTimeoutError",
    "KeysRefusedError",
    "Learner",
    "LearnerRefusedError",
    "LearnerStats",
    "SyncerUnreachableError",
    "__version__",
]
_MODULES = {"Learner": "atoll.learner.api", "LearnerStats": "atoll.island.stats"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "atoll.errors")), name)


def __dir__() -> list[str]:
    return __all__
