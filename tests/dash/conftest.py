"""A real Chromium for the tests of the page. Whatever the console complains of fails the test that looked at it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import pytest

from tests.dash.served import ServedInThread

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MS = 20_000

Visit = Callable[..., Any]
Served = TypeVar("Served", bound=ServedInThread)


class Browsers:
    """One after the other: the one that is there, unless the network has changed since it was started."""

    def __init__(self, driver: Any, path: str) -> None:
        self._driver = driver
        self._path = path
        self._launched: Any = None
        self._changes = -1

    def at(self, changes: int) -> Any:
        if self._launched is None or changes != self._changes:
            self.close()
            self._launched = self._driver.chromium.launch(executable_path=self._path, args=["--no-sandbox"])
            self._changes = changes
        return self._launched

    def close(self) -> None:
        if self._launched is not None:
            self._launched.close()


@pytest.fixture(scope="module")
def browsers() -> Iterator[Browsers]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser is installed: looked for {', '.join(NAMES)}")
    playwright.expect.set_options(timeout=PATIENCE_MS)
    with playwright.sync_playwright() as driver:
        started = Browsers(driver, found)
        yield started
        started.close()


@pytest.fixture
def browser(browsers: Browsers, still_network: int) -> Any:
    return browsers.at(still_network)


@pytest.fixture
def serve() -> Iterator[Callable[[Served], Served]]:
    """`serve(FakeDash(...))` starts it; it ends after the pages that look at it, which would complain of the end."""
    with ExitStack() as stack:

        def start(served: Served) -> Served:
            stack.enter_context(served)
            return served

        yield start


@pytest.fixture
def visit(browser: Any, serve: object) -> Iterator[Visit]:
    """`visit(url, width=390, allow="409")` opens a page; `allow` is what the console may say there."""
    problems: list[str] = []
    contexts = []

    def open_page(url: str, width: int = 1280, height: int = 900, allow: str = "$^", **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)

        def complain(text: str) -> None:
            if not re.search(allow, text):
                problems.append(text)

        page.on("console", lambda said: complain(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda wrong: complain(str(wrong)))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
