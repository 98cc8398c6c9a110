"""What operators ask of a run: checked here, written down, then told to the core.

`controls.json` in the store holds what is in force, by what it is about (`pause`, `quorum`, `grace`), each as
`{"what", "value", "who", "at"}` with `at` in seconds of the Unix epoch. It is durable before the core hears of it, and
a syncer that starts on the directory tells its core again: a pause, a quorum and a grace margin outlive the process
that was asked. A wish to drain does not: a syncer that is killed before the learner has left has to be asked again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from msgspec.structs import asdict

from atoll.core.policy import control_problem
from atoll.core.protocol import ControlRequested
from atoll.core.reasons import Reason
from atoll.core.states import Stage, Standing
from atoll.core.syncer.controls import OUT
from atoll.core.syncer.core import SyncerCore
from atoll.core.types import ControlWhat, Limits
from atoll.store.tensor_file import StoreDamaged
from atoll.store.version_store import Fenced

if TYPE_CHECKING:
    from atoll.syncer.process import SyncerProcess

MOST_WHO = 200
FIELDS = {"what", "value", "who"}
LASTING = ("pause", "quorum", "grace")


class Answer(NamedTuple):
    """`status` as in HTTP: 200 done, 400 no such wish, 404 no such learner, 409 not now, 507 it cannot be kept."""

    status: int
    sentence: str


ENDS = Answer(409, "the run ends or has ended: nothing can be changed any more")


class Wishes:
    """What is in force, as the file has it. Never changed: `after` makes another one."""

    def __init__(self, kept: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.kept = dict(kept or {})

    @classmethod
    def checked(cls, kept: object, path: Path, limits: Limits) -> Wishes:
        """What was read, if a syncer has written it."""
        if not isinstance(kept, Mapping) or not all(_is_wish(kept, about, limits) for about in kept):
            raise StoreDamaged(path, "is not what a syncer writes", "remove it: nothing is paused or changed then")
        return cls(kept)

    def after(self, event: ControlRequested, at: float) -> Wishes:
        about = "pause" if event.what == "resume" else event.what
        if about not in LASTING:
            return self
        return Wishes(self.kept | {about: {**asdict(event), "at": at}})

    def events(self) -> list[ControlRequested]:
        return [ControlRequested(wish["what"], wish["value"], wish["who"]) for wish in self.kept.values()]

    def without_pause(self) -> Wishes:
        """For a run that ends. Who stood still is told that it is over, by whichever syncer it meets."""
        if self.kept.get("pause", {}).get("what") != "pause":
            return self
        return self.after(ControlRequested("resume", None, self.kept["pause"]["who"]), time.time())


def _is_wish(kept: Mapping[Any, Any], about: object, limits: Limits) -> bool:
    wish = kept[about]
    return (
        about in LASTING
        and isinstance(wish, Mapping)
        and isinstance(wish.get("who"), str)
        and wish.get("what") in get_args(ControlWhat)
        and control_problem(wish["what"], wish.get("value"), limits) is None
    )


def who_problem(who: object) -> str | None:
    if not isinstance(who, str) or not who.strip() or len(who) > MOST_WHO or not who.isprintable():
        return f"say who asks, in at most {MOST_WHO} characters: it is written on the tape"
    return None


async def control(syncer: SyncerProcess, raw: object) -> Answer:
    """One wish, as it came. Nothing has happened where the status is not 200."""
    if not isinstance(raw, dict) or not {"what", "who"} <= set(raw) <= FIELDS:
        return Answer(400, "a control is a JSON object with what, who, and where it takes one a value")
    what, value, who = raw["what"], raw.get("value"), raw["who"]
    problem = who_problem(who) or control_problem(what, value, syncer.settings.config.limits)
    if problem is not None:
        return Answer(400, problem)
    core = syncer.core
    if core is None:
        return Answer(409, "the run has no model yet, so there is nothing to control")
    if core.state.stage is not Stage.RUNNING:
        return ENDS
    event = ControlRequested(what, value, who)
    known = _known_already(core, event)
    if known is not None:
        return known
    said = _sentence(core, event)
    try:
        if not await syncer.control(event):
            return ENDS
    except Fenced as fenced:
        return Answer(409, str(fenced))
    except OSError as wrong:
        return Answer(507, f"the syncer cannot write it down, so nothing is changed: {wrong.strerror}")
    return Answer(200, said)


def _known_already(core: SyncerCore, event: ControlRequested) -> Answer | None:
    """An answer for what needs no change, or allows none."""
    if event.what == "pause" and core.state.paused:
        return Answer(200, "the run is paused already")
    if event.what == "resume" and not core.state.paused:
        return Answer(200, "the run is not paused")
    if event.what == "drain":
        assert event.value is not None
        member = core.state.members.get(int(event.value))
        if member is None:
            return Answer(404, f"learner {event.value} is not in this run")
        if member.standing in OUT:
            return Answer(409, f"learner {event.value} is not in the run any more: {member.reason or 'it is out'}")
    return None


def _sentence(core: SyncerCore, event: ControlRequested) -> str:
    if event.what == "drain":
        assert event.value is not None
        away = core.state.members[int(event.value)].standing is Standing.AWAY
        later = "; it is away, and is told when it is back" if away else ""
        return f"learner {event.value} was {Reason('control-drain', (event.who,))}{later}"
    if event.what == "quorum":
        assert event.value is not None
        said = str(Reason("control-quorum", (event.value, core.state.config.quorum, event.who)))
        few = f"; {len(core.state.live)} learners train, and no round opens until there are more"
        return said + few if len(core.state.live) < event.value else said
    if event.what == "grace":
        return str(Reason("control-grace", (event.value, core.state.config.grace_margin, event.who)))
    return f"the run is {Reason('control-paused' if event.what == 'pause' else 'control-resumed', (event.who,))}"
