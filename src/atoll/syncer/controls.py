"""What operators ask of a run: checked here, written down, then told to the core.

`controls.json` in the store holds what is in force, by what it is about (`pause`, `quorum`, `grace`), each as
`{"kind", "value", "requested_by", "at"}` with `at` in seconds of the Unix epoch. It is durable before the core hears of it, and
a syncer that starts on the directory tells its core again: a pause, a quorum and a grace margin outlive the process
that was asked. A wish to drain does not: a syncer that is killed before the learner has left has to be asked again.
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
    """`status` as in HTTP: 200 done, 400 no such control, 404 no such learner, 409 not now, 507 it cannot be kept."""

    status: int
    message: str


RUN_ENDED = HttpReply(409, "the run ends or has ended: nothing can be changed any more")


class ControlState:
    """What is in force, as the file has it. Never changed: `with_event` makes another one."""

    def __init__(self, kept: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.controls = dict(kept or {})

    @classmethod
    def from_json(cls, kept: object, path: Path, limits: Limits) -> ControlState:
        """What was read, if a syncer has written it."""
        if not isinstance(kept, Mapping) or not all(_is_valid_control(kept, about, limits) for about in kept):
            raise StoreDamagedError(path, "is not what a syncer writes", "remove it: nothing is paused or changed then")
        return cls(kept)

    def with_event(self, event: ControlRequested, at: float) -> ControlState:
        about = "pause" if event.kind == "resume" else event.kind
        if about not in DURABLE_CONTROLS:
            return self
        return ControlState(self.controls | {about: {**asdict(event), "at": at}})

    def events(self) -> list[ControlRequested]:
        return [
            ControlRequested(control["kind"], control["value"], control["requested_by"])
            for control in self.controls.values()
        ]

    def without_pause(self) -> ControlState:
        """For a run that ends. Who stood still is told that it is over, by whichever syncer it meets."""
        if self.controls.get("pause", {}).get("kind") != "pause":
            return self
        return self.with_event(ControlRequested("resume", None, self.controls["pause"]["requested_by"]), time.time())


def _is_valid_control(kept: Mapping[Any, Any], about: object, limits: Limits) -> bool:
    control = kept[about]
    return (
        about in DURABLE_CONTROLS
        and isinstance(control, Mapping)
        and isinstance(control.get("requested_by"), str)
        and control.get("kind") in get_args(ControlKind)
        and find_control_problem(control["kind"], control.get("value"), limits) is None
    )


def find_requester_problem(who: object) -> str | None:
    if not isinstance(who, str) or not who.strip() or len(who) > MAX_REQUESTED_BY_LENGTH or not who.isprintable():
        return f"say who asks, in at most {MAX_REQUESTED_BY_LENGTH} characters: it is written on the tape"
    return None


async def handle_control(syncer: SyncerProcess, raw: object) -> HttpReply:
    """One control, as it came. Nothing has happened where the status is not 200."""
    if not isinstance(raw, dict) or not {"kind", "requested_by"} <= set(raw) <= CONTROL_FIELDS:
        return HttpReply(400, "a control is a JSON object with kind, requested_by, and where it takes one a value")
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
    known = _find_early_reply(core, event)
    if known is not None:
        return known
    said = _describe_control(core, event)
    try:
        if not await syncer.apply_control(event):
            return RUN_ENDED
    except FencedError as fenced:
        return HttpReply(409, str(fenced))
    except OSError as wrong:
        return HttpReply(507, f"the syncer cannot write it down, so nothing is changed: {wrong.strerror}")
    return HttpReply(200, said)


def _find_early_reply(core: SyncerCore, event: ControlRequested) -> HttpReply | None:
    """An answer for what needs no change, or allows none."""
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
        away = core.state.members[int(event.value)].state is MemberState.DISCONNECTED
        later = "; it is away, and is told when it is back" if away else ""
        return f"learner {event.value} was {Reason('control-drain-requested', (event.requested_by,))}{later}"
    if event.kind == "quorum":
        assert event.value is not None
        said = str(Reason("control-quorum-changed", (event.value, core.state.config.quorum, event.requested_by)))
        few = f"; {len(core.state.live)} learners train, and no round opens until there are more"
        return said + few if len(core.state.live) < event.value else said
    if event.kind == "grace":
        return str(Reason("control-grace-changed", (event.value, core.state.config.grace_margin, event.requested_by)))
    return (
        f"the run is {Reason('control-paused' if event.kind == 'pause' else 'control-resumed', (event.requested_by,))}"
    )
