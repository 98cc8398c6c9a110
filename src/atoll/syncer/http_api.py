"""The HTTP API of the syncer (docs/wire.md): paths, checks and error replies. Other modules make the decisions."""

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

from atoll.core.protocol import Contribution, DownloadTime, Envelope, Hello, MessageArrived, OptimizerState
from atoll.core.reasons import Reason
from atoll.core.types import FragmentId, Incarnation, LearnerId, describe_first_difference
from atoll.store.run_settings import new_run_advice
from atoll.store.snapshots import read_snapshot_info
from atoll.syncer.controls import HttpReply, find_requester_problem, handle_control
from atoll.syncer.fragment_endpoints import (
    MAX_DIGITS,
    FragmentEndpoints,
    FrameReader,
    auth_middleware,
    error_response,
    parse_path_numbers,
)
from atoll.syncer.process import SyncerLink, SyncerProcess
from atoll.syncer.prometheus import NOT_INSTALLED, render_metrics
from atoll.syncer.shards.coordinator import ShardsUnavailableError
from atoll.syncer.status import LEARNER_METRICS, build_status
from atoll.tensors.codecs import get_codec
from atoll.tensors.plan import FragmentPlan, make_stable_plan
from atoll.tensors.robust_merge import find_nonfinite_in_fragment
from atoll.transport.auth import IdentityMismatchError, Rejection, check_identity, choose_learner_id, log_key
from atoll.transport.websocket import WebSocketConnection
from atoll.transport.wire import (
    FRAME_HEAD_BYTES,
    MAX_MESSAGE_BYTES,
    FrameHead,
    FrameKind,
    WireError,
    as_bytes,
    decode_header,
    decode_message,
    encode_frame_head,
    max_state_bytes,
    parse_json,
)

MAX_LEARNER_ID = 1_000_000
MAX_METRICS_BYTES = 4096
MAX_PLAN_BYTES = 256 * 2**20
MAX_MODEL_BYTES = 2**40


def build_app(syncer: SyncerProcess) -> web.Application:
    """Build the HTTP application of one syncer. Every path requires the token."""
    endpoints = SyncerEndpoints(syncer)
    app = web.Application(middlewares=[auth_middleware(syncer)], client_max_size=MAX_MESSAGE_BYTES)
    app.router.add_get("/v1/run", endpoints.get_run)
    app.router.add_put("/v1/model", endpoints.put_model)
    app.router.add_post("/v1/join", endpoints.post_join)
    app.router.add_get("/v1/link", endpoints.open_link)
    app.router.add_put("/v1/slice", endpoints.fragment_endpoints.put_slice)
    app.router.add_put("/v1/contribution", endpoints.fragment_endpoints.put_contribution)
    app.router.add_get("/v1/fragment/{fragment:[0-9]+}/{version:[0-9]+}", endpoints.fragment_endpoints.get_fragment)
    app.router.add_put("/v1/state", endpoints.put_state)
    app.router.add_get("/v1/state/{learner:[0-9]+}/{incarnation:[0-9]+}", endpoints.get_state)
    app.router.add_get("/v1/status", endpoints.get_status)
    app.router.add_post("/v1/snapshot", endpoints.post_snapshot)
    app.router.add_get("/v1/snapshot/{snapshot:[0-9]+}", endpoints.get_snapshot)
    app.router.add_post("/v1/control", endpoints.post_control)
    app.router.add_post("/v1/finish", endpoints.post_finish)
    app.router.add_get("/metrics", endpoints.get_metrics)
    app.router.add_get("/v1/shards", endpoints.get_shards)
    if syncer.shards is not None:
        app.router.add_get("/v1/head", syncer.shards.open_link)
        app.router.add_get("/v1/initial/{fragment:[0-9]+}", syncer.shards.get_initial)
    app.on_cleanup.append(endpoints.clean_up)
    return app


