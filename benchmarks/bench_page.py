"""The dashboard's page under many islands: how long does an interaction take? Figures are kept in benchmarks/README.md.

    python benchmarks/bench_page.py [--json] [--learners 64] [--rounds 2000] [--repeats 40] [--slow 1]
    python benchmarks/bench_page.py --run DIR                   a run with tapes, by the real server

A real Chromium without a window looks at an invented run (tests/dashboard/fake_dashboard.py), or at a run. An
interaction is dispatched inside the page; its time is from there until the frame that shows it is done, so it includes
the wait for the next frame, up to 17 ms. `script` is the part of it in which the page's own code runs. `--slow 4` slows
the processor down four times, as of an old laptop. Needs `playwright` and a Chromium.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from playwright.sync_api import Page, sync_playwright

from tests.dashboard.fake_dashboard import FakeDashboard
from tests.dashboard.fake_run import FakeRun
from tests.dashboard.threaded_server import RealDashboard, ThreadedServer

TARGET_MS = 100.0
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

MEASURE_SCRIPT = """
async ([name, repeats]) => {
    const page = atollPage, column = page.columns[0], {timeline} = column.parts;
    const plot = document.querySelector("#timeline-0 .plot"), box = plot.getBoundingClientRect();
    const at = (share) => ({
        clientX: box.left + 90 + (box.width - 110) * share,
        clientY: box.top + box.height * share,
        cancelable: true,
        pointerType: "mouse",
    });
    const turn = (i) => new WheelEvent("wheel", {...at(0.6), deltaY: i % 20 < 10 ? -60 : 60});
    const picture = structuredClone(column.newest);
    const acts = {
        "zoom by wheel": (i) => plot.dispatchEvent(turn(i)),
        "move the view": (i) => timeline.shift(i % 20 < 10 ? -300 : 300),
        "hover": (i) => plot.dispatchEvent(new PointerEvent("pointermove", at((i % 50) / 50))),
        "new picture": (i) => {
            const news = {loss: 2 + (i % 7) / 10, staleness_s: i % 5};
            for (const island of picture.islands) Object.assign(island, news, {step: island.step + 1});
            column.receive({...structuredClone(picture), to: picture.to + i});
        },
        "filter islands": (i) => document.querySelector("#now-0 .filter").click(),
        "change the theme": () => document.getElementById("theme").click(),
    };
    const frame = () => new Promise((done) => requestAnimationFrame(() => {
        const after = new MessageChannel();
        after.port1.onmessage = done;
        after.port2.postMessage(0);
    }));
    plot.focus();
    if (name === "move the view") timeline.setView(30000, 50000);
    await frame();
    const whole = [], script = [];
    for (let i = 0; i < repeats; i += 1) {
        let busy = 0;
        const render = requestAnimationFrame;
        window.requestAnimationFrame = (work) => render((now) => {
            const begin = performance.now();
            work(now);
            busy += performance.now() - begin;
        });
        const begin = performance.now();
        acts[name](i);
        busy += performance.now() - begin;
        window.requestAnimationFrame = render;
        await frame();
        whole.push(performance.now() - begin);
        script.push(busy);
    }
    timeline.showWhole();
    await frame();
    return {whole, script};
}
"""
READ_ALL_SCRIPT = """async () => {
    while (atollPage.columns[0].newest?.loading !== null) await new Promise((done) => setTimeout(done, 200));
}"""
ACTIONS = ("zoom by wheel", "move the view", "hover", "new picture", "filter islands", "change the theme")


def measure_action(page: Page, name: str, repeats: int) -> dict[str, float]:
    found: dict[str, list[float]] = page.evaluate(MEASURE_SCRIPT, [name, repeats])
    whole, script = found["whole"], found["script"]
    return {
        "median_ms": statistics.median(whole),
        "worst_ms": max(whole),
        "script_median_ms": statistics.median(script),
        "script_worst_ms": max(script),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--learners", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--slow", type=float, default=1.0, help="times as slow a processor")
    parser.add_argument("--run", type=Path, help="directory of a run, also of atoll simulate --tape")
    options = parser.parse_args()
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        raise SystemExit(f"no browser is installed: looked for {', '.join(BROWSERS)}")
    run = FakeRun(
        learners=options.learners, rounds=options.rounds, fragments=24, horizon=86400.0, now=86400.0, live=False
    )
    results: dict[str, Any] = {}
    served: ThreadedServer = FakeDashboard(run) if options.run is None else RealDashboard(options.run)
    with served as dash, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.goto(dash.url)
        page.locator("#timeline-0 .legend li").first.wait_for()
        page.evaluate(READ_ALL_SCRIPT)
        page.locator("#timeline-0 .plot").scroll_into_view_if_needed()
        if options.slow != 1.0:
            page.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": options.slow})
        for name in ACTIONS:
            results[name] = measure_action(page, name, options.repeats)
        browser.close()
    if options.json:
        print(json.dumps({"learners": options.learners, "rounds": options.rounds, "slow": options.slow, **results}))
        return
    what = f"{options.learners} islands, {options.rounds} rounds" if options.run is None else str(options.run)
    print(f"{what}, {options.repeats} times each; wanted: {TARGET_MS:g} ms")
    print(f"{'':18} {'median':>9} {'worst':>9}   script {'median':>9} {'worst':>9}")
    for name, row in results.items():
        numbers = [row["median_ms"], row["worst_ms"], row["script_median_ms"], row["script_worst_ms"]]
        a, b, c, d = (f"{number:6.1f} ms" for number in numbers)
        print(f"{name:18} {a} {b}          {c} {d}")


if __name__ == "__main__":
    main()
