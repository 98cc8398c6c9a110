"""Invalid bytes are refused with a message and counted. They close the connection of their sender and no other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
from msgspec import structs

from atoll.core.protocol import (
    Contribution,
    DownloadTime,
    Left,
    OptimizerState,
    Ping,
    Pong,
    Pull,
    Ready,
    Refuse,
    Report,
)
from atoll.core.reasons import Reason
from atoll.core.types import RoundId
from atoll.tensors.codecs import get_codec
from atoll.tensors.settings import Numerics
from atoll.transport.wire import CODEC_NUMBERS, WIRE_VERSION, FrameKind, encode_frame_head, encode_message
from tests.learner.runs import LIMIT_S, LearnerSpec, Run, endless
from tests.syncer.raw_learner import RawLearner

READY = Ready(Reason("state-kept"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Start one run for all tests. A learner trains all the time, and no test may affect it."""
    with Run(tmp_path_factory.mktemp("hostile"), endless(fragments=2, every_steps=2)) as run:
        (good,) = run.joined(LearnerSpec(1, pace_s=0.005))
        run.go(good)
        run.until(run.merges(2), "the run trains")
        yield run
        run.end()
        run.assert_same(run.finish(good), 1)
        assert run.log_lines(good, "connection closed: ") == []
        assert run.log_lines(run.syncer, " ERROR ") == []
        assert run.log_lines(run.syncer, "never retrieved") == []
        run.verdict()  # for the tapes that exist: clients write none


@pytest.fixture(autouse=True)
def learner_is_unaffected(run: Run) -> Iterator[None]:
    before = run.status()
    yield
    run.until(run.merges(before["merges"] + 2), "the run continues")
    one = run.until(run.learner(1), "learner 1 is shown")
    assert (one["standing"], one["link"], one["incarnation"]) == ("live", "up", 1)


def refused_count(run: Run, code: str) -> int:
    return int(run.status()["refused"].get(code, 0))


def with_raw_learner(
    run: Run, learner: int, test: Callable[[RawLearner], Awaitable[Any]], incarnation: int | None = None
) -> Any:
    """Run a test coroutine with a raw client that has the number of this learner."""
    if incarnation is None:
        _, body = run.request("POST", "/v1/join", json.dumps({"learner": learner}).encode())
        incarnation = json.loads(body)["incarnation"]

    async def run_test() -> Any:
        async with RawLearner(run, learner, incarnation) as client:
            return await test(client)

    return asyncio.run(run_test())


async def join_and_train(client: RawLearner) -> Pull:
    """Join, train one step, and wait for a pull."""
    await client.join()
    await client.send(READY)
    step = 0
    while True:
        step += 1
        client.step = step  # type: ignore[attr-defined]
        await client.send(Report(step, 16 * step, 0.01))
        await client.send(Ping(step))
        found = await client.receive(Pull, Pong)
        if isinstance(found, Pull):
            return found


# --------------------------------------------------------------------------------------------------------------------
# Requests

PING = b'ATLL\x04["Envelope",1,1,1,0,7,3,0,["Ping",5]]'


def head(
    kind: int = 1,
    codec: int = 1,
    header: int = 0,
    payload: int = 0,
    magic: bytes = b"ATLF",
    version: int = WIRE_VERSION,
):
    return struct.pack("<4sBBBBIQ", magic, version, kind, codec, 0, header, payload) + bytes(16)


INVALID_BODIES = {
    "not Atoll": (b"GET me something, and make it long enough for a whole head", "magic"),
    "nothing": (b"", "truncated"),
    "half a head": (head()[:20], "truncated"),
    "another version": (head(version=9), "version"),
    "no such kind": (head(kind=77), "kind"),
    "a model": (encode_frame_head(FrameKind.MODEL, 0, b"{}", b"") + b"{}", "kind"),
    "no such codec": (head(codec=200), "codec"),
    "a header of 4 GiB": (head(header=2**32 - 1), "size"),
    "a payload of 16 EiB": (head(payload=2**64 - 1), "size"),
    "a header that is no message": (head(header=2) + b"{}", "magic"),
    "a header that is cut": (head(header=10) + b"ATLL", "truncated"),
    "a message that is none": (head(header=6) + b"ATLL\x04{", "json"),
    "another message": (head(header=len(PING)) + PING, "type"),
}


