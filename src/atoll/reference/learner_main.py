"""Main function of a learner process: build the model, join the run, and train until the run is finished.

This is the training loop of the README with a learning rate schedule, a pace and metrics. It uses the public API only.
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
    """Train until the run is finished. Return False if the learner was drained before.

    Args:
        learner: number of the learner. None: the syncer assigns one.
        syncer: address or addresses of the syncer.
        on_step: called after every inner step.
        notice_s: time between the notice of a preemption and its SIGKILL.
    """
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
        # Use the settings with which the run was created: the current number of learners must not change the schedule.
        share = JobSettings.from_json(link.extra).step_share(loop.config.context)

        def link_metrics() -> dict[str, Any]:
            stats = link.stats()
            fields = {"bytes_up": stats.bytes_up, "bytes_down": stats.bytes_down, "boundary_s": stats.boundary_s}
            return fields | {"repeated": stats.repeated_steps} if stats.repeated_steps else fields

        with LearnerMetricsWriter(run, link.id, link.incarnation, link_metrics) as metrics:
            paused_s = 0.0
            while not link.finished:
                samples = link.take(settings.batch)
                # Use the progress at the end of the step: at the start of a new run it is 0, so the learning rate would
                # be 0.
                step = loop.step(samples, min(1.0, link.progress + share), link.lr_scale)
                # Write before the syncer receives the step: a learner that the status shows as training then has
                # metrics.
                metrics.record_step(step, link.paused_s - paused_s)
                paused_s = link.paused_s
                link.step(tokens=step.tokens, loss=step.loss)
                if on_step is not None:
                    on_step(link, step)
        return not link.drained


class OfferedJob(NamedTuple):
    """Job that a syncer offers to learners."""

    run_id: str
    settings: JobSettings


def request_job(endpoint: Endpoint, token: str | None, on_wait: Callable[[], None] | None = None) -> OfferedJob:
    """Request the job from the syncer. Retry for a minute if no syncer replies.

    Args:
        on_wait: called once, before the first retry.
    """
    endpoint.check()
    syncer, addresses = endpoint.addresses, endpoint.addresses.split(",")
    deadline = time.monotonic() + SYNCER_TIMEOUT_S
    while True:
        try:
            fields = send_request(addresses[0], token, "GET", "/v1/run", 10.0, tls=endpoint.tls)
            break
        except RequestRefusedError as error:
            raise ValueError(f"the syncer at {syncer} refused the request: {error}") from None
        except TlsVerificationError:
            raise
        except NoAnswerError as error:
            addresses.append(addresses.pop(0))
            if time.monotonic() >= deadline:
                raise ValueError(f"{error}; start one with: atoll syncer") from None
            if on_wait is not None:
                on_wait()
                on_wait = None
            time.sleep(RETRY_INTERVAL_S)
    run = RunSettings.from_json(fields)
    if "format" not in run.extra:
        raise ValueError(
            f"the syncer at {syncer} has no job for atoll learner; start it with atoll syncer, or train with your own"
            " script and atoll.Learner"
        )
    return OfferedJob(run.config.run_id, JobSettings.from_json(run.extra))
