"""`atoll dash` over HTTP: static files, what a picture shows as JSON, live updates, and controls for whoever may.

Tapes are read and pictures drawn in one thread beside the event loop, so that nobody sees half of an update; the loop
only sends. docs/dash.md has the paths.
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
"""How often tapes are looked at for more, while somebody watches; four times as seldom otherwise."""

READ_BUDGET_S = 0.2
"""Of a long tape at a time: a request waits no longer than this for its turn."""

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
    """One run, its picture, and whoever waits for news of it. The directory may still be empty."""

    def __init__(self, run: Path, rules: AlertRules | None = None) -> None:
        self.run = run
        self.name = run.resolve().name
        self._rules = rules
        self.history: RunHistory | None = None
        self.view_json: bytes | None = None  # the newest picture as JSON
        self.view_changed = asyncio.Condition()
        self.watchers = 0
        self.is_live = False
        self._view_version = -1
        self._view_updated_at = 0.0

    def load(self) -> None:
        """TapeError where there is nothing to show."""
        self.history = RunHistory(self.run, self._rules)

    def try_load(self) -> RunHistory | None:
        """The picture, as soon as there is a tape."""
        if self.history is None:
            with suppress(TapeError):
                self.load()
        return self.history

    def update_view(self, may_control: Callable[[Path], bool]) -> bool:
        """In the reading thread: the newest picture, if something is new."""
        if self.history is None:
            return False
        stale = self.is_live and time.monotonic() - self._view_updated_at > MAX_VIEW_AGE_S  # silence has to be seen too
        if self.history.version == self._view_version and not stale:
            return False
        self._view_version, self._view_updated_at = self.history.version, time.monotonic()
        shown = view_at(self.history)
        self.is_live = shown["live"]
        self.view_json = _dumps(shown | {"controls": may_control(self.run)})
        return True


class DashboardServer:
    def __init__(self, runs: list[RunFeed], token: str | None, own_token: bool = False) -> None:
        """`own_token`: it was made for this page by whoever started the run beside it, and is not the run's."""
        self.runs = runs
        self._token = token
        self._own_token = own_token
        self._thread = ThreadPoolExecutor(1, "reading")
        self._tasks: list[asyncio.Task[None]] = []
        self._active_alerts: dict[tuple[int, str, str], Alert] = {}
        self.static_folder = Path(str(files("atoll.dashboard") / "static"))

    # ---------------------------------------------------------------------------------------------------- the app

    def app(self) -> web.Application:
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
        self._tasks = [asyncio.create_task(self._poll_run(watched)) for watched in self.runs]
        self._tasks.append(asyncio.create_task(self._watch_alerts()))
        yield
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run_in_reader(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _poll_run(self, watched: RunFeed) -> None:
        """Read on for ever. What goes wrong with one look is told once, and the next one tries again."""
        told = ""
        while True:
            more = False
            try:
                picture = await self._run_in_reader(watched.try_load)
                if picture is not None:
                    more = await self._run_in_reader(picture.update, READ_BUDGET_S)
                    if await self._run_in_reader(watched.update_view, self._may_control):
                        async with watched.view_changed:
                            watched.view_changed.notify_all()
            except Exception as error:
                if repr(error) != told:
                    log.exception("%s cannot be read", watched.run)
                told = repr(error)
            if not more:
                await asyncio.sleep(POLL_INTERVAL_S if watched.watchers else 4 * POLL_INTERVAL_S)

    # ---------------------------------------------------------------------------------------------------- access

    @web.middleware
    async def _auth_middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._token is None and not is_loopback(_host(request)):
            return _error(403, "without a token this page is for this machine only: open it by localhost")
        if request.headers.get("Sec-Fetch-Site") == "cross-site":
            return _error(403, "another site asks: open the page itself")
        if request.path.startswith("/api/") and not self._is_allowed(request):
            return _error(401, "the token is missing or wrong: open the page by the address that atoll dash printed")
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return _error(404, "there is nothing here")
        except web.HTTPMethodNotAllowed:
            return _error(405, "not in this way")
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"more than {MAX_BODY_BYTES} bytes")
        except DashboardRequestError as error:
            return _error(error.status, str(error))
        except ConnectionResetError:
            raise  # it has gone away
        except Exception:
            log.exception("%s %s has failed", request.method, request.path)
            return _error(500, "atoll dash has failed on this; its log says how")

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
        for index, watched in enumerate(self.runs):
            picture = watched.history
            runs.append(
                {
                    "index": index,
                    "name": watched.name,
                    "simulated": picture.simulated if picture is not None else False,
                    "controls": self._may_control(watched.run),
                }
            )
        return _json({"runs": runs, "version": __version__})

    def _find_feed(self, request: web.Request) -> RunFeed:
        index = int(request.match_info["run"])
        if index >= len(self.runs):
            raise DashboardRequestError(404, f"there is no run {index} here")
        return self.runs[index]

    def _require_history(self, request: web.Request) -> RunHistory:
        picture = self._find_feed(request).history
        if picture is None:
            raise DashboardRequestError(503, "the run has not begun: there are no tapes yet")
        return picture

    async def _view(self, request: web.Request) -> web.StreamResponse:
        at = _number(request, "at")
        return _json(await self._run_in_reader(view_at, self._require_history(request), at))

    async def _timeline(self, request: web.Request) -> web.StreamResponse:
        width = int(_number(request, "width") or 1000)
        begin, end = _number(request, "from"), _number(request, "to")
        return _json(await self._run_in_reader(timeline, self._require_history(request), begin, end, width))

    async def _series(self, request: web.Request) -> web.StreamResponse:
        picture = self._require_history(request)
        if "names" not in request.query:
            known = await self._run_in_reader(curves.list_series, picture)
            return _json({"series": [{**each._asdict(), "x": ["time", "tokens"]} for each in known]})
        names, x = _names(request)
        points = min(int(_number(request, "points") or 600), MAX_POINTS)
        begin, end = _number(request, "from"), _number(request, "to")

        def draw() -> list[dict[str, Any]]:
            drawn = ((name, curves.compute_curve(picture, name, x, begin, end, max(2, points))) for name in names)
            return [{"name": name, "x": list(found.x), "y": list(found.y)} for name, found in drawn]

        return _json({"x": x, "series": await self._curves(draw)})

    async def _csv(self, request: web.Request) -> web.StreamResponse:
        picture = self._require_history(request)
        names, x = _names(request)
        text = await self._curves(lambda: curves.to_csv(picture, names, x))
        headers = {"Content-Disposition": f'attachment; filename="atoll-{x}.csv"'}
        return web.Response(text=text, content_type="text/csv", headers=headers)

    async def _curves(self, draw: Callable[[], T]) -> T:
        try:
            return await self._run_in_reader(draw)
        except KeyError as unknown:
            raise DashboardRequestError(404, f"there is no series {unknown}") from None

    async def _story(self, request: web.Request) -> web.StreamResponse:
        subject: Subject = ("run", 0)
        for kind in ("learner", "fragment"):
            number = _number(request, kind)
            if number is not None:
                subject = (kind, int(number))
        limit = min(int(_number(request, "limit") or 200), MAX_STORY_LINES)
        until = _number(request, "until")
        told = await self._run_in_reader(read_story, self._require_history(request), subject, until, max(1, limit))
        lines = [{"at": line.at, "subject": format_subject(line.subject), "text": line.sentence} for line in told.lines]
        return _json({"lines": lines, "has_more": told.has_more})

    async def _config(self, request: web.Request) -> web.StreamResponse:
        return _json(await self._run_in_reader(config_view, self._require_history(request)))

    # ---------------------------------------------------------------------------------------------------- live

    async def _live(self, request: web.Request) -> web.StreamResponse:
        watched = self._find_feed(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        sent: bytes | None = None
        watched.watchers += 1
        try:
            while True:
                if watched.view_json is not None and watched.view_json is not sent:
                    sent = watched.view_json
                    began = loop.time()
                    await response.write(b"event: view\ndata: " + sent + b"\n\n")
                    await asyncio.sleep(max(0.0, STREAM_INTERVAL_S - (loop.time() - began)))
                try:
                    async with asyncio.timeout(STREAM_KEEPALIVE_S), watched.view_changed:
                        while watched.view_json is sent:
                            await watched.view_changed.wait()
                except TimeoutError:
                    await response.write(b": still here\n\n")
        except (ConnectionResetError, ConnectionError):
            return response
        finally:
            watched.watchers -= 1

    # ---------------------------------------------------------------------------------------------------- controls

    async def _control(self, request: web.Request) -> web.StreamResponse:
        """Only with a token, from this page itself, and asked twice."""
        watched = self._find_feed(request)
        if self._token is None:
            raise DashboardRequestError(
                401, "this page only shows; start atoll dash with the run's token to control it"
            )
        if not self._may_control(watched.run):
            raise DashboardRequestError(503, "no syncer of this run can be reached from here with this token")
        origin = request.headers.get("Origin", "")
        if origin.partition("://")[2] != request.host:
            raise DashboardRequestError(403, "this must come from the page itself")
        if request.content_type != "application/json":
            raise DashboardRequestError(415, "this must be JSON")
        try:
            wanted = control.OperatorRequest.parse(json.loads(await request.read()))
        except RecursionError:
            raise DashboardRequestError(400, "this is no wish") from None
        except ValueError as error:
            raise DashboardRequestError(400, str(error)) from None
        if not wanted.is_confirmed:
            return _json({"prompt": wanted.confirmation_prompt()}, 409)
        done = await asyncio.get_running_loop().run_in_executor(None, control.apply_control, watched.run, wanted)
        log.warning("%s: %s, asked for by %s", watched.name, done, wanted.requested_by)
        return _json({"done": done})

    # ---------------------------------------------------------------------------------------------------- alerts

    async def _watch_alerts(self) -> None:
        """Log new alerts and those that are over."""
        while True:
            await asyncio.sleep(ALERT_INTERVAL_S)
            for index, watched in enumerate(self.runs):
                if watched.history is None or watched.view_json is None:
                    continue
                shown_now = json.loads(watched.view_json)
                alerts = shown_now["alerts"] if shown_now["live"] else []  # with the run its alerts are over
                now = {(index, each["rule"], each["subject"]): Alert(**each) for each in alerts}
                for key, alert in now.items():
                    if key not in self._active_alerts:
                        log.warning("%s: %s", watched.name, alert.text)
                for key in [key for key in self._active_alerts if key[0] == index and key not in now]:
                    log.warning("%s: over: %s", watched.name, self._active_alerts.pop(key).text)
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
        raise DashboardRequestError(400, f"{name} is {text[:40]!r}; give a number")
    return found


def _names(request: web.Request) -> tuple[list[str], str]:
    x = request.query.get("x", "time")
    if x not in ("time", "tokens"):
        raise DashboardRequestError(400, f"x is {x[:40]!r}; give time or tokens")
    return list(dict.fromkeys(filter(None, request.query.get("names", "").split(","))))[:MAX_SERIES_NAMES], x


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=_dumps(value), status=status, content_type="application/json")


