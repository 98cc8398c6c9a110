"""Requests of a learner before it has a connection. Only here the training thread waits for replies."""

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
"""HTTP statuses after which a later attempt may succeed: too slow, not ready, no room."""

T = TypeVar("T")
DownloadFinal: TypeAlias = Callable[[FragmentTensors, int], Awaitable[Buffer | None]]
"""Type of `FragmentTransfer.download_final`."""


class JoinClient:
    """Client for the requests of a join.

    `join_by` is a deadline on the monotonic clock. With None a request is retried without limit, and each wait is
    logged.
    """

    def __init__(self, link: LearnerLink, log: logging.Logger) -> None:
        self._link = link
        self._log = log

    async def fetch_settings(self, requested: int | None, join_by: float | None) -> tuple[RunSettings, bool, str]:
        """Return the run's settings, whether it has a model, and its directory at the syncer.

        The request contains the learner number, so that a key for another number is refused here. A learner that cannot
        join must not provide the initial weights.
        """
        params = {"learner": str(requested)} if requested is not None else None
        reply = await self._retry(lambda: self._link.request("GET", "/v1/run", params=params), join_by)
        return RunSettings.from_json(reply), bool(reply["founded"]), str(reply.get("directory", "its directory"))

    async def check_reachable(self, address: str) -> None:
        """Raise SyncerUnreachableError unless the syncer at this address accepts a request of this process now."""
        if address not in self._link.address.split(","):
            raise SyncerUnreachableError(f"{address} is none of {self._link.address}")
        try:
            async with asyncio.timeout(REACH_TIMEOUT_S):
                await self._link.request("GET", "/v1/run", address)
        except (SyncerRefusedError, aiohttp.ClientError, OSError, TimeoutError, WireError) as error:
            raise SyncerUnreachableError(f"{address}: {describe_network_error(error)}") from None

    async def request_number(self, requested: int | None, join_by: float | None) -> tuple[int, int]:
        """Return the number of this learner, and of its incarnation."""
        reply = await self._retry(lambda: self._link.request("POST", "/v1/join", json={"learner": requested}), join_by)
        return int(reply["learner"]), int(reply["incarnation"])

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
            # A syncer that has a model by now does not read a second one to its end. The connection may break before
            # its reply is read.
            if not (await self._link.request("GET", "/v1/run")).get("founded"):
                raise

    async def download_final(
        self, fragments: list[FragmentTensors], join_by: float | None, fetch: DownloadFinal
    ) -> None:
        """Set the final values of the run as the anchors."""
        await self._retry(lambda: self._download_final(fragments, fetch), join_by)

    async def _download_final(self, fragments: list[FragmentTensors], fetch: DownloadFinal) -> None:
        status = await self._link.request("GET", "/v1/status")
        if status["stage"] != "finished":
            raise TimeoutError("the last merges are not finished")
        for fragment, published in zip(fragments, status["fragments"], strict=True):
            version = int(published["version"])
            value = await fetch(fragment, version)
            if value is None:
                raise WireError(f"fragment {fragment.p} version {version} differs from the published value", "digest")
            fragment.set_newest(version, value)
            fragment.release(*fragment.prepare_adoption(False))

    async def _retry(self, send: Callable[[], Coroutine[Any, Any, T]], join_by: float | None) -> T:
        """Repeat a request until the syncer replies or `join_by` is over. Raise LearnerRefusedError for a refusal."""
        logged_at = 0.0
        address = self._link.address
        while True:
            try:
                async with asyncio.timeout_at(join_by):  # the loop's clock is the monotonic one
                    return await send()
            except SyncerRefusedError as refusal:
                if refusal.status not in RETRIABLE_STATUSES:
                    raise LearnerRefusedError(f"syncer at {address} refused this learner: {refusal}") from None
                problem = str(refusal)
            except (aiohttp.ClientError, OSError, TimeoutError, WireError) as error:
                if find_tls_problem(error) is not None:
                    raise KeysRefusedError(
                        f"no secure connection to syncer at {address}: {describe_network_error(error)}"
                    ) from None
                problem = describe_network_error(error)
            self._link.rotate_address()
            now = time.monotonic()
            if join_by is not None and now + RETRY_INTERVAL_S >= join_by:
                raise SyncerUnreachableError(f"cannot reach syncer at {address}: {problem}")
            if now - logged_at >= LOG_INTERVAL_S:
                logged_at = now
                self._log.warning("cannot reach syncer at %s (%s); retrying", address, problem)
            await asyncio.sleep(RETRY_INTERVAL_S)
