"""Scenario files: a conversation with a core and what it does about it, as text.

    # A sentence that says what this shows.
    core syncer fragments=1 every_steps=2

    > at 1 learner 1 reports step 1 trained 100
    to learner 1: pull fragment 0 base 0 epoch 1 attempt 1

A line that starts with `>` is what happens, and the lines below it are the effects; `nothing` stands for none. `core`
says which core it is and its settings, and `# ` is a comment. The phrases are in the tables below; words that follow a
phrase are names and values, `why "no space"` in quotes where there is a blank, `versions 1,2` with commas.
`> quietly ...` does not show the effects: for the way to where the story begins.

`pytest --rewrite-scenarios` writes down what the cores do. Read it before you believe it.
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
from tests.core.conversation import LearnerTalk, SyncerTalk, Talk, Voice

Words = dict[str, Any]


class ScenarioError(ValueError):
    """A scenario that cannot be read; says the line."""


# --------------------------------------------------------------------------------------------------------------------
# Effects as lines


def line_of(effect: Any, talk: Talk) -> str:
    if isinstance(effect, Send):
        return _message(effect, talk)
    if isinstance(effect, LogReason):
        kind, number = effect.subject
        return f"says of {'the run' if kind == 'run' else f'{kind} {number}'}: {effect.reason} [{effect.reason.code}]"
    return _words(effect)


def _message(effect: Send, talk: Talk) -> str:
    envelope = effect.envelope
    where = f"learner {envelope.learner}" if isinstance(talk, SyncerTalk) else "syncer"
    notes = []
    if (envelope.incarnation, envelope.session) != (1, 1):
        notes.append(f"incarnation {envelope.incarnation}, session {envelope.session}")
    if envelope.marker not in (0, envelope.epoch * 1_000_000):
        notes.append(f"marker {envelope.marker}")
    note = f" ({', '.join(notes)})" if notes else ""
    return f"to {where}{note}: {_words(envelope.body)}"


def _words(value: Any) -> str:
    """A value: its name and its fields, each by name."""
    name = re.sub(r"(?<!^)(?=[A-Z])", "-", type(value).__name__).lower()
    return " ".join([name, *_fields(value)])


def _fields(value: Any) -> list[str]:
    shown = []
    for field, inner in structs.asdict(value).items():
        if field == "consumed_samples" and not inner:
            continue  # a run without leases
        if isinstance(inner, RoundId):
            shown += _fields(inner)
        elif isinstance(inner, Reason):
            shown.append(f'because "{inner}" [{inner.code}]')
        elif isinstance(inner, Value):
            shown.append(f"{field} ({_words(inner)})" if field != "record" else f"({_words(inner)})")
        else:
            shown.append(f"{field} {_shown(inner)}")
    return shown


def _shown(value: Any) -> str:
    if isinstance(value, RoundId):
        return "/".join(map(str, structs.astuple(value)))
    if isinstance(value, Value):
        return " ".join(_fields(value))
    if isinstance(value, tuple):
        return f"[{'; '.join(_shown(inner) for inner in value)}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return f'"{value}"' if " " in value or not value else value
    return "-" if value is None else str(value)


# --------------------------------------------------------------------------------------------------------------------
# Phrases: what happens

Phrase = tuple[re.Pattern[str], Callable[..., Any]]


def _round(words: Words) -> RoundId:
    return RoundId(words.pop("fragment", 0), words.pop("base", 0), words.pop("epoch", 1), words.pop("attempt", 1))


def _rounds(text: object) -> tuple[RoundId, ...]:
    """`0/0/1/1`: fragment, base, epoch, attempt."""
    parts = text if isinstance(text, tuple) else (text,)
    return tuple(RoundId(*map(int, str(part).split("/"))) for part in parts if part != "-")


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _joins(talk: SyncerTalk, at: float, who: str, words: Words) -> None:
    talk.joined(int(who), at, words.pop("incarnation", 1))


def _restarts(talk: SyncerTalk, at: float, who: str, words: Words) -> None:
    old = talk.voices[int(who)]
    talk.voice(old.id, old.incarnation + 1, 1).hello(at)


def _redials(talk: SyncerTalk, at: float, who: str, words: Words) -> None:
    voice = talk.voices[int(who)]
    voice.session += 1
    voice.step, voice.trained = words.pop("step", voice.step), words.pop("trained", voice.trained)
    voice.hello(at, training=True)


def _hello(talk: SyncerTalk, at: float, who: str, words: Words) -> None:
    voice = talk.voices.get(int(who)) or talk.voice(int(who))
    training = bool(words.pop("training", 0))
    if "received" in words:
        words["received"] = _tuple(words["received"])
    if "fingerprint" in words:
        words["fingerprint"] = _tuple(words["fingerprint"])
    voice.hello(at, training, **{key: words.pop(key) for key in list(words)})


def _known(talk: SyncerTalk, at: float, who: str, words: Words) -> None:
    """A learner of before a restart of the syncer dials the new one."""
    voice = talk.voice(int(who), words.pop("incarnation", 1), words.pop("session", 2))
    voice.received = dict(zip(voice.received, _tuple(words.pop("received")), strict=True))
    voice.step, voice.trained = words.pop("step"), words.pop("trained")
    voice.hello(at, training=True)


def _part(talk: SyncerTalk, at: float, who: str, words: Words) -> None:
    voice = talk.voices[int(who)]
    voice.marker = words["snapshot"]
    part = SnapshotPart(
        words.pop("snapshot"),
        words.pop("step"),
        words.pop("trained"),
        _tuple(words.pop("versions")),
        _rounds(words.pop("outstanding", "-")),
        words.pop("problem", None),
    )
    voice.delivers(at, part)


def _says(make: Callable[[Voice, Words], Any]) -> Callable[..., None]:
    def say(talk: SyncerTalk, at: float, who: str, words: Words) -> None:
        voice = talk.voices[int(who)]
        voice.delivers(at, make(voice, words))

    return say


def _takes_all(words: Words) -> Words:
    taken = dict(words)
    words.clear()
    return taken


def _phrases(table: dict[str, Callable[..., Any]]) -> list[Phrase]:
    who = r"learner (-?\d+)"
    return [(re.compile(pattern.replace("WHO", who) + r"(?: |$)"), do) for pattern, do in table.items()]


def _disk_kept(talk: SyncerTalk, at: float, words: Words) -> None:
    talk.written_without_reply()


def _reports(talk: SyncerTalk, at: float, who: str, words: Words) -> None:
    talk.voices[int(who)].reports(at, words.pop("step"), words.pop("trained", None), words.pop("step_time", 1.0))


def _reports_late(talk: SyncerTalk, at: float, who: str, words: Words) -> None:
    voice = talk.voices[int(who)]
    voice.delivers(at, Report(words.pop("step"), words.pop("trained"), 1.0), session=voice.session - 1)


def _contributes(talk: SyncerTalk, at: float, who: str, words: Words) -> None:
    voice = talk.voices[int(who)]
    marker = words.pop("marker", voice.marker)
    body = structs.replace(voice.contribution(words.pop("fragment", 0)), **_takes_all(words))
    voice.delivers(at, body, marker=marker)


def _shard_lost(talk: SyncerTalk, at: float, words: Words) -> None:
    talk.shard_lost(at, *_tuple(words.pop("fragments")), why=words.pop("why"))


def _shard_back(talk: SyncerTalk, at: float, words: Words) -> None:
    """`held 0/3,2/4`: fragment and version."""
    held = (str(part).split("/") for part in _tuple(words.pop("held")))
    talk.shard_back(at, *((int(fragment), int(version)) for fragment, version in held))


def _wants(talk: SyncerTalk, at: float, words: Words) -> None:
    """`the operator wants what quorum value 2`."""
    talk.handle(at, ControlRequested(words.pop("what"), words.pop("value", None), "ada"))


SYNCER = _phrases(
    {
        "WHO joins": _joins,
        "WHO says hello": _hello,
        "WHO restarts": _restarts,
        "WHO dials again": _redials,
        "WHO dials the new syncer": _known,
        "WHO reports": _reports,
        "WHO reports on the old link": _reports_late,
        "WHO contributes": _contributes,
        "WHO acknowledges the end": _says(lambda voice, words: FinishAck(0)),
        "WHO acknowledges everything": lambda talk, at, who, words: talk.voices[int(who)].acknowledges(at),
        "WHO has got": _says(lambda voice, words: PublishAck(words.pop("fragment"), words.pop("version"))),
        "WHO wants the whole": _says(lambda voice, words: Resync(words.pop("fragment"), words.pop("have"))),
        "WHO asks for inner state": _says(lambda voice, words: StateRequest(_tuple(words.pop("tried", ())))),
        "WHO gives inner state": _says(
            lambda voice, words: OptimizerState(
                voice.id, words.pop("to"), words.pop("incarnation"), words.pop("step"), _tuple(words.pop("versions"))
            )
        ),
        "WHO asks for leases": _says(lambda voice, words: LeaseRequest(words.pop("leases"), words.pop("taken"))),
        "WHO has heard of the pause": _says(
            lambda voice, words: PausedAck(words.pop("serial"), bool(words.pop("paused")))
        ),
        "WHO is ready": _says(lambda voice, words: Ready(because("state-kept"))),
        "WHO has to go": _says(
            lambda voice, words: DrainRequest(voice.step, voice.trained, _tuple(words.pop("unmerged")))
        ),
        "WHO leaves": _says(lambda voice, words: Left(words.pop("why"))),
        "WHO pings": _says(lambda voice, words: Ping(words.pop("serial", 1))),
        "WHO has saved its part": _part,
        "WHO loses its link": lambda talk, at, who, words: talk.handle(
            at,
            LearnerDisconnected(
                int(who),
                talk.voices[int(who)].incarnation,
                talk.voices[int(who)].session,
                words.pop("why", "connection reset by peer"),
            ),
        ),
        "the merge is done": lambda talk, at, words: talk.merged(at),
        "the merge fails": lambda talk, at, words: talk.merge_failed(at, words.pop("why")),
        "the disk has written it": lambda talk, at, words: talk.persisted(at),
        "the disk fails": lambda talk, at, words: talk.persist_failed(at, words.pop("why")),
        "the disk has written it and nobody hears of it": _disk_kept,
        "the shard is lost": _shard_lost,
        "the shard is back": _shard_back,
        "a snapshot is wanted": lambda talk, at, words: talk.handle(at, SnapshotRequested()),
        "the operator wants": _wants,
        "the end is wanted": lambda talk, at, words: talk.handle(at, FinishRequested()),
        "a timer fires": lambda talk, at, words: talk.handle(at, TimerFired()),
    }
)


def _mark(words: Words) -> MergedUpTo | None:
    """`merged 2,200`: the copy of step 2, with 200 tokens trained, is in."""
    merged = words.pop("merged", None)
    base, incarnation = words.pop("merged_base", 0), words.pop("merged_incarnation", 1)
    return None if merged is None else MergedUpTo(incarnation, base, merged[0], merged[1], 0)


def _published(talk: LearnerTalk, at: float, words: Words) -> None:
    mark = _mark(words)
    talk.gets(at, words.pop("fragment", 0), words.pop("version"), mark, words.pop("base", None))


def _next_syncer(talk: LearnerTalk, at: float, words: Words) -> None:
    talk.epoch += 1


def _hears(make: Callable[[Words], Any]) -> Callable[..., None]:
    def hear(talk: LearnerTalk, at: float, words: Words) -> None:
        talk.receives(at, make(words))

    return hear


def _marker(talk: LearnerTalk, at: float, words: Words) -> None:
    talk.marker = words.pop("snapshot")
    talk.receives(at, Marker(talk.marker))


LEARNER = _phrases(
    {
        "trains": lambda talk, at, words: talk.trains(at),
        "the link opens": lambda talk, at, words: talk.opens(at),
        "the link closes": lambda talk, at, words: talk.handle(at, ConnectionClosed(talk.session, words.pop("why"))),
        "dialing fails": lambda talk, at, words: talk.handle(at, DialFailed(words.pop("why"))),
        "takes a step": lambda talk, at, words: talk.steps(
            at,
            words.pop("steps", 1),
            words.pop("tokens", None),
            words.pop("step_time", 1.0),
            words.pop("samples", 0),
        ),
        "has saved its part": lambda talk, at, words: talk.saved(at),
        "cannot save its part": lambda talk, at, words: talk.save_failed(at, words.pop("why")),
        "is told to push and leave": lambda talk, at, words: talk.handle(
            at, LeaveRequested(words.pop("why"), drain=True)
        ),
        "is told to leave": lambda talk, at, words: talk.handle(at, LeaveRequested(words.pop("why"))),
        "another syncer takes over": _next_syncer,
        "the syncer pauses": _hears(lambda words: SetPaused(words.pop("serial"), True)),
        "the syncer resumes": _hears(lambda words: SetPaused(words.pop("serial"), False)),
        "the syncer drains": _hears(lambda words: Drain(words.pop("why"))),
        "the syncer welcomes": lambda talk, at, words: talk.welcomed(
            at, _tuple(words.pop("versions")), words.pop("step_time", 0.0)
        ),
        "the syncer refuses for good": _hears(
            lambda words: Refuse(Reason(words.pop("code")), words.pop("current"), True)
        ),
        "the syncer pulls": _hears(lambda words: Pull(_round(words))),
        "the syncer refuses the contribution": _hears(
            lambda words: RefuseContribution(_round(words), because("contribution-late"))
        ),
        "the syncer publishes": _published,
        "the syncer leases": _hears(lambda words: Lease(words.pop("number"), words.pop("begin"), words.pop("end"))),
        "the syncer marks": _marker,
        "the syncer wants state": _hears(
            lambda words: ProvideState(words.pop("to"), words.pop("incarnation", 1), _tuple(words.pop("versions")))
        ),
        "the syncer has chosen": _hears(lambda words: PeerChosen(words.pop("peer"))),
        "the syncer has no peer": _hears(lambda words: NoPeer(because("peer-none"), False)),
        "the syncer passes on inner state": _hears(
            lambda words: OptimizerState(
                words.pop("giver"), 1, words.pop("incarnation", 1), words.pop("step"), _tuple(words.pop("versions"))
            )
        ),
        "the syncer says that the run is finished": _hears(
            lambda words: Finish(_tuple(words.pop("versions")), words.pop("merges"))
        ),
        "the syncer answers the ping": _hears(lambda words: Pong(words.pop("serial", 1))),
        "a timer fires": lambda talk, at, words: talk.handle(at, TimerFired()),
        "inner state is rejected": lambda talk, at, words: talk.handle(
            at, StateRejected(words.pop("giver"), words.pop("why"))
        ),
    }
)


# --------------------------------------------------------------------------------------------------------------------
# Reading and running


class Scenario:
    """Runs line by line. `played` is the text with the effects as they are."""

    def __init__(self, text: str, name: str = "scenario") -> None:
        self.name = name
        self.text = text
        self.talk: SyncerTalk | LearnerTalk | None = None
        self.number = 0

    def played(self) -> str:
        out: list[str] = []
        for number, line in enumerate(self.text.splitlines(), 1):
            self.number = number
            if line.startswith(">"):
                out += [line, *self._happens(line[1:].strip())]
            elif line.startswith("core "):
                self.talk = self._core(line)
                out.append(line)
            elif not line.strip() or line.startswith("#"):
                out.append(line)
        return "\n".join(out) + "\n"

    def check(self) -> None:
        got, wanted = self.played().splitlines(), self.text.splitlines()
        for number in range(max(len(got), len(wanted))):
            ours = got[number] if number < len(got) else "the end of the file"
            theirs = wanted[number] if number < len(wanted) else "the end of the file"
            if ours != theirs:
                raise AssertionError(
                    f"{self.name}, line {number + 1}: expected\n  {theirs}\nbut the core does\n  {ours}\n"
                    "If that is right, `pytest --rewrite-scenarios` writes it down."
                )

    def _wrong(self, what: str) -> ScenarioError:
        return ScenarioError(f"{self.name}, line {self.number}: {what}")

    def _core(self, line: str) -> SyncerTalk | LearnerTalk:
        kind, *rest = shlex.split(line)[1:]
        plain: Words = {}
        limits: Words = {}
        learner = incarnation = 1
        for word in rest:
            key, _, value = word.partition("=")
            if key == "learner":
                learner = int(value)
            elif key == "incarnation":
                incarnation = int(value)
            elif key.startswith("limits."):
                limits[key.removeprefix("limits.")] = _value(value)
            else:
                plain[key] = _tuple(_value(value)) if key == "fingerprint" else _value(value)
        config = RunConfig(**plain, limits=Limits(**limits))
        if kind == "syncer":
            return SyncerTalk(config)
        if kind == "learner":
            return LearnerTalk(config, learner, incarnation)
        raise self._wrong(f"a core is a syncer or a learner, not a {kind}")

    def _happens(self, text: str) -> list[str]:
        quietly = text.startswith("quietly ")
        lines = self._run(text.removeprefix("quietly "))
        return [] if quietly else lines or ["nothing"]

    def _run(self, text: str) -> list[str]:
        if self.talk is None:
            raise self._wrong("say first which core it is: core syncer ..., or core learner ...")
        if text == "the syncer is killed and another one starts":
            assert isinstance(self.talk, SyncerTalk)
            self.talk = self.talk.restarted()
            return self._lines(self.talk.effects)
        if found := re.fullmatch(r"nothing happens until (\S+)", text):
            return self._timers(float(found[1]))
        found = re.match(r"at (\S+) (.*)", text)
        if found is None:
            raise self._wrong(f"expected `> at TIME ...`, found {text!r}")
        return self._told(float(found[1]), found[2])

    def _told(self, at: float, text: str) -> list[str]:
        assert self.talk is not None
        matching = [
            (found, do)
            for pattern, do in (SYNCER if isinstance(self.talk, SyncerTalk) else LEARNER)
            if (found := pattern.match(text))
        ]
        if not matching:
            raise self._wrong(f"no such phrase: {text!r}")
        found, do = max(matching, key=lambda pair: pair[0].end())
        words = self._pairs(text[found.end() :])
        self.talk.effects = []
        start = len(self.talk.done)
        do(self.talk, at, *found.groups(), words)
        if words:
            raise self._wrong(f"words that mean nothing here: {words}")
        return self._lines(self.talk.done[start:])

    def _pairs(self, text: str) -> Words:
        words = shlex.split(text)
        if len(words) % 2:
            raise self._wrong(f"names and values come in pairs: {text!r}")
        return {key: _value(value) for key, value in zip(words[::2], words[1::2], strict=True)}

    def _timers(self, until: float) -> list[str]:
        talk = self.talk
        assert talk is not None
        lines: list[str] = []
        while (deadline := talk.core.next_deadline()) is not None and deadline <= until:
            done = talk.handle(deadline, TimerFired())
            lines += [f"at {deadline:.6g}:", *[f"  {line}" for line in self._lines(done)]] if done else []
        return lines

    def _lines(self, effects: list[Any]) -> list[str]:
        assert self.talk is not None
        return [line_of(effect, self.talk) for effect in effects]


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
