"""From a command line to a page that answers: where to listen, what to say, how to end."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

from atoll.dashboard.alerts import Rules
from atoll.dashboard.server import LOOPBACK, Dash, RunFeed
from atoll.transport.tls import ServerTls, key_files

PORT = 7410
TRIES = 20
"""Ports after the first that are tried where it is taken, unless one was asked for."""

FORCE_S = 1.0
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
    if token is None and host not in LOOPBACK:
        raise ValueError(f"--host {host} shows the run to others: give a token (--token or ATOLL_TOKEN) as well")
    if keys is None and host not in LOOPBACK and not plain_text:
        raise ValueError(
            f"on {host} others could read the page and its token on the way: give --keys DIR with the syncer's key"
            f" (atoll keys init), or --plain-text where nobody else is on the network"
        )
    # Whoever looks has a browser and the token; keys of their own are not asked for.
    tls = ServerTls(key_files(keys, of_syncer=True)._replace(authority=None)) if keys is not None else None
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(message)s")
    limits = Rules.load(rules) if rules is not None else None
    asyncio.run(_serve(runs, limits, host, port, token, wait, while_stdin, own_token, open_browser, tls))


async def _serve(
    runs: Sequence[Path],
    rules: Rules | None,
    host: str,
    port: int | None,
    token: str | None,
    wait: bool,
    while_stdin: bool,
    own_token: bool,
    open_browser: bool,
    tls: ServerTls | None,
) -> None:
    watched = [RunFeed(run, rules) for run in runs]
    if not wait:
        for each in watched:
            each.begin()
    listening = _listen(host, port)
    runner = web.AppRunner(Dash(watched, token, own_token).app(), access_log=None, shutdown_timeout=FORCE_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listening, ssl_context=tls.context if tls is not None else None).start()
        address = _address(host, listening.getsockname()[1], token, "https" if tls is not None else "http")
        print(f"The page is at {address}", flush=True)
        print(_what(token), flush=True)
        if open_browser:
            webbrowser.open(address.partition("#")[0])  # others can read a command line: the page asks for the token
        await _until_told(while_stdin)
    finally:
        await runner.cleanup()


def _what(token: str | None) -> str:
    if token is None:
        return "It shows the run to this machine only, and changes nothing. Ctrl-C ends the page, not the run."
    return "Whoever has this address can see and control the run. Ctrl-C ends the page, not the run."


async def _until_told(while_stdin: bool) -> None:
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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    wanted = [port] if port is not None else [*range(PORT, PORT + TRIES), 0]
    for number in wanted:
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host.strip("[]"), number))
            listening.listen(64)
        except OSError as wrong:
            listening.close()
            if wrong.errno == errno.EADDRINUSE and number != wanted[-1]:
                continue
            raise ValueError(f"cannot listen on {host}, port {number}: {wrong.strerror}") from None
        return listening
    raise AssertionError("one of the ports was the last")


def _address(host: str, port: int, token: str | None, scheme: str) -> str:
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(host, host)
    return f"{scheme}://{name}:{port}/" + (f"#token={quote(token, safe='')}" if token is not None else "")
