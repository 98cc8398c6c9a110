"""The page's server: shapes, access, hostile requests, live news, a run that begins later, alerts."""

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
async def client_of(*runs, token=None, rules=None):
    dash = DashboardServer([RunFeed(run, rules) for run in runs], token)
    async with TestClient(TestServer(dash.app())) as client:
        yield client


async def until_read(client, index=0):
    """The first picture that has islands in it."""
    async with client.get(f"/api/run/{index}/live") as answer:
        while True:
            shown = await next_picture(answer)
            if shown["islands"]:
                return shown


def go(work):
    return asyncio.run(asyncio.wait_for(work, 60))


# --------------------------------------------------------------------------------------------------------------------
# What it serves


def test_every_path_answers_in_the_shape_of_the_contract(run):
    async def talk():
        async with client_of(run) as client:
            await until_read(client)
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

    go(talk())


def test_two_runs_are_served_side_by_side_and_a_third_is_not_there(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")

    async def talk():
        async with client_of(run, other) as client:
            assert (await until_read(client, 1))["stage"] == "finished"
            runs = await (await client.get("/api/runs")).json()
            assert [each["index"] for each in runs["runs"]] == [0, 1]
        async with client_of(run) as client:
            answer = await client.get("/api/run/1/view")
            assert answer.status == 404
            assert "no run 1" in (await answer.json())["error"]

    go(talk())


def test_live_news_come_as_the_tape_grows(tmp_path):
    tiny = TinyRun().run_until(5.0)
    run = tiny.save(tmp_path / "run")

    async def talk():
        async with client_of(run) as client:
            answer = await client.get("/api/run/0/live")
            assert answer.content_type == "text/event-stream"
            first = await next_picture(answer)
            shutil.rmtree(run / "tapes")
            tiny.run_until(9.0).save(run)
            second = await next_picture(answer)
            while second["to"] <= first["to"]:
                second = await next_picture(answer)
            assert second["headline"]["tokens"] > first["headline"]["tokens"]

    go(talk())


async def next_picture(answer):
    """The data of the next event, in pieces of any size."""
    async with asyncio.timeout(20):
        while True:
            line = (await answer.content.readuntil(b"\n")).decode()
            if line.startswith("data: "):
                return json.loads(line.removeprefix("data: "))


def test_a_run_that_has_not_begun_is_waited_for(tmp_path):
    (tmp_path / "run").mkdir()

    async def talk():
        async with client_of(tmp_path / "run") as client:
            early = await client.get("/api/run/0/view")
            assert early.status == 503
            assert "not begun" in (await early.json())["error"]
            TinyRun().run_until(5.0).save(tmp_path / "run")
            assert (await until_read(client))["stage"] == "running"

    go(talk())


# --------------------------------------------------------------------------------------------------------------------
# Who may


def test_without_the_token_nothing_of_the_run_is_shown(run):
    async def talk():
        async with client_of(run, token=TOKEN) as client:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {TOKEN}x"}):
                for path in ("/api/runs", "/api/run/0/view", "/api/run/0/live", "/api/run/0/story"):
                    answer = await client.get(path, headers=headers)
                    assert answer.status == 401, path
                    assert "token" in (await answer.json())["error"]
            assert (await client.get("/api/runs", headers=AUTHORIZED)).status == 200

    go(talk())


def test_without_a_token_other_names_of_this_machine_are_refused(run):
    """A page elsewhere whose name is made to point here must not read the run through somebody's browser."""

    async def talk():
        async with client_of(run) as client:
            answer = await client.get("/api/runs", headers={"Host": "evil.example:7410"})
            assert answer.status == 403
        async with client_of(run, token=TOKEN) as client:
            answer = await client.get("/api/runs", headers={"Host": "head.example:7410", **AUTHORIZED})
            assert answer.status == 200

    go(talk())


def test_every_answer_has_the_strict_headers(run):
    async def talk():
        async with client_of(run) as client:
            for path in ("/api/runs", "/nothing", "/api/run/0/view?at=x"):
                answer = await client.get(path)
                assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
            live = await client.get("/api/run/0/live")
            assert live.headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]

    go(talk())


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
def test_files_beside_the_static_ones_are_not_served(run, path):
    async def talk():
        async with client_of(run) as client, ClientSession() as session:
            from yarl import URL

            answer = await session.get(URL(f"{client.make_url('/')}".rstrip("/") + path, encoded=True))
            assert answer.status in (400, 404)
            assert b"import" not in await answer.read()

    go(talk())


def test_other_sites_are_refused(run):
    """Without a token a browser would fetch for any page that somebody has open."""

    async def talk():
        async with client_of(run) as client:
            for path in ("/api/runs", "/api/run/0/story", "/index.html"):
                answer = await client.get(path, headers={"Sec-Fetch-Site": "cross-site"})
                assert answer.status == 403

    go(talk())


