"""The syncer's side of docs/wire.md: paths, checks, errors. What it means is decided elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import math
import mmap
import os
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from torch import Tensor

from atoll.core.protocol import Contribution, Envelope, FetchTime, Hello, InnerState, MessageArrived
from atoll.core.reasons import Reason
from atoll.core.types import FragmentId, Incarnation, LearnerId, first_difference
from atoll.store.run_settings import start_anew
from atoll.store.snapshots import snapshot_info
from atoll.syncer.controls import Answer, control, who_problem
from atoll.syncer.fragment_endpoints import MOST_DIGITS, Bulk, Frames, error_response, guard_of, numbers
from atoll.syncer.process import SyncerLink, SyncerProcess
from atoll.syncer.prometheus import MISSING, exposition
from atoll.syncer.shards.coordinator import ShardsMissing
from atoll.syncer.status import TOLD, status
from atoll.tensors.codecs import codec
from atoll.tensors.plan import FragmentPlan, settled_plan
from atoll.tensors.robust_merge import unfit_in_fragment
from atoll.transport.auth import IdentityMismatchError, Rejection, check_speaker, log_key, own_number
from atoll.transport.websocket import WebSocketConnection
from atoll.transport.wire import (
    HEAD_BYTES,
    MOST_MESSAGE_BYTES,
    FrameHead,
    Kind,
    WireError,
    as_bytes,
    decode_header,
    decode_message,
    frame_head,
    max_state_bytes,
    parse_json,
)

MAX_LEARNER = 1_000_000
MOST_METRICS_BYTES = 4096
MOST_PLAN_BYTES = 256 * 2**20
MOST_MODEL_BYTES = 2**40


def build_app(syncer: SyncerProcess) -> web.Application:
    """The application of one syncer. Every path asks for the token."""
    paths = Paths(syncer)
    app = web.Application(middlewares=[guard_of(syncer)], client_max_size=MOST_MESSAGE_BYTES)
    app.router.add_get("/v1/run", paths.run)
    app.router.add_put("/v1/model", paths.model)
    app.router.add_post("/v1/join", paths.join)
    app.router.add_get("/v1/link", paths.link)
    app.router.add_put("/v1/slice", paths.bulk.slice)
    app.router.add_put("/v1/contribution", paths.bulk.contribution)
    app.router.add_get("/v1/fragment/{fragment:[0-9]+}/{version:[0-9]+}", paths.bulk.fragment)
    app.router.add_put("/v1/state", paths.put_state)
    app.router.add_get("/v1/state/{learner:[0-9]+}/{incarnation:[0-9]+}", paths.get_state)
    app.router.add_get("/v1/status", paths.status)
    app.router.add_post("/v1/snapshot", paths.take_snapshot)
    app.router.add_get("/v1/snapshot/{snapshot:[0-9]+}", paths.snapshot)
    app.router.add_post("/v1/control", paths.control)
    app.router.add_post("/v1/finish", paths.finish)
    app.router.add_get("/metrics", paths.metrics)
    app.router.add_get("/v1/shards", paths.shards)
    if syncer.shards is not None:
        app.router.add_get("/v1/head", syncer.shards.link)
        app.router.add_get("/v1/initial/{fragment:[0-9]+}", syncer.shards.initial)
    app.on_cleanup.append(paths.clean_up)
    return app


class Paths:
    def __init__(self, syncer: SyncerProcess) -> None:
        self.syncer = syncer
        self.spool = Spool(syncer.directory / "spool")
        self.bulk = Bulk(syncer)
        self._founding = asyncio.Lock()

    # ---------------------------------------------------------------------------------------------------- joining

    async def run(self, request: web.Request) -> web.StreamResponse:
        """Answer with the settings of the run. A learner names its number: one that its key is not for is refused here,
        before it founds a run that it could not join."""
        text = request.query.get("learner")
        if text is not None:
            number = int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else 0
            own_number(_learner_number(number), self.syncer.present())
        return web.json_response(self.syncer.settings.told() | {"directory": str(self.syncer.directory.absolute())})

    async def shards(self, request: web.Request) -> web.StreamResponse:
        """Where the shards are, by their numbers; null: it is away."""
        known = self.syncer.shards
        return web.json_response({"shards": known.addresses() if known is not None else []})

    async def join(self, request: web.Request) -> web.StreamResponse:
        raw = parse_json(await request.read())
        wanted = _learner_number(raw.get("learner") if isinstance(raw, dict) else 0)
        learner, incarnation = self.syncer.hand_out(own_number(wanted, self.syncer.present()))
        return web.json_response({"learner": learner, "incarnation": incarnation})

    async def model(self, request: web.Request) -> web.StreamResponse:
        """Founding. The first model that arrives whole is the run's; a second one is compared with it."""
        async with self._founding:
            frames = Frames(request)
            frame = await frames.next(Kind.MODEL, _accept_plan)
            try:
                plan = FragmentPlan.from_json(parse_json(frame.payload, MOST_PLAN_BYTES))
            except ValueError as error:
                raise WireError(f"the plan is refused: {error}", "type") from None
            refusal = self._plan_refusal(plan)
            if refusal is not None:
                return error_response(*refusal)
            if self.syncer.plan is not None:
                return web.json_response({"founded": False})
            values = [await self._read_value(frames, plan, p) for p in range(len(plan.fragments))]
            await frames.end()
            try:
                await self.syncer.found(plan, values)
            except ShardsMissing as missing:
                return error_response(503, str(missing))
            except ValueError as error:
                self.syncer.log.error("no run is founded: %s", error)
                return error_response(409, str(error))
            except OSError as error:
                self.syncer.log.error("the model cannot be written: %s", error)
                return error_response(507, f"the syncer cannot write the model: {error.strerror}")
            return web.json_response({"founded": True}, status=201)

    def _plan_refusal(self, plan: FragmentPlan) -> Answer | None:
        settings = self.syncer.settings
        if plan.total_numel * 4 > MOST_MODEL_BYTES:
            return Answer(413, f"a model of {plan.total_numel} parameters is larger than this syncer takes")
        wanted = settled_plan(plan.tensors, settings.config.fragments, settings.numerics.plan)
        if plan != wanted:
            given, due = (f"{each.how} with {len(each.fragments)} fragments" for each in (plan, wanted))
            if given == due:
                due += " that hold other tensors; use one version of Atoll everywhere"
            return Answer(409, f"the plan is {given}, the run's is {due}")
        if self.syncer.plan is None:
            return None
        ours, theirs = self.syncer.plan.fingerprint(), plan.fingerprint()
        if ours != theirs:
            reason = Reason("refused-fingerprint", (first_difference(ours, theirs),))
            return Answer(409, f"{reason}; {start_anew(str(self.syncer.directory.absolute()))}")
        return None

    async def _read_value(self, frames: Frames, plan: FragmentPlan, p: FragmentId) -> Tensor:
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
            named = unfit_in_fragment(plan, p, codec("f32"), value.view(torch.uint8))
            raise WireError(
                f"the model holds values that are not finite: {named}; initialize it before joining, and register"
                " constants such as attention masks as buffers with persistent=False, which are not sent",
                "type",
            )
        return value

    # ---------------------------------------------------------------------------------------------------- the link

    async def link(self, request: web.Request) -> web.StreamResponse:
        if self.syncer.core is None:
            return error_response(409, "the run has no model yet: bring one first")
        connection = await WebSocketConnection.accept(request, MOST_MESSAGE_BYTES)
        link: SyncerLink | None = None
        refusal: WireError | IdentityMismatchError | None = None
        try:
            async for data in connection.messages():
                if isinstance(data, bytes):
                    envelope = decode_message(data, "learner")
                    link = self._identify(link, envelope, connection)
                    if type(envelope.body) in (Contribution, InnerState):
                        raise WireError(f"{type(envelope.body).__name__} travels beside its values", "type")
                    if type(envelope.body) is FetchTime and self.syncer.settings.numerics.down != "auto":
                        raise WireError("FetchTime, where the run names the codec of updates", "type")
                    link.heard(envelope.body)
                    self.syncer.tell(MessageArrived(envelope))
                elif link is not None:
                    self._take_metrics(link, data)
        except (WireError, IdentityMismatchError) as error:
            refusal = error
            turned = Rejection(error.code, 400, str(error))
            self.syncer.access.reject(turned, str(request.remote), "a link", log_key(error.code))
        finally:
            connection.cancel()
            if link is not None:
                refused = f"what it sent was refused: {refusal}"
                self.syncer.detach(link, refused if refusal is not None else connection.ended)
                link.abandon()
        if refusal is not None:
            await connection.refuse(str(refusal))
        assert isinstance(connection.socket, web.WebSocketResponse)
        return connection.socket

    def _identify(self, link: SyncerLink | None, envelope: Envelope, connection: WebSocketConnection) -> SyncerLink:
        """A link belongs to the one who said hello on it."""
        key = (envelope.learner, envelope.incarnation, envelope.session)
        if link is None:
            if type(envelope.body) is not Hello:
                raise WireError(f"the first message on a link is Hello, found {type(envelope.body).__name__}", "type")
            check_speaker(envelope.learner)
            link = SyncerLink(key, connection, self.syncer.served)
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
        if syncer.core is not None and learner in syncer.core.state.members:
            told = {name: raw[name] for name in TOLD if _is_figure(raw.get(name, ""))}
            syncer.metrics.told(syncer.clock.now(), learner, incarnation, told)

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
            frames = Frames(request)
            await frames.next(Kind.INNER_STATE, accept)
            await frames.end()
            await asyncio.get_running_loop().run_in_executor(None, found[0][1].fill_in)
            found[0][1].keep()
        except ConnectionError:
            raise
        except OSError as error:
            self.syncer.log.warning("inner state cannot be kept: %s", error)
            return error_response(507, f"the syncer cannot keep it: {error.strerror}")
        finally:
            if found:
                found[0][1].close()
        self.syncer.tell(MessageArrived(found[0][0]))
        return web.Response(status=204)

    def _check_state(self, head: FrameHead, header: bytes) -> Envelope:
        envelope = decode_message(header, "learner")
        if type(envelope.body) is not InnerState:
            raise WireError(f"inner state was due, found {type(envelope.body).__name__}", "type")
        self.bulk.check_link(envelope.learner, envelope.incarnation, envelope.session)
        assert self.syncer.plan is not None
        most = max_state_bytes(self.syncer.plan.total_numel)
        if head.payload_bytes > most:
            raise WireError(f"inner state of {head.payload_bytes} bytes, the limit is {most}", "size")
        return envelope

    async def get_state(self, request: web.Request) -> web.StreamResponse:
        learner, incarnation = numbers(request, "learner", "incarnation")
        check_speaker(learner)
        path = self.spool.path((learner, incarnation))
        if path is None:
            return error_response(404, "no inner state waits for this learner")
        return web.FileResponse(path)

    # ---------------------------------------------------------------------------------------------------- people

    async def status(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(status(self.syncer))

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """For Prometheus."""
        try:
            text, content_type = exposition(self.syncer, request.headers.get("Accept", ""))
        except ImportError:
            return error_response(501, MISSING)
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def take_snapshot(self, request: web.Request) -> web.StreamResponse:
        raw = parse_json(await request.read()) if request.can_read_body else {"who": ""}
        if not isinstance(raw, dict) or set(raw) != {"who"}:
            return error_response(400, "a snapshot is asked for with nothing, or with a JSON object that says who asks")
        problem = who_problem(raw["who"]) if raw["who"] != "" else None
        if problem is not None:
            return error_response(400, problem)
        number = self.syncer.take_snapshot(raw["who"])
        if number is None:
            if self.syncer.core is None:
                return error_response(409, "the run has no model yet, so there is nothing to take a snapshot of")
            return error_response(409, "no snapshot is taken of a run that ends or has ended: its model is its result")
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
            return error_response(404, f"there is no snapshot {number}; the newest few are kept")
        return web.json_response(told | {"state": "durable"} | info.to_json(self.syncer.directory))

    async def control(self, request: web.Request) -> web.StreamResponse:
        answer = await control(self.syncer, parse_json(await request.read()))
        if answer.status != 200:
            return error_response(*answer)
        return web.json_response({"done": answer.sentence})

    async def finish(self, request: web.Request) -> web.StreamResponse:
        await self.syncer.finish()
        return web.Response(status=204)

    async def clean_up(self, app: web.Application) -> None:
        self.bulk.arrivals.close()
        self.spool.clear()


def _learner_number(told: object) -> int | None:
    if told is None or (type(told) is int and 1 <= told <= MAX_LEARNER):
        return told
    raise WireError(f"a learner's number is a whole number from 1 to {MAX_LEARNER}, or null for any", "type")


def _accept_plan(head: FrameHead, header: bytes) -> Any:
    decode_header(header, {})
    if head.payload_bytes > MOST_PLAN_BYTES:
        raise WireError(f"a plan of {head.payload_bytes} bytes, the limit is {MOST_PLAN_BYTES}", "size")
    return bytearray(head.payload_bytes)


def _is_figure(value: object) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value))  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------------------------
# Inner state on its way from one learner to another: files, because its taker may come for it at any time


