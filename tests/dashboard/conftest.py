"""Fixtures that drive a real Chromium. A test fails if the console of its page reports an error or a warning."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from atoll.chaos.netns import enter_namespace
from tests.dashboard.threaded_server import ThreadedServer
from tests.programs import find_browser

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")

BROWSER_TIMEOUT_MS = 300_000
CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP = 0x40000000, 0x8914, 0x1

Visit = Callable[..., Any]
Served = TypeVar("Served", bound=ThreadedServer)


@pytest.fixture(scope="module")
def machine_network() -> Iterator[Path]:
    """Run the tests of a module in their own network namespace; yield the namespace of the machine.

    Chromium aborts all requests with ERR_NETWORK_CHANGED up to seconds after a network interface was added or removed.
    Tests in tests/chaos and other programs do that at any time. Without root, tests share the network of the machine.
    """
    with open("/proc/thread-self/ns/net", "rb") as before:
        machine = Path(f"/proc/{os.getpid()}/fd/{before.fileno()}")
        if os.geteuid() != 0 or ctypes.CDLL(None).unshare(CLONE_NEWNET):
            yield machine
            return
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
        yield machine
        enter_namespace(machine)


@pytest.fixture(scope="module")
def browser(machine_network: Path) -> Iterator[Any]:
    playwright.expect.set_options(timeout=BROWSER_TIMEOUT_MS)
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Served], Served]]:
    """Return a function that starts a server. The server stops after the pages, which would log a lost connection."""
    with ExitStack() as stack:

        def start(served: Served) -> Served:
            stack.enter_context(served)
            return served

        yield start


@pytest.fixture
def visit(browser: Any, serve: object) -> Iterator[Visit]:
    """Return a function that opens a page. `allow` is a pattern of console messages that do not fail the test."""
    problems: list[str] = []
    contexts = []

    def open_page(url: str, width: int = 1280, height: int = 900, allow: str = "$^", **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(BROWSER_TIMEOUT_MS)

        def record_problem(text: str) -> None:
            if not re.search(allow, text):
                problems.append(text)

        page.on("console", lambda entry: record_problem(entry.text) if entry.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: record_problem(str(error)))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
