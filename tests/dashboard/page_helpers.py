"""How tests look at the page: where its parts are, and questions that only the page itself can answer."""

from __future__ import annotations

from typing import Any

NO_ANSWER = "ERR_|status of (401|409|400|403)"
"""What the console may say while a server is away or refuses."""


def figure(page: Any, name: str) -> Any:
    return page.locator(f"#now-0 [data-figure={name}] dd")


def card(page: Any, learner: int, run: int = 0) -> Any:
    named = page.get_by_role("button", name=f"learner {learner}", exact=True)
    return page.locator(f"#now-{run} .card").filter(has=named)


def until(page: Any, condition: str) -> None:
    """The content policy forbids the `eval` with which playwright would look again; a frame is a good moment to."""
    page.evaluate(f"""() => new Promise((done, fail) => {{
        const late = performance.now() + 300000;
        const look = () => {{
            if ({condition}) done();
            else if (performance.now() > late) fail(new Error("in vain"));
            else requestAnimationFrame(look);
        }};
        look();
    }})""")


def settled(page: Any) -> None:
    """Every picture that was sent is drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def timeline(page: Any) -> Any:
    """The plot, drawn and in view."""
    plot = page.locator("#timeline-0 .plot")
    until(page, "atollPage.columns[0]?.parts.timeline.canvas.draws > 0")
    plot.scroll_into_view_if_needed()
    return plot


def timeline_state(page: Any) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate("""() => {
        const t = atollPage.columns[0].parts.timeline;
        return {draws: t.canvas.draws, view: t.view(), zoomed: t.zoom !== null};
    }""")
    return found


def without_a_name(page: Any) -> list[str]:
    """What can be seen and used, and has neither text nor a label for those who do not see it."""
    found: list[str] = page.evaluate("""() => {
        const named = (some) => some.textContent.trim() || some.labels?.length || some.getAttribute("aria-label");
        return [...document.querySelectorAll("button, a, canvas, [role=img], input, select")]
            .filter((some) => some.checkVisibility() && !some.closest("[aria-hidden=true]"))
            .filter((some) => !named(some) && !some.parentElement.closest("[role=img]"))
            .map((some) => some.outerHTML);
    }""")
    return found


def poor_contrast(page: Any) -> list[list[str]]:
    """Text whose contrast with what lies behind it is below 4.5 (WCAG 2, level AA)."""
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
        const behind = (node) => {
            for (let some = node; some; some = some.parentElement) {
                const found = rgb(getComputedStyle(some).backgroundColor);
                if (found[3] > 250) return found;
            }
            return [255, 255, 255];
        };
        const poor = [];
        for (const node of document.querySelectorAll("body *")) {
            const says = [...node.childNodes].some((some) => some.nodeType === 3 && some.textContent.trim());
            if (!says || !node.checkVisibility() || node.closest("button:disabled, .unseen, .skip")) continue;
            const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))].sort((p, q) => q - p);
            const ratio = (a + 0.05) / (b + 0.05);
            const name = node.className || node.nodeName;
            if (ratio < 4.5) poor.push([name, node.textContent.slice(0, 30), ratio.toFixed(2)]);
        }
        return poor;
    }""")
    return found
