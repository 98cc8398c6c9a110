"""Scenario files: events for one core and the effects that it produces, as text.

    # A sentence that describes the scenario.
    core syncer fragments=1 every_steps=2

    > at 1 learner 1 reports step 1 trained 100
    to learner 1: pull fragment 0 base 0 epoch 1 attempt 1

A line that starts with `>` is an event. The lines below it are its effects, or `nothing`. The line `core` selects the
core and its settings. A line that starts with `# ` is a comment. The tables below list the phrases for events. Names
and values follow a phrase: `cause "no space"` in quotes if the value has a blank, `versions 1,2` with commas.
`> quietly ...` hides the effects of an event: use it for the setup.

`pytest --rewrite-scenarios` replaces the expected effects with those of the cores. Review the difference.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import structs

from atoll.core.codec import Value
from atoll.core.protocol import (
    ConnectionClosed,
    ControlRequested,
    DialFailed,
    Drain,
    DrainRequest,
    Finish,
    FinishAck,
    FinishRequested,
    LearnerDisconnected,
    Lease,
    LeaseRequest,
    LeaveRequested,
    Left,
    LogReason,
    Marker,
    NoPeer,
    OptimizerState,
    PausedAck,
    PeerChosen,
    Ping,
    Pong,
    ProvideState,
    PublishAck,
    Pull,
    Ready,
    Refuse,
    RefuseContribution,
    Report,
    Resync,
    Send,
    SetPaused,
    SnapshotPart,
    SnapshotRequested,
    StateRejected,
    StateRequest,
    TimerFired,
)
from atoll.core.reasons import Reason, because
from atoll.core.types import Limits, MergedUpTo, RoundId, RunConfig
from tests.core.harness import FakeLearner, Harness, LearnerHarness, SyncerHarness

Fields = dict[str, Any]


class ScenarioError(ValueError):
    """A scenario line that cannot be parsed; the message names the line."""


# --------------------------------------------------------------------------------------------------------------------
# Effects as lines


def format_effect(effect: Any, harness: Harness) -> str:
    if isinstance(effect, Send):
        return _format_message(effect, harness)
    if isinstance(effect, LogReason):
        kind, number = effect.subject
        return f"logs for {'the run' if kind == 'run' else f'{kind} {number}'}: {effect.reason} [{effect.reason.code}]"
    return _format_value(effect)


def _format_message(effect: Send, harness: Harness) -> str:
    envelope = effect.envelope
    recipient = f"learner {envelope.learner}" if isinstance(harness, SyncerHarness) else "syncer"
    notes = []
    if (envelope.incarnation, envelope.session) != (1, 1):
        notes.append(f"incarnation {envelope.incarnation}, session {envelope.session}")
    if envelope.marker not in (0, envelope.epoch * 1_000_000):
        notes.append(f"marker {envelope.marker}")
    note = f" ({', '.join(notes)})" if notes else ""
    return f"to {recipient}{note}: {_format_value(envelope.body)}"


def _format_value(value: Any) -> str:
    """Return the type name and the named fields of a value."""
    name = re.sub(r"(?<!^)(?=[A-Z])", "-", type(value).__name__).lower()
    return " ".join([name, *_format_fields(value)])


def _format_fields(value: Any) -> list[str]:
    shown = []
    for field, inner in structs.asdict(value).items():
        if field == "consumed_samples" and not inner:
            continue  # a run without leases
        if isinstance(inner, RoundId):
            shown += _format_fields(inner)
        elif isinstance(inner, Reason):
            shown.append(f'because "{inner}" [{inner.code}]')
        elif isinstance(inner, Value):
            shown.append(f"{field} ({_format_value(inner)})" if field != "record" else f"({_format_value(inner)})")
        else:
            shown.append(f"{field} {_format_field(inner)}")
    return shown


def _format_field(value: Any) -> str:
    if isinstance(value, RoundId):
        return "/".join(map(str, structs.astuple(value)))
    if isinstance(value, Value):
        return " ".join(_format_fields(value))
    if isinstance(value, tuple):
        return f"[{'; '.join(_format_field(inner) for inner in value)}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return f'"{value}"' if " " in value or not value else value
    return "-" if value is None else str(value)


# --------------------------------------------------------------------------------------------------------------------
# Phrases for events

Phrase = tuple[re.Pattern[str], Callable[..., Any]]


def _round(fields: Fields) -> RoundId:
    return RoundId(fields.pop("fragment", 0), fields.pop("base", 0), fields.pop("epoch", 1), fields.pop("attempt", 1))


def _rounds(text: object) -> tuple[RoundId, ...]:
    """Parse `0/0/1/1`: fragment, base, epoch, attempt."""
    parts = text if isinstance(text, tuple) else (text,)
    return tuple(RoundId(*map(int, str(part).split("/"))) for part in parts if part != "-")


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _joins(harness: SyncerHarness, at: float, learner: str, fields: Fields) -> None:
    harness.joined(int(learner), at, fields.pop("incarnation", 1))


def _restarts(harness: SyncerHarness, at: float, learner: str, fields: Fields) -> None:
    old = harness.learners[int(learner)]
    harness.add_learner(old.id, old.incarnation + 1, 1).hello(at)


def _reconnects(harness: SyncerHarness, at: float, learner: str, fields: Fields) -> None:
    fake = harness.learners[int(learner)]
    fake.session += 1
    fake.step, fake.trained = fields.pop("step", fake.step), fields.pop("trained", fake.trained)
    fake.hello(at, training=True)


def _hello(harness: SyncerHarness, at: float, learner: str, fields: Fields) -> None:
    fake = harness.learners.get(int(learner)) or harness.add_learner(int(learner))
    training = bool(fields.pop("training", 0))
    if "received" in fields:
        fields["received"] = _tuple(fields["received"])
    if "fingerprint" in fields:
        fields["fingerprint"] = _tuple(fields["fingerprint"])
    fake.hello(at, training, **{key: fields.pop(key) for key in list(fields)})


def _connects_to_new_syncer(harness: SyncerHarness, at: float, learner: str, fields: Fields) -> None:
    """Connect a learner that joined before the syncer was restarted."""
    fake = harness.add_learner(int(learner), fields.pop("incarnation", 1), fields.pop("session", 2))
    fake.received = dict(zip(fake.received, _tuple(fields.pop("received")), strict=True))
    fake.step, fake.trained = fields.pop("step"), fields.pop("trained")
    fake.hello(at, training=True)


def _part(harness: SyncerHarness, at: float, learner: str, fields: Fields) -> None:
    fake = harness.learners[int(learner)]
    fake.marker = fields["snapshot"]
    part = SnapshotPart(
        fields.pop("snapshot"),
        fields.pop("step"),
        fields.pop("trained"),
        _tuple(fields.pop("versions")),
        _rounds(fields.pop("outstanding", "-")),
        fields.pop("problem", None),
    )
    fake.delivers(at, part)


def _learner_sends(make: Callable[[FakeLearner, Fields], Any]) -> Callable[..., None]:
    def send(harness: SyncerHarness, at: float, learner: str, fields: Fields) -> None:
        fake = harness.learners[int(learner)]
        fake.delivers(at, make(fake, fields))

    return send


def _pop_all(fields: Fields) -> Fields:
    popped = dict(fields)
    fields.clear()
    return popped


def _phrases(table: dict[str, Callable[..., Any]]) -> list[Phrase]:
    learner = r"learner (-?\d+)"
    return [(re.compile(pattern.replace("LEARNER", learner) + r"(?: |$)"), do) for pattern, do in table.items()]


def _written_without_reply(harness: SyncerHarness, at: float, fields: Fields) -> None:
    harness.written_without_reply()


def _reports(harness: SyncerHarness, at: float, learner: str, fields: Fields) -> None:
    harness.learners[int(learner)].reports(
        at, fields.pop("step"), fields.pop("trained", None), fields.pop("step_time", 1.0)
    )


def _reports_late(harness: SyncerHarness, at: float, learner: str, fields: Fields) -> None:
    fake = harness.learners[int(learner)]
    fake.delivers(at, Report(fields.pop("step"), fields.pop("trained"), 1.0), session=fake.session - 1)


def _contributes(harness: SyncerHarness, at: float, learner: str, fields: Fields) -> None:
    fake = harness.learners[int(learner)]
    marker = fields.pop("marker", fake.marker)
    body = structs.replace(fake.contribution(fields.pop("fragment", 0)), **_pop_all(fields))
    fake.delivers(at, body, marker=marker)


def _shard_lost(harness: SyncerHarness, at: float, fields: Fields) -> None:
    harness.shard_lost(at, *_tuple(fields.pop("fragments")), cause=fields.pop("cause"))


def _shard_reconnects(harness: SyncerHarness, at: float, fields: Fields) -> None:
    """Parse `versions 0/3,2/4`: fragment and version."""
    versions = (str(part).split("/") for part in _tuple(fields.pop("versions")))
    harness.shard_reconnected(at, *((int(fragment), int(version)) for fragment, version in versions))


def _control_requested(harness: SyncerHarness, at: float, fields: Fields) -> None:
    """Parse `the operator requests control quorum value 2`."""
    harness.handle(at, ControlRequested(fields.pop("control"), fields.pop("value", None), "ada"))


SYNCER = _phrases(
    {
        "LEARNER joins": _joins,
        "LEARNER sends hello": _hello,
        "LEARNER restarts": _restarts,
        "LEARNER reconnects": _reconnects,
        "LEARNER connects to the new syncer": _connects_to_new_syncer,
        "LEARNER reports": _reports,
        "LEARNER reports on the old connection": _reports_late,
        "LEARNER contributes": _contributes,
        "LEARNER acknowledges the finish": _learner_sends(lambda fake, fields: FinishAck(0)),
        "LEARNER acknowledges all versions": lambda harness, at, learner, fields: harness.learners[
            int(learner)
        ].acknowledges(at),
        "LEARNER acknowledges": _learner_sends(
            lambda fake, fields: PublishAck(fields.pop("fragment"), fields.pop("version"))
        ),
        "LEARNER requests a resync": _learner_sends(
            lambda fake, fields: Resync(fields.pop("fragment"), fields.pop("received"))
        ),
        "LEARNER requests optimizer state": _learner_sends(
            lambda fake, fields: StateRequest(_tuple(fields.pop("tried", ())))
        ),
        "LEARNER sends optimizer state": _learner_sends(
            lambda fake, fields: OptimizerState(
                fake.id,
                fields.pop("target"),
                fields.pop("incarnation"),
                fields.pop("step"),
                _tuple(fields.pop("versions")),
            )
        ),
        "LEARNER requests leases": _learner_sends(
            lambda fake, fields: LeaseRequest(fields.pop("leases"), fields.pop("consumed"))
        ),
        "LEARNER acknowledges the pause": _learner_sends(
            lambda fake, fields: PausedAck(fields.pop("serial"), bool(fields.pop("paused")))
        ),
        "LEARNER is ready": _learner_sends(lambda fake, fields: Ready(because("state-kept"))),
        "LEARNER requests to drain": _learner_sends(
            lambda fake, fields: DrainRequest(fake.step, fake.trained, _tuple(fields.pop("unmerged")))
        ),
        "LEARNER leaves": _learner_sends(lambda fake, fields: Left(fields.pop("cause"))),
        "LEARNER pings": _learner_sends(lambda fake, fields: Ping(fields.pop("serial", 1))),
        "LEARNER has saved its part": _part,
        "LEARNER disconnects": lambda harness, at, learner, fields: harness.handle(
            at,
            LearnerDisconnected(
                int(learner),
                harness.learners[int(learner)].incarnation,
                harness.learners[int(learner)].session,
                fields.pop("cause", "connection reset by peer"),
            ),
        ),
        "the merge is done": lambda harness, at, fields: harness.merged(at),
        "the merge fails": lambda harness, at, fields: harness.merge_failed(at, fields.pop("cause")),
        "the write is done": lambda harness, at, fields: harness.persisted(at),
        "the write fails": lambda harness, at, fields: harness.persist_failed(at, fields.pop("cause")),
        "the write is done without a reply": _written_without_reply,
        "the shard is lost": _shard_lost,
        "the shard reconnects": _shard_reconnects,
        "a snapshot is requested": lambda harness, at, fields: harness.handle(at, SnapshotRequested()),
        "the operator requests": _control_requested,
        "the end is requested": lambda harness, at, fields: harness.handle(at, FinishRequested()),
        "a timer fires": lambda harness, at, fields: harness.handle(at, TimerFired()),
    }
)


def _merged_up_to(fields: Fields) -> MergedUpTo | None:
    """Parse `merged 2,200`: the copy of step 2, with 200 tokens trained, is merged."""
    merged = fields.pop("merged", None)
    base, incarnation = fields.pop("merged_base", 0), fields.pop("merged_incarnation", 1)
    return None if merged is None else MergedUpTo(incarnation, base, merged[0], merged[1], 0)


def _published(harness: LearnerHarness, at: float, fields: Fields) -> None:
    merged_up_to = _merged_up_to(fields)
    harness.published(at, fields.pop("fragment", 0), fields.pop("version"), merged_up_to, fields.pop("base", None))


def _syncer_takeover(harness: LearnerHarness, at: float, fields: Fields) -> None:
    harness.epoch += 1


def _learner_receives(make: Callable[[Fields], Any]) -> Callable[..., None]:
    def receive(harness: LearnerHarness, at: float, fields: Fields) -> None:
        harness.receives(at, make(fields))

    return receive


def _marker(harness: LearnerHarness, at: float, fields: Fields) -> None:
    harness.marker = fields.pop("snapshot")
    harness.receives(at, Marker(harness.marker))


LEARNER = _phrases(
    {
        "trains": lambda harness, at, fields: harness.trains(at),
        "the connection opens": lambda harness, at, fields: harness.opens(at),
        "the connection closes": lambda harness, at, fields: harness.handle(
            at, ConnectionClosed(harness.session, fields.pop("cause"))
        ),
        "dialing fails": lambda harness, at, fields: harness.handle(at, DialFailed(fields.pop("cause"))),
        "takes a step": lambda harness, at, fields: harness.steps(
            at,
            fields.pop("steps", 1),
            fields.pop("tokens", None),
            fields.pop("step_time", 1.0),
            fields.pop("samples", 0),
        ),
        "has saved its part": lambda harness, at, fields: harness.saved(at),
        "cannot save its part": lambda harness, at, fields: harness.save_failed(at, fields.pop("cause")),
        "is requested to drain": lambda harness, at, fields: harness.handle(
            at, LeaveRequested(fields.pop("cause"), drain=True)
        ),
        "is requested to leave": lambda harness, at, fields: harness.handle(at, LeaveRequested(fields.pop("cause"))),
        "another syncer takes over": _syncer_takeover,
        "the syncer pauses": _learner_receives(lambda fields: SetPaused(fields.pop("serial"), True)),
        "the syncer resumes": _learner_receives(lambda fields: SetPaused(fields.pop("serial"), False)),
        "the syncer drains": _learner_receives(lambda fields: Drain(fields.pop("cause"))),
        "the syncer welcomes": lambda harness, at, fields: harness.welcomed(
            at, _tuple(fields.pop("versions")), fields.pop("step_time", 0.0)
        ),
        "the syncer refuses permanently": _learner_receives(
            lambda fields: Refuse(Reason(fields.pop("code")), fields.pop("current"), True)
        ),
        "the syncer pulls": _learner_receives(lambda fields: Pull(_round(fields))),
        "the syncer refuses the contribution": _learner_receives(
            lambda fields: RefuseContribution(_round(fields), because("contribution-late"))
        ),
        "the syncer publishes": _published,
        "the syncer leases": _learner_receives(
            lambda fields: Lease(fields.pop("number"), fields.pop("begin"), fields.pop("end"))
        ),
        "the syncer sends a marker": _marker,
        "the syncer requests optimizer state": _learner_receives(
            lambda fields: ProvideState(
                fields.pop("target"), fields.pop("incarnation", 1), _tuple(fields.pop("versions"))
            )
        ),
        "the syncer chooses": _learner_receives(lambda fields: PeerChosen(fields.pop("peer"))),
        "the syncer has no peer": _learner_receives(lambda fields: NoPeer(because("peer-none"), False)),
        "the syncer forwards optimizer state": _learner_receives(
            lambda fields: OptimizerState(
                fields.pop("source"),
                1,
                fields.pop("incarnation", 1),
                fields.pop("step"),
                _tuple(fields.pop("versions")),
            )
        ),
        "the syncer finishes the run": _learner_receives(
            lambda fields: Finish(_tuple(fields.pop("versions")), fields.pop("merges"))
        ),
        "the syncer answers the ping": _learner_receives(lambda fields: Pong(fields.pop("serial", 1))),
        "a timer fires": lambda harness, at, fields: harness.handle(at, TimerFired()),
        "optimizer state is rejected": lambda harness, at, fields: harness.handle(
            at, StateRejected(fields.pop("source"), fields.pop("cause"))
        ),
    }
)


# --------------------------------------------------------------------------------------------------------------------
# Reading and running


class Scenario:
    """Runner of one scenario; `played` returns its text with the actual effects."""

    def __init__(self, text: str, name: str = "scenario") -> None:
        self.name = name
        self.text = text
        self.harness: SyncerHarness | LearnerHarness | None = None
        self.number = 0

    def played(self) -> str:
        out: list[str] = []
        for number, line in enumerate(self.text.splitlines(), 1):
            self.number = number
            if line.startswith(">"):
                out += [line, *self._run_line(line[1:].strip())]
            elif line.startswith("core "):
                self.harness = self._core(line)
                out.append(line)
            elif not line.strip() or line.startswith("#"):
                out.append(line)
        return "\n".join(out) + "\n"

    def check(self) -> None:
        actual, expected = self.played().splitlines(), self.text.splitlines()
        for number in range(max(len(actual), len(expected))):
            found = actual[number] if number < len(actual) else "the end of the file"
            wanted = expected[number] if number < len(expected) else "the end of the file"
            if found != wanted:
                raise AssertionError(
                    f"{self.name}, line {number + 1}: expected\n  {wanted}\nbut the core does\n  {found}\n"
                    "If the core is right, update the file with `pytest --rewrite-scenarios`."
                )

    def _error(self, problem: str) -> ScenarioError:
        return ScenarioError(f"{self.name}, line {self.number}: {problem}")

    def _core(self, line: str) -> SyncerHarness | LearnerHarness:
        kind, *rest = shlex.split(line)[1:]
        settings: Fields = {}
        limits: Fields = {}
        learner = incarnation = 1
        for argument in rest:
            key, _, value = argument.partition("=")
            if key == "learner":
                learner = int(value)
            elif key == "incarnation":
                incarnation = int(value)
            elif key.startswith("limits."):
                limits[key.removeprefix("limits.")] = _value(value)
            else:
                settings[key] = _tuple(_value(value)) if key == "fingerprint" else _value(value)
        config = RunConfig(**settings, limits=Limits(**limits))
        if kind == "syncer":
            return SyncerHarness(config)
        if kind == "learner":
            return LearnerHarness(config, learner, incarnation)
        raise self._error(f"a core is a syncer or a learner, not a {kind}")

    def _run_line(self, text: str) -> list[str]:
        quietly = text.startswith("quietly ")
        lines = self._run(text.removeprefix("quietly "))
        return [] if quietly else lines or ["nothing"]

    def _run(self, text: str) -> list[str]:
        if self.harness is None:
            raise self._error("no core yet: start with `core syncer ...` or `core learner ...`")
        if text == "the syncer is killed and restarted":
            assert isinstance(self.harness, SyncerHarness)
            self.harness = self.harness.restarted()
            return self._lines(self.harness.effects)
        if found := re.fullmatch(r"time passes until (\S+)", text):
            return self._timers(float(found[1]))
        found = re.match(r"at (\S+) (.*)", text)
        if found is None:
            raise self._error(f"expected `> at TIME ...`, found {text!r}")
        return self._handle(float(found[1]), found[2])

    def _handle(self, at: float, text: str) -> list[str]:
        assert self.harness is not None
        matching = [
            (found, do)
            for pattern, do in (SYNCER if isinstance(self.harness, SyncerHarness) else LEARNER)
            if (found := pattern.match(text))
        ]
        if not matching:
            raise self._error(f"no such phrase: {text!r}")
        found, do = max(matching, key=lambda pair: pair[0].end())
        fields = self._pairs(text[found.end() :])
        self.harness.effects = []
        start = len(self.harness.done)
        do(self.harness, at, *found.groups(), fields)
        if fields:
            raise self._error(f"unknown fields: {fields}")
        return self._lines(self.harness.done[start:])

    def _pairs(self, text: str) -> Fields:
        parts = shlex.split(text)
        if len(parts) % 2:
            raise self._error(f"names and values come in pairs: {text!r}")
        return {key: _value(value) for key, value in zip(parts[::2], parts[1::2], strict=True)}

    def _timers(self, until: float) -> list[str]:
        harness = self.harness
        assert harness is not None
        lines: list[str] = []
        while (deadline := harness.core.next_deadline()) is not None and deadline <= until:
            done = harness.handle(deadline, TimerFired())
            lines += [f"at {deadline:.6g}:", *[f"  {line}" for line in self._lines(done)]] if done else []
        return lines

    def _lines(self, effects: list[Any]) -> list[str]:
        assert self.harness is not None
        return [format_effect(effect, self.harness) for effect in effects]


def _value(text: str) -> Any:
    if "," in text:
        return tuple(_value(part) for part in text.split(",") if part)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def scenario_files() -> list[Path]:
    return sorted((Path(__file__).resolve().parent.parent / "scenarios").glob("*.scenario"))
