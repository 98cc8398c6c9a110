"""Raw learner client for the runs of these tests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from atoll.tensors.plan import FragmentPlan, describe_tensors, make_plan
from atoll.transport.tls import ClientTls
from tests.learner.runs import LIMIT_S, Run
from tests.learner.small_models import work
from tests.syncer.scripted_learner import ScriptedLearner


def plan_of(run: Run) -> FragmentPlan:
    """Retimer the plan of the `plain` model, which most runs use."""
    return make_plan(describe_tensors(work("plain").model), run.settings.config.fragments, run.settings.numerics.plan)


class RawLearner(ScriptedLearner):
    """Raw learner with the `plain` model. Use it with `async with`."""

    def __init__(
        self, run: Run, learner: int, incarnation: int = 1, session: int = 1, keys: Path | None = None
    ) -> None:
        tls = ClientTls(keys).make_context() if keys is not None else None
        super().__init__(run.address, run.settings, plan_of(run), learner, incarnation, session, run.token, tls)

    def open_session(self) -> aiohttp.ClientSession:
        self._others = _count_connections()
        return super().open_session()

    async def close_session(self) -> None:
        """Close the session, and wait until its connections are closed, with the closing handshake of TLS."""
        await super().close_session()
        async with asyncio.timeout(LIMIT_S):
            while _count_connections() > self._others:
                timer = asyncio.Event()
                asyncio.get_running_loop().call_later(0.01, timer.set)
                await timer.wait()


def _count_connections() -> int:
    """Count the connections of this loop, and its own pipe."""
    return len(asyncio.get_running_loop()._selector.get_map())  # type: ignore[attr-defined]