@pytest.mark.parametrize("path", ["/v1/contribution", "/v1/state"])
@pytest.mark.parametrize("name", INVALID_BODIES)
def test_invalid_frame_is_refused_with_its_code(run, path, name):
    body, code = INVALID_BODIES[name]
    if path == "/v1/state" and body[:4] == b"ATLF" and body[5] == 1:  # the same, as the kind that belongs there
        body = body[:5] + b"\x03" + (body[6:7] if code == "codec" else b"\x00") + body[7:]
    before = refused_count(run, code)
    status, answer = run.request("PUT", path, body)
    reply = json.loads(answer)
    assert (status, reply["code"]) == (400, code), reply
    assert len(reply["error"]) > 10
    assert refused_count(run, code) == before + 1


def test_frame_of_closed_link_is_refused_without_strike(run):
    before = run.status()["refused"]
    client = RawLearner(run, 50)
    body = Contribution(RoundId(0, 0, 1, 1), 1, 1, 16, 16, 0)
    status, answer = run.request("PUT", "/v1/contribution", client.frame(body, client.values(0)))
    assert status == 409
    assert b"closed" in answer
    assert run.status()["refused"] == before


WRONG_PATHS = [
    ("GET", "/v1/fragment/99/0", 404),
    ("GET", f"/v1/fragment/{'9' * 4500}/0", 404),
    ("GET", "/v1/fragment/0/123456789", 410),
    ("GET", "/v1/fragment/0/0?base=nonsense", 410),
    ("GET", "/v1/fragment/-1/0", 404),
    ("GET", "/v1/fragment/%D9%A1/0", 404),
    ("GET", "/v1/state/9/9", 404),
    ("GET", "/v1/state/../../../etc/passwd", 404),
    ("GET", "/v1/nothing", 404),
    ("DELETE", "/v1/run", 405),
    ("GET", "/v1/link", 400),
]


@pytest.mark.parametrize(("method", "path", "code"), WRONG_PATHS, ids=lambda value: str(value)[:30])
def test_unknown_path_is_not_found(run, method, path, code):
    assert run.request(method, path)[0] == code


@pytest.mark.parametrize(
    "body", [b"", b"no JSON", b"[]", b'{"learner": 0}', b'{"learner": true}', b'{"learner": "1"}', b'{"learner": 1e9}']
)
def test_invalid_join_is_refused(run, body):
    status, answer = run.request("POST", "/v1/join", body)
    assert status == 400
    assert json.loads(answer)["code"] in ("json", "type")


def test_bytes_that_are_not_http_close_only_their_connection(run):
    host, _, port = run.address.rpartition(":")
    for data in (
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PUT /v1/state HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=LIMIT_S) as raw:
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            answer = raw.recv(4096)
            assert answer == b"" or b" 400 " in answer.split(b"\r\n")[0], answer


def test_interrupted_upload_is_dropped(run):
    host, _, port = run.address.rpartition(":")
    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=LIMIT_S) as raw:
            raw.sendall(b"PUT /v1/contribution HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nATLF\x04")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset


# --------------------------------------------------------------------------------------------------------------------
# Models

OTHER_MODEL = {
    "no plan": (b"[]", 400, "a fragment plan must be an object"),
    "no JSON": (b"{", 400, "bad JSON"),
    "a plan with a hole": (
        b'{"how":"balanced","tensors":[["a",[4],"float32","weight",""]],"fragments":[[[0,0,3]]]}',
        400,
        "3 of 4 rows of a",
    ),
    "a plan for all memory on earth": (
        b'{"how":"balanced","tensors":[["a",[281474976710656],"float32","weight",""]],"fragments":[[[0,0,281474976710656]]]}',
        413,
        "larger than this syncer takes",
    ),
    "another model": (
        b'{"how":"balanced","tensors":[["a",[4],"float32","weight",""]],"fragments":[[[0,0,4]]]}',
        409,
        "'a' (4 float32 weight), which the run does not have",
    ),
    "another kind of plan": (
        b'{"how":"rows","tensors":[["a",[4],"float32","weight",""]],"fragments":[[[0,0,4]]]}',
        409,
        "the run's is balanced",
    ),
}


@pytest.mark.parametrize("name", OTHER_MODEL)
def test_upload_of_another_model_is_refused(run, name):
    plan, status, message = OTHER_MODEL[name]
    code, answer = run.request("PUT", "/v1/model", encode_frame_head(FrameKind.MODEL, 0, b"{}", plan) + b"{}" + plan)
    assert code == status, answer
    assert message in json.loads(answer)["error"]


