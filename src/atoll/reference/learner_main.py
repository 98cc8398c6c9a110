"""What one learner process does: build the model, join, and train until the run is over.

This is the loop that the README shows to users, with a schedule, a pace and metrics; nothing in it is hidden from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from atoll.learner.api import Learner
from atoll.reference.job_settings import JobSettings
from atoll.reference.loop import InnerLoop, InnerStep, LearnerMetricsWriter
from atoll.store.run_settings import RunSettings
from atoll.transport.endpoint import Endpoint, NoAnswerError, RequestRefusedError, TlsVerificationError, send_request

RETRY_INTERVAL_S = 1.0
SYNCER_TIMEOUT_S = 60.0


def train_learner(
    settings: JobSettings,
    learner: int | None,
    syncer: str,
    token: str | None,
    run: Path,
    on_step: Callable[[Learner, InnerStep], None] | None = None,
    keys: Path | None = None,
    ca: Path | None = None,
    notice_s: float | None = None,
) -> bool:
    """Train as this learner, or as whichever the syncer says, until the run is over. False: it was asked to leave."""
    loop = InnerLoop(settings)
    with Learner(
        loop.model,
        loop.optimizer,
        syncer,
        token,
        keys=keys,
        ca=ca,
        learner=learner,
        run_directory=run,
        max_rate=settings.max_rate,
        streams=settings.streams,
        notice_s=notice_s,
    ) as link:
        loop.set_pace(link.id)
        share = JobSettings.from_json(link.extra).step_share(loop.config.context)  # of the run as it was founded

        def of_the_link() -> dict[str, Any]:
            stats = link.stats()
            told = {"bytes_up": stats.bytes_up, "bytes_down": stats.bytes_down, "boundary_s": stats.boundary_s}
            return told | {"repeated": stats.repeated_steps} if stats.repeated_steps else told

        with LearnerMetricsWriter(run, link.id, link.incarnation, of_the_link) as metrics:
            paused_s = 0.0
            while not link.finished:
                samples = link.take(settings.batch)
                # The schedule is asked for the end of the step: at its beginning a new run stands at 0.
                step = loop.step(samples, min(1.0, link.progress + share), link.lr_scale)
                # Before the syncer receives the step: a learner that was seen to train has left a line of metrics.
                metrics.record_step(step, link.paused_s - paused_s)
                paused_s = link.paused_s
                link.step(tokens=step.tokens, loss=step.loss)
                if on_step is not None:
                    on_step(link, step)
        return not link.drained


class OfferedJob(NamedTuple):
    """What a syncer has its learners train."""

    run_id: str
    settings: JobSettings


def request_job(endpoint: Endpoint, token: str | None, on_wait: Callable[[], None] | None = None) -> OfferedJob:
    """What a syncer has for its learners to do. Waits for a syncer that is not there yet, and says so once."""
    endpoint.check()
    syncer, addresses = endpoint.addresses, endpoint.addresses.split(",")
    until = time.monotonic() + SYNCER_TIMEOUT_S
    while True:
        try:
            told = send_request(addresses[0], token, "GET", "/v1/run", 10.0, tls=endpoint.tls)
            break
        except RequestRefusedError as refused:
            raise ValueError(f"the syncer at {syncer} refused: {refused}") from None
        except TlsVerificationError:
            raise
        except NoAnswerError as error:
            addresses.append(addresses.pop(0))
            if time.monotonic() >= until:
                raise ValueError(f"{error}; start one with: atoll syncer") from None
            if on_wait is not None:
                on_wait()
                on_wait = None
            time.sleep(RETRY_INTERVAL_S)
    run = RunSettings.from_json(told)
    if "format" not in run.extra:
        raise ValueError(
            f"the syncer at {syncer} has no job for atoll learner: start it with atoll syncer, or train with your own"
            " script and atoll.Learner"
        )
    return OfferedJob(run.config.run_id, JobSettings.from_json(run.extra))
