"""What tests of the network share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith(("atoll", "asyncio"))]
    assert left == []