def test_repeated_upload_of_same_model_is_accepted(run):
    plan = json.dumps(RawLearner(run, 50).plan.to_json()).encode()
    code, answer = run.request("PUT", "/v1/model", encode_frame_head(FrameKind.MODEL, 0, b"{}", plan) + b"{}" + plan)
    assert (code, json.loads(answer)) == (200, {"founded": False})


# --------------------------------------------------------------------------------------------------------------------
# Links

INVALID_MESSAGES = {
    "not Atoll": (b"HELO me", "magic"),
    "another version": (b"ATLL\x01[]", "version"),
    "no JSON": (b"ATLL\x04[", "json"),
    "no envelope": (b'ATLL\x04["Ping",1]', "type"),
    "not a number": (b'ATLL\x04["Envelope",1,1,1,0,7,3,0,["Report",1,1,NaN]]', "json"),
    "a number of 65 bits": (b'ATLL\x04["Envelope",1,1,1,0,7,3,0,["Ping",%d]]' % 2**64, "json"),
    "a message of a syncer": (b'ATLL\x04["Envelope",1,1,1,0,7,3,0,["Pong",1]]', "type"),
    "no hello first": (PING, "type"),
    "too long": (b"ATLL\x04" + b" " * (4 * 2**20), "size"),
}


@pytest.mark.parametrize("name", INVALID_MESSAGES)
def test_invalid_message_closes_its_link_with_message(run, name):
    data, code = INVALID_MESSAGES[name]
    before = refused_count(run, code)

    async def test(client: RawLearner) -> tuple[int, str]:
        with contextlib.suppress(ConnectionError):  # a message that is too long is not read to its end
            await client.socket.send_bytes(data)
        return await client.wait_closed()

    closing, message = with_raw_learner(run, 50, test)
    assert name == "too long" or (closing == 1008 and message)
    assert refused_count(run, code) == before + 1


def test_message_of_another_learner_closes_the_link(run):
    async def test(client: RawLearner) -> tuple[int, str]:
        await client.join()
        client.learner = 1
        await client.send(Left("I am learner 1, believe me"))
        return await client.wait_closed()

    closing, message = with_raw_learner(run, 51, test)
    assert closing == 1008
    assert message == "this link belongs to learner 51, the message says 1"


@pytest.mark.parametrize("body", ["contribution", "state"])
def test_values_are_refused_on_the_link(run, body):
    async def test(client: RawLearner) -> tuple[int, str]:
        await client.join()
        from atoll.core.types import RoundId

        await client.send(
            Contribution(RoundId(0, 0, 1, 1), 1, 1, 1, 1, 0)
            if body == "contribution"
            else OptimizerState(52, 1, 1, 1, (0, 0))
        )
        return await client.wait_closed()

    closing, message = with_raw_learner(run, 52, test)
    assert (closing, "needs a frame with its values" in message) == (1008, True)


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        ({"run_id": "another"}, "refused-run"),
        ({"fingerprint": ("first.bias 99 float32 weight",)}, "refused-fingerprint"),
        ({"received": (0,)}, "refused-fingerprint"),
        ({"trained": 10**15}, "refused-implausible"),
        ({"step": -1}, "refused-implausible"),
    ],
)
def test_refused_hello_gets_reason_is_counted_and_closed(run, hello, code):
    before = refused_count(run, code)

    async def test(client: RawLearner) -> Refuse:
        await client.send(client.hello(**hello))
        refuse: Refuse = await client.receive(Refuse)
        assert (await client.wait_closed())[0] == 1001
        return refuse

    refuse = with_raw_learner(run, 53, test)
    assert (refuse.reason.code, refuse.final) == (code, True)
    assert refused_count(run, code) == before + 1


def test_old_incarnation_does_not_affect_new_one(run):
    async def test(client: RawLearner) -> Refuse:
        await client.send(client.hello())
        found: Refuse = await client.receive(Refuse)
        return found

    refuse = with_raw_learner(run, 1, test, incarnation=0)
    assert refuse.reason.code == "refused-incarnation"


@pytest.mark.parametrize(
    "text",
    ["no JSON", "[]", '{"loss": NaN}', '{"loss": "' + "x" * 5000 + '"}'],
)
def test_invalid_metrics_close_the_link(run, text):
    async def test(client: RawLearner) -> tuple[int, str]:
        await client.join()
        await client.socket.send_str(text)
        return await client.wait_closed()

    assert with_raw_learner(run, 54, test)[0] == 1008


