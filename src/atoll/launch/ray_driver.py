"""A process that speaks to one Ray cluster, for an engine in another.

A driver of Ray prints what the cluster complains of on stdout, sets a handler for SIGTERM, and can be in one cluster at
a time. None of that may happen to the process of `atoll up`, or to one that uses Ray for its own purposes.

    python -m atoll.launch.ray_driver HOST:PORT

Reads one JSON object per line, `{"do": "status", ...}`, and answers with one: `{"ok": ...}` or `{"wrong": "..."}`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError

from atoll.launch.engine import Unit, UnitStanding
from atoll.launch.ray_cluster import FINAL, last_word, write_last_word
from atoll.launch.ray_keeper import RayKeeper

HEAD = "node:__internal_head__"
"""A resource that every head node has. Whatever needs a little of it is there."""
START_S = 120.0
ANSWER_S = 10.0
STOP_S = 2.0
LOOK_S = 0.1


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # whatever Ray prints is no answer
    address = sys.argv[1]
    try:
        ray.init(
            address=address,
            namespace="atoll",
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
        answers.write(json.dumps({"ok": None}) + "\n")
    except Exception as wrong:
        answers.write(json.dumps({"wrong": f"no Ray cluster can be entered at {address}: {wrong}"}) + "\n")
        return
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer: dict[str, Any] = {"ok": ORDERS[asked.pop("do")](**asked)}
        except ValueError as wrong:
            answer = {"wrong": str(wrong)}
        except RayError as wrong:
            answer = {"wrong": f"the Ray cluster at {address}: {str(wrong).strip()}"}
        answers.write(json.dumps(answer) + "\n")


def _start(actor: str, namespace: str, unit: dict[str, Any]) -> None:
    """Return when the keeper lives: before that it still needs this process."""
    wanted = Unit.from_json(unit)
    if _is_kept(actor, namespace, wanted):
        return
    if last_word(wanted.directory):
        write_last_word(wanted.directory, {})
    keeper: Any = ray.remote(RayKeeper)
    begun = keeper.options(
        name=actor,
        namespace=namespace,
        lifetime="detached",
        num_cpus=0,
        resources={HEAD: 0.001},
        max_restarts=-1,
        max_concurrency=4,
    ).remote(wanted, f"{namespace}/{actor}")
    try:
        ray.get(begun.standing.remote(), timeout=START_S)
    except GetTimeoutError:
        ray.kill(begun, no_restart=True)
        raise ValueError(
            f"the head node of the Ray cluster has started no process within {START_S:g} s; look at `ray status` there"
        ) from None
    except RayError as wrong:
        if last_word(wanted.directory).get("standing") in FINAL:
            return  # a short life
        raise ValueError(
            f"the Ray cluster cannot run {actor}: {str(wrong).strip()}\nIts nodes need the Python environment of Atoll"
        ) from None


def _is_kept(actor: str, namespace: str, wanted: Unit) -> bool:
    """Return whether a keeper has it already. One that has ended is waited for, one of something else refused."""
    deadline = time.monotonic() + ANSWER_S
    while (found := _found(actor, namespace)) is not None:
        try:
            told = ray.get(found.keeps.remote(wanted), timeout=ANSWER_S)
        except (GetTimeoutError, ActorUnavailableError):
            raise ValueError(f"the keeper of {actor} does not answer now: start it again later") from None
        except RayError:
            told = {}  # it has ended, and its name goes next
        if told and told["standing"] not in FINAL:
            if told["is_stopping"]:
                raise ValueError(f"{actor} is being stopped: start it again when it has left")
            if told["is_same"]:
                return True
            order = json.dumps({"do": "stop", "actor": actor, "namespace": namespace})
            driver = f"python -m atoll.launch.ray_driver {ray.get_runtime_context().gcs_address}"
            raise ValueError(
                f"{actor} is in the cluster already, and not as it is wanted now: stop it with echo '{order}' |"
                f" {driver}, or start it as it was"
            )
        if time.monotonic() > deadline:
            raise ValueError(f"{actor} has ended, and Ray keeps its name: start it again later")
        time.sleep(LOOK_S)
    return False


def _status(actor: str, namespace: str) -> dict[str, Any]:
    found = _found(actor, namespace)
    if found is not None:
        try:
            told: dict[str, Any] = ray.get(found.standing.remote(), timeout=ANSWER_S)
            return told
        except GetTimeoutError:
            return {"standing": UnitStanding.WAITING, "why": "its keeper does not answer yet"}
        except ActorUnavailableError:
            return {"standing": UnitStanding.WAITING, "why": "its keeper is started again by Ray"}
        except RayError:
            pass  # it ended while it was asked
    return {}


def _stop(actor: str, namespace: str, kill: bool = False) -> bool:
    """Whether anything is left of it. A keeper that does not stop is killed, and Ray ends what it has."""
    found = _found(actor, namespace)
    if found is None:
        return False
    if kill:
        ray.kill(found, no_restart=True)
    else:
        with contextlib.suppress(RayError):  # who asks again sees whether it is gone
            ray.get(found.stop.remote(), timeout=STOP_S)  # it has arrived, should this process end now
    return True


def _found(actor: str, namespace: str) -> Any | None:
    try:
        return ray.get_actor(actor, namespace)
    except ValueError:
        return None


ORDERS: dict[str, Callable[..., Any]] = {"start": _start, "status": _status, "stop": _stop}

if __name__ == "__main__":
    main()
