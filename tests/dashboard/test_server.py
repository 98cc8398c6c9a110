"""Server of the page: formats, access, hostile requests, live updates, a run that starts later, alerts."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestClient, TestServer

from atoll.dashboard import server as serving
from atoll.dashboard.alerts import AlertRules
from atoll.dashboard.server import HEADERS, DashboardServer, RunFeed
from atoll.transport.endpoint import SyncerAddress, write_address_file
from tests.tiny_run import TinyRun, eventful_run

TOKEN = "a secret of four words"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return eventful_run().save(tmp_path_factory.mktemp("eventful"))


@asynccontextmanager
async def connect_client(*runs, token=None, rules=None):
    dash = DashboardServer([RunFeed(run, rules) for run in runs], token)
    async with TestClient(TestServer(dash.app())) as client:
        yield client


async def wait_until_read(client, index=0):
    """Return the first view with islands."""
    async with client.get(f"/api/run/{index}/live") as reply:
        while True:
            shown = await next_view(reply)
            if shown["islands"]:
                return shown


def run_async(work):
    return asyncio.run(asyncio.wait_for(work, 60))


# --------------------------------------------------------------------------------------------------------------------
# Data


def test_every_path_replies_in_documented_format(run):
    async def talk():
        async with connect_client(run) as client:
            await wait_until_read(client)
            runs = await (await client.get("/api/runs")).json()
            assert [each["name"] for each in runs["runs"]] == [run.name]
            assert runs["runs"][0]["controls"] is False
            past = await (await client.get("/api/run/0/view?at=13")).json()
            assert past["at"] == 13.0
            timeline = await (await client.get("/api/run/0/timeline?from=5&to=15&width=300")).json()
            assert {"islands", "syncer", "marks", "rounds", "from", "to"} == set(timeline)
            series = await (await client.get("/api/run/0/series")).json()
            names = ",".join(each["name"] for each in series["series"])
            curves = await (await client.get(f"/api/run/0/series?names={names}&x=tokens&points=20")).json()
            assert all(len(each["x"]) == len(each["y"]) <= 20 for each in curves["series"])
            table = await client.get("/api/run/0/series.csv?names=goodput")
            assert table.content_type == "text/csv"
            assert "attachment" in table.headers["Content-Disposition"]
            story = await (await client.get("/api/run/0/story?learner=2&limit=4")).json()
            assert len(story["lines"]) == 4
            assert {"at", "subject", "text"} == set(story["lines"][0])
            config = await (await client.get("/api/run/0/config")).json()
            assert config["config"]["fragments"] == 3

    run_async(talk())


def test_two_runs_are_served_and_unknown_run_is_404(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")

    async def talk():
        async with connect_client(run, other) as client:
            assert (await wait_until_read(client, 1))["stage"] == "finished"
            runs = await (await client.get("/api/runs")).json()
            assert [each["index"] for each in runs["runs"]] == [0, 1]
        async with connect_client(run) as client:
            reply = await client.get("/api/run/1/view")
            assert reply.status == 404
            assert "no run 1" in (await reply.json())["error"]

    run_async(talk())


def test_live_stream_follows_growing_tape(tmp_path):
    tiny = TinyRun().run_until(5.0)
    run = tiny.save(tmp_path / "run")

    async def talk():
        async with connect_client(run) as client:
            reply = await client.get("/api/run/0/live")
            assert reply.content_type == "text/event-stream"
            first = await next_view(reply)
            shutil.rmtree(run / "tapes")
            tiny.run_until(9.0).save(run)
            second = await next_view(reply)
            while second["to"] <= first["to"]:
                second = await next_view(reply)
            assert second["headline"]["tokens"] > first["headline"]["tokens"]

    run_async(talk())


async def next_view(reply):
    """Return the data of the next event, whatever chunks it arrives in."""
    async with asyncio.timeout(20):
        while True:
            line = (await reply.content.readuntil(b"\n")).decode()
            if line.startswith("data: "):
                return json.loads(line.removeprefix("data: "))


def test_server_waits_for_run_to_start(tmp_path):
    (tmp_path / "run").mkdir()

    async def talk():
        async with connect_client(tmp_path / "run") as client:
            early = await client.get("/api/run/0/view")
            assert early.status == 503
            assert "not started" in (await early.json())["error"]
            TinyRun().run_until(5.0).save(tmp_path / "run")
            assert (await wait_until_read(client))["stage"] == "running"

    run_async(talk())


# --------------------------------------------------------------------------------------------------------------------
# Access


def test_data_needs_token(run):
    async def talk():
        async with connect_client(run, token=TOKEN) as client:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {TOKEN}x"}):
                for path in ("/api/runs", "/api/run/0/view", "/api/run/0/live", "/api/run/0/story"):
                    reply = await client.get(path, headers=headers)
                    assert reply.status == 401, path
                    assert "token" in (await reply.json())["error"]
            assert (await client.get("/api/runs", headers=AUTHORIZED)).status == 200

    run_async(talk())


def test_without_token_other_host_names_are_refused(run):
    """DNS rebinding: a site whose name resolves to this host must not read the run through a user's browser."""

    async def talk():
        async with connect_client(run) as client:
            reply = await client.get("/api/runs", headers={"Host": "evil.example:7410"})
            assert reply.status == 403
        async with connect_client(run, token=TOKEN) as client:
            reply = await client.get("/api/runs", headers={"Host": "head.example:7410", **AUTHORIZED})
            assert reply.status == 200

    run_async(talk())