def test_status_shows_only_numeric_metrics(run):
    async def test(client: RawLearner) -> Any:
        await client.join()
        metrics = {"loss": 1.5, "tokens_per_s": {"a": 1}, "step_s": "fast", "goodput": None, "standing": "king"}
        await client.socket.send_str(json.dumps(metrics)[:-1] + ', "boundary_s": 1e999}')
        await client.send(Ping(1))
        await client.receive(Pong)
        found = run.learner(55)(run.status())
        assert found is not None
        return found

    shown = with_raw_learner(run, 55, test)
    assert (shown["loss"], shown["goodput"], shown["standing"]) == (1.5, None, "joining")
    assert not {"tokens_per_s", "step_s", "boundary_s"} & shown.keys()


# --------------------------------------------------------------------------------------------------------------------
# Contributions


@pytest.mark.parametrize("defect", ["short", "long", "codec", "fragment", "digest", "trailing", "reports a problem"])
def test_damaged_contribution_is_refused_and_next_one_is_accepted(run, defect):
    code = {"short": "size", "long": "size", "fragment": "type", "reports a problem": "type"}.get(defect, defect)
    before = refused_count(run, code)

    async def test(client: RawLearner) -> None:
        pull = await join_and_train(client)
        step = client.step  # type: ignore[attr-defined]
        body = client.contribution(pull, step)
        data = client.values(pull.round.fragment)
        if defect == "short":
            frame = client.frame(body, data[:-1])
        elif defect == "long":
            frame = client.frame(body, torch.cat([data, data]))
        elif defect == "codec":
            frame = client.frame(body, data, codec=0)
        elif defect == "fragment":
            frame = client.frame(structs.replace(body, round=structs.replace(pull.round, fragment=99)), data)
        elif defect == "digest":
            good = client.frame(body, data)
            frame = good[:-1] + bytes([good[-1] ^ 1])
        elif defect == "trailing":
            frame = client.frame(body, data) + b"more"
        else:
            frame = client.frame(structs.replace(body, problem="not finite"), data)
        status, reply = await client.put("/v1/contribution", frame)
        assert (status, reply["code"]) == (400, code), reply
        status, _ = await client.put("/v1/contribution", client.frame(body, data))
        assert status == 204
        await client.send(Left("done"))

    with_raw_learner(run, 60, test)
    assert refused_count(run, code) == before + 1


def put_in_codec(run: Run, learner: int, name: str, head_codec: str | None = None) -> tuple[int, dict[str, Any]]:
    """Upload a contribution in one codec. Its frame head names `head_codec`, if given."""

    async def test(client: RawLearner) -> tuple[int, dict[str, Any]]:
        pull = await join_and_train(client)
        values = get_codec(name).encode(torch.full((client.plan.numel(pull.round.fragment),), 0.001))
        body = client.contribution(pull, client.step)  # type: ignore[attr-defined]
        frame = client.frame(body, values, codec=CODEC_NUMBERS[head_codec or name])
        answer = await client.put("/v1/contribution", frame)
        await client.send(Left("done"))
        return answer

    return with_raw_learner(run, learner, test)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_learner_may_choose_any_allowed_codec(run, name):
    assert run.settings.numerics.up == "auto"
    assert put_in_codec(run, 62, name) == (204, {})


def test_other_codec_or_size_is_refused(run):
    status, reply = put_in_codec(run, 63, "f32")
    assert (status, reply["code"]) == (400, "codec")
    assert reply["error"] == "codec 0, the run's contributions are bf16 or int8 or int4"
    for name, head_codec in (("int8", "bf16"), ("bf16", "int4"), ("int4", "int8")):
        status, reply = put_in_codec(run, 63, name, head_codec)
        assert (status, reply["code"]) == (400, "size"), (name, head_codec, reply)


async def send_download_time(client: RawLearner) -> tuple[int, str]:
    """Only runs with an automatic codec of updates accept `DownloadTime`."""
    await client.join()
    await client.send(DownloadTime(1e6))
    await client.send(Left("done"))
    return await client.wait_closed()


