"""Fixtures for the tests of framework integrations."""

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
    """Use one thread of torch: results are bitwise reproducible, and models this small are not slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