def test_every_reply_has_security_headers(run):
    async def talk():
        async with connect_client(run) as client:
            for path in ("/api/runs", "/nothing", "/api/run/0/view?at=x"):
                reply = await client.get(path)
                assert {name: reply.headers.get(name) for name in HEADERS} == HEADERS
            live = await client.get("/api/run/0/live")
            assert live.headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]

    run_async(talk())


@pytest.mark.parametrize(
    "path",
    [
        "/../server.py",
        "/..%2fserver.py",
        "/vendor/..%2f..%2fserver.py",
        "/%2e%2e/server.py",
        "/vendor/../../server.py",
        "/etc/passwd",
        "/static",
    ],
)
def test_files_outside_static_folder_are_not_served(run, path):
    async def talk():
        async with connect_client(run) as client, ClientSession() as session:
            from yarl import URL

            reply = await session.get(URL(f"{client.make_url('/')}".rstrip("/") + path, encoded=True))
            assert reply.status in (400, 404)
            assert b"import" not in await reply.read()

    run_async(talk())


def test_cross_site_requests_are_refused(run):
    """Without a token, a browser would load the data for any site that a user has open."""

    async def talk():
        async with connect_client(run) as client:
            for path in ("/api/runs", "/api/run/0/story", "/index.html"):
                reply = await client.get(path, headers={"Sec-Fetch-Site": "cross-site"})
                assert reply.status == 403

    run_async(talk())


def test_silent_run_is_still_updated(tmp_path, monkeypatch):
    """Age and alerts of a run change even if nothing is written."""
    monkeypatch.setattr(serving, "MAX_VIEW_AGE_S", 0.1)
    run = TinyRun().run_until(5.0).save(tmp_path / "run")
    (run / "store").mkdir()
    (run / "store" / "run.json").write_text(json.dumps({"value": {"founded_at": 1.0}}))
    for tape in (run / "tapes").iterdir():
        os.utime(tape, (time.time() - 55.5, time.time() - 55.5))

    async def talk():
        async with connect_client(run, rules=AlertRules(stale_s=56.0)) as client:
            reply = await client.get("/api/run/0/live")
            shown = await next_view(reply)
            while not shown["alerts"]:
                shown = await next_view(reply)
            assert [each["rule"] for each in shown["alerts"]] == ["stale"]

    run_async(talk())


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/run/0/view?at=nan", 400),
        ("/api/run/0/view?at=1e400", 400),
        ("/api/run/0/view?at=';--", 400),
        ("/api/run/0/timeline?width=-5", 200),
        ("/api/run/0/timeline?from=9&to=3", 200),
        ("/api/run/0/series?names=no.such", 404),
        ("/api/run/0/series?names=goodput&points=999999999", 200),
        ("/api/run/0/series?names=goodput&x=moon", 400),
        ("/api/run/0/story?learner=99", 200),
        ("/api/run/0/story?until=1e300", 200),
        ("/api/run/0/series?names=throughput.learner.²", 404),
        ("/api/run/0/series?names=throughput.unknown", 404),
        ("/api/run/0/story?limit=-3", 200),
        ("/api/run/7/view", 404),
    ],
)
def test_unusual_queries_get_replies(run, path, status):
    async def talk():
        async with connect_client(run) as client:
            await wait_until_read(client)
            reply = await client.get(path)
            assert reply.status == status
            json.loads(await reply.read())

    run_async(talk())


# --------------------------------------------------------------------------------------------------------------------
# Controls


def control_request(**changes):
    return {"action": "pause", "requested_by": "ada", **changes}


def own_origin(client):
    return {"Origin": str(client.make_url("/")).rstrip("/"), **AUTHORIZED}


