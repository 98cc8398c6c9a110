"""Requests of a learner before it has a link. Here, and only here, the training thread waits for answers."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeAlias, TypeVar

import aiohttp
from torch import Tensor

from atoll.errors import KeysRefused, LearnerRefused, SyncerUnreachable
from atoll.island.fragments import Buffer, FragmentTensors
from atoll.store.run_settings import RunSettings
from atoll.tensors.model_view import ModelView
from atoll.tensors.plan import FragmentPlan
from atoll.transport.http_client import ChunkedModel, ChunkedPayload, LearnerLink, Refusal, why
from atoll.transport.tls import tls_problem
from atoll.transport.wire import WireError

RETRY_S = 0.5
SAY_EVERY_S = 10.0
REACH_S = 15.0

MAY_CHANGE = (408, 503, 507)
"""Answers that are another one later: too slow, not ready, no room."""

T = TypeVar("T")
FetchFinal: TypeAlias = Callable[[FragmentTensors, int], Awaitable[Buffer | None]]
"""`FragmentTraffic.fetch_final`"""


class JoinClient:
    """`join_by` is a moment of the monotonic clock; None waits for as long as it takes, and says so."""

    def __init__(self, link: LearnerLink, log: logging.Logger) -> None:
        self._link = link
        self._log = log

    async def settings(self, wanted: int | None, join_by: float | None) -> tuple[RunSettings, bool, str]:
        """Return what the run is, whether it has a model, and its directory at the syncer.

        A number that the key is not for is refused already here: a learner that cannot join must not found the run.
        """
        asked = {"learner": str(wanted)} if wanted is not None else None
        told = await self._patiently(lambda: self._link.ask("GET", "/v1/run", params=asked), join_by)
        return RunSettings.from_json(told), bool(told["founded"]), str(told.get("directory", "its directory"))

    async def reach(self, address: str) -> None:
        """Does the syncer at this address answer to this process? It is not waited for."""
        if address not in self._link.address.split(","):
            raise SyncerUnreachable(f"{address} is none of {self._link.address}")
        try:
            async with asyncio.timeout(REACH_S):
                await self._link.ask("GET", "/v1/run", address)
        except (Refusal, aiohttp.ClientError, OSError, TimeoutError, WireError) as wrong:
            raise SyncerUnreachable(f"{address}: {why(wrong)}") from None

    async def number(self, wanted: int | None, join_by: float | None) -> tuple[int, int]:
        """The number of this learner, and of its incarnation."""
        told = await self._patiently(lambda: self._link.ask("POST", "/v1/join", json={"learner": wanted}), join_by)
        return int(told["learner"]), int(told["incarnation"])

    async def found(self, plan: FragmentPlan, view: ModelView, compute: Executor, join_by: float | None) -> None:
        async def values() -> AsyncIterator[Tensor | ChunkedPayload]:
            for p in range(len(plan.fragments)):
                if view.packed and isinstance(view, ChunkedModel):
                    yield ChunkedPayload(4 * plan.numel(p), partial(view.flow, p), compute)
                    continue
                buffer = view.buffer(p)
                await asyncio.get_running_loop().run_in_executor(compute, view.read, p, buffer)
                yield buffer

        text = json.dumps(plan.to_json(), separators=(",", ":")).encode()
        await self._patiently(lambda: self._bring(text, values), join_by)

    async def _bring(self, plan: bytes, values: Callable[[], AsyncIterator[Tensor | ChunkedPayload]]) -> None:
        try:
            await self._link.found(plan, values)
        except (aiohttp.ClientError, OSError):
            # A syncer that has a model by now does not read another one to its end, and the connection may break before
            # its answer is read.
            if not (await self._link.ask("GET", "/v1/run")).get("founded"):
                raise

    async def final(self, fragments: list[FragmentTensors], join_by: float | None, fetch: FetchFinal) -> None:
        """The values that a run has ended with become the anchors."""
        await self._patiently(lambda: self._fetch_final(fragments, fetch), join_by)

    async def _fetch_final(self, fragments: list[FragmentTensors], fetch: FetchFinal) -> None:
        told = await self._link.ask("GET", "/v1/status")
        if told["stage"] != "finished":
            raise TimeoutError("the last merges are under way")
        for fragment, shown in zip(fragments, told["fragments"], strict=True):
            version = int(shown["version"])
            value = await fetch(fragment, version)
            if value is None:
                raise WireError(f"fragment {fragment.p} is not the one that was published", "digest")
            fragment.arrived(version, value)
            fragment.release(*fragment.will_adopt(False))

    async def _patiently(self, ask: Callable[[], Coroutine[Any, Any, T]], join_by: float | None) -> T:
        """A syncer that does not answer is asked again and again, until the time is over. A no is a no."""
        said = 0.0
        address = self._link.address
        while True:
            try:
                async with asyncio.timeout_at(join_by):  # the loop's clock is the monotonic one
                    return await ask()
            except Refusal as refusal:
                if refusal.status not in MAY_CHANGE:
                    raise LearnerRefused(f"the syncer at {address} refused: {refusal}") from None
                problem = str(refusal)
            except (aiohttp.ClientError, OSError, TimeoutError, WireError) as wrong:
                if tls_problem(wrong) is not None:
                    raise KeysRefused(f"the syncer at {address} cannot be spoken to: {why(wrong)}") from None
                problem = why(wrong)
            self._link.turn()
            now = time.monotonic()
            if join_by is not None and now + RETRY_S >= join_by:
                raise SyncerUnreachable(f"no syncer answers at {address}: {problem}")
            if now - said >= SAY_EVERY_S:
                said = now
                self._log.warning("no syncer answers at %s yet (%s); trying again", address, problem)
            await asyncio.sleep(RETRY_S)
