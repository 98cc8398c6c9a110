"""Wrong bytes cost their sender a request or a link, with a sentence, and nobody else anything. Each is counted."""

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
from atoll.transport.wire import CODEC_NUMBERS, FrameKind, encode_frame_head, encode_message
from tests.learner.runs import LIMIT_S, LearnerSpec, Run, endless
from tests.syncer.stranger import Stranger

READY = Ready(Reason("state-kept"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One run for all of it: a learner trains from the first test to the last, and must not notice any of them."""
    with Run(tmp_path_factory.mktemp("hostile"), endless(fragments=2, every_steps=2)) as run:
        (good,) = run.joined(LearnerSpec(1, pace_s=0.005))
        run.go(good)
        run.until(run.merges(2), "the run is under way")
        yield run
        run.end()
        run.assert_same(run.finish(good), 1)
        assert run.log_lines(good, "the link closed") == []
        assert run.log_lines(run.syncer, " ERROR ") == []
        assert run.log_lines(run.syncer, "never retrieved") == []
        run.verdict()  # as far as the tapes go: strangers leave none


@pytest.fixture(autouse=True)
def nobody_else_is_hurt(run: Run) -> Iterator[None]:
    before = run.status()
    yield
    run.until(run.merges(before["merges"] + 2), "the run goes on")
    one = run.until(run.learner(1), "learner 1 is shown")
    assert (one["standing"], one["link"], one["incarnation"]) == ("live", "up", 1)


def counted(run: Run, code: str) -> int:
    return int(run.status()["refused"].get(code, 0))


def with_stranger(
    run: Run, learner: int, test: Callable[[Stranger], Awaitable[Any]], incarnation: int | None = None
) -> Any:
    """The test as a coroutine, with a learner that was joined by hand."""
    if incarnation is None:
        _, body = run.ask("POST", "/v1/join", json.dumps({"learner": learner}).encode())
        incarnation = json.loads(body)["incarnation"]

    async def told() -> Any:
        async with Stranger(run, learner, incarnation) as stranger:
            return await test(stranger)

    return asyncio.run(told())


async def trains(stranger: Stranger) -> Pull:
    """Joined, one step taken, and asked for a contribution."""
    await stranger.join()
    await stranger.send(READY)
    step = 0
    while True:
        step += 1
        stranger.step = step  # type: ignore[attr-defined]
        await stranger.send(Report(step, 16 * step, 0.01))
        await stranger.send(Ping(step))
        found = await stranger.receive(Pull, Pong)
        if isinstance(found, Pull):
            return found


# --------------------------------------------------------------------------------------------------------------------
# Requests

FINE = b'ATLL\x04["Envelope",1,1,1,0,7,3,0,["Ping",5]]'


def head(kind: int = 1, codec: int = 1, header: int = 0, payload: int = 0, magic: bytes = b"ATLF", version: int = 3):
    return struct.pack("<4sBBBBIQ", magic, version, kind, codec, 0, header, payload) + bytes(16)


WRONG_BODIES = {
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
    "another message": (head(header=len(FINE)) + FINE, "type"),
}


@pytest.mark.parametrize("path", ["/v1/contribution", "/v1/state"])
@pytest.mark.parametrize("name", WRONG_BODIES)
def test_a_frame_that_is_wrong_is_refused_with_its_code(run, path, name):
    body, code = WRONG_BODIES[name]
    if path == "/v1/state" and body[:4] == b"ATLF" and body[5] == 1:  # the same, as the kind that belongs there
        body = body[:5] + b"\x03" + (body[6:7] if code == "codec" else b"\x00") + body[7:]
    before = counted(run, code)
    status, answer = run.ask("PUT", path, body)
    told = json.loads(answer)
    assert (status, told["code"]) == (400, code), told
    assert len(told["error"]) > 10
    assert counted(run, code) == before + 1


def test_a_frame_of_a_link_that_is_closed_is_refused_and_no_offence(run):
    before = run.status()["refused"]
    stranger = Stranger(run, 50)
    body = Contribution(RoundId(0, 0, 1, 1), 1, 1, 16, 16, 0)
    status, answer = run.ask("PUT", "/v1/contribution", stranger.frame(body, stranger.values(0)))
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
def test_a_path_that_leads_nowhere(run, method, path, code):
    assert run.ask(method, path)[0] == code


@pytest.mark.parametrize(
    "body", [b"", b"no JSON", b"[]", b'{"learner": 0}', b'{"learner": true}', b'{"learner": "1"}', b'{"learner": 1e9}']
)
def test_a_join_that_is_wrong(run, body):
    status, answer = run.ask("POST", "/v1/join", body)
    assert status == 400
    assert json.loads(answer)["code"] in ("json", "type")


def test_bytes_that_are_no_http_cost_their_connection_only(run):
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


def test_an_upload_that_breaks_off_is_forgotten(run):
    host, _, port = run.address.rpartition(":")
    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=LIMIT_S) as raw:
            raw.sendall(b"PUT /v1/contribution HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nATLF\x04")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not a farewell


# --------------------------------------------------------------------------------------------------------------------
# Models

OTHER_MODEL = {
    "no plan": (b"[]", 400, "a fragment plan is an object"),
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
def test_another_model_is_refused(run, name):
    plan, status, sentence = OTHER_MODEL[name]
    code, answer = run.ask("PUT", "/v1/model", encode_frame_head(FrameKind.MODEL, 0, b"{}", plan) + b"{}" + plan)
    assert code == status, answer
    assert sentence in json.loads(answer)["error"]


def test_the_model_of_the_run_may_be_offered_again(run):
    plan = json.dumps(Stranger(run, 50).plan.to_json()).encode()
    code, answer = run.ask("PUT", "/v1/model", encode_frame_head(FrameKind.MODEL, 0, b"{}", plan) + b"{}" + plan)
    assert (code, json.loads(answer)) == (200, {"founded": False})


# --------------------------------------------------------------------------------------------------------------------
# Links

WRONG_MESSAGES = {
    "not Atoll": (b"HELO me", "magic"),
    "another version": (b"ATLL\x01[]", "version"),
    "no JSON": (b"ATLL\x04[", "json"),
    "no envelope": (b'ATLL\x04["Ping",1]', "type"),
    "not a number": (b'ATLL\x04["Envelope",1,1,1,0,7,3,0,["Report",1,1,NaN]]', "json"),
    "a number of 65 bits": (b'ATLL\x04["Envelope",1,1,1,0,7,3,0,["Ping",%d]]' % 2**64, "json"),
    "a syncer's word": (b'ATLL\x04["Envelope",1,1,1,0,7,3,0,["Pong",1]]', "type"),
    "no hello first": (FINE, "type"),
    "too long": (b"ATLL\x04" + b" " * (4 * 2**20), "size"),
}


@pytest.mark.parametrize("name", WRONG_MESSAGES)
def test_a_message_that_is_wrong_closes_its_link_with_a_sentence(run, name):
    data, code = WRONG_MESSAGES[name]
    before = counted(run, code)

    async def test(stranger: Stranger) -> tuple[int, str]:
        with contextlib.suppress(ConnectionError):  # what is too long is not read to its end
            await stranger.socket.send_bytes(data)
        return await stranger.wait_closed()

    closing, sentence = with_stranger(run, 50, test)
    assert name == "too long" or (closing == 1008 and sentence)
    assert counted(run, code) == before + 1


def test_the_voice_of_another_on_a_link_closes_it(run):
    async def test(stranger: Stranger) -> tuple[int, str]:
        await stranger.join()
        stranger.learner = 1
        await stranger.send(Left("I am learner 1, believe me"))
        return await stranger.wait_closed()

    closing, sentence = with_stranger(run, 51, test)
    assert closing == 1008
    assert sentence == "this link belongs to learner 51, the message says 1"


@pytest.mark.parametrize("body", ["contribution", "state"])
def test_values_do_not_travel_on_the_link(run, body):
    async def test(stranger: Stranger) -> tuple[int, str]:
        await stranger.join()
        from atoll.core.types import RoundId

        await stranger.send(
            Contribution(RoundId(0, 0, 1, 1), 1, 1, 1, 1, 0)
            if body == "contribution"
            else OptimizerState(52, 1, 1, 1, (0, 0))
        )
        return await stranger.wait_closed()

    closing, sentence = with_stranger(run, 52, test)
    assert (closing, "travels beside its values" in sentence) == (1008, True)


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
def test_a_hello_that_is_refused_is_told_why_counted_and_closed(run, hello, code):
    before = counted(run, code)

    async def test(stranger: Stranger) -> Refuse:
        await stranger.send(stranger.hello(**hello))
        refuse: Refuse = await stranger.receive(Refuse)
        assert (await stranger.wait_closed())[0] == 1001
        return refuse

    refuse = with_stranger(run, 53, test)
    assert (refuse.reason.code, refuse.final) == (code, True)
    assert counted(run, code) == before + 1


def test_an_old_incarnation_does_not_disturb_the_new_one(run):
    async def test(stranger: Stranger) -> Refuse:
        await stranger.send(stranger.hello())
        found: Refuse = await stranger.receive(Refuse)
        return found

    refuse = with_stranger(run, 1, test, incarnation=0)
    assert refuse.reason.code == "refused-incarnation"


@pytest.mark.parametrize(
    "text",
    ["no JSON", "[]", '{"loss": NaN}', '{"loss": "' + "x" * 5000 + '"}'],
)
def test_figures_that_are_none_close_the_link(run, text):
    async def test(stranger: Stranger) -> tuple[int, str]:
        await stranger.join()
        await stranger.socket.send_str(text)
        return await stranger.wait_closed()

    assert with_stranger(run, 54, test)[0] == 1008


def test_figures_are_numbers_and_nothing_else_is_shown(run):
    async def test(stranger: Stranger) -> Any:
        await stranger.join()
        figures = {"loss": 1.5, "tokens_per_s": {"a": 1}, "step_s": "fast", "goodput": None, "standing": "king"}
        await stranger.socket.send_str(json.dumps(figures)[:-1] + ', "boundary_s": 1e999}')
        await stranger.send(Ping(1))
        await stranger.receive(Pong)
        found = run.learner(55)(run.status())
        assert found is not None
        return found

    shown = with_stranger(run, 55, test)
    assert (shown["loss"], shown["goodput"], shown["standing"]) == (1.5, None, "joining")
    assert not {"tokens_per_s", "step_s", "boundary_s"} & shown.keys()


# --------------------------------------------------------------------------------------------------------------------
# Contributions


@pytest.mark.parametrize("wrong", ["short", "long", "codec", "fragment", "digest", "trailing", "says its own problem"])
def test_a_contribution_with_wrong_bytes_is_refused_and_the_next_one_is_taken(run, wrong):
    code = {"short": "size", "long": "size", "fragment": "type", "says its own problem": "type"}.get(wrong, wrong)
    before = counted(run, code)

    async def test(stranger: Stranger) -> None:
        pull = await trains(stranger)
        step = stranger.step  # type: ignore[attr-defined]
        body = stranger.contribution(pull, step)
        data = stranger.values(pull.round.fragment)
        if wrong == "short":
            frame = stranger.frame(body, data[:-1])
        elif wrong == "long":
            frame = stranger.frame(body, torch.cat([data, data]))
        elif wrong == "codec":
            frame = stranger.frame(body, data, codec=0)
        elif wrong == "fragment":
            frame = stranger.frame(structs.replace(body, round=structs.replace(pull.round, fragment=99)), data)
        elif wrong == "digest":
            good = stranger.frame(body, data)
            frame = good[:-1] + bytes([good[-1] ^ 1])
        elif wrong == "trailing":
            frame = stranger.frame(body, data) + b"more"
        else:
            frame = stranger.frame(structs.replace(body, problem="mine is bad"), data)
        status, told = await stranger.put("/v1/contribution", frame)
        assert (status, told["code"]) == (400, code), told
        status, _ = await stranger.put("/v1/contribution", stranger.frame(body, data))
        assert status == 204
        await stranger.send(Left("done"))

    with_stranger(run, 60, test)
    assert counted(run, code) == before + 1


def put_in(run: Run, learner: int, name: str, said: str | None = None) -> tuple[int, dict[str, Any]]:
    """A contribution in one codec whose head names the same or another one."""

    async def test(stranger: Stranger) -> tuple[int, dict[str, Any]]:
        pull = await trains(stranger)
        values = get_codec(name).encode(torch.full((stranger.plan.numel(pull.round.fragment),), 0.001))
        body = stranger.contribution(pull, stranger.step)  # type: ignore[attr-defined]
        frame = stranger.frame(body, values, codec=CODEC_NUMBERS[said or name])
        answer = await stranger.put("/v1/contribution", frame)
        await stranger.send(Left("done"))
        return answer

    return with_stranger(run, learner, test)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_where_learners_choose_each_of_their_codecs_is_taken(run, name):
    assert run.settings.numerics.up == "auto"
    assert put_in(run, 62, name) == (204, {})


def test_and_no_other_one_nor_one_whose_size_is_not_that_of_its_name(run):
    status, told = put_in(run, 63, "f32")
    assert (status, told["code"]) == (400, "codec")
    assert told["error"] == "codec 0, the run's contributions are bf16 or int8 or int4"
    for name, said in (("int8", "bf16"), ("bf16", "int4"), ("int4", "int8")):
        status, told = put_in(run, 63, name, said)
        assert (status, told["code"]) == (400, "size"), (name, said, told)


async def says_how_long_it_fetches(stranger: Stranger) -> tuple[int, str]:
    """Asked for by nobody where the run names the codec of updates, and never more than its word where it does not."""
    await stranger.join()
    await stranger.send(DownloadTime(1e6))
    await stranger.send(Left("done"))
    return await stranger.wait_closed()


def test_where_the_run_names_a_codec_there_is_no_choice(tmp_path):
    with Run(tmp_path, endless(), Numerics(up="int8", down="int8")) as fixed:
        fixed.joined(1)
        assert put_in(fixed, 9, "int8") == (204, {})
        assert with_stranger(fixed, 8, says_how_long_it_fetches)[0] == 1008
        for number, name in enumerate(("f32", "bf16", "int4")):
            status, told = put_in(fixed, 10 + number, name)
            assert (status, told["code"]) == (400, "codec")
            assert told["error"].endswith("the run's contributions are int8")


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 3e38])
def test_values_that_are_not_finite_are_refused_with_a_reason_and_quarantined_when_they_repeat(run, fill):
    async def test(stranger: Stranger) -> Refuse:
        await stranger.join()
        await stranger.send(READY)
        step = 0
        with contextlib.suppress(ConnectionError):  # the syncer hangs up
            while not stranger.socket.closed:
                step += 1
                await stranger.send(Report(step, 16 * step, 0.01))
                await stranger.send(Ping(step))
                found = await stranger.receive(Pull, Pong)
                if isinstance(found, Pull):
                    values = stranger.values(found.round.fragment, fill)
                    await stranger.put("/v1/contribution", stranger.frame(stranger.contribution(found, step), values))
        async with Stranger(run, stranger.learner, stranger.incarnation, session=2) as again:
            again.epoch = stranger.epoch
            await again.send(again.hello(step=step, trained=16 * step, training=True))
            refuse: Refuse = await again.receive(Refuse)
            return refuse

    refuse = with_stranger(run, 61, test)
    assert refuse.reason.code == "refused-quarantined"
    shown = run.learner(61)(run.status())
    assert shown is not None
    assert (shown["standing"], shown["strikes"]) == ("quarantined", 3)
    assert "bad values" in shown["reason"]


# --------------------------------------------------------------------------------------------------------------------
# Inner state


def test_two_peers_that_give_to_the_same_learner_at_once_do_not_hurt_each_other(run):
    """Both bodies are half-way at the same time, the second one shorter than the first."""

    async def test(stranger: Stranger) -> None:
        await stranger.join()

        async def halves(frame: bytes, first: asyncio.Event, second: asyncio.Event) -> Any:
            async def body() -> Any:
                yield frame[: len(frame) // 2]
                first.set()
                await second.wait()
                yield frame[len(frame) // 2 :]

            async with stranger.http.put("/v1/state", data=body()) as answer:
                return answer.status

        state = OptimizerState(stranger.learner, 99, 7, 1, (0, 0))
        large, small = stranger.frame(state, b"a" * 3_000_000), stranger.frame(state, b"b" * 1000)
        one_half, other_half = asyncio.Event(), asyncio.Event()
        one = asyncio.create_task(halves(large, one_half, other_half))
        await one_half.wait()
        other = asyncio.create_task(halves(small, other_half, one_half))
        async with asyncio.timeout(LIMIT_S):
            assert await other == 204
            assert await one == 204
        async with stranger.http.get("/v1/state/99/7") as answer:
            assert answer.status == 200
            assert len(await answer.read()) in (len(large), len(small))
        await stranger.send(Left("done"))

    with_stranger(run, 70, test)


def test_inner_state_beyond_every_optimizer_is_refused_before_memory_is_taken(run):
    async def test(stranger: Stranger) -> tuple[int, dict[str, Any]]:
        await stranger.join()
        header = encode_message(stranger.envelope(OptimizerState(stranger.learner, 99, 7, 1, (0, 0))))
        frame = struct.pack("<4sBBBBIQ", b"ATLF", 3, 3, 0, 0, len(header), 2**39) + bytes(16) + header
        return await stranger.put("/v1/state", frame)

    status, told = with_stranger(run, 71, test)
    assert (status, told["code"]) == (400, "size")
    assert "the limit is" in told["error"]


def test_a_model_that_is_not_finite_founds_nothing(tmp_path):
    with Run(tmp_path) as empty:
        stranger = Stranger(empty, 1)
        plan = json.dumps(stranger.plan.to_json()).encode()
        body = encode_frame_head(FrameKind.MODEL, 0, b"{}", plan) + b"{}" + plan
        for p in range(len(stranger.plan.fragments)):
            values = torch.full((stranger.plan.numel(p),), float("nan")).numpy().tobytes()
            header = b'{"fragment":%d}' % p
            body += encode_frame_head(FrameKind.MODEL, 0, header, values) + header + values
        code, answer = empty.ask("PUT", "/v1/model", body)
        assert (code, "not finite" in json.loads(answer)["error"]) == (400, True)
        assert empty.status()["founded"] is False
