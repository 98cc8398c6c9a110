"""Helpers for tests of the page: locators of its parts, and checks that run in the page."""

from __future__ import annotations

from typing import Any

CONNECTION_ERRORS = "ERR_|status of (401|409|400|403)"
"""Pattern of console messages while a server is down or refuses a request."""


def metric(page: Any, name: str) -> Any:
    return page.locator(f"#now-0 [data-figure={name}] dd")


def card(page: Any, learner: int, run: int = 0) -> Any:
    button = page.get_by_role("button", name=f"learner {learner}", exact=True)
    return page.locator(f"#now-{run} .card").filter(has=button)


def wait_until(page: Any, condition: str) -> None:
    """Wait for a JavaScript condition, checked every frame. The content policy forbids the `eval` of playwright."""
    page.evaluate(f"""() => new Promise((done, fail) => {{
        const deadline =  performance.now() + 300000;
        const check = () => {{
            if ({condition}) done();
            else if (performance.now() > deadline) fail(new Error("timeout"));
            else requestAnimationFrame(check);
        }};
        check();
    }})""")


def wait_for_render(page: Any) -> None:
    """Wait until the last status that was received is rendered."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def timeline(page: Any) -> Any:
    """Return the plot, drawn and scrolled into view."""
    plot = page.locator("#timeline-0 .plot")
    wait_until(page, "atollPage.columns[0]?.parts.timeline.canvas.draws > 0")
    plot.scroll_into_view_if_needed()
    return plot


def timeline_state(page: Any) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate("""() => {
        const t = atollPage.columns[0].parts.timeline;
        return {draws: t.canvas.draws, view: t.view(), zoomed: t.zoom !== null};
    }""")
    return found


def find_unnamed_controls(page: Any) -> list[str]:
    """Return visible controls that have neither text nor a label for screen readers."""
    found: list[str] = page.evaluate("""() => {
        const isNamed = (some) => some.textContent.trim() || some.labels?.length || some.getAttribute("aria-label");
        return [...document.querySelectorAll("button, a, canvas, [role=img], input, select")]
            .filter((some) => some.checkVisibility() && !some.closest("[aria-hidden=true]"))
            .filter((some) => !isNamed(some) && !some.parentElement.closest("[role=img]"))
            .map((some) => some.outerHTML);
    }""")
    return found


def find_poor_contrast(page: Any) -> list[list[str]]:
    """Return texts whose contrast with their background is below 4.5 (WCAG 2, level AA)."""
    found: list[list[str]] = page.evaluate("""() => {
        const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
        const rgb = (text) => {
            canvas.clearRect(0, 0, 1, 1);
            canvas.fillStyle = text;
            canvas.fillRect(0, 0, 1, 1);
            return [...canvas.getImageData(0, 0, 1, 1).data];
        };
        const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
        const background = (node) => {
            for (let some = node; some; some = some.parentElement) {
                const found = rgb(getComputedStyle(some).backgroundColor);
                if (found[3] > 250) return found;
            }
            return [255, 255, 255];
        };
        const poor = [];
        for (const node of document.querySelectorAll("body *")) {
            const hasText = [...node.childNodes].some((some) => some.nodeType === 3 && some.textContent.trim());
            if (!hasText || !node.checkVisibility() || node.closest("button:disabled, .unseen, .skip")) continue;
            const [a, b] = [light(rgb(getComputedStyle(node).color)), light(background(node))].sort((p, q) => q - p);
            const ratio = (a + 0.05) / (b + 0.05);
            const name = node.className || node.nodeName;
            if (ratio < 4.5) poor.push([name, node.textContent.slice(0, 30), ratio.toFixed(2)]);
        }
        return poor;
    }""")
    return found
