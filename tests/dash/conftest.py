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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser is installed: looked for {', '.join(NAMES)}")
    playwright.expect.set_options(timeout=PATIENCE_MS)
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Served], Served]]:
    """`serve(FakeDash(...))` starts it; it ends after the pages that look at it, which would complain of the end."""
    with ExitStack() as stack:

        def start(served: Served) -> Served:
            stack.enter_context(served)
            return served

        yield start


@pytest.fixture
def visit(browser: Any, serve: object, still_network: None) -> Iterator[Visit]:
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
