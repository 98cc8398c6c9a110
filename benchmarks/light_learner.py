"""Learners that do not train: the real core and the real connections, prepared bytes in the place of tensors.

Many of them fit into one process, so that what is measured is the syncer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

import aiohttp
import torch
from torch import Tensor

from atoll.core.learner.core import LearnerCore
from atoll.core.protocol import (
    AdoptFragment,
    CloseConnection,
    Contribution,
    Dial,
    Envelope,
    LearnerEvent,
    LeaveRequested,
    MessageArrived,
    OptimizerState,
    Published,
    Send,
    Started,
    StartTraining,
    StepTaken,
    Stop,
    TimerFired,
)
from atoll.core.types import FragmentId
from atoll.store.run_settings import RunSettings
from atoll.tensors.plan import FragmentPlan, TensorInfo, make_plan
from atoll.transport.buffers import StreamingBuffer
from atoll.transport.http_client import FragmentClient, LearnerLink, LinkEvent, SyncerRefusedError, fragment_sizes
from atoll.transport.wire import CODEC_NUMBERS, FrameKind, WireError, encode_message

LOG = logging.getLogger("atoll.light")
OPTIMIZER_STATE_BYTES = b"inner state of a learner that has none"

NETWORK_ERRORS = (SyncerRefusedError, WireError, aiohttp.ClientError, OSError, TimeoutError)


def even_plan(fragments: int, numel: int) -> FragmentPlan:
    """Fragments of one tensor each, all of one size."""
    tensors = [TensorInfo(f"tensors.{p:03d}", (numel,), "float32", "weight") for p in range(fragments)]
    return make_plan(tensors, fragments, "balanced")


class SimulatedLearner:
    """One learner. `payload`: what every one of its contributions holds; it is shared, and never changed."""

    def __init__(
        self,
        address: str,
        number: int,
        settings: RunSettings,
        plan: FragmentPlan,
        payload: Tensor,
        token: str | None = None,
    ) -> None:
        self.number = number
        self.link = LearnerLink(address, token, LOG, self)
        self.bulk = FragmentClient(self.link, None)
        self.sent = 0  # control messages
        self.received = 0
        self.uploaded = 0  # contributions that were taken
        self.downloaded = 0  # fragments
        self.adopted = 0
        self.failed = 0  # transfers
        self.training = asyncio.Event()
        self.stopped = asyncio.Event()
        self._settings = settings
        self._plan = plan
        self._payload = payload
        self._config = replace(settings.config, fragments=len(plan.fragments), fingerprint=plan.fingerprint())
        self._core: LearnerCore | None = None
        self._published: dict[FragmentId, Envelope] = {}
        self._downloading: set[FragmentId] = set()
        self._tasks: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    @property
    def core(self) -> LearnerCore:
        assert self._core is not None, "the learner has not started"
        return self._core

    # ---------------------------------------------------------------------------------------------------- a life

    async def provide_model(self) -> None:
        """Bring a model of zeros."""

        async def values() -> AsyncIterator[Tensor]:
            for p in range(len(self._plan.fragments)):
                yield torch.zeros(self._plan.numel(p))

        await self.link.upload_model(json.dumps(self._plan.to_json()).encode(), values)

    async def join(self) -> None:
        reply = await self.link.request("POST", "/v1/join", json={"learner": self.number})
        self._core = LearnerCore(self._config, int(reply["learner"]), int(reply["incarnation"]))
        self.handle_event(Started())

    async def train(self, pace_s: float, tokens: int = 512) -> None:
        """Steps at this pace until the run is over, the first one at a moment of its own."""
        await self.training.wait()
        due = time.monotonic() + pace_s * (self.number * 0.618 % 1.0)
        while not self.stopped.is_set() and self.core.training:
            wait = due - time.monotonic()
            await asyncio.sleep(max(0.0, wait))
            due = max(due + pace_s, time.monotonic())
            if self.core.training:
                self.handle_event(StepTaken(1, tokens, pace_s))

    async def leave(self) -> None:
        if self._core is not None and not self.stopped.is_set():
            self.handle_event(LeaveRequested("the measurement is over"))
            await self.link.close_gracefully(1.0)
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.link.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---------------------------------------------------------------------------------------------------- the core

    def handle_event(self, event: LearnerEvent) -> None:
        for effect in self.core.handle(time.monotonic(), event):
            if type(effect) is Send:
                self._send(effect.envelope)
            elif type(effect) is AdoptFragment:
                self.adopted += 1
            elif type(effect) is Dial:
                self._spawn(self.link.dial(effect.delay_s))
            elif type(effect) is CloseConnection:
                self.link.disconnect(effect.session)
            elif type(effect) is StartTraining:
                self.training.set()
            elif type(effect) is Stop:
                self.stopped.set()
        self._arm_timer()

    def _arm_timer(self) -> None:
        deadline = self.core.next_deadline()
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        wait = max(0.0, deadline - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(wait, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if not self.stopped.is_set():
            self.handle_event(TimerFired())

    def _send(self, envelope: Envelope) -> None:
        self.sent += 1
        if type(envelope.body) in (Contribution, OptimizerState):
            self._spawn(self._upload_envelope(envelope))
        else:
            self.link.post(envelope)

    # ---------------------------------------------------------------------------------------------------- bulk

    async def upload(self, envelope: Envelope) -> None:
        number = CODEC_NUMBERS[self._settings.numerics.upload_codecs[0]]
        await self.bulk.upload_contribution(number, envelope, StreamingBuffer.from_complete(self._payload))

    async def download(self, p: FragmentId, version: int, base: int | None) -> None:
        sizes = fragment_sizes(self._plan.numel(p), self._settings.numerics.download_codecs)
        self.bulk.release_buffer((await self.bulk.download(p, version, base, sizes)).data)

    async def _upload_envelope(self, envelope: Envelope) -> None:
        try:
            if type(envelope.body) is OptimizerState:
                await self.bulk.put_frame(
                    "/v1/state",
                    FrameKind.OPTIMIZER_STATE,
                    0,
                    encode_message(envelope),
                    memoryview(OPTIMIZER_STATE_BYTES),
                )
            else:
                await self.upload(envelope)
                self.uploaded += 1
        except NETWORK_ERRORS as error:
            self.failed += 1
            LOG.debug("learner %d: %s", self.number, error)

    async def _download_newest(self, p: FragmentId) -> None:
        """One fetch per fragment at a time; the newest notice counts."""
        try:
            while (envelope := self._published.pop(p, None)) is not None:
                body = envelope.body
                assert isinstance(body, Published)
                if body.version > self.core.state.received[p] and body.base in (None, self.core.state.received[p]):
                    await self.download(p, body.version, body.base)
                    self.downloaded += 1
                self.handle_event(MessageArrived(envelope))
        except NETWORK_ERRORS as error:
            self.failed += 1
            LOG.debug("learner %d: %s", self.number, error)
        finally:
            self._downloading.discard(p)

    # ---------------------------------------------------------------------------------------------------- hearing

    def handle_link_event(self, event: LinkEvent) -> None:
        if not isinstance(event, MessageArrived):
            self.handle_event(event)
            return
        self.received += 1
        envelope, body = event.envelope, event.envelope.body
        if type(body) is Published:
            self._published[body.fragment] = envelope
            if body.fragment not in self._downloading:
                self._downloading.add(body.fragment)
                self._spawn(self._download_newest(body.fragment))
        else:
            self.handle_event(event)  # optimizer state: the message is enough, it is not used here
