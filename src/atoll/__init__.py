"""Atoll: Decoupled DiLoCo, training on islands that never wait for each other.

`atoll.Learner` is loaded when it is first asked for: tools that need no tensors start without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.net.learner import Learner as Learner
    from atoll.net.learner_errors import AtollError as AtollError
    from atoll.net.learner_errors import LearnerRefused as LearnerRefused
    from atoll.net.learner_errors import SyncerUnreachable as SyncerUnreachable

try:  # a file and not the metadata of the package, which takes 40 ms to read
    from atoll._version import version as __version__
except ImportError:  # run from its sources, never built
    __version__ = "0+unknown"

__all__ = ["AtollError", "Learner", "LearnerRefused", "SyncerUnreachable", "__version__"]
_ERRORS = ("AtollError", "LearnerRefused", "SyncerUnreachable")


def __getattr__(name: str) -> Any:
    if name == "Learner":
        from atoll.net.learner import Learner

        return Learner
    if name in _ERRORS:
        from atoll.net import learner_errors

        return getattr(learner_errors, name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