def test_fixed_codec_is_the_only_accepted_one(tmp_path):
    with Run(tmp_path, endless(), Numerics(up="int8", down="int8")) as fixed:
        fixed.joined(1)
        assert put_in_codec(fixed, 9, "int8") == (204, {})
        assert with_raw_learner(fixed, 8, send_download_time)[0] == 1008
        for number, name in enumerate(("f32", "bf16", "int4")):
            status, reply = put_in_codec(fixed, 10 + number, name)
            assert (status, reply["code"]) == (400, "codec")
            assert reply["error"].endswith("the run's contributions are int8")


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 3e38])
def test_nonfinite_values_are_refused_and_repeated_ones_quarantined(run, fill):
    async def test(client: RawLearner) -> Refuse:
        await client.join()
        await client.send(READY)
        step = 0
        with contextlib.suppress(ConnectionError):  # the syncer closes the link
            while not client.socket.closed:
                step += 1
                await client.send(Report(step, 16 * step, 0.01))
                await client.send(Ping(step))
                found = await client.receive(Pull, Pong)
                if isinstance(found, Pull):
                    values = client.values(found.round.fragment, fill)
                    await client.put("/v1/contribution", client.frame(client.contribution(found, step), values))
        async with RawLearner(run, client.learner, client.incarnation, session=2) as again:
            again.epoch = client.epoch
            await again.send(again.hello(step=step, trained=16 * step, training=True))
            refuse: Refuse = await again.receive(Refuse)
            return refuse

    refuse = with_raw_learner(run, 61, test)
    assert refuse.reason.code == "refused-quarantined"
    shown = run.learner(61)(run.status())
    assert shown is not None
    assert (shown["standing"], shown["strikes"]) == ("quarantined", 3)
    assert "invalid values" in shown["reason"]


# --------------------------------------------------------------------------------------------------------------------
# Optimizer state


def test_two_sources_of_optimizer_state_for_one_learner_do_not_interfere(run):
    """Both uploads are in progress at the same time, and the second one is shorter."""

    async def test(client: RawLearner) -> None:
        await client.join()

        async def upload_in_halves(frame: bytes, first: asyncio.Event, second: asyncio.Event) -> Any:
            async def body() -> Any:
                yield frame[: len(frame) // 2]
                first.set()
                await second.wait()
                yield frame[len(frame) // 2 :]

            async with client.http.put("/v1/state", data=body()) as answer:
                return answer.status

        state = OptimizerState(client.learner, 99, 7, 1, (0, 0))
        large, small = client.frame(state, b"a" * 3_000_000), client.frame(state, b"b" * 1000)
        one_half, other_half = asyncio.Event(), asyncio.Event()
        one = asyncio.create_task(upload_in_halves(large, one_half, other_half))
        await one_half.wait()
        other = asyncio.create_task(upload_in_halves(small, other_half, one_half))
        async with asyncio.timeout(LIMIT_S):
            assert await other == 204
            assert await one == 204
        async with client.http.get("/v1/state/99/7") as answer:
            assert answer.status == 200
            assert len(await answer.read()) in (len(large), len(small))
        await client.send(Left("done"))

    with_raw_learner(run, 70, test)


def test_too_large_optimizer_state_is_refused_before_allocation(run):
    async def test(client: RawLearner) -> tuple[int, dict[str, Any]]:
        await client.join()
        header = encode_message(client.envelope(OptimizerState(client.learner, 99, 7, 1, (0, 0))))
        frame = struct.pack("<4sBBBBIQ", b"ATLF", WIRE_VERSION, 3, 0, 0, len(header), 2**39) + bytes(16) + header
        return await client.put("/v1/state", frame)

    status, reply = with_raw_learner(run, 71, test)
    assert (status, reply["code"]) == (400, "size")
    assert "the limit is" in reply["error"]


def test_nonfinite_model_creates_no_run(tmp_path):
    with Run(tmp_path) as empty:
        client = RawLearner(empty, 1)
        plan = json.dumps(client.plan.to_json()).encode()
        body = encode_frame_head(FrameKind.MODEL, 0, b"{}", plan) + b"{}" + plan
        for p in range(len(client.plan.fragments)):
            values = torch.full((client.plan.numel(p),), float("nan")).numpy().tobytes()
            header = b'{"fragment":%d}' % p
            body += encode_frame_head(FrameKind.MODEL, 0, header, values) + header + values
        code, answer = empty.request("PUT", "/v1/model", body)
        assert (code, "not finite" in json.loads(answer)["error"]) == (400, True)
        assert empty.status()["founded"] is False