Key = tuple[LearnerId, Incarnation]

MOST_FILES = 16
"""That wait at once. The oldest makes room: its taker has given up, or will ask another peer."""


class SpoolFile:
    """A whole frame in a file. Its payload is memory of the file, so nothing is held twice."""

    def __init__(self, spool: Spool, key: Key, header: bytes, payload_bytes: int) -> None:
        self._spool = spool
        self._key = key
        self._header = header
        # Two peers may give to the same learner at once. One file for both would be cut under the memory of the first.
        self.path = spool.folder / f"learner-{key[0]}-i{key[1]}-{next(spool.serial)}.part"
        size = HEAD_BYTES + len(header) + payload_bytes
        self._file = open(self.path, "w+b", buffering=0)  # noqa: SIM115 - closed by close()
        try:
            os.posix_fallocate(self._file.fileno(), 0, size)  # a full disk says so here, and not by a signal later
        except OSError:
            self.close()
            raise
        self._memory = mmap.mmap(self._file.fileno(), size)
        self.payload = memoryview(self._memory)[HEAD_BYTES + len(header) :]

    def fill_in(self) -> None:
        """All of it has arrived: write what stands before it. Reads all of it once more, so not for the loop."""
        head = frame_head(Kind.INNER_STATE, 0, self._header, self.payload)
        self._memory[: HEAD_BYTES + len(self._header)] = head + self._header

    def keep(self) -> None:
        final = self.path.with_suffix(".state")
        self.path.rename(final)
        self._spool.kept(self._key, final)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)  # where it was kept it has another name
        self._file.close()


class Spool:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.iterdir():
            leftover.unlink()  # of a syncer that is gone: nobody comes for it
        self.serial = itertools.count(1)
        self._files: dict[Key, Path] = {}

    def file(self, key: Key, header: bytes, payload_bytes: int) -> SpoolFile:
        return SpoolFile(self, key, header, payload_bytes)

    def kept(self, key: Key, path: Path) -> None:
        old = self._files.pop(key, None)
        if old is not None:
            old.unlink(missing_ok=True)
        self._files[key] = path
        while len(self._files) > MOST_FILES:
            oldest = next(iter(self._files))
            self._files.pop(oldest).unlink(missing_ok=True)

    def path(self, key: Key) -> Path | None:
        return self._files.get(key)

    def clear(self) -> None:
        for path in self._files.values():
            path.unlink(missing_ok=True)
        self._files.clear()
