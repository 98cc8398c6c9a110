"""What the page costs a run, and how quickly its server answers. Figures are kept in benchmarks/README.md.

    python benchmarks/bench_dash.py cost [--seconds 40]         a real job, without and with a page that is looked at
    python benchmarks/bench_dash.py answers RUN [--repeats 20]  every path of the server, on any run's tapes
    atoll simulate --learners 64 --chips 1200000 --days 1 --protocol-hours 9 --tape RUN      two million entries

`cost`: four islands with paced steps train; after a while `atoll dash` is started, and a client reads its live
pictures and requests timeline and curves every few seconds, as the page does. Compared are the steps of the islands and
the processor time of the syncer, before and with it, in one run; and what the page's own process takes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from atoll.dashboard.run_history import RunHistory
from benchmarks.measurement import collect_machine, cpu_s, machine_line, to_json_line

STEP_S = 0.1
SETTLE_TIME_S = 8.0
REQUEST_INTERVAL_S = 3.0
REQUESTED_PATHS = ("timeline?width=1200", "series?names=loss,throughput,goodput,merges.contributions&points=600")
PATHS = (
    "view",
    "view?at={middle}",
    "timeline?width=1200",
    "timeline?from={quarter}&to={middle}&width=1200",
    "series?names=throughput&points=600",
    "series?names=goodput&points=600",
    "series?names=merges.contributions&points=600",
    "story?learner=1&limit=200",
    "story?fragment=0&limit=200&until={middle}",
)


def poll_dashboard(address: str, over: Event) -> None:
    """As the page does: pictures as they come, the rest every few seconds."""

    def ask() -> None:
        while not over.wait(REQUEST_INTERVAL_S):
            for path in REQUESTED_PATHS:
                with urllib.request.urlopen(f"{address}api/run/0/{path}", timeout=30) as answer:
                    answer.read()

    Thread(target=ask, daemon=True).start()
    with urllib.request.urlopen(f"{address}api/run/0/live", timeout=60) as stream:
        while not over.is_set():
            stream.readline()


def measure_cost(seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        steps = round((2 * seconds + 3 * SETTLE_TIME_S) / STEP_S)
        words = ["--model", "100k", "--inner", "adamw", "--batch", "2", "--tokens", str(4 * steps * 128)]
        words += ["--step-time", f"{STEP_S}s", "--kill", "none", "--eval-tokens", "1024", "--out", str(run)]
        job = subprocess.Popen(
            [sys.executable, "-m", "atoll", "train", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        over = Event()
        page: subprocess.Popen[str] | None = None
        try:
            while not list((run / "tapes").glob("learner-4-*")):
                time.sleep(0.2)
            syncer = int((run / "store" / "lock").read_text())
            time.sleep(SETTLE_TIME_S)
            without = _measure_with_viewer(run, syncer, None, seconds)
            page = subprocess.Popen(
                [sys.executable, "-m", "atoll", "dash", str(run), "--port", "0"], stdout=subprocess.PIPE, text=True
            )
            assert page.stdout is not None
            address = page.stdout.readline().split()[-1]
            Thread(target=poll_dashboard, args=(address, over), daemon=True).start()
            time.sleep(SETTLE_TIME_S)
            beside = _measure_with_viewer(run, syncer, page.pid, seconds)
        finally:
            over.set()
            for process in (page, job):
                if process is not None:
                    process.send_signal(signal.SIGINT)
                    process.wait(30)
        picture = RunHistory(run)
        while picture.update():
            pass
        gaps = [_step_s(picture, span) for span in (without["span"], beside["span"])]
        return {
            "step_s": gaps,
            "step_ratio": gaps[1] / gaps[0],
            "syncer_core_share": [without["syncer"], beside["syncer"]],
            "page_core_share": beside["page"],
        }


def _measure_with_viewer(run: Path, syncer: int, page: int | None, seconds: float) -> dict[str, Any]:
    picture = RunHistory(run)
    while picture.update():
        pass
    at, cpu, own = time.monotonic(), cpu_s(syncer), cpu_s(page) if page is not None else 0.0
    time.sleep(seconds)
    took_s = time.monotonic() - at
    return {
        "span": (picture.newest_at, picture.newest_at + took_s),
        "syncer": (cpu_s(syncer) - cpu) / took_s,
        "page": (cpu_s(page) - own) / took_s if page is not None else 0.0,
    }


def _step_s(picture: RunHistory, span: tuple[float, float]) -> float:
    """Mean time from one step's end to the next one's, of all islands."""
    gaps = [
        after - before
        for processes in picture.processes.values()
        for process in processes
        for before, after in pairwise(process.log.ends)
        if span[0] <= before and after <= span[1]
    ]
    return statistics.fmean(gaps)


async def measure_requests(run: Path, repeats: int) -> dict[str, Any]:
    from aiohttp.test_utils import TestClient, TestServer

    from atoll.dashboard.server import DashboardServer, RunFeed

    watched = RunFeed(run)
    async with TestClient(TestServer(DashboardServer([watched], None).app())) as client:
        began = time.monotonic()
        while (
            watched.history is None
            or watched.history.newest_at == 0.0
            or watched.history.loading_progress() is not None
        ):
            await asyncio.sleep(0.2)
        load_s = time.monotonic() - began
        picture = watched.history
        times = {
            "middle": (picture.started_at + picture.newest_at) / 2,
            "quarter": picture.started_at + (picture.newest_at - picture.started_at) / 4,
        }
        found: dict[str, Any] = {"load_s": load_s, "tapes_mb": sum(_sizes(run)) / 1e6}
        for path in PATHS:
            took = []
            for _ in range(repeats):
                begun = time.monotonic()
                answer = await client.get(f"/api/run/0/{path.format(**times)}")
                await answer.read()
                assert answer.status == 200, path
                took.append(1000 * (time.monotonic() - begun))
            found[path.partition("?")[0] + "?" + path.partition("?")[2].partition("&")[0]] = {
                "median_ms": statistics.median(took),
                "worst_ms": max(took),
            }
    return found


def _sizes(run: Path) -> list[int]:
    return [path.stat().st_size for path in (run / "tapes").iterdir()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "answers"))
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.what == "answers" and options.run is None:
        parser.error("say which run")
    found = collect_machine()
    found |= (
        measure_cost(options.seconds)
        if options.what == "cost"
        else asyncio.run(measure_requests(options.run, options.repeats))
    )
    if options.json:
        print(to_json_line(found))
        return
    print(machine_line(found))
    if options.what == "cost":
        before, after = found["syncer_core_share"]
        print(f"steps with the page / without: {found['step_ratio']:.4f}")
        print(f"the syncer's share of a core: {100 * before:.2f} % without, {100 * after:.2f} % with the page")
        print(f"the page's own process: {100 * found['page_core_share']:.2f} % of a core")
        return
    print(f"{found['tapes_mb']:.0f} MB of tapes are read in {found['load_s']:.0f} s")
    for path in (key for key, value in found.items() if isinstance(value, dict) and "median_ms" in value):
        print(f"  {path:34} median {found[path]['median_ms']:7.1f} ms, worst {found[path]['worst_ms']:7.1f} ms")


if __name__ == "__main__":
    main()
