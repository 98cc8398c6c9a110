"""Shared settings of the tests.

Hypothesis draws the same examples on every run, so that a red build is red again when it is repeated. To look for new
examples: `pytest --hypothesis-profile=explore`. `make test` draws fewer of them, `make test-all` all.

`pytest --rewrite-scenarios` writes the effects of the cores to tests/scenarios. Read the diff before you commit it.
`pytest --rewrite-vectors` does the same for the golden bytes in tests/transport/vectors. A diff there means that the
wire format has changed, and that the wire version must rise.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.programs import FIXTURE_MARKERS, MARKER_CHECKS, find_missing

# torch reads this when it is imported, here and in child processes. Several pytest workers share the cores, so each
# uses one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The time to draw an example depends on the load of the machine, not on the code, so there is no deadline.
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
    """Restore SIGINT. A shell ignores it for background jobs, and child processes of tests would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests whose program is missing, with the reason. Run the type checks first, because they take longest."""
    items.sort(key=lambda item: item.path.name != "test_checks.py")
    for item in items:
        for fixture in FIXTURE_MARKERS.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(FIXTURE_MARKERS[fixture])
        for marker in MARKER_CHECKS:
            if item.get_closest_marker(marker) is not None and (reason := find_missing(marker)) is not None:
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {reason}"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-scenarios", action="store_true", help="write the effects of the cores to tests/scenarios/*.scenario"
    )
    parser.addoption(
        "--rewrite-vectors", action="store_true", help="write the golden bytes to tests/transport/vectors/*.json"
    )


@pytest.fixture
def no_leaked_threads() -> Iterator[None]:
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith(("atoll", "asyncio"))]
    assert left == []