class SyncerEndpoints:
    def __init__(self, syncer: SyncerProcess) -> None:
        self.syncer = syncer
        self.spool = StateSpool(syncer.directory / "spool")
        self.fragment_endpoints = FragmentEndpoints(syncer)
        self._create_lock = asyncio.Lock()

    # ---------------------------------------------------------------------------------------------------- joining

    async def get_run(self, request: web.Request) -> web.StreamResponse:
        """Reply with the settings of the run.

        A learner sends its number. A number that its key does not allow is refused here, before the learner creates a
        run that it could not join.
        """
        text = request.query.get("learner")
        if text is not None:
            number = int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else 0
            choose_learner_id(_parse_learner_id(number), self.syncer.connected_learners())
        return web.json_response(
            self.syncer.settings.to_learner_json() | {"directory": str(self.syncer.directory.absolute())}
        )

    async def get_shards(self, request: web.Request) -> web.StreamResponse:
        """Reply with the addresses of the shards, by number. An unavailable shard is null."""
        known = self.syncer.shards
        return web.json_response({"shards": known.addresses() if known is not None else []})

    async def post_join(self, request: web.Request) -> web.StreamResponse:
        raw = parse_json(await request.read())
        requested = _parse_learner_id(raw.get("learner") if isinstance(raw, dict) else 0)
        learner, incarnation = self.syncer.assign_learner(
            choose_learner_id(requested, self.syncer.connected_learners())
        )
        return web.json_response({"learner": learner, "incarnation": incarnation})

    async def put_model(self, request: web.Request) -> web.StreamResponse:
        """Create the run from the first complete model. Of a later model, compare only the plan."""
        async with self._create_lock:
            frames = FrameReader(request)
            frame = await frames.read_frame(FrameKind.MODEL, _accept_plan)
            try:
                plan = FragmentPlan.from_json(parse_json(frame.payload, MAX_PLAN_BYTES))
            except ValueError as error:
                raise WireError(f"invalid fragment plan: {error}", "type") from None
            refusal = self._check_plan(plan)
            if refusal is not None:
                return error_response(*refusal)
            if self.syncer.plan is not None:
                return web.json_response({"founded": False})
            values = [await self._read_value(frames, plan, p) for p in range(len(plan.fragments))]
            await frames.expect_end()
            try:
                await self.syncer.create_run(plan, values)
            except ShardsUnavailableError as error:
                return error_response(503, str(error))
            except ValueError as error:
                self.syncer.log.error("cannot create the run: %s", error)
                return error_response(409, str(error))
            except OSError as error:
                self.syncer.log.error("cannot write the model: %s", error)
                return error_response(507, f"the syncer cannot write the model: {error.strerror}")
            return web.json_response({"founded": True}, status=201)

    def _check_plan(self, plan: FragmentPlan) -> HttpReply | None:
        settings = self.syncer.settings
        if plan.total_numel * 4 > MAX_MODEL_BYTES:
            return HttpReply(413, f"a model of {plan.total_numel} parameters is larger than this syncer takes")
        expected_plan = make_stable_plan(plan.tensors, settings.config.fragments, settings.numerics.plan)
        if plan != expected_plan:
            offered, expected = (
                f"{each.method} with {len(each.fragments)} fragments" for each in (plan, expected_plan)
            )
            if offered == expected:
                expected += " that hold other tensors; use one version of Atoll everywhere"
            return HttpReply(409, f"the plan is {offered}, the run's is {expected}")
        if self.syncer.plan is None:
            return None
        ours, theirs = self.syncer.plan.fingerprint(), plan.fingerprint()
        if ours != theirs:
            reason = Reason("refused-fingerprint", (describe_first_difference(ours, theirs),))
            return HttpReply(409, f"{reason}; {new_run_advice(str(self.syncer.directory.absolute()))}")
        return None

    async def _read_value(self, frames: FrameReader, plan: FragmentPlan, p: FragmentId) -> Tensor:
        try:
            value = torch.empty(plan.numel(p))
        except RuntimeError:
            raise WireError(f"no memory for the {plan.numel(p)} values of fragment {p}", "size") from None

        def accept(head: FrameHead, header: bytes) -> Any:
            fragment = decode_header(header, {"fragment": int})["fragment"]
            if fragment != p:
                raise WireError(f"found fragment {fragment}, expected {p}", "type")
            return as_bytes(value)

        await frames.read_frame(FrameKind.MODEL, accept)
        if not torch.isfinite(value.sum()):
            named = find_nonfinite_in_fragment(plan, p, get_codec("f32"), value.view(torch.uint8))
            raise WireError(
                f"the model holds values that are not finite: {named}; initialize it before joining, and register"
                " constants such as attention masks as buffers with persistent=False, which are not sent",
                "type",
            )
        return value

    # ---------------------------------------------------------------------------------------------------- the link

    async def open_link(self, request: web.Request) -> web.StreamResponse:
        if self.syncer.core is None:
            return error_response(409, "the run has no model yet: bring one first")
        connection = await WebSocketConnection.accept(request, MAX_MESSAGE_BYTES)
        link: SyncerLink | None = None
        refusal: WireError | IdentityMismatchError | None = None
        try:
            async for data in connection.messages():
                if isinstance(data, bytes):
                    envelope = decode_message(data, "learner")
                    link = self._identify(link, envelope, connection)
                    if type(envelope.body) in (Contribution, OptimizerState):
                        raise WireError(f"{type(envelope.body).__name__} needs a frame with its values", "type")
                    if type(envelope.body) is DownloadTime and self.syncer.settings.numerics.down != "auto":
                        raise WireError("DownloadTime is only for runs that choose the codec of updates (auto)", "type")
                    link.acknowledge(envelope.body)
                    self.syncer.handle_event(MessageArrived(envelope))
                elif link is not None:
                    self._record_metrics(link, data)
        except (WireError, IdentityMismatchError) as error:
            refusal = error
            rejection = Rejection(error.code, 400, str(error))
            self.syncer.access.reject(rejection, str(request.remote), "a link", log_key(error.code))
        finally:
            connection.cancel()
            if link is not None:
                refused = f"what it sent was refused: {refusal}"
                self.syncer.detach(link, refused if refusal is not None else connection.end_reason)
                link.abandon()
        if refusal is not None:
            await connection.refuse(str(refusal))
        assert isinstance(connection.socket, web.WebSocketResponse)
        return connection.socket

    def _identify(self, link: SyncerLink | None, envelope: Envelope, connection: WebSocketConnection) -> SyncerLink:
        """Return the link of this connection. Its first message, Hello, decides which learner it belongs to."""
        key = (envelope.learner, envelope.incarnation, envelope.session)
        if link is None:
            if type(envelope.body) is not Hello:
                raise WireError(f"the first message on a link is Hello, found {type(envelope.body).__name__}", "type")
            check_identity(envelope.learner)
            link = SyncerLink(key, connection, self.syncer.all_fragments)
            self.syncer.attach(link)
        if link.key != key:
            raise WireError(f"this link belongs to learner {link.key[0]}, the message says {key[0]}", "type")
        return link

    def _record_metrics(self, link: SyncerLink, text: str) -> None:
        if len(text) > MAX_METRICS_BYTES:
            raise WireError(f"metrics of {len(text)} letters, the limit is {MAX_METRICS_BYTES}", "size")
        raw = parse_json(text.encode(), 4 * MAX_METRICS_BYTES)
        if type(raw) is not dict:
            raise WireError("metrics are a JSON object", "type")
        syncer, (learner, incarnation, _) = self.syncer, link.key
        if syncer.core is not None and learner in syncer.core.state.members:
            metrics = {name: raw[name] for name in LEARNER_METRICS if _is_number(raw.get(name, ""))}
            syncer.metrics.record_learner(syncer.clock.now(), learner, incarnation, metrics)

    # -------------------------------------------------------------------------------------------------- optimizer state

    async def put_state(self, request: web.Request) -> web.StreamResponse:
        """Store a peer's optimizer state in a file: it may be larger than the model, and its receiver may be slow."""
        found: list[tuple[Envelope, SpooledStateFile]] = []

        def accept(head: FrameHead, header: bytes) -> Any:
            envelope = self._check_state(head, header)
            assert isinstance(envelope.body, OptimizerState)
            key = (envelope.body.target, envelope.body.target_incarnation)
            found.append((envelope, self.spool.create_file(key, header, head.payload_bytes)))
            return found[0][1].payload

        try:
            frames = FrameReader(request)
            await frames.read_frame(FrameKind.OPTIMIZER_STATE, accept)
            await frames.expect_end()
            await asyncio.get_running_loop().run_in_executor(None, found[0][1].write_head)
            found[0][1].publish()
        except ConnectionError:
            raise
        except OSError as error:
            self.syncer.log.warning("cannot store optimizer state: %s", error)
            return error_response(507, f"the syncer cannot store the optimizer state: {error.strerror}")
        finally:
            if found:
                found[0][1].close()
        self.syncer.handle_event(MessageArrived(found[0][0]))
        return web.Response(status=204)

    def _check_state(self, head: FrameHead, header: bytes) -> Envelope:
        envelope = decode_message(header, "learner")
        if type(envelope.body) is not OptimizerState:
            raise WireError(f"expected OptimizerState, found {type(envelope.body).__name__}", "type")
        self.fragment_endpoints.check_link(envelope.learner, envelope.incarnation, envelope.session)
        assert self.syncer.plan is not None
        max_bytes = max_state_bytes(self.syncer.plan.total_numel)
        if head.payload_bytes > max_bytes:
            raise WireError(f"optimizer state of {head.payload_bytes} bytes, the limit is {max_bytes}", "size")
        return envelope

    async def get_state(self, request: web.Request) -> web.StreamResponse:
        learner, incarnation = parse_path_numbers(request, "learner", "incarnation")
        check_identity(learner)
        path = self.spool.path((learner, incarnation))
        if path is None:
            return error_response(404, "no optimizer state waits for this learner")
        return web.FileResponse(path)

    # ---------------------------------------------------------------------------------------------------- operators

    async def get_status(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(build_status(self.syncer))

    async def get_metrics(self, request: web.Request) -> web.StreamResponse:
        """Reply with the metrics for Prometheus."""
        try:
            text, content_type = render_metrics(self.syncer, request.headers.get("Accept", ""))
        except ImportError:
            return error_response(501, NOT_INSTALLED)
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def post_snapshot(self, request: web.Request) -> web.StreamResponse:
        raw = parse_json(await request.read()) if request.can_read_body else {"requested_by": ""}
        if not isinstance(raw, dict) or set(raw) != {"requested_by"}:
            return error_response(400, "a snapshot request is empty or a JSON object with requested_by")
        problem = find_requester_problem(raw["requested_by"]) if raw["requested_by"] != "" else None
        if problem is not None:
            return error_response(400, problem)
        number = self.syncer.take_snapshot(raw["requested_by"])
        if number is None:
            if self.syncer.core is None:
                return error_response(409, "the run has no model yet, so there is nothing to take a snapshot of")
            return error_response(
                409, "cannot take a snapshot of a run that ends or has ended: its model is its result"
            )
        return web.json_response({"snapshot": number}, status=202)

    async def get_snapshot(self, request: web.Request) -> web.StreamResponse:
        """Reply with the state of a snapshot, and with the contents of a durable one."""
        text = request.match_info["snapshot"]
        number = int(text) if len(text) <= MAX_DIGITS else 0
        status = self.syncer.snapshots.get(number) or {"snapshot": number, "left_out": [], "said": ""}
        if status.get("state") not in (None, "durable"):
            return web.json_response(status)
        info = await asyncio.to_thread(read_snapshot_info, self.syncer.directory, number)
        if info is None:
            return error_response(404, f"there is no snapshot {number}; the newest few are kept")
        return web.json_response(status | {"state": "durable"} | info.to_json(self.syncer.directory))

    async def post_control(self, request: web.Request) -> web.StreamResponse:
        reply = await handle_control(self.syncer, parse_json(await request.read()))
        if reply.status != 200:
            return error_response(*reply)
        return web.json_response({"done": reply.message})

    async def post_finish(self, request: web.Request) -> web.StreamResponse:
        await self.syncer.finish()
        return web.Response(status=204)

    async def clean_up(self, app: web.Application) -> None:
        self.fragment_endpoints.partial_uploads.close()
        self.spool.clear()


def _parse_learner_id(value: object) -> int | None:
    if value is None or (type(value) is int and 1 <= value <= MAX_LEARNER_ID):
        return value
    raise WireError(f"a learner's number is a whole number from 1 to {MAX_LEARNER_ID}, or null for any", "type")


def _accept_plan(head: FrameHead, header: bytes) -> Any:
    decode_header(header, {})
    if head.payload_bytes > MAX_PLAN_BYTES:
        raise WireError(f"a plan of {head.payload_bytes} bytes, the limit is {MAX_PLAN_BYTES}", "size")
    return bytearray(head.payload_bytes)


def _is_number(value: object) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value))  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------------------------
# Optimizer state in transit between learners: files, because the receiver may download it at any time