def _error(status: int, sentence: str) -> web.Response:
    return _json({"error": sentence}, status)


# --------------------------------------------------------------------------------------------------------------------
# From a command line to a page that answers: where to listen, what to say, how to end

DEFAULT_PORT = 7410
PORT_ATTEMPTS = 20
"""Ports after the first that are tried where it is taken, unless one was asked for."""

SHUTDOWN_TIMEOUT_S = 1.0
"""Connections that are still open when the page ends, and browsers keep them open, are cut after this."""


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
    """Until Ctrl-C or SIGTERM. ValueError and TapeError for whatever is wrong with what was asked."""
    if token is None and not is_loopback(host):
        raise ValueError(f"--host {host} shows the run to others: give a token (--token or ATOLL_TOKEN) as well")
    if keys is None and not is_loopback(host) and not plain_text:
        raise ValueError(
            f"on {host} others could read the page and its token on the way: give --keys DIR with the syncer's key"
            f" (atoll keys init), or --plain-text where nobody else is on the network"
        )
    # Whoever looks has a browser and the token; keys of their own are not asked for.
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
        print(f"The page is at {address}", flush=True)
        print(_describe_access(token), flush=True)
        if open_browser:
            webbrowser.open(address.partition("#")[0])  # others can read a command line: the page asks for the token
        await _wait_for_shutdown(while_stdin)
    finally:
        await runner.cleanup()


def _describe_access(token: str | None) -> str:
    if token is None:
        return "It shows the run to this machine only, and changes nothing. Ctrl-C ends the page, not the run."
    return "Whoever has this address can see and control the run. Ctrl-C ends the page, not the run."


async def _wait_for_shutdown(while_stdin: bool) -> None:
    """By a signal; beside a job also by its end, whatever that was: then nobody holds the other end of stdin."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    if while_stdin:
        loop.add_reader(sys.stdin, told.set)  # nothing is ever written there
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    await told.wait()


def _listen(host: str, port: int | None) -> socket.socket:
    """On the port that was asked for, or the first free one of a few."""
    wanted = [port] if port is not None else [*range(DEFAULT_PORT, DEFAULT_PORT + PORT_ATTEMPTS), 0]
    for number in wanted[:-1]:
        with suppress(ValueError):
            return bind_socket(host, number, listen=True)
    return bind_socket(host, wanted[-1], listen=True)


def _format_url(host: str, port: int, token: str | None, scheme: str) -> str:
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(host, host)
    return f"{scheme}://{name}:{port}/" + (f"#token={quote(token, safe='')}" if token is not None else "")
