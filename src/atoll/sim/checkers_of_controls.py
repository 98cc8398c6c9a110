"""Checkers of what operators ask for: the pause, and quorum and grace margin as they are in force."""

from __future__ import annotations

from dataclasses import replace

from atoll.core.protocol import ControlRequested, Envelope, Held, Leave, Leaving, Pull, Say, StepTaken
from atoll.core.syncer.state import Restored
from atoll.core.types import FragmentId, LearnerId, RoundId, RunConfig
from atoll.sim.checkers import Checker, is_syncer
from atoll.tape.format import Actor, Entry


class InForce(Checker):
    """Knows the settings that each syncer goes by, as operators have changed them. Not a checker of its own."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.events[ControlRequested] = self._on_control_event
        self._changed: dict[Actor, RunConfig] = {}

    def in_force(self, entry: Entry) -> RunConfig:
        return self._changed.get(entry.actor, self.config)

    def _on_control_event(self, entry: Entry, event: ControlRequested) -> None:
        if event.what == "quorum" and event.value is not None:
            self._changed[entry.actor] = replace(self.in_force(entry), quorum=int(event.value))
        elif event.what == "grace" and event.value is not None:
            self._changed[entry.actor] = replace(self.in_force(entry), grace_margin=event.value)


class Paused(Checker):
    name = "paused"
    sentence = (
        "a paused run opens no round, but for a learner that leaves, and a learner that was told takes no step but the"
        " one that it is in"
    )

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.events = {ControlRequested: self._on_control, StepTaken: self._on_step}
        self.effects = {Say: self._on_say}
        self.sent = {Pull: self._on_pull, Held: self._on_held}
        self.arrived = {Leaving: self._on_leaving, Leave: self._on_leave}
        self._leavers: dict[tuple[Actor, LearnerId], tuple[FragmentId, ...]] = {}  # what they named, to each syncer
        self._since: dict[Actor, int] = {}  # syncers that are paused: the tick at which they were told
        self._ending: set[Actor] = set()  # syncers that have begun to end the run
        self._newest: dict[tuple[Actor, FragmentId], RoundId] = {}
        self._held: dict[Actor, int] = {}  # learners that stand still: steps that they told of since

    def started(self, actor: Actor, restored: Restored | None) -> None:
        super().started(actor, restored)
        if restored is not None and restored.manifest is not None:
            self._ending.add(actor)

    def _on_control(self, entry: Entry, event: ControlRequested) -> None:
        if event.what == "pause" and entry.actor not in self._ending:
            self._since.setdefault(entry.actor, entry.tick)
        elif event.what == "resume":
            self._since.pop(entry.actor, None)

    def _on_say(self, entry: Entry, effect: Say) -> None:
        if is_syncer(entry) and effect.reason.code in ("finish-budget", "finish-asked"):
            self._ending.add(entry.actor)
            self._since.pop(entry.actor, None)

    def _on_pull(self, entry: Entry, envelope: Envelope) -> None:
        """Whoever was asked may be asked again. Timers that were due before the wish were handled before it."""
        body = envelope.body
        assert isinstance(body, Pull)
        key = (entry.actor, body.round.fragment)
        opened, self._newest[key] = self._newest.get(key) != body.round, body.round
        if opened and entry.tick > self._since.get(entry.actor, entry.tick) and not self._is_named(entry, body):
            self.fail(entry, ("fragment", body.round.fragment), f"{body.round} was opened while the run is paused")

    def _on_leaving(self, entry: Entry, envelope: Envelope) -> None:
        body = envelope.body
        assert isinstance(body, Leaving)
        self._leavers[(entry.actor, envelope.learner)] = body.unmerged

    def _on_leave(self, entry: Entry, envelope: Envelope) -> None:
        self._leavers.pop((entry.actor, envelope.learner), None)

    def _is_named(self, entry: Entry, body: Pull) -> bool:
        return any(actor == entry.actor and body.round.fragment in named for (actor, _), named in self._leavers.items())

    def _on_held(self, entry: Entry, envelope: Envelope) -> None:
        body = envelope.body
        assert isinstance(body, Held)
        if body.paused:
            self._held.setdefault(entry.actor, 0)
        else:
            self._held.pop(entry.actor, None)

    def _on_step(self, entry: Entry, event: StepTaken) -> None:
        if event.steps and entry.actor in self._held:
            self._held[entry.actor] += 1
            if self._held[entry.actor] > 1:
                self.fail(entry, ("learner", entry.actor.learner), "a step while the run is paused")


CONTROL_CHECKERS: tuple[type[Checker], ...] = (Paused,)
