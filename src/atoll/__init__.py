"""Atoll: Decoupled DiLoCo, training on islands that never wait for each other.

`atoll.Learner` is loaded when it is first asked for: tools that need no tensors start without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.net.learner import Learner as Learner

__version__ = "0.1.0"
__all__ = ["Learner", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Learner":
        from atoll.net.learner import Learner

        return Learner
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
