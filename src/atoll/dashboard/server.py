"""HTTP server of `atoll dash`: static files, the run as JSON, a stream of updates, and operator controls.

One worker thread reads tapes and computes views, so that no request sees a partial update. The event loop only sends.
docs/dash.md lists the paths.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import signal
import socket
import sys
import time
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from aiohttp import web

from atoll import __version__
from atoll.dashboard import control, curves
from atoll.dashboard.alerts import Alert, AlertRules
from atoll.dashboard.control import DashboardRequestError
from atoll.dashboard.run_history import RunHistory, read_story
from atoll.dashboard.view import config_view, timeline, view_at
from atoll.tape.format import TapeError
from atoll.tape.story import Subject, format_subject
from atoll.transport.endpoint import is_loopback
from atoll.transport.listener import bind_socket
from atoll.transport.tls import ServerTls, find_key_files

log = logging.getLogger("atoll.dash")

POLL_INTERVAL_S = 0.5
"""Interval between reads of the tapes while a page is connected; without one it is four times as long."""

READ_BUDGET_S = 0.2
"""Limit on one read of a long tape: a request waits no longer than this for the worker thread."""

STREAM_INTERVAL_S = 1.0
MAX_VIEW_AGE_S = 3.0
STREAM_KEEPALIVE_S = 10.0
MAX_POINTS = 5000
MAX_STORY_LINES = 1000
MAX_SERIES_NAMES = 80
MAX_BODY_BYTES = 4096
ALERT_INTERVAL_S = 5.0

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RunFeed:
    """Served run: its newest view and the pages that wait for updates. The directory may still be empty."""

    def __init__(self, run: Path, rules: AlertRules | None = None) -> None:
        self.run = run
        self.name = run.resolve().name
        self._rules = rules
        self.history: RunHistory | None = None
        self.view_json: bytes | None = None  # newest view as JSON
        self.view_changed = asyncio.Condition()
        self.watchers = 0  # connected pages
        self.is_live = False
        self._view_version = -1
        self._view_updated_at = 0.0

    def load(self) -> None:
        """Open the run. Raise TapeError if it has no tapes."""
        self.history = RunHistory(self.run, self._rules)

    def try_load(self) -> RunHistory | None:
        """Return the history, or None while the run has no tapes."""
        if self.history is None:
            with suppress(TapeError):
                self.load()
        return self.history

    def update_view(self, may_control: Callable[[Path], bool]) -> bool:
        """Compute a new view in the worker thread if there is anything new. Return whether it was computed."""
        if self.history is None:
            return False
        # Recompute the view even without new entries: its age and its alerts change.
        is_outdated = self.is_live and time.monotonic() - self._view_updated_at > MAX_VIEW_AGE_S
        if self.history.version == self._view_version and not is_outdated:
            return False
        self._view_version, self._view_updated_at = self.history.version, time.monotonic()
        shown = view_at(self.history)
        self.is_live = shown["live"]
        self.view_json = _dumps(shown | {"controls": may_control(self.run)})
        return True


class DashboardServer:
    """Serves one or two runs to the pages that have the token."""

    def __init__(self, runs: list[RunFeed], token: str | None, own_token: bool = False) -> None:
        """Create the server.

        Args:
            token: required of every request for data; None restricts the server to this machine, without controls.
            own_token: whether the token was generated for this page, and is not the run's token.
        """
        self.runs = runs
        self._token = token
        self._own_token = own_token
        self._thread = ThreadPoolExecutor(1, "tape-reader")
        self._tasks: list[asyncio.Task[None]] = []
        self._active_alerts: dict[tuple[int, str, str], Alert] = {}
        self.static_folder = Path(str(files("atoll.dashboard") / "static"))

    # ------------------------------------------------------------------------------------------------- application

    def app(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(middlewares=[self._auth_middleware], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/", self._file)
        app.router.add_get("/api/runs", self._runs)
        for path, handler in (
            ("view", self._view),
            ("live", self._live),
            ("timeline", self._timeline),
            ("series", self._series),
            ("series.csv", self._csv),
            ("story", self._story),
            ("config", self._config),
        ):
            app.router.add_get("/api/run/{run:[01]}/" + path, handler)
        app.router.add_post("/api/run/{run:[01]}/control", self._control)
        app.router.add_get("/{name:[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)?}", self._file)
        app.on_response_prepare.append(_add_headers)
        app.cleanup_ctx.append(self._background)
        return app

    async def _background(self, app: web.Application) -> AsyncIterator[None]:
        self._tasks = [asyncio.create_task(self._poll_run(feed)) for feed in self.runs]
        self._tasks.append(asyncio.create_task(self._watch_alerts()))
        yield
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run_in_reader(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _poll_run(self, feed: RunFeed) -> None:
        """Read new entries forever. A repeated error is logged once, and the next poll retries."""
        logged = ""
        while True:
            more = False
            try:
                history = await self._run_in_reader(feed.try_load)
                if history is not None:
                    more = await self._run_in_reader(history.update, READ_BUDGET_S)
                    if await self._run_in_reader(feed.update_view, self._may_control):
                        async with feed.view_changed:
                            feed.view_changed.notify_all()
            except Exception as error:
                if repr(error) != logged:
                    log.exception("cannot read run %s; retrying", feed.run)
                logged = repr(error)
            if not more:
                await asyncio.sleep(POLL_INTERVAL_S if feed.watchers else 4 * POLL_INTERVAL_S)

    # ---------------------------------------------------------------------------------------------------- access

    @web.middleware
    async def _auth_middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._token is None and not is_loopback(_host(request)):
            return _error(403, "without a token the page is served to this machine only; open it as localhost")
        if request.headers.get("Sec-Fetch-Site") == "cross-site":
            return _error(403, "cross-site request refused; open the page itself")
        if request.path.startswith("/api/") and not self._is_allowed(request):
            return _error(401, "the token is missing or invalid; open the address that atoll dash printed")
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return _error(404, "not found")
        except web.HTTPMethodNotAllowed:
            return _error(405, "method not allowed")
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the request has more than {MAX_BODY_BYTES} bytes")
        except DashboardRequestError as error:
            return _error(error.status, str(error))
        except ConnectionResetError:
            raise  # the client has disconnected
        except Exception:
            log.exception("request failed: %s %s", request.method, request.path)
            return _error(500, "internal error of atoll dash; see its log")

    def _may_control(self, run: Path) -> bool:
        return self._token is not None and control.is_reachable(run, None if self._own_token else self._token)

    def _is_allowed(self, request: web.Request) -> bool:
        if self._token is None:
            return True
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, f"Bearer {self._token}".encode())

    # ---------------------------------------------------------------------------------------------------- files

    async def _file(self, request: web.Request) -> web.StreamResponse:
        path = (self.static_folder / request.match_info.get("name", "index.html")).resolve()
        if not path.is_relative_to(self.static_folder.resolve()) or not path.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(path)

    # ---------------------------------------------------------------------------------------------------- reading

    async def _runs(self, request: web.Request) -> web.StreamResponse:
        runs = []
        for index, feed in enumerate(self.runs):
            history = feed.history
            runs.append(
                {
                    "index": index,
                    "name": feed.name,
                    "simulated": history.simulated if history is not None else False,
                    "controls": self._may_control(feed.run),
                }
            )
        return _json({"runs": runs, "version": __version__})

    def _find_feed(self, request: web.Request) -> RunFeed:
        index = int(request.match_info["run"])
        if index >= len(self.runs):
            raise DashboardRequestError(404, f"there is no run {index}; /api/runs lists the runs")
        return self.runs[index]

    def _require_history(self, request: web.Request) -> RunHistory:
        history = self._find_feed(request).history
        if history is None:
            raise DashboardRequestError(503, "the run has not started: it has no tapes yet")
        return history

    async def _view(self, request: web.Request) -> web.StreamResponse:
        at = _number(request, "at")
        return _json(await self._run_in_reader(view_at, self._require_history(request), at))

    async def _timeline(self, request: web.Request) -> web.StreamResponse:
        width = int(_number(request, "width") or 1000)
        begin, end = _number(request, "from"), _number(request, "to")
        return _json(await self._run_in_reader(timeline, self._require_history(request), begin, end, width))

    async def _series(self, request: web.Request) -> web.StreamResponse:
        history = self._require_history(request)
        if "names" not in request.query:
            series = await self._run_in_reader(curves.list_series, history)
            return _json({"series": [{**each._asdict(), "x": ["time", "tokens"]} for each in series]})
        names, x = _names(request)
        points = min(int(_number(request, "points") or 600), MAX_POINTS)
        begin, end = _number(request, "from"), _number(request, "to")

        def compute() -> list[dict[str, Any]]:
            found = ((name, curves.compute_curve(history, name, x, begin, end, max(2, points))) for name in names)
            return [{"name": name, "x": list(curve.x), "y": list(curve.y)} for name, curve in found]

        return _json({"x": x, "series": await self._curves(compute)})

    async def _csv(self, request: web.Request) -> web.StreamResponse:
        history = self._require_history(request)
        names, x = _names(request)
        text = await self._curves(lambda: curves.to_csv(history, names, x))
        headers = {"Content-Disposition": f'attachment; filename="atoll-{x}.csv"'}
        return web.Response(text=text, content_type="text/csv", headers=headers)

    async def _curves(self, compute: Callable[[], T]) -> T:
        try:
            return await self._run_in_reader(compute)
        except KeyError as error:
            raise DashboardRequestError(404, f"there is no series {error}") from None

    async def _story(self, request: web.Request) -> web.StreamResponse:
        subject: Subject = ("run", 0)
        for kind in ("learner", "fragment"):
            number = _number(request, kind)
            if number is not None:
                subject = (kind, int(number))
        limit = min(int(_number(request, "limit") or 200), MAX_STORY_LINES)
        until = _number(request, "until")
        story = await self._run_in_reader(read_story, self._require_history(request), subject, until, max(1, limit))
        lines = [
            {"at": line.at, "subject": format_subject(line.subject), "text": line.sentence} for line in story.lines
        ]
        return _json({"lines": lines, "has_more": story.has_more})

    async def _config(self, request: web.Request) -> web.StreamResponse:
        return _json(await self._run_in_reader(config_view, self._require_history(request)))

    # ---------------------------------------------------------------------------------------------------- live

    async def _live(self, request: web.Request) -> web.StreamResponse:
        feed = self._find_feed(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        sent: bytes | None = None
        feed.watchers += 1
        try:
            while True:
                if feed.view_json is not None and feed.view_json is not sent:
                    sent = feed.view_json
                    started_at = loop.time()
                    await response.write(b"event: view\ndata: " + sent + b"\n\n")
                    await asyncio.sleep(max(0.0, STREAM_INTERVAL_S - (loop.time() - started_at)))
                try:
                    async with asyncio.timeout(STREAM_KEEPALIVE_S), feed.view_changed:
                        while feed.view_json is sent:
                            await feed.view_changed.wait()
                except TimeoutError:
                    await response.write(b": keep-alive\n\n")
        except (ConnectionResetError, ConnectionError):
            return response
        finally:
            feed.watchers -= 1

    # ---------------------------------------------------------------------------------------------------- controls

    async def _control(self, request: web.Request) -> web.StreamResponse:
        """Forward an operator request. It needs the token, this page as its origin, and a confirmation."""
        feed = self._find_feed(request)
        if self._token is None:
            raise DashboardRequestError(
                401, "the page is read-only; start atoll dash with the run's token to control the run"
            )
        if not self._may_control(feed.run):
            raise DashboardRequestError(503, "no syncer of this run accepts this token; check the token and the syncer")
        origin = request.headers.get("Origin", "")
        if origin.partition("://")[2] != request.host:
            raise DashboardRequestError(403, "control requests are accepted from the page itself only")
        if request.content_type != "application/json":
            raise DashboardRequestError(415, "the request must be JSON")
        try:
            operator_request = control.OperatorRequest.parse(json.loads(await request.read()))
        except RecursionError:
            raise DashboardRequestError(400, "the request is nested too deeply") from None
        except ValueError as error:
            raise DashboardRequestError(400, str(error)) from None
        if not operator_request.is_confirmed:
            return _json({"prompt": operator_request.confirmation_prompt()}, 409)
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(None, control.apply_control, feed.run, operator_request)
        log.warning("%s: %s, requested by %s", feed.name, result, operator_request.requested_by)
        return _json({"done": result})

    # ---------------------------------------------------------------------------------------------------- alerts

    async def _watch_alerts(self) -> None:
        """Log every alert when it starts and when it ends."""
        while True:
            await asyncio.sleep(ALERT_INTERVAL_S)
            for index, feed in enumerate(self.runs):
                if feed.history is None or feed.view_json is None:
                    continue
                view = json.loads(feed.view_json)
                alerts = view["alerts"] if view["live"] else []  # the alerts of a run end with it
                now = {(index, each["rule"], each["subject"]): Alert(**each) for each in alerts}
                for key, alert in now.items():
                    if key not in self._active_alerts:
                        log.warning("%s: alert: %s", feed.name, alert.text)
                for key in [key for key in self._active_alerts if key[0] == index and key not in now]:
                    log.warning("%s: alert ended: %s", feed.name, self._active_alerts.pop(key).text)
                self._active_alerts |= now


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update({name: value for name, value in HEADERS.items() if name not in response.headers})


def _host(request: web.Request) -> str:
    host = request.host
    return host if host.endswith("]") else host.rpartition(":")[0] or host


def _number(request: web.Request, name: str) -> float | None:
    text = request.query.get(name, "")
    if not text:
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise DashboardRequestError(400, f"{name} is {text[:40]!r}; use a number")
    return found


def _names(request: web.Request) -> tuple[list[str], str]:
    x = request.query.get("x", "time")
    if x not in ("time", "tokens"):
        raise DashboardRequestError(400, f"x is {x[:40]!r}; use time or tokens")
    return list(dict.fromkeys(filter(None, request.query.get("names", "").split(","))))[:MAX_SERIES_NAMES], x


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=_dumps(value), status=status, content_type="application/json")


def _error(status: int, sentence: str) -> web.Response:
    return _json({"error": sentence}, status)


# --------------------------------------------------------------------------------------------------------------------
# Serving: listen, print the address, shut down

DEFAULT_PORT = 7410
PORT_ATTEMPTS = 20
"""Number of ports that are tried, from the default one, if no port is given."""

SHUTDOWN_TIMEOUT_S = 1.0
"""Time after which open connections are closed at shutdown. Browsers keep theirs open."""


def serve(
    runs: Sequence[Path],
    host: str,
    port: int | None,
    token: str | None,
    rules: Path | None,
    wait: bool,
    while_stdin: bool,
    own_token: bool,
    open_browser: bool,
    keys: Path | None = None,
    plain_text: bool = False,
) -> None:
    """Serve runs until Ctrl-C or SIGTERM. Raise ValueError or TapeError for invalid arguments.

    Args:
        port: port to listen on; None tries DEFAULT_PORT and the ports after it.
        token: required to see and control the runs; needed unless `host` is a loopback address.
        rules: TOML file with alert limits.
        wait: whether to start before the runs have tapes.
        while_stdin: whether to stop when stdin is closed; used when a job starts this process.
        own_token: whether the token was generated for this page and is not the run's.
        keys: directory with the syncer's key, for TLS.
        plain_text: whether to allow other hosts without TLS.
    """
    if token is None and not is_loopback(host):
        raise ValueError(f"--host {host} serves the page to other machines; give a token too (--token or ATOLL_TOKEN)")
    if keys is None and not is_loopback(host) and not plain_text:
        raise ValueError(
            f"without TLS, others on the network of {host} could read the page and its token; give --keys DIR with the"
            f" syncer's key (atoll keys init), or --plain-text if the network is trusted"
        )
    # The browser authenticates with the token, so no client certificate is required.
    tls = ServerTls(find_key_files(keys, for_syncer=True)._replace(authority=None)) if keys is not None else None
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(message)s")
    limits = AlertRules.load(rules) if rules is not None else None
    feeds = [RunFeed(run, limits) for run in runs]
    asyncio.run(
        _serve(DashboardServer(feeds, token, own_token), host, port, token, wait, while_stdin, open_browser, tls)
    )


async def _serve(
    dash: DashboardServer,
    host: str,
    port: int | None,
    token: str | None,
    wait: bool,
    while_stdin: bool,
    open_browser: bool,
    tls: ServerTls | None,
) -> None:
    if not wait:
        for each in dash.runs:
            each.load()
    listening = _listen(host, port)
    runner = web.AppRunner(dash.app(), access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listening, ssl_context=tls.context if tls is not None else None).start()
        address = _format_url(host, listening.getsockname()[1], token, "https" if tls is not None else "http")
        print(f"Dashboard: {address}", flush=True)
        print(_describe_access(token), flush=True)
        if open_browser:
            # Without the token: other users can read command lines. The page asks for the token.
            webbrowser.open(address.partition("#")[0])
        await _wait_for_shutdown(while_stdin)
    finally:
        await runner.cleanup()


def _describe_access(token: str | None) -> str:
    if token is None:
        return "The page is read-only and served to this machine only. Ctrl-C stops the page, not the run."
    return "Everyone with this address can see and control the run. Ctrl-C stops the page, not the run."


async def _wait_for_shutdown(while_stdin: bool) -> None:
    """Wait for SIGINT or SIGTERM, or with `while_stdin` until the job that started this process closes stdin."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    if while_stdin:
        loop.add_reader(sys.stdin, stopped.set)  # the job never writes to it, so readable means closed
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()


def _listen(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens on the given port, or on the first free port of the default range."""
    candidates = [port] if port is not None else [*range(DEFAULT_PORT, DEFAULT_PORT + PORT_ATTEMPTS), 0]
    for number in candidates[:-1]:
        with suppress(ValueError):
            return bind_socket(host, number, listen=True)
    return bind_socket(host, candidates[-1], listen=True)


def _format_url(host: str, port: int, token: str | None, scheme: str) -> str:
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(host, host)
    return f"{scheme}://{name}:{port}/" + (f"#token={quote(token, safe='')}" if token is not None else "")