StateKey = tuple[LearnerId, Incarnation]

MAX_STATE_FILES = 16
"""Files that wait at the same time. The oldest is deleted first: its receiver has given up or will request another."""


class SpooledStateFile:
    """Complete frame in a file. Its payload is the memory-mapped file, so it is never in memory twice."""

    def __init__(self, spool: StateSpool, key: StateKey, header: bytes, payload_bytes: int) -> None:
        self._spool = spool
        self._key = key
        self._header = header
        # Two peers may send to the same learner at once. With one file, the second would truncate the first's mapping.
        self.path = spool.folder / f"learner-{key[0]}-i{key[1]}-{next(spool.serial)}.part"
        size = FRAME_HEAD_BYTES + len(header) + payload_bytes
        self._file = open(self.path, "w+b", buffering=0)  # noqa: SIM115 - closed by close()
        try:
            os.posix_fallocate(self._file.fileno(), 0, size)  # a full disk is an error here, not SIGBUS later
        except OSError:
            self.close()
            raise
        self._memory = mmap.mmap(self._file.fileno(), size)
        self.payload = memoryview(self._memory)[FRAME_HEAD_BYTES + len(header) :]

    def write_head(self) -> None:
        """Write the frame head after the payload has arrived. It reads the whole payload: not for the event loop."""
        head = encode_frame_head(FrameKind.OPTIMIZER_STATE, 0, self._header, self.payload)
        self._memory[: FRAME_HEAD_BYTES + len(self._header)] = head + self._header

    def publish(self) -> None:
        final = self.path.with_suffix(".state")
        self.path.rename(final)
        self._spool.add(self._key, final)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)  # a published file has another name
        self._file.close()


class StateSpool:
    """Files of optimizer state that wait for their receivers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.iterdir():
            leftover.unlink()  # a file of an earlier syncer: no learner will request it
        self.serial = itertools.count(1)
        self._files: dict[StateKey, Path] = {}

    def create_file(self, key: StateKey, header: bytes, payload_bytes: int) -> SpooledStateFile:
        return SpooledStateFile(self, key, header, payload_bytes)

    def add(self, key: StateKey, path: Path) -> None:
        old = self._files.pop(key, None)
        if old is not None:
            old.unlink(missing_ok=True)
        self._files[key] = path
        while len(self._files) > MAX_STATE_FILES:
            oldest = next(iter(self._files))
            self._files.pop(oldest).unlink(missing_ok=True)

    def path(self, key: StateKey) -> Path | None:
        return self._files.get(key)

    def clear(self) -> None:
        for path in self._files.values():
            path.unlink(missing_ok=True)
        self._files.clear()
