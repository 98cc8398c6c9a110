"""Fake of the dashboard's server that serves generated runs to the real page.

`python -m tests.dashboard.fake_dashboard --learners 64 --grow` serves one for manual use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.dashboard.fake_run import FakeRun, Json
from tests.dashboard.threaded_server import ThreadedServer

STATIC = Path(__file__).resolve().parents[2] / "src/atoll/dashboard/static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PROMPTS = {
    "pause": "All learners pause after their current step.",
    "resume": "All learners continue training.",
    "snapshot": "Take a snapshot of the whole run.",
    "drain": "Learner {} leaves for good.",
    "quorum": "Rounds will need {} contributions.",
    "grace": "Rounds will wait {} of their slack.",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeDashboard(ThreadedServer):
    """Serves generated runs. A test can change them while a page is connected."""

    def __init__(self, *runs: FakeRun, token: str | None = None, port: int = 0) -> None:
        super().__init__(port)
        self.runs = list(runs)
        self.token = token
        self.requests: list[str] = []  # every path that was requested, with its query
        self.controls: list[Json] = []  # every control that was sent
        self._changed: asyncio.Event

    def change(self, index: int = 0, **news: Any) -> None:
        """Change fields of the run and notify every connected page."""
        self.call(self._change(index, news))

    async def _change(self, index: int, news: Json) -> None:
        for name, value in news.items():
            assert hasattr(self.runs[index], name), name
            setattr(self.runs[index], name, value)
        self._changed.set()
        self._changed = asyncio.Event()

    def app(self) -> web.Application:
        self._changed = asyncio.Event()
        app = web.Application(middlewares=[self._auth_middleware])
        app.add_routes(
            [
                web.get("/api/runs", self._runs),
                web.get("/api/run/{run}/view", self._view),
                web.get("/api/run/{run}/live", self._live),
                web.get("/api/run/{run}/timeline", self._timeline),
                web.get("/api/run/{run}/series", self._series),
                web.get("/api/run/{run}/series.csv", self._csv),
                web.get("/api/run/{run}/story", self._story),
                web.get("/api/run/{run}/config", self._config),
                web.post("/api/run/{run}/control", self._control),
                web.get("/{name:.*}", self._static),
            ]
        )
        return app

    @web.middleware
    async def _auth_middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.requests.append(request.path_qs)
        expected = None if self.token is None else f"Bearer {self.token}"
        if request.path.startswith("/api/") and expected not in (None, request.headers.get("Authorization")):
            return self._finished(web.json_response({"error": "the token is missing or wrong"}, status=401))
        return self._finished(await handler(request))

    @staticmethod
    def _finished(response: web.StreamResponse) -> web.StreamResponse:
        if not response.prepared:
            response.headers["Content-Security-Policy"] = POLICY
            response.headers["Cache-Control"] = "no-store"
        return response

    async def _static(self, request: web.Request) -> web.StreamResponse:
        path = STATIC / (request.match_info["name"] or "index.html")
        if ".." in path.parts or not path.is_file():
            return web.json_response({"error": "there is no such page"}, status=404)
        return web.FileResponse(path)

    def _run(self, request: web.Request) -> FakeRun:
        return self.runs[int(request.match_info["run"])]

    async def _runs(self, request: web.Request) -> web.Response:
        runs = [
            {"index": index, "name": run.name, "simulated": run.simulated, "controls": run.controls}
            for index, run in enumerate(self.runs)
        ]
        return web.json_response({"runs": runs, "version": "0.1.0"})

    async def _view(self, request: web.Request) -> web.Response:
        at = request.query.get("at")
        return web.json_response(self._run(request).status(None if at is None else float(at)))

    async def _live(self, request: web.Request) -> web.StreamResponse:
        run = self._run(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Content-Security-Policy": POLICY})
        response.headers["Cache-Control"] = "no-store"
        await response.prepare(request)
        while True:
            changed = self._changed
            await response.write(f"event: view\ndata: {json.dumps(run.status(None))}\n\n".encode())
            while not changed.is_set():
                try:
                    await asyncio.wait_for(changed.wait(), timeout=10)
                except TimeoutError:
                    await response.write(b": keep-alive\n\n")

    async def _timeline(self, request: web.Request) -> web.Response:
        run, query = self._run(request), request.query
        since, until = float(query.get("from", 0.0)), float(query.get("to", run.now))
        return web.json_response(run.timeline(since, until, int(query.get("width", 1000))))

    async def _series(self, request: web.Request) -> web.Response:
        run, query = self._run(request), request.query
        if "names" not in query:
            return web.json_response({"series": run.names()})
        x, points = query.get("x", "time"), int(query.get("points", 600))
        since, until = float(query.get("from", 0.0)), float(query.get("to", run.now))
        values = [run.values(name, x, since, until, points) for name in query["names"].split(",")]
        return web.json_response({"x": x, "series": values})

    async def _csv(self, request: web.Request) -> web.Response:
        run, x = self._run(request), request.query.get("x", "time")
        lines = [f"name,{x},value"]
        for name in request.query["names"].split(","):
            values = run.values(name, x, 0.0, run.now, 100)
            lines += [f"{name},{a},{b}" for a, b in zip(values["x"], values["y"], strict=True)]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/csv")

    async def _story(self, request: web.Request) -> web.Response:
        run, query = self._run(request), request.query
        learner, fragment = (int(query[key]) if key in query else None for key in ("learner", "fragment"))
        story = run.story(learner, fragment, float(query.get("until", run.now)), int(query.get("limit", 200)))
        return web.json_response(story)

    async def _config(self, request: web.Request) -> web.Response:
        run = self._run(request)
        return web.json_response({"config": {"learners": run.learners, "seed": run.seed}, "report": None})

    async def _control(self, request: web.Request) -> web.Response:
        run = self._run(request)
        if not run.controls:
            return web.json_response({"error": "no syncer can be reached"}, status=401)
        if request.headers.get("Origin") != self.url.rstrip("/") or request.content_type != "application/json":
            return web.json_response({"error": "not from this page"}, status=403)
        body = await request.json()
        self.controls.append(body)
        action, value = body["action"], body.get("value")
        if action not in PROMPTS or (action == "quorum" and not 1 <= value <= run.learners):
            return web.json_response({"error": f"{action} cannot be {value}"}, status=400)
        sentence = PROMPTS[action].format(value)
        if not body.get("confirmed"):
            return web.json_response({"prompt": sentence}, status=409)
        if action in ("pause", "resume"):
            run.paused = action == "pause"
        elif action == "quorum":
            run.quorum = value
        elif action == "grace":
            run.grace_margin = value
        run.done.append({**body, "at": run.now})
        await self._change(0, {})
        return web.json_response({"done": f"done: {sentence}"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=480)
    parser.add_argument("--port", type=int, default=7480)
    parser.add_argument("--two", action="store_true")
    parser.add_argument("--grow", action="store_true", help="one second of the run every second")
    options = parser.parse_args()
    runs = [FakeRun(learners=options.learners, rounds=options.rounds, controls=True)]
    if options.two:
        runs.append(FakeRun(name="second", seed=7, learners=options.learners, live=False))
    with FakeDashboard(*runs, port=options.port) as dash:
        print(dash.url, flush=True)
        ended = threading.Event()
        try:
            while not ended.wait(1.0):
                if options.grow:
                    dash.change(now=min(runs[0].now + 1.0, runs[0].horizon))
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
