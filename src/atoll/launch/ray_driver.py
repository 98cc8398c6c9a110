"""Child process of the Ray launcher that is connected to one Ray cluster.

A Ray driver prints cluster warnings to stdout, sets a SIGTERM handler, and connects to one cluster only. None of that
may happen in the process of `atoll up`, or in a process that uses Ray for its own purposes.

    python -m atoll.launch.ray_driver HOST:PORT

Reads one JSON object per line, `{"do": "status", ...}`, and replies with one: `{"ok": ...}` or `{"error": "..."}`.
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

from atoll.launch.launcher import Unit, UnitState
from atoll.launch.ray_cluster import FINAL_STATES, read_last_state, write_last_state
from atoll.launch.ray_supervisor import RaySupervisor

HEAD_RESOURCE = "node:__internal_head__"
"""A resource that only the head node has. An actor that requests a small amount of it runs there."""
SUPERVISOR_START_TIMEOUT_S = 120.0
REPLY_TIMEOUT_S = 10.0
STOP_REPLY_TIMEOUT_S = 2.0
NAME_POLL_INTERVAL_S = 0.1


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # output of Ray must not mix with replies
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
    except Exception as error:
        answers.write(json.dumps({"error": f"cannot connect to the Ray cluster at {address}: {error}"}) + "\n")
        return
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"ok": COMMANDS[request.pop("do")](**request)}
        except ValueError as error:
            answer = {"error": str(error)}
        except RayError as error:
            answer = {"error": f"the Ray cluster at {address}: {str(error).strip()}"}
        answers.write(json.dumps(answer) + "\n")


def _start(actor: str, namespace: str, unit: dict[str, Any]) -> None:
    """Start the supervisor. Return when it runs, because until then it needs this process."""
    requested = Unit.from_json(unit)
    if _is_running(actor, namespace, requested):
        return
    if read_last_state(requested.directory):
        write_last_state(requested.directory, {})
    supervisor: Any = ray.remote(RaySupervisor)
    actor_handle = supervisor.options(
        name=actor,
        namespace=namespace,
        lifetime="detached",
        num_cpus=0,
        resources={HEAD_RESOURCE: 0.001},
        max_restarts=-1,
        max_concurrency=4,
    ).remote(requested, f"{namespace}/{actor}")
    try:
        ray.get(actor_handle.state.remote(), timeout=SUPERVISOR_START_TIMEOUT_S)
    except GetTimeoutError:
        ray.kill(actor_handle, no_restart=True)
        raise ValueError(
            f"the head node of the Ray cluster has started no process within {SUPERVISOR_START_TIMEOUT_S:g} s;"
            " look at `ray status` there"
        ) from None
    except RayError as error:
        if read_last_state(requested.directory).get("state") in FINAL_STATES:
            return  # it has already finished
        raise ValueError(
            f"the Ray cluster cannot run {actor}: {str(error).strip()}\nIts nodes need the Python environment of Atoll"
        ) from None


def _is_running(actor: str, namespace: str, requested: Unit) -> bool:
    """Return whether a supervisor already runs this unit.

    Wait for a supervisor that is exiting. Refuse one that runs another unit under this name.
    """
    deadline = time.monotonic() + REPLY_TIMEOUT_S
    while (found := _find_actor(actor, namespace)) is not None:
        try:
            reply = ray.get(found.compare.remote(requested), timeout=REPLY_TIMEOUT_S)
        except (GetTimeoutError, ActorUnavailableError):
            raise ValueError(f"the supervisor of {actor} does not reply now: start it again later") from None
        except RayError:
            reply = {}  # it has exited; Ray frees its name next
        if reply and reply["state"] not in FINAL_STATES:
            if reply["is_stopping"]:
                raise ValueError(f"{actor} is being stopped: start it again when it has left")
            if reply["is_same"]:
                return True
            order = json.dumps({"do": "stop", "actor": actor, "namespace": namespace})
            driver = f"python -m atoll.launch.ray_driver {ray.get_runtime_context().gcs_address}"
            raise ValueError(
                f"{actor} already runs with other settings: stop it with echo '{order}' |"
                f" {driver}, or start it as it was"
            )
        if time.monotonic() > deadline:
            raise ValueError(f"{actor} has exited, but its name is still registered in Ray: start it again later")
        time.sleep(NAME_POLL_INTERVAL_S)
    return False


def _status(actor: str, namespace: str) -> dict[str, Any]:
    found = _find_actor(actor, namespace)
    if found is not None:
        try:
            reply: dict[str, Any] = ray.get(found.state.remote(), timeout=REPLY_TIMEOUT_S)
            return reply
        except GetTimeoutError:
            return {"state": UnitState.WAITING, "cause": "its supervisor does not reply yet"}
        except ActorUnavailableError:
            return {"state": UnitState.WAITING, "cause": "its supervisor is being restarted by Ray"}
        except RayError:
            pass  # it ended during the request
    return {}


def _stop(actor: str, namespace: str, kill: bool = False) -> bool:
    """Request the end of the unit. Return whether its supervisor still runs.

    `kill` kills the supervisor. Ray then ends its runners.
    """
    found = _find_actor(actor, namespace)
    if found is None:
        return False
    if kill:
        ray.kill(found, no_restart=True)
    else:
        with contextlib.suppress(RayError):  # the next request shows whether it has ended
            # wait until the request has arrived, in case this process ends now
            ray.get(found.stop.remote(), timeout=STOP_REPLY_TIMEOUT_S)
    return True


def _find_actor(actor: str, namespace: str) -> Any | None:
    try:
        return ray.get_actor(actor, namespace)
    except ValueError:
        return None


COMMANDS: dict[str, Callable[..., Any]] = {"start": _start, "status": _status, "stop": _stop}

if __name__ == "__main__":
    main()
