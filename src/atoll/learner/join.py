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

from atoll.errors import KeysRefusedError, LearnerRefusedError, SyncerUnreachableError
from atoll.island.fragments import Buffer, FragmentTensors
from atoll.store.run_settings import RunSettings
from atoll.tensors.model_view import ModelView
from atoll.tensors.plan import FragmentPlan
from atoll.transport.http_client import (
    ChunkedModel,
    ChunkedPayload,
    LearnerLink,
    SyncerRefusedError,
    describe_network_error,
)
from atoll.transport.tls import find_tls_problem
from atoll.transport.wire import WireError

RETRY_INTERVAL_S = 0.5
LOG_INTERVAL_S = 10.0
REACH_TIMEOUT_S = 15.0

RETRIABLE_STATUSES = (408, 503, 507)
"""Answers that are another one later: too slow, not ready, no room."""

T = TypeVar("T")
DownloadFinal: TypeAlias = Callable[[FragmentTensors, int], Awaitable[Buffer | None]]
"""`FragmentTransfer.download_final`"""


class JoinClient:
    """`join_by` is a moment of the monotonic clock; None waits for as long as it takes, and says so."""

    def __init__(self, link: LearnerLink, log: logging.Logger) -> None:
        self._link = link
        self._log = log

    async def fetch_settings(self, wanted: int | None, join_by: float | None) -> tuple[RunSettings, bool, str]:
        """Return what the run is, whether it has a model, and its directory at the syncer.

        A number that the key is not for is refused already here: a learner that cannot join must not found the run.
        """
        asked = {"learner": str(wanted)} if wanted is not None else None
        told = await self._retry(lambda: self._link.request("GET", "/v1/run", params=asked), join_by)
        return RunSettings.from_json(told), bool(told["founded"]), str(told.get("directory", "its directory"))

    async def check_reachable(self, address: str) -> None:
        """Does the syncer at this address answer to this process? It is not waited for."""
        if address not in self._link.address.split(","):
            raise SyncerUnreachableError(f"{address} is none of {self._link.address}")
        try:
            async with asyncio.timeout(REACH_TIMEOUT_S):
                await self._link.request("GET", "/v1/run", address)
        except (SyncerRefusedError, aiohttp.ClientError, OSError, TimeoutError, WireError) as wrong:
            raise SyncerUnreachableError(f"{address}: {describe_network_error(wrong)}") from None

    async def request_number(self, wanted: int | None, join_by: float | None) -> tuple[int, int]:
        """The number of this learner, and of its incarnation."""
        told = await self._retry(lambda: self._link.request("POST", "/v1/join", json={"learner": wanted}), join_by)
        return int(told["learner"]), int(told["incarnation"])

    async def upload_model(self, plan: FragmentPlan, view: ModelView, compute: Executor, join_by: float | None) -> None:
        async def values() -> AsyncIterator[Tensor | ChunkedPayload]:
            for p in range(len(plan.fragments)):
                if view.packed and isinstance(view, ChunkedModel):
                    yield ChunkedPayload(4 * plan.numel(p), partial(view.stream_fragment, p), compute)
                    continue
                buffer = view.buffer(p)
                await asyncio.get_running_loop().run_in_executor(compute, view.read, p, buffer)
                yield buffer

        text = json.dumps(plan.to_json(), separators=(",", ":")).encode()
        await self._retry(lambda: self._upload(text, values), join_by)

    async def _upload(self, plan: bytes, values: Callable[[], AsyncIterator[Tensor | ChunkedPayload]]) -> None:
        try:
            await self._link.upload_model(plan, values)
        except (aiohttp.ClientError, OSError):
            # A syncer that has a model by now does not read another one to its end, and the connection may break before
            # its answer is read.
            if not (await self._link.request("GET", "/v1/run")).get("founded"):
                raise

    async def download_final(
        self, fragments: list[FragmentTensors], join_by: float | None, fetch: DownloadFinal
    ) -> None:
        """The values that a run has ended with become the anchors."""
        await self._retry(lambda: self._download_final(fragments, fetch), join_by)

    async def _download_final(self, fragments: list[FragmentTensors], fetch: DownloadFinal) -> None:
        told = await self._link.request("GET", "/v1/status")
        if told["stage"] != "finished":
            raise TimeoutError("the last merges are under way")
        for fragment, shown in zip(fragments, told["fragments"], strict=True):
            version = int(shown["version"])
            value = await fetch(fragment, version)
            if value is None:
                raise WireError(f"fragment {fragment.p} is not the one that was published", "digest")
            fragment.set_newest(version, value)
            fragment.release(*fragment.prepare_adoption(False))

    async def _retry(self, ask: Callable[[], Coroutine[Any, Any, T]], join_by: float | None) -> T:
        """A syncer that does not answer is asked again and again, until the time is over. A no is a no."""
        said = 0.0
        address = self._link.address
        while True:
            try:
                async with asyncio.timeout_at(join_by):  # the loop's clock is the monotonic one
                    return await ask()
            except SyncerRefusedError as refusal:
                if refusal.status not in RETRIABLE_STATUSES:
                    raise LearnerRefusedError(f"the syncer at {address} refused: {refusal}") from None
                problem = str(refusal)
            except (aiohttp.ClientError, OSError, TimeoutError, WireError) as wrong:
                if find_tls_problem(wrong) is not None:
                    raise KeysRefusedError(
                        f"the syncer at {address} cannot be spoken to: {describe_network_error(wrong)}"
                    ) from None
                problem = describe_network_error(wrong)
            self._link.rotate_address()
            now = time.monotonic()
            if join_by is not None and now + RETRY_INTERVAL_S >= join_by:
                raise SyncerUnreachableError(f"no syncer answers at {address}: {problem}")
            if now - said >= LOG_INTERVAL_S:
                said = now
                self._log.warning("no syncer answers at %s yet (%s); trying again", address, problem)
            await asyncio.sleep(RETRY_INTERVAL_S)
