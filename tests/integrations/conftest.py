"""Fixtures for the tests of the frameworks."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def no_leaked_threads() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("atoll")] == []


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bit by bit the same, and no slower with models as small as these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