@pytest.fixture
def reachable(run, tmp_path):
    """Return a run with a syncer address on which no process listens."""
    copied = shutil.copytree(run, tmp_path / "reachable")
    write_address_file(copied, SyncerAddress("127.0.0.1:9", TOKEN, 1))
    return copied


def test_controls_need_confirmation_and_syncer_with_same_token(run, tmp_path):
    run = shutil.copytree(run, tmp_path / "run")

    async def talk():
        async with connect_client(run, token=TOKEN) as client:
            missing = await client.post("/api/run/0/control", json=control_request(), headers=own_origin(client))
            assert missing.status == 503
            assert "no syncer" in (await missing.json())["error"]
            write_address_file(run, SyncerAddress("127.0.0.1:9", TOKEN, 1))
            first = await client.post("/api/run/0/control", json=control_request(), headers=own_origin(client))
            assert first.status == 409
            assert "pause after their current step" in (await first.json())["prompt"]
            confirmed = await client.post(
                "/api/run/0/control", json=control_request(confirmed=True), headers=own_origin(client)
            )
            assert confirmed.status == 503
            assert "no syncer answers" in (await confirmed.json())["error"]
            write_address_file(run, SyncerAddress("127.0.0.1:9", "another run's", 1))
            other = await client.post(
                "/api/run/0/control", json=control_request(confirmed=True), headers=own_origin(client)
            )
            assert other.status == 503
            runs = await (await client.get("/api/runs", headers=AUTHORIZED)).json()
            assert runs["runs"][0]["controls"] is False

    run_async(talk())


def test_controls_from_other_origins_are_refused(run, reachable):
    async def talk():
        async with connect_client(reachable, token=TOKEN) as client:
            for headers, status in (
                ({}, 401),
                (AUTHORIZED, 403),
                ({**AUTHORIZED, "Origin": "http://evil.example"}, 403),
                ({**AUTHORIZED, "Origin": "null"}, 403),
            ):
                reply = await client.post("/api/run/0/control", json=control_request(), headers=headers)
                assert reply.status == status, headers
            form = await client.post(
                "/api/run/0/control", data=json.dumps(control_request()), headers=own_origin(client)
            )
            assert form.status == 415
        async with connect_client(run) as client:
            headers = {"Origin": str(client.make_url("/")).rstrip("/")}
            reply = await client.post("/api/run/0/control", json=control_request(confirmed=True), headers=headers)
            assert reply.status == 401

    run_async(talk())


@pytest.mark.parametrize(
    "raw",
    [
        [],
        {},
        {"action": "explode", "requested_by": "me"},
        control_request(requested_by=""),
        control_request(requested_by=7),
        control_request(requested_by="x" * 200),
        control_request(action="drain"),
        control_request(action="drain", value="3"),
        control_request(action="drain", value=True),
        control_request(action="quorum", value=0),
        control_request(action="grace", value=1.5),
        control_request(action="grace", value="much"),
        [[[[[[[[]]]]]]]],
    ],
)
def test_invalid_control_requests_are_refused(reachable, raw):
    async def talk():
        async with connect_client(reachable, token=TOKEN) as client:
            reply = await client.post("/api/run/0/control", json=raw, headers=own_origin(client))
            assert reply.status == 400
            assert (await reply.json())["error"]

    run_async(talk())


# --------------------------------------------------------------------------------------------------------------------
# Alerts


def test_alerts_are_logged_at_start_and_end(tmp_path, monkeypatch):
    """Learner 2 is lost, then returns. Times are those of the tape, so the test does not wait."""
    monkeypatch.setattr(serving, "ALERT_INTERVAL_S", 0.05)
    tiny = TinyRun().run_until(10.0)
    tiny.kill(2)
    run = tiny.run_until(30.0).save(tmp_path / "run")

    async def talk():
        logged: asyncio.Queue[str] = asyncio.Queue()
        handler = logging.Handler()
        handler.emit = lambda record: logged.put_nowait(record.getMessage())  # type: ignore[method-assign]
        serving.log.addHandler(handler)
        try:
            async with connect_client(run, rules=AlertRules(down_s=5.0)) as client:
                await wait_until_read(client)
                assert "run: alert: learner 2 is lost for " in await asyncio.wait_for(logged.get(), 20)
                tiny.start(2)
                shutil.rmtree(run / "tapes")
                tiny.run_until(40.0).save(run)
                assert "run: alert ended: learner 2 is lost for " in await asyncio.wait_for(logged.get(), 20)
        finally:
            serving.log.removeHandler(handler)

    run_async(talk())
