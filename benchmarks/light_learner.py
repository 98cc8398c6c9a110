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
    Contribution,
    Dial,
    Envelope,
    Hangup,
    InnerState,
    LearnerEvent,
    LeaveWanted,
    MessageArrived,
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
from atoll.transport.http_client import LearnerBulk, LearnerLink, LinkEvent, Refusal, fragment_sizes
from atoll.transport.wire import CODEC_NUMBERS, Kind, WireError, encode_message

LOG = logging.getLogger("atoll.light")
STATE = b"inner state of a learner that has none"

NETWORK = (Refusal, WireError, aiohttp.ClientError, OSError, TimeoutError)


def even_plan(fragments: int, numel: int) -> FragmentPlan:
    """Fragments of one tensor each, all of one size."""
    tensors = [TensorInfo(f"tensors.{p:03d}", (numel,), "float32", "weight") for p in range(fragments)]
    return make_plan(tensors, fragments, "balanced")


class LightLearner:
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
        self.bulk = LearnerBulk(self.link, None)
        self.sent = 0  # control messages
        self.heard = 0
        self.put = 0  # contributions that were taken
        self.got = 0  # fragments
        self.adopted = 0
        self.failed = 0  # transfers
        self.training = asyncio.Event()
        self.stopped = asyncio.Event()
        self._settings = settings
        self._plan = plan
        self._payload = payload
        self._config = replace(settings.config, fragments=len(plan.fragments), fingerprint=plan.fingerprint())
        self._core: LearnerCore | None = None
        self._noticed: dict[FragmentId, Envelope] = {}
        self._fetching: set[FragmentId] = set()
        self._tasks: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    @property
    def core(self) -> LearnerCore:
        assert self._core is not None, "the learner has not started"
        return self._core

    # ---------------------------------------------------------------------------------------------------- a life

    async def found(self) -> None:
        """Bring a model of zeros."""

        async def values() -> AsyncIterator[Tensor]:
            for p in range(len(self._plan.fragments)):
                yield torch.zeros(self._plan.numel(p))

        await self.link.found(json.dumps(self._plan.to_json()).encode(), values)

    async def join(self) -> None:
        told = await self.link.ask("POST", "/v1/join", json={"learner": self.number})
        self._core = LearnerCore(self._config, int(told["learner"]), int(told["incarnation"]))
        self.tell(Started())

    async def train(self, pace_s: float, tokens: int = 512) -> None:
        """Steps at this pace until the run is over, the first one at a moment of its own."""
        await self.training.wait()
        due = time.monotonic() + pace_s * (self.number * 0.618 % 1.0)
        while not self.stopped.is_set() and self.core.training:
            wait = due - time.monotonic()
            await asyncio.sleep(max(0.0, wait))
            due = max(due + pace_s, time.monotonic())
            if self.core.training:
                self.tell(StepTaken(1, tokens, pace_s))

    async def leave(self) -> None:
        if self._core is not None and not self.stopped.is_set():
            self.tell(LeaveWanted("the measurement is over"))
            await self.link.say_goodbye(1.0)
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

    def tell(self, event: LearnerEvent) -> None:
        for effect in self.core.handle(time.monotonic(), event):
            if type(effect) is Send:
                self._send(effect.envelope)
            elif type(effect) is AdoptFragment:
                self.adopted += 1
            elif type(effect) is Dial:
                self._spawn(self.link.dial(effect.after_s))
            elif type(effect) is Hangup:
                self.link.hang_up(effect.session)
            elif type(effect) is StartTraining:
                self.training.set()
            elif type(effect) is Stop:
                self.stopped.set()
        self._arm()

    def _arm(self) -> None:
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
            self.tell(TimerFired())

    def _send(self, envelope: Envelope) -> None:
        self.sent += 1
        if type(envelope.body) in (Contribution, InnerState):
            self._spawn(self._put(envelope))
        else:
            self.link.post(envelope)

    # ---------------------------------------------------------------------------------------------------- bulk

    async def contribute(self, envelope: Envelope) -> None:
        number = CODEC_NUMBERS[self._settings.numerics.ups[0]]
        await self.bulk.contribute(number, envelope, StreamingBuffer.complete(self._payload))

    async def fetch(self, p: FragmentId, version: int, base: int | None) -> None:
        sizes = fragment_sizes(self._plan.numel(p), self._settings.numerics.downs)
        self.bulk.give_back((await self.bulk.fetch(p, version, base, sizes)).data)

    async def _put(self, envelope: Envelope) -> None:
        try:
            if type(envelope.body) is InnerState:
                await self.bulk.put("/v1/state", Kind.INNER_STATE, 0, encode_message(envelope), memoryview(STATE))
            else:
                await self.contribute(envelope)
                self.put += 1
        except NETWORK as wrong:
            self.failed += 1
            LOG.debug("learner %d: %s", self.number, wrong)

    async def _get(self, p: FragmentId) -> None:
        """One fetch per fragment at a time; the newest notice counts."""
        try:
            while (envelope := self._noticed.pop(p, None)) is not None:
                body = envelope.body
                assert isinstance(body, Published)
                if body.version > self.core.state.received[p] and body.base in (None, self.core.state.received[p]):
                    await self.fetch(p, body.version, body.base)
                    self.got += 1
                self.tell(MessageArrived(envelope))
        except NETWORK as wrong:
            self.failed += 1
            LOG.debug("learner %d: %s", self.number, wrong)
        finally:
            self._fetching.discard(p)

    # ---------------------------------------------------------------------------------------------------- hearing

    def handle_link_event(self, event: LinkEvent) -> None:
        if not isinstance(event, MessageArrived):
            self.tell(event)
            return
        self.heard += 1
        envelope, body = event.envelope, event.envelope.body
        if type(body) is Published:
            self._noticed[body.fragment] = envelope
            if body.fragment not in self._fetching:
                self._fetching.add(body.fragment)
                self._spawn(self._get(body.fragment))
        else:
            self.tell(event)  # of inner state the notice is enough: nobody uses it here
