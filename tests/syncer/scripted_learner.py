"""Learner client for tests that sends any message, in valid or invalid bytes."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import aiohttp
import torch
from torch import Tensor

from atoll.core.protocol import Body, Contribution, Envelope, Hello, OptimizerState, Pull, Welcome
from atoll.core.types import NO_VERSION
from atoll.store.run_settings import RunSettings
from atoll.tensors.codecs import get_codec
from atoll.tensors.plan import FragmentPlan
from atoll.transport.wire import CODEC_NUMBERS, FrameKind, decode_message, encode_frame_head, encode_message

WAIT_TIMEOUT_S = 30.0
"""Timeout of each wait."""


class ScriptedLearner:
    """Learner client with one link. Use it with `async with`. `plan` is the plan of the run."""

    def __init__(
        self,
        address: str,
        settings: RunSettings,
        plan: FragmentPlan,
        learner: int,
        incarnation: int = 1,
        session: int = 1,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.settings = settings
        self.plan = plan
        self.learner = learner
        self.incarnation = incarnation
        self.session = session
        self.epoch = 0
        self.tick = 0
        self.numerics = settings.numerics
        self._headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        self._base = f"http{'s' if tls is not None else ''}://{address}"
        self._tls = tls
        self.http: aiohttp.ClientSession
        self.socket: aiohttp.ClientWebSocketResponse

    def open_session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(ssl=self._tls if self._tls is not None else True)
        return aiohttp.ClientSession(self._base, headers=self._headers, connector=connector)

    async def __aenter__(self) -> Self:
        self.http = self.open_session()
        try:
            self.socket = await self.http.ws_connect("/v1/link", max_msg_size=2**26)
        except BaseException:
            await self.http.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.socket.close()
        await self.close_session()

    @asynccontextmanager
    async def without_link(self) -> AsyncIterator[Self]:
        """Open a session for HTTP requests, without a link."""
        self.http = self.open_session()
        try:
            yield self
        finally:
            await self.close_session()

    async def close_session(self) -> None:
        await self.http.close()

    def envelope(self, body: Body) -> Envelope:
        self.tick += 1
        return Envelope(self.learner, self.incarnation, self.session, self.epoch, self.tick, 0, 0, body)

    def hello(self, **other: Any) -> Hello:
        fields: dict[str, Any] = {
            "run_id": self.settings.config.run_id,
            "fingerprint": self.plan.fingerprint(),
            "received": (NO_VERSION,) * len(self.plan.fragments),
            "step": 0,
            "trained": 0,
            "training": False,
        }
        return Hello(**(fields | other))

    async def send(self, body: Body) -> None:
        await self.socket.send_bytes(encode_message(self.envelope(body)))

    async def receive(self, *kinds: type) -> Any:
        """Return the next message of one of these kinds, or None if the syncer closes the link first."""
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while True:
                message = await self.socket.receive()
                if message.type is not aiohttp.WSMsgType.BINARY:
                    self.last = message
                    return None
                envelope = decode_message(message.data, "syncer")
                self.epoch = max(self.epoch, envelope.epoch)
                if type(envelope.body) in kinds:
                    return envelope.body

    async def join(self, **hello: Any) -> Welcome:
        await self.send(self.hello(**hello))
        welcome = await self.receive(Welcome)
        assert isinstance(welcome, Welcome)
        return welcome

    async def wait_closed(self) -> tuple[int, str]:
        """Wait until the syncer closes the link, and return the code and the reason."""
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while True:
                message = await self.socket.receive()
                if message.type is aiohttp.WSMsgType.CLOSE:
                    return int(message.data), str(message.extra)
                if message.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSING):
                    return int(self.socket.close_code or 0), ""

    # ------------------------------------------------------------------------------------------ bulk

    def contribution(self, pull: Pull, step: int, **other: Any) -> Contribution:
        fields: dict[str, Any] = {
            "round": pull.round,
            "copied_at": step,
            "steps": 1,
            "tokens": 16,
            "trained": 16 * step,
            "dropped": 0,
        }
        return Contribution(**(fields | other))

    def values(self, fragment: int, fill: float = 0.001) -> Tensor:
        return get_codec(self.numerics.upload_codecs[0]).encode(torch.full((self.plan.numel(fragment),), fill))

    def frame(self, body: Contribution | OptimizerState, payload: Tensor | bytes, **other: Any) -> bytes:
        """Encode a frame. `other`: an invalid kind or codec."""
        header = encode_message(self.envelope(body))
        is_contribution = isinstance(body, Contribution)
        kind = other.get("kind", FrameKind.CONTRIBUTION if is_contribution else FrameKind.OPTIMIZER_STATE)
        number = other.get("codec", CODEC_NUMBERS[self.numerics.upload_codecs[0]] if is_contribution else 0)
        raw = payload if isinstance(payload, bytes) else payload.numpy().tobytes()
        return encode_frame_head(kind, number, header, raw) + header + raw

    async def put(self, path: str, data: bytes) -> tuple[int, dict[str, Any]]:
        async with asyncio.timeout(WAIT_TIMEOUT_S), self.http.put(path, data=data) as response:
            text = await response.read()
            return response.status, json.loads(text) if text else {}