def test_a_run_that_falls_silent_is_drawn_all_the_same(tmp_path, monkeypatch):
    """Its age and its alerts grow although nothing is written."""
    monkeypatch.setattr(serving, "MAX_VIEW_AGE_S", 0.1)
    run = TinyRun().run_until(5.0).save(tmp_path / "run")
    (run / "store").mkdir()
    (run / "store" / "run.json").write_text(json.dumps({"value": {"founded_at": 1.0}}))
    for tape in (run / "tapes").iterdir():
        os.utime(tape, (time.time() - 55.5, time.time() - 55.5))

    async def talk():
        async with client_of(run, rules=AlertRules(stale_s=56.0)) as client:
            answer = await client.get("/api/run/0/live")
            shown = await next_picture(answer)
            while not shown["alerts"]:
                shown = await next_picture(answer)
            assert [each["rule"] for each in shown["alerts"]] == ["stale"]

    go(talk())


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
        ("/api/run/0/series?names=throughput.nobody", 404),
        ("/api/run/0/story?limit=-3", 200),
        ("/api/run/7/view", 404),
    ],
)
def test_odd_questions_get_answers(run, path, status):
    async def talk():
        async with client_of(run) as client:
            await until_read(client)
            answer = await client.get(path)
            assert answer.status == status
            json.loads(await answer.read())

    go(talk())


# --------------------------------------------------------------------------------------------------------------------
# Controls


def wish(**changes):
    return {"action": "pause", "requested_by": "somebody", **changes}


def own(client):
    return {"Origin": str(client.make_url("/")).rstrip("/"), **AUTHORIZED}


@pytest.fixture
def reachable(run, tmp_path):
    """A run whose syncer has told where it is; nobody listens there."""
    copied = shutil.copytree(run, tmp_path / "reachable")
    write_address_file(copied, SyncerAddress("127.0.0.1:9", TOKEN, 1))
    return copied


def test_controls_are_asked_twice_and_need_a_syncer_of_that_token(run, tmp_path):
    run = shutil.copytree(run, tmp_path / "run")

    async def talk():
        async with client_of(run, token=TOKEN) as client:
            nobody = await client.post("/api/run/0/control", json=wish(), headers=own(client))
            assert nobody.status == 503
            assert "no syncer" in (await nobody.json())["error"]
            write_address_file(run, SyncerAddress("127.0.0.1:9", TOKEN, 1))
            first = await client.post("/api/run/0/control", json=wish(), headers=own(client))
            assert first.status == 409
            assert "stand still" in (await first.json())["prompt"]
            sure = await client.post("/api/run/0/control", json=wish(confirmed=True), headers=own(client))
            assert sure.status == 503
            assert "no syncer answers" in (await sure.json())["error"]
            write_address_file(run, SyncerAddress("127.0.0.1:9", "another run's", 1))
            other = await client.post("/api/run/0/control", json=wish(confirmed=True), headers=own(client))
            assert other.status == 503
            runs = await (await client.get("/api/runs", headers=AUTHORIZED)).json()
            assert runs["runs"][0]["controls"] is False

    go(talk())


def test_controls_from_elsewhere_are_refused(run, reachable):
    async def talk():
        async with client_of(reachable, token=TOKEN) as client:
            for headers, status in (
                ({}, 401),
                (AUTHORIZED, 403),
                ({**AUTHORIZED, "Origin": "http://evil.example"}, 403),
                ({**AUTHORIZED, "Origin": "null"}, 403),
            ):
                answer = await client.post("/api/run/0/control", json=wish(), headers=headers)
                assert answer.status == status, headers
            form = await client.post("/api/run/0/control", data=json.dumps(wish()), headers=own(client))
            assert form.status == 415
        async with client_of(run) as client:
            headers = {"Origin": str(client.make_url("/")).rstrip("/")}
            answer = await client.post("/api/run/0/control", json=wish(confirmed=True), headers=headers)
            assert answer.status == 401

    go(talk())


@pytest.mark.parametrize(
    "raw",
    [
        [],
        {},
        {"action": "explode", "requested_by": "me"},
        wish(requested_by=""),
        wish(requested_by=7),
        wish(requested_by="x" * 200),
        wish(action="drain"),
        wish(action="drain", value="3"),
        wish(action="drain", value=True),
        wish(action="quorum", value=0),
        wish(action="grace", value=1.5),
        wish(action="grace", value="much"),
        [[[[[[[[]]]]]]]],
    ],
)
def test_wishes_that_make_no_sense_are_refused_with_a_sentence(reachable, raw):
    async def talk():
        async with client_of(reachable, token=TOKEN) as client:
            answer = await client.post("/api/run/0/control", json=raw, headers=own(client))
            assert answer.status == 400
            assert (await answer.json())["error"]

    go(talk())


# --------------------------------------------------------------------------------------------------------------------
# Alerts


def test_alerts_go_to_the_log_and_are_called_off(tmp_path, monkeypatch):
    """Learner 2 is dead for long, then comes back. Times are the tape's, so nobody waits."""
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
            async with client_of(run, rules=AlertRules(down_s=5.0)) as client:
                await until_read(client)
                assert "run: learner 2 is away for " in await asyncio.wait_for(logged.get(), 20)
                tiny.start(2)
                shutil.rmtree(run / "tapes")
                tiny.run_until(40.0).save(run)
                assert "run: over: learner 2 is away for " in await asyncio.wait_for(logged.get(), 20)
        finally:
            serving.log.removeHandler(handler)

    go(talk())
