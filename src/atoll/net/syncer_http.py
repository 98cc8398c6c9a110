"""The syncer's side of docs/wire.md: paths, checks, errors. What it means is decided elsewhere."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import torch
from aiohttp import WebSocketError, WSCloseCode, WSMsgType, web
from torch import Tensor

from atoll.core.protocol import Contribution, Envelope, Hello, InnerState, MessageArrived
from atoll.core.types import MOST_TOKENS, FragmentId
from atoll.ml.codecs import codec
from atoll.ml.plan import FragmentPlan
from atoll.ml.robust import size_of
from atoll.net.byte_buffers import CHUNK_BYTES, SMALL_BYTES, ByteBuffers
from atoll.net.controls import control, who_problem
from atoll.net.memory_gate import MemoryGate
from atoll.net.prometheus import MISSING, exposition
from atoll.net.snapshot_files import snapshot_info
from atoll.net.spool import Spool, SpoolFile
from atoll.net.stand_still import StandStill
from atoll.net.syncer import Payload, SyncerProcess
from atoll.net.syncer_link import CLOSING_S, SyncerLink, as_last_words
from atoll.net.syncer_status import TOLD, status
from atoll.net.wire import (
    CODEC_NUMBERS,
    MOST_MESSAGE_BYTES,
    FragmentHeader,
    Frame,
    FrameHead,
    FrameParser,
    Kind,
    WireError,
    as_bytes,
    decode_header,
    decode_message,
    frame_head,
    parse_json,
)

SILENT_S = 60.0
"""An upload from which nothing comes for so long is given up, and a reader that does not take a chunk: both hold memory
that others wait for."""

MOST_METRICS_BYTES = 4096
MOST_PLAN_BYTES = 256 * 2**20
MOST_MODEL_BYTES = 2**40
STATE_BYTES_PER_PARAMETER = 64
MOST_DIGITS = 18

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


class Refused(NamedTuple):
    status: int
    sentence: str


class LinkGone(Exception):  # noqa: N818 - nobody's fault: the link broke while it was on its way
    """What belongs to a link that is closed is of no use to anybody."""


def build_app(syncer: SyncerProcess) -> web.Application:
    """The application of one syncer. Every path asks for the token."""
    paths = Paths(syncer)
    app = web.Application(middlewares=[paths.guard], client_max_size=MOST_MESSAGE_BYTES)
    app.router.add_get("/v1/run", paths.run)
    app.router.add_put("/v1/model", paths.model)
    app.router.add_post("/v1/join", paths.join)
    app.router.add_get("/v1/link", paths.link)
    app.router.add_put("/v1/contribution", paths.contribution)
    app.router.add_get("/v1/fragment/{fragment:[0-9]+}/{version:[0-9]+}", paths.fragment)
    app.router.add_put("/v1/state", paths.put_state)
    app.router.add_get("/v1/state/{learner:[0-9]+}/{incarnation:[0-9]+}", paths.get_state)
    app.router.add_get("/v1/status", paths.status)
    app.router.add_post("/v1/snapshot", paths.take_snapshot)
    app.router.add_get("/v1/snapshot/{snapshot:[0-9]+}", paths.snapshot)
    app.router.add_post("/v1/control", paths.control)
    app.router.add_post("/v1/finish", paths.finish)
    app.router.add_get("/metrics", paths.metrics)
    app.on_cleanup.append(paths.clean_up)
    return app


class Paths:
    def __init__(self, syncer: SyncerProcess) -> None:
        self.syncer = syncer
        self.spool = Spool(syncer.directory / "spool")
        self._founding = asyncio.Lock()
        self._buffers = ByteBuffers()

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Token first; then whatever is wrong with a request closes that connection and is counted."""
        syncer = self.syncer
        if not syncer.is_allowed(request.headers.get("Authorization", "")):
            syncer.refused["token"] += 1
            syncer.log.warning("a request without the right token from %s was refused", request.remote)
            return _error(401, "the token is missing or wrong: the learner and the syncer must be given the same one")
        try:
            return await handler(request)
        except WireError as wrong:
            syncer.refused[wrong.code] += 1
            syncer.log.warning("%s %s from %s was refused: %s", request.method, request.path, request.remote, wrong)
            return _error(400, str(wrong), wrong.code)
        except LinkGone:
            return _error(409, "the link that this belongs to is closed")
        except ConnectionError as wrong:
            syncer.log.info("%s %s from %s broke off: %s", request.method, request.path, request.remote, wrong)
            return _error(400, "it broke off")  # nobody reads it
        except web.HTTPException:
            raise
        except TimeoutError:
            syncer.refused["silent"] += 1
            return _error(408, f"nothing came for {SILENT_S:g} s")
        except Exception:
            syncer.log.exception("%s %s has failed", request.method, request.path)
            return _error(500, "the syncer has failed on this request; its log says how")

    # ---------------------------------------------------------------------------------------------------- joining

    async def run(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self.syncer.settings.told())

    async def join(self, request: web.Request) -> web.StreamResponse:
        raw = parse_json(await request.read())
        wanted = raw.get("learner") if isinstance(raw, dict) else 0
        if wanted is not None and (type(wanted) is not int or not 1 <= wanted <= 1_000_000):
            raise WireError("a learner's number is a whole number from 1, or null for any", "type")
        learner, incarnation = self.syncer.hand_out(wanted)
        return web.json_response({"learner": learner, "incarnation": incarnation})

    async def model(self, request: web.Request) -> web.StreamResponse:
        """Founding. The first model that arrives whole is the run's; a second one is compared with it."""
        async with self._founding:
            frames = _Frames(request)
            frame = await frames.next(Kind.MODEL, _accept_plan)
            try:
                plan = FragmentPlan.from_json(parse_json(frame.payload, MOST_PLAN_BYTES))
            except ValueError as wrong:
                raise WireError(f"the plan is refused: {wrong}", "type") from None
            refusal = self._plan_refusal(plan)
            if refusal is not None:
                return _error(*refusal)
            if self.syncer.plan is not None:
                return web.json_response({"founded": False})
            values = [await self._read_value(frames, plan, p) for p in range(len(plan.fragments))]
            await frames.end()
            try:
                await self.syncer.found(plan, values)
            except OSError as wrong:
                self.syncer.log.error("the model cannot be written: %s", wrong)
                return _error(507, f"the syncer cannot write the model: {wrong.strerror}")
            return web.json_response({"founded": True}, status=201)

    def _plan_refusal(self, plan: FragmentPlan) -> Refused | None:
        settings = self.syncer.settings
        if plan.total_numel * 4 > MOST_MODEL_BYTES:
            return Refused(413, f"a model of {plan.total_numel} parameters is larger than this syncer takes")
        if plan.how != settings.numerics.plan or len(plan.fragments) > settings.config.fragments:
            wanted = f"{settings.numerics.plan} with at most {settings.config.fragments} fragments"
            return Refused(409, f"the plan is {plan.how} with {len(plan.fragments)} fragments, the run's is {wanted}")
        if self.syncer.plan is None:
            return None
        for ours, theirs in zip(self.syncer.plan.fingerprint(), plan.fingerprint(), strict=False):
            if ours != theirs:
                return Refused(409, f"another model: {theirs!r} where the run has {ours!r}")
        if len(self.syncer.plan.tensors) != len(plan.tensors):
            return Refused(409, f"another model: {len(plan.tensors)} tensors, the run has another number")
        return None

    async def _read_value(self, frames: _Frames, plan: FragmentPlan, p: FragmentId) -> Tensor:
        try:
            value = torch.empty(plan.numel(p))
        except RuntimeError:
            raise WireError(f"no memory for the {plan.numel(p)} values of fragment {p}", "size") from None

        def accept(head: FrameHead, header: bytes) -> Any:
            said = decode_header(header, {"fragment": int})["fragment"]
            if said != p:
                raise WireError(f"fragment {said} where {p} was due", "type")
            return as_bytes(value)

        await frames.next(Kind.MODEL, accept)
        if not torch.isfinite(value.sum()):
            raise WireError(f"fragment {p} of the model holds values that are not finite", "type")
        return value

    # ---------------------------------------------------------------------------------------------------- the link

    async def link(self, request: web.Request) -> web.StreamResponse:
        if self.syncer.core is None:
            return _error(409, "the run has no model yet: bring one first")
        socket = web.WebSocketResponse(
            max_msg_size=MOST_MESSAGE_BYTES, compress=False, autoping=True, timeout=CLOSING_S
        )
        await socket.prepare(request)
        link: SyncerLink | None = None
        why = "the connection was closed"
        refusal: WireError | None = None
        try:
            async for message in socket:
                if message.type is WSMsgType.BINARY:
                    envelope = decode_message(message.data, "learner")
                    link = self._identify(link, envelope, socket, request)
                    if type(envelope.body) in (Contribution, InnerState):
                        raise WireError(f"{type(envelope.body).__name__} travels beside its values", "type")
                    link.heard(envelope.body)
                    self.syncer.tell(MessageArrived(envelope))
                elif message.type is WSMsgType.TEXT and link is not None:
                    self._take_metrics(link, message.data)
                elif isinstance(message.data, WebSocketError):  # aiohttp has closed it, with this code
                    too_big = message.data.code == WSCloseCode.MESSAGE_TOO_BIG
                    raise WireError(str(message.data), "size" if too_big else "type")
                elif message.type is WSMsgType.ERROR:
                    why = f"the connection broke: {socket.exception()}"
        except WireError as wrong:
            refusal = wrong
            why = f"what it sent was refused: {wrong}"
            self.syncer.refused[wrong.code] += 1
            self.syncer.log.warning("a link from %s is closed, %s", request.remote, why)
        finally:
            if link is not None:
                self.syncer.detach(link, why)
                link.abandon()
        if refusal is not None:
            await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=as_last_words(str(refusal)))
        return socket

    def _identify(
        self, link: SyncerLink | None, envelope: Envelope, socket: web.WebSocketResponse, request: web.Request
    ) -> SyncerLink:
        """A link belongs to the one who said hello on it."""
        key = (envelope.learner, envelope.incarnation, envelope.session)
        if link is None:
            if type(envelope.body) is not Hello:
                raise WireError(f"the first message on a link is Hello, found {type(envelope.body).__name__}", "type")
            link = SyncerLink(key, socket, request.transport, self.syncer.fragments)
            self.syncer.attach(link)
        if link.key != key:
            raise WireError(f"this link belongs to learner {link.key[0]}, the message says {key[0]}", "type")
        return link

    def _take_metrics(self, link: SyncerLink, text: str) -> None:
        if len(text) > MOST_METRICS_BYTES:
            raise WireError(f"metrics of {len(text)} letters, the limit is {MOST_METRICS_BYTES}", "size")
        raw = parse_json(text.encode(), 4 * MOST_METRICS_BYTES)
        if type(raw) is not dict:
            raise WireError("metrics are a JSON object", "type")
        syncer, (learner, incarnation, _) = self.syncer, link.key
        if syncer.core is not None and learner in syncer.core.members:
            told = {name: raw[name] for name in TOLD if _is_figure(raw.get(name, ""))}
            syncer.metrics.told(syncer.clock.now(), learner, incarnation, told)

    # ---------------------------------------------------------------------------------------------------- bulk

    async def contribution(self, request: web.Request) -> web.StreamResponse:
        """Values are checked before the core hears of them: a bad one must be refused with its reason."""
        syncer = self.syncer
        payload: Payload | None = None
        found: list[tuple[Envelope, int, Tensor]] = []

        def accept(head: FrameHead, header: bytes) -> Any:
            envelope, numel = self._check_contribution(head, header)
            found.append((envelope, numel, self._buffers.take(head.payload_bytes)))
            return as_bytes(found[0][2])

        def give_back() -> None:
            frames.give_back()
            while found:
                self._buffers.give(found.pop()[2])

        frames = _Frames(request, syncer.gate)
        try:
            await frames.next(Kind.CONTRIBUTION, accept)
            await frames.end()
            envelope, numel, data = found[0]
            up = codec(syncer.settings.numerics.up)
            problem, norm = await _computed(data.numel(), up.examine, data, numel)
            syncer.bytes_up += data.numel()
            assert isinstance(envelope.body, Contribution)
            if problem is None:
                usual = syncer.fragments[envelope.body.round.fragment].usual
                problem = usual.problem(size_of(norm, envelope.body.steps))
            envelope = envelope._replace(body=envelope.body._replace(problem=problem))
            payload = Payload(data, norm, give_back)
            syncer.tell(MessageArrived(envelope), payload)
            return web.Response(status=204)
        finally:
            if payload is None or not payload.is_taken:
                give_back()

    def _check_contribution(self, head: FrameHead, header: bytes) -> tuple[Envelope, int]:
        syncer = self.syncer
        envelope = decode_message(header, "learner")
        body = envelope.body
        if type(body) is not Contribution:
            raise WireError(f"a contribution was due, found {type(body).__name__}", "type")
        self._check_link(envelope)
        if syncer.plan is None or not 0 <= body.round.fragment < len(syncer.plan.fragments):
            raise WireError(f"there is no fragment {body.round.fragment}", "type")
        up = codec(syncer.settings.numerics.up)
        if head.codec != CODEC_NUMBERS[up.name]:
            raise WireError(f"codec {head.codec}, the run's contributions are {up.name}", "codec")
        numel = syncer.plan.numel(body.round.fragment)
        if head.payload_bytes != up.size(numel):
            raise WireError(f"{head.payload_bytes} bytes, fragment {body.round.fragment} has {up.size(numel)}", "size")
        if body.problem is not None or not 0 <= body.trained <= MOST_TOKENS:
            raise WireError("a learner does not say this of its own contribution", "type")
        return envelope, numel

    def _check_link(self, envelope: Envelope) -> None:
        if (envelope.learner, envelope.incarnation, envelope.session) not in self.syncer.links:
            raise LinkGone

    async def fragment(self, request: web.Request) -> web.StreamResponse:
        syncer = self.syncer
        p, version = _numbers(request, "fragment", "version")
        held, wanted = syncer.fragments.get(p), request.query.get("base", "whole")
        if held is None:
            return _error(404, "there is no such fragment")
        served = held.hold(version)
        if served is None:
            return _error(410, f"version {version} is not served any more, the newest is {held.served.version}")
        try:
            if served.update is not None and wanted == str(served.base):
                payload, base, number = served.update, served.base, CODEC_NUMBERS[syncer.settings.numerics.down]
            else:
                payload, base, number = served.value, None, CODEC_NUMBERS["f32"]
            view = as_bytes(payload)
            start = held.starts.get((served.version, base))
            if start is None:  # all learners fetch the same bytes: the digest is computed once
                header = FragmentHeader(held.id, served.version, base, served.value_digest).encode()
                head = await _computed(view.nbytes, frame_head, Kind.FRAGMENT, number, header, view)
                start = held.starts[served.version, base] = head + header
            sent = await _stream(request, start, view)
            syncer.bytes_down += view.nbytes
            return sent
        finally:
            held.release(version)

    # ---------------------------------------------------------------------------------------------------- inner state

    async def put_state(self, request: web.Request) -> web.StreamResponse:
        """A peer's inner state waits in a file: it may be larger than the model, and its taker may be slow."""
        found: list[tuple[Envelope, SpoolFile]] = []

        def accept(head: FrameHead, header: bytes) -> Any:
            envelope = self._check_state(head, header)
            assert isinstance(envelope.body, InnerState)
            key = (envelope.body.to, envelope.body.to_incarnation)
            found.append((envelope, self.spool.file(key, header, head.payload_bytes)))
            return found[0][1].payload

        try:
            frames = _Frames(request)
            await frames.next(Kind.INNER_STATE, accept)
            await frames.end()
            await asyncio.get_running_loop().run_in_executor(None, found[0][1].fill_in)
            found[0][1].keep()
        except ConnectionError:
            raise
        except OSError as wrong:
            self.syncer.log.warning("inner state cannot be kept: %s", wrong)
            return _error(507, f"the syncer cannot keep it: {wrong.strerror}")
        finally:
            if found:
                found[0][1].close()
        self.syncer.tell(MessageArrived(found[0][0]))
        return web.Response(status=204)

    def _check_state(self, head: FrameHead, header: bytes) -> Envelope:
        envelope = decode_message(header, "learner")
        if type(envelope.body) is not InnerState:
            raise WireError(f"inner state was due, found {type(envelope.body).__name__}", "type")
        self._check_link(envelope)
        assert self.syncer.plan is not None
        most = STATE_BYTES_PER_PARAMETER * self.syncer.plan.total_numel + 2**24
        if head.payload_bytes > most:
            raise WireError(f"inner state of {head.payload_bytes} bytes, the limit is {most}", "size")
        return envelope

    async def get_state(self, request: web.Request) -> web.StreamResponse:
        path = self.spool.path(_numbers(request, "learner", "incarnation"))
        if path is None:
            return _error(404, "no inner state waits for this learner")
        return web.FileResponse(path)

    # ---------------------------------------------------------------------------------------------------- people

    async def status(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(status(self.syncer))

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """For Prometheus."""
        try:
            text, content_type = exposition(self.syncer, request.headers.get("Accept", ""))
        except ImportError:
            return _error(501, MISSING)
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def take_snapshot(self, request: web.Request) -> web.StreamResponse:
        raw = parse_json(await request.read()) if request.can_read_body else {"who": ""}
        if not isinstance(raw, dict) or set(raw) != {"who"}:
            return _error(400, "a snapshot is asked for with nothing, or with a JSON object that says who asks")
        problem = who_problem(raw["who"]) if raw["who"] != "" else None
        if problem is not None:
            return _error(400, problem)
        number = self.syncer.take_snapshot(raw["who"])
        if number is None:
            if self.syncer.core is None:
                return _error(409, "the run has no model yet, so there is nothing to take a snapshot of")
            return _error(409, "no snapshot is taken of a run that ends or has ended: its model is its result")
        return web.json_response({"snapshot": number}, status=202)

    async def snapshot(self, request: web.Request) -> web.StreamResponse:
        """What became of a snapshot; of a durable one what it holds."""
        text = request.match_info["snapshot"]
        number = int(text) if len(text) <= MOST_DIGITS else 0
        told = self.syncer.snapshots.of(number) or {"snapshot": number, "left_out": [], "said": ""}
        if told.get("state") not in (None, "durable"):
            return web.json_response(told)
        info = await asyncio.to_thread(snapshot_info, self.syncer.directory, number)
        if info is None:
            return _error(404, f"there is no snapshot {number}; the newest few are kept")
        return web.json_response(told | {"state": "durable"} | info.to_json(self.syncer.directory))

    async def control(self, request: web.Request) -> web.StreamResponse:
        answer = await control(self.syncer, parse_json(await request.read()))
        if answer.status != 200:
            return _error(*answer)
        return web.json_response({"done": answer.sentence})

    async def finish(self, request: web.Request) -> web.StreamResponse:
        await self.syncer.finish()
        return web.Response(status=204)

    async def clean_up(self, app: web.Application) -> None:
        self.spool.clear()


class _Frames:
    """The frames of one request's body. A body that stands still for too long is given up.

    With a gate, the bytes of a payload are asked for there before more than its first piece is read.
    """

    def __init__(self, request: web.Request, gate: MemoryGate | None = None) -> None:
        self._chunks: AsyncIterator[bytes] = request.content.iter_any()
        self._rest = b""
        self._gate = gate
        self._taken = 0

    async def _more(self) -> bytes | None:
        if self._rest:
            rest, self._rest = self._rest, b""
            return rest
        return await anext(self._chunks, None)

    async def next(self, kind: Kind, accept: Callable[[FrameHead, bytes], Any]) -> Frame:
        wanted = 0

        def noting(head: FrameHead, header: bytes) -> Any:
            nonlocal wanted
            memory = accept(head, header)
            wanted = head.payload_bytes
            return memory

        parser = FrameParser(kind, noting, several=True)
        async with StandStill(SILENT_S) as still:
            while not parser.done:
                chunk = await self._more()
                if chunk is None:
                    break
                parser.feed(chunk)
                still.moved += 1
                if wanted and self._gate is not None and not self._taken:
                    still.pause()
                    await self._gate.take(wanted)
                    still.go_on()
                    self._taken = wanted
        frame = parser.finish()
        self._rest = parser.rest
        return frame

    def give_back(self) -> None:
        if self._gate is not None:
            self._gate.give(self._taken)
            self._taken = 0

    async def end(self) -> None:
        async with asyncio.timeout(SILENT_S):
            if await self._more() is not None:
                raise WireError("more bytes than frames", "trailing")


def _numbers(request: web.Request, one: str, other: str) -> tuple[int, int]:
    """Two numbers of the path. Longer ones than any that was ever given out are nothing that is here."""
    texts = request.match_info[one], request.match_info[other]
    if max(map(len, texts)) > MOST_DIGITS:
        raise web.HTTPNotFound
    return int(texts[0]), int(texts[1])


def _accept_plan(head: FrameHead, header: bytes) -> Any:
    decode_header(header, {})
    if head.payload_bytes > MOST_PLAN_BYTES:
        raise WireError(f"a plan of {head.payload_bytes} bytes, the limit is {MOST_PLAN_BYTES}", "size")
    return bytearray(head.payload_bytes)


async def _computed(size: int, pass_over: Callable[..., T], *args: Any) -> T:
    """In another thread, unless there are few bytes to pass over."""
    if size <= SMALL_BYTES:
        return pass_over(*args)
    return await asyncio.get_running_loop().run_in_executor(None, pass_over, *args)


async def _stream(request: web.Request, start: bytes, payload: memoryview) -> web.StreamResponse:
    """In pieces, so that a slow reader costs nothing but its own time; one that does not read at all is cut off."""
    if payload.nbytes <= SMALL_BYTES:
        return web.Response(body=start + bytes(payload), content_type="application/octet-stream")
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    response.content_length = len(start) + payload.nbytes
    try:
        async with StandStill(SILENT_S) as still:
            await response.prepare(request)
            await response.write(start)
            for begin in range(0, payload.nbytes, CHUNK_BYTES):
                await response.write(payload[begin : begin + CHUNK_BYTES])
                still.moved += 1
            await response.write_eof()
    except (TimeoutError, ConnectionError):
        if request.transport is not None:
            request.transport.abort()
    return response


def _is_figure(value: object) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value))  # type: ignore[arg-type]


def _error(status: int, sentence: str, code: str = "") -> web.Response:
    text = json.dumps({"error": sentence} | ({"code": code} if code else {}))
    return web.Response(status=status, text=text, content_type="application/json")
