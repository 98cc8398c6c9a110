"""Shared settings of the tests.

Hypothesis draws the same examples on every run, so that a red build is red again when it is repeated. To look for new
examples: `pytest --hypothesis-profile=explore`. `make test` draws fewer of them, `make test-all` all.

`pytest --rewrite-scenarios` writes what the cores do into tests/scenarios. Read the difference before you commit it.
`pytest --rewrite-vectors` does the same for the golden bytes in tests/transport/vectors: a difference there means that
other programs no longer understand us, and that the wire version has to rise.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.programs import FIXTURE_MARKERS, MARKER_CHECKS, find_missing

# Read when torch is loaded, here and in every process that a test starts. Several workers share the cores, and threads
# that wait for each other would take them from the other workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes to draw says how busy the machine is, and nothing about the code.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", settings.get_profile("repeatable"), max_examples=25)
settings.register_profile("explore", deadline=None, max_examples=2_000, print_blob=True)
settings.load_profile("repeatable")


def pytest_configure() -> None:
    """A shell that starts us in the background has us ignore interrupts, and whatever we start would inherit that: a
    test that sends one would wait for ever."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a program that is missing here; the reason names it. The type check is the longest: it begins."""
    items.sort(key=lambda item: item.path.name != "test_checks.py")
    for item in items:
        for fixture in FIXTURE_MARKERS.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(FIXTURE_MARKERS[fixture])
        for marker in MARKER_CHECKS:
            if item.get_closest_marker(marker) is not None and (reason := find_missing(marker)) is not None:
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {reason}"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-scenarios", action="store_true", help="write down what the cores do in tests/scenarios/*.scenario"
    )
    parser.addoption(
        "--rewrite-vectors", action="store_true", help="write down what travels in tests/transport/vectors/*.json"
    )


@pytest.fixture
def no_leaked_threads() -> Iterator[None]:
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith(("atoll", "asyncio"))]
    assert left == []
