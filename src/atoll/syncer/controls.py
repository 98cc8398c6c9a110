"""Requests of operators to a run: checked here, made durable, then handled by the core.

`controls.json` in the store has the settings in force, by subject (`pause`, `quorum`, `grace`), each as
`{"kind", "value", "requested_by", "at"}` with `at` in Unix seconds. A setting is durable before the core handles it. A
syncer that starts on the directory applies it again: a pause, a quorum and a grace margin survive a restart. A drain
request does not: repeat it if the syncer is killed before the learner has left.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from msgspec.structs import asdict

from atoll.core.policy import find_control_problem
from atoll.core.protocol import ControlRequested
from atoll.core.reasons import Reason
from atoll.core.states import MemberState, RunStage
from atoll.core.syncer.controls import GONE_STATES
from atoll.core.syncer.core import SyncerCore
from atoll.core.types import ControlKind, Limits
from atoll.store.tensor_file import StoreDamagedError
from atoll.store.version_store import FencedError

if TYPE_CHECKING:
    from atoll.syncer.process import SyncerProcess

MAX_REQUESTED_BY_LENGTH = 200
CONTROL_FIELDS = {"kind", "value", "requested_by"}
DURABLE_CONTROLS = ("pause", "quorum", "grace")


class HttpReply(NamedTuple):
    """`status` as in HTTP: 200 done, 400 no such control, 404 no such learner, 409 not now, 507 cannot be written."""

    status: int
    message: str


RUN_ENDED = HttpReply(409, "the run ends or has ended: nothing can be changed any more")


class ControlState:
    """The settings in force, as in the file. Immutable: `with_event` returns a new object."""

    def __init__(self, stored: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.controls = dict(stored or {})

    @classmethod
    def from_json(cls, stored: object, path: Path, limits: Limits) -> ControlState:
        """Check the content of the file and return its settings."""
        if not isinstance(stored, Mapping) or not all(_is_valid_control(stored, name, limits) for name in stored):
            raise StoreDamagedError(
                path, "has content that no syncer writes", "remove it; then no operator request is in effect"
            )
        return cls(stored)

    def with_event(self, event: ControlRequested, at: float) -> ControlState:
        name = "pause" if event.kind == "resume" else event.kind
        if name not in DURABLE_CONTROLS:
            return self
        return ControlState(self.controls | {name: {**asdict(event), "at": at}})

    def events(self) -> list[ControlRequested]:
        return [
            ControlRequested(control["kind"], control["value"], control["requested_by"])
            for control in self.controls.values()
        ]

    def without_pause(self) -> ControlState:
        """Return the settings without a pause, for a run that ends: any later syncer then sends the end to learners."""
        if self.controls.get("pause", {}).get("kind") != "pause":
            return self
        return self.with_event(ControlRequested("resume", None, self.controls["pause"]["requested_by"]), time.time())


def _is_valid_control(stored: Mapping[Any, Any], name: object, limits: Limits) -> bool:
    control = stored[name]
    return (
        name in DURABLE_CONTROLS
        and isinstance(control, Mapping)
        and isinstance(control.get("requested_by"), str)
        and control.get("kind") in get_args(ControlKind)
        and find_control_problem(control["kind"], control.get("value"), limits) is None
    )


def find_requester_problem(requester: object) -> str | None:
    is_text = isinstance(requester, str) and bool(requester.strip()) and requester.isprintable()
    if not is_text or len(str(requester)) > MAX_REQUESTED_BY_LENGTH:
        return f"requested_by must be text of at most {MAX_REQUESTED_BY_LENGTH} characters: it is written on the tape"
    return None


async def handle_control(syncer: SyncerProcess, raw: object) -> HttpReply:
    """Check and apply one control request. Nothing has changed unless the status is 200."""
    if not isinstance(raw, dict) or not {"kind", "requested_by"} <= set(raw) <= CONTROL_FIELDS:
        return HttpReply(400, "a control is a JSON object with kind, requested_by and, for some kinds, value")
    kind, value, requested_by = raw["kind"], raw.get("value"), raw["requested_by"]
    problem = find_requester_problem(requested_by) or find_control_problem(kind, value, syncer.settings.config.limits)
    if problem is not None:
        return HttpReply(400, problem)
    core = syncer.core
    if core is None:
        return HttpReply(409, "the run has no model yet, so there is nothing to control")
    if core.state.stage is not RunStage.RUNNING:
        return RUN_ENDED
    event = ControlRequested(kind, value, requested_by)
    early = _find_early_reply(core, event)
    if early is not None:
        return early
    message = _describe_control(core, event)
    try:
        if not await syncer.apply_control(event):
            return RUN_ENDED
    except FencedError as error:
        return HttpReply(409, str(error))
    except OSError as error:
        return HttpReply(507, f"the syncer cannot write the request, so nothing has changed: {error.strerror}")
    return HttpReply(200, message)


def _find_early_reply(core: SyncerCore, event: ControlRequested) -> HttpReply | None:
    """Return the reply to a request that needs no change or allows none."""
    if event.kind == "pause" and core.state.paused:
        return HttpReply(200, "the run is paused already")
    if event.kind == "resume" and not core.state.paused:
        return HttpReply(200, "the run is not paused")
    if event.kind == "drain":
        assert event.value is not None
        member = core.state.members.get(int(event.value))
        if member is None:
            return HttpReply(404, f"learner {event.value} is not in this run")
        if member.state in GONE_STATES:
            return HttpReply(409, f"learner {event.value} is not in the run any more: {member.reason or 'it is out'}")
    return None


def _describe_control(core: SyncerCore, event: ControlRequested) -> str:
    if event.kind == "drain":
        assert event.value is not None
        is_disconnected = core.state.members[int(event.value)].state is MemberState.DISCONNECTED
        later = "; it is disconnected and gets the request when it reconnects" if is_disconnected else ""
        return f"learner {event.value}: {Reason('control-drain-requested', (event.requested_by,))}{later}"
    if event.kind == "quorum":
        assert event.value is not None
        message = str(Reason("control-quorum-changed", (event.value, core.state.config.quorum, event.requested_by)))
        too_few = f"; {len(core.state.live)} learners train, and no round opens until there are more"
        return message + too_few if len(core.state.live) < event.value else message
    if event.kind == "grace":
        return str(Reason("control-grace-changed", (event.value, core.state.config.grace_margin, event.requested_by)))
    return (
        f"the run is {Reason('control-paused' if event.kind == 'pause' else 'control-resumed', (event.requested_by,))}"
    )
