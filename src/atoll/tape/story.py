"""Stories: the history of one learner, one fragment or the whole run, in sentences.

The sentences come from the `LogReason` effects of cores and from the reasons in other effects. This module adds
sentences for copies, contributions, versions, adoptions, starts and ends. It reads any entries in causal order, from
the tapes of a run or from the memory of a failed test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import asdict

from atoll.core import protocol
from atoll.core.reasons import REASONS, Reason
from atoll.core.types import SYNCER, FragmentId, LearnerId, RoundId, RunConfig
from atoll.tape.format import Actor, Entry

Subject: TypeAlias = tuple[str, int]
"""("learner", 3), ("fragment", 7) or ("run", 0)."""

RUN: Subject = ("run", 0)


class StoryLine(NamedTuple):
    """Sentence of a story, with its time, tape entry and subject."""

    at: float
    actor: Actor
    tick: int
    subject: Subject
    sentence: str

    def __str__(self) -> str:
        return f"{self.at:.3f} s  {format_subject(self.subject)}: {self.sentence}"


def format_subject(subject: Subject) -> str:
    """Return a subject as text.

    >>> format_subject(("fragment", 7)), format_subject(("run", 0))
    ('fragment 7', 'the run')
    """
    return "the run" if subject == RUN else f"{subject[0]} {subject[1]}"


def build_story(entries: Iterable[Entry], subject: Subject, config: RunConfig | None = None) -> Iterator[StoryLine]:
    """Yield the lines about one subject.

    Args:
        entries: entries in causal order.
        config: adds the quorum to the opening of a round.
    """
    builder = _StoryBuilder(config)
    for entry in entries:
        for statement in builder.describe(entry):
            if statement.subject == subject or statement.concerns is None or subject in statement.concerns:
                yield StoryLine(entry.at, entry.actor, entry.tick, statement.subject, statement.sentence)


def format_reason(reason: Reason) -> str:
    """Return the sentence of a reason, or its code and arguments if the code is unknown to this version."""
    try:
        return str(reason)
    except (LookupError, TypeError, ValueError):
        return " ".join([reason.code, *map(str, reason.args)])


class _Statement(NamedTuple):
    """Sentence about one subject. It is also in the stories of the subjects in `concerns`; None: in all stories."""

    subject: Subject
    sentence: str
    concerns: tuple[Subject, ...] | None = ()


_Describe: TypeAlias = Callable[[Entry, Any], _Statement | None]


def _learner(learner: LearnerId) -> Subject:
    return ("learner", learner)


def _fragment(fragment: FragmentId) -> Subject:
    return ("fragment", fragment)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass
class _Process:
    """State of one process, to describe how it ended."""

    last_at: float = 0.0
    is_over: bool = False  # it has stopped, or the story already describes its end


class _StoryBuilder:
    def __init__(self, config: RunConfig | None) -> None:
        self.config = config
        self.quorum = config.quorum if config is not None else 0  # effective quorum
        self.processes: dict[Actor, _Process] = {}
        self.opened: dict[FragmentId, RoundId] = {}  # newest round whose opening was described

    def describe(self, entry: Entry) -> Iterator[_Statement]:
        if type(entry.event) is protocol.Started:
            yield self._describe_start(entry)
        process = self.processes.setdefault(entry.actor, _Process())
        process.last_at = entry.at
        if entry.actor.learner == SYNCER:
            yield from self._describe_syncer_entry(entry)
        else:
            yield from _describe_learner_entry(entry)
        if any(type(effect) in (protocol.Stop, protocol.Halt) for effect in entry.effects):
            process.is_over = True

    def _describe_start(self, entry: Entry) -> _Statement:
        """Describe a start, and the end of an earlier process that was killed."""
        learner, start = entry.actor
        noun = "epoch" if learner == SYNCER else "incarnation"
        sentence = f"{noun} {start} started"
        for actor, process in sorted(self.processes.items()):
            if actor.learner == learner and not process.is_over:
                process.is_over = True
                sentence += f"; {noun} {actor.generation} ended without a stop, last entry at {process.last_at:.3f} s"
        if learner == SYNCER:
            # A new syncer receives the changed settings again.
            self.quorum = self.config.quorum if self.config is not None else 0
            return _Statement(RUN, f"syncer {sentence}", None)
        return _Statement(_learner(learner), sentence, (RUN,))

    def _describe_syncer_entry(self, entry: Entry) -> Iterator[_Statement]:
        if type(entry.event) is protocol.ControlRequested and entry.event.kind == "quorum":
            assert entry.event.value is not None
            self.quorum = int(entry.event.value)
        ignored = _describe_ignored(entry)
        if ignored is not None:
            yield ignored
        yield from _describe_shard_entry(entry)
        sent: dict[tuple[FragmentId, int], list[LearnerId]] = {}
        pulled: dict[RoundId, list[LearnerId]] = {}
        for effect in entry.effects:
            body = effect.envelope.body if type(effect) is protocol.Send else None
            if type(effect) is protocol.Send and type(body) is protocol.Published:
                sent.setdefault((body.fragment, body.version), []).append(effect.envelope.learner)
            elif type(effect) is protocol.Send and type(body) is protocol.Pull:
                pulled.setdefault(body.round, []).append(effect.envelope.learner)
        durable = _durable(entry)
        if durable is not None:
            to = _count(len(sent.pop(durable, ())), "learner")
            yield _Statement(_fragment(durable[0]), f"version {durable[1]} is durable and sent to {to}")
        yield from _from_table(_SYNCER_DESCRIPTIONS, entry)
        for (fragment, version), learners in sent.items():
            concerns = tuple(map(_learner, learners))
            yield _Statement(_fragment(fragment), f"version {version} sent to {_join_names(learners)}", concerns)
        for round_id, learners in pulled.items():
            yield self._describe_pull(round_id, learners)

    def _describe_pull(self, round_id: RoundId, learners: list[LearnerId]) -> _Statement:
        subject, concerns = _fragment(round_id.fragment), tuple(map(_learner, learners))
        if self.opened.get(round_id.fragment) == round_id:
            return _Statement(subject, f"version {round_id.base}: pulled again from {_join_names(learners)}", concerns)
        self.opened[round_id.fragment] = round_id
        if self.config is None:
            sentence = f"opened on version {round_id.base}: {_count(len(learners), 'learner')} pulled"
        else:
            sentence = REASONS["round-opened"].format(round_id.base, len(learners), self.quorum)
        return _Statement(subject, sentence, concerns)


def _join_names(learners: list[LearnerId]) -> str:
    return f"{'learner' if len(learners) == 1 else 'learners'} {', '.join(map(str, learners))}"


def _durable(entry: Entry) -> tuple[FragmentId, int] | None:
    event = entry.event
    if type(event) is protocol.Persisted and event.key.kind == "version":
        return event.key.number, event.key.version
    return None


def _describe_shard_entry(entry: Entry) -> Iterator[_Statement]:
    """Describe the loss or the reconnection of a shard, for the story of the run."""
    event = entry.event
    if type(event) is protocol.ShardLost:
        yield _Statement(RUN, f"the shard of {_fragments(event.fragments)} is unavailable: {event.cause}")
    elif type(event) is protocol.ShardReconnected:
        yield _Statement(RUN, f"the shard of {_fragments(p for p, _ in event.versions)} is back")


def _fragments(fragments: Iterable[FragmentId]) -> str:
    each = list(map(str, fragments))
    return f"{'fragment' if len(each) == 1 else 'fragments'} {', '.join(each)}"


def _describe_ignored(entry: Entry) -> _Statement | None:
    """Describe a contribution or a hello that got no reply, which may be the start of a problem."""
    if type(entry.event) is not protocol.MessageArrived:
        return None
    envelope = entry.event.envelope
    body, learner = envelope.body, envelope.learner
    if type(body) is protocol.Contribution and not _is_answered(entry, body):
        sentence = f"a contribution of learner {learner} to {_attempt(body.round)} was ignored"
        return _Statement(_fragment(body.round.fragment), sentence, (_learner(learner),))
    if type(body) is protocol.Hello and not entry.effects:
        sentence = f"a hello of incarnation {envelope.incarnation} on connection {envelope.session} got no reply"
        return _Statement(_learner(learner), sentence)
    return None


def _is_answered(entry: Entry, body: protocol.Contribution) -> bool:
    for effect in entry.effects:
        if type(effect) is protocol.Accumulate and effect.round == body.round:
            return True
        if type(effect) is protocol.Send and type(effect.envelope.body) is protocol.RefuseContribution:
            return True
    return False


def _attempt(round_id: RoundId) -> str:
    return f"attempt {round_id.attempt} on version {round_id.base}"


def _from_table(table: dict[type, _Describe], entry: Entry) -> Iterator[_Statement]:
    """Describe the effects of an entry and the messages that they send, in order.

    A closed connection has the same reason as a log effect of the entry, so the reason appears once.
    """
    closed = {(e.learner, e.reason) for e in entry.effects if type(e) is protocol.CloseConnection}
    for effect in entry.effects:
        if (
            type(effect) is protocol.LogReason
            and effect.subject[0] == "learner"
            and (effect.subject[1], effect.reason) in closed
        ):
            continue
        described = effect.envelope.body if type(effect) is protocol.Send else effect
        describe = table.get(type(described))
        statement = describe(entry, effect) if describe is not None else None
        if statement is not None:
            yield statement


# --------------------------------------------------------------------------------------------------------------------
# Sentences from the syncer's tape


def _describe_say(entry: Entry, effect: protocol.LogReason) -> _Statement:
    # A change of a learner at the syncer concerns the run; a log line of the learner does not.
    is_from_syncer = entry.actor.learner == SYNCER
    concerns = (RUN,) if is_from_syncer and effect.subject[0] == "learner" else ()
    return _Statement(effect.subject, format_reason(effect.reason), concerns)


def _describe_hangup(entry: Entry, effect: protocol.CloseConnection) -> _Statement:
    sentence = f"{_subject_name(entry)} closes connection {effect.session}: {format_reason(effect.reason)}"
    return _Statement(_learner(effect.learner), sentence, (RUN,) if entry.actor.learner == SYNCER else ())


def _subject_name(entry: Entry) -> str:
    return "the syncer" if entry.actor.learner == SYNCER else "it"


def _describe_accumulate(entry: Entry, effect: protocol.Accumulate) -> _Statement:
    a = effect.contribution
    sentence = f"contribution of learner {a.learner} accepted: {_count(a.steps, 'step')}, {_count(a.tokens, 'token')}"
    return _Statement(_fragment(effect.round.fragment), sentence, (_learner(a.learner),))


def _describe_refusal(entry: Entry, effect: protocol.Send) -> _Statement:
    learner, body = effect.envelope.learner, effect.envelope.body
    assert type(body) is protocol.RefuseContribution
    sentence = f"contribution of learner {learner} refused: {format_reason(body.reason)}"
    return _Statement(_fragment(body.round.fragment), sentence, (_learner(learner),))


def _describe_decision(
    entry: Entry, effect: protocol.OpenGrace | protocol.MergeRound | protocol.DiscardRound
) -> _Statement:
    return _Statement(_fragment(effect.round.fragment), format_reason(effect.reason))


def _describe_persist(entry: Entry, effect: protocol.Persist) -> _Statement | None:
    """Describe the write of a version. Other records have a log effect in the same entry."""
    record = effect.record
    if type(record) is not protocol.VersionRecord:
        return None
    return _Statement(_fragment(record.fragment), REASONS["persisting"].format(record.version))


def _describe_in_flight(entry: Entry, effect: protocol.RecordInFlight) -> _Statement:
    sentence = f"the contribution of learner {effect.learner} was in flight at snapshot {effect.snapshot} and is stored"
    return _Statement(_fragment(effect.round.fragment), sentence, (_learner(effect.learner), RUN))


def _describe_halt(entry: Entry, effect: protocol.Halt) -> _Statement:
    return _Statement(RUN, f"syncer epoch {entry.actor.generation} halts: {format_reason(effect.reason)}", None)


def _describe_with(sentence: str, *concerns: tuple[str, str | int]) -> _Describe:
    """Return a function that describes an effect, or a message that it sends, for the learner concerned.

    Args:
        sentence: format with the fields of the effect or message.
        concerns: kind and number, or the field with the number, of other subjects whose stories include the sentence.
    """

    def describe(entry: Entry, effect: protocol.Effect) -> _Statement:
        learner = effect.envelope.learner if type(effect) is protocol.Send else entry.actor.learner
        fields = asdict(effect.envelope.body if type(effect) is protocol.Send else effect)
        values = {name: format_reason(each) if type(each) is Reason else each for name, each in fields.items()}
        others = tuple((kind, fields[of] if isinstance(of, str) else of) for kind, of in concerns)
        return _Statement(_learner(learner), sentence.format(**values), others)

    return describe


_SYNCER_DESCRIPTIONS: dict[type, _Describe] = {
    protocol.LogReason: _describe_say,
    protocol.CloseConnection: _describe_hangup,
    protocol.Accumulate: _describe_accumulate,
    protocol.RefuseContribution: _describe_refusal,
    protocol.OpenGrace: _describe_decision,
    protocol.MergeRound: _describe_decision,
    protocol.DiscardRound: _describe_decision,
    protocol.Persist: _describe_persist,
    protocol.RecordInFlight: _describe_in_flight,
    protocol.Halt: _describe_halt,
    protocol.Welcome: _describe_with("welcomed at {progress:.1%} of the budget"),
    protocol.Refuse: _describe_with("refused: {reason}"),
    protocol.ProvideState: _describe_with(
        "its optimizer state is requested for learner {target}", ("learner", "target")
    ),
    protocol.OptimizerState: _describe_with("the optimizer state of learner {source} is forwarded to it"),
    protocol.NoPeer: _describe_with("receives no optimizer state: {reason}"),
    protocol.Lease: _describe_with("lease {number}: samples from {begin} to before {end}"),
    protocol.Finish: _describe_with("is notified that the run is finished at {merges} merges"),
}

# --------------------------------------------------------------------------------------------------------------------
# Sentences from a learner's tape


def _describe_learner_entry(entry: Entry) -> Iterator[_Statement]:
    subject, event = _learner(entry.actor.learner), entry.event
    if type(event) is protocol.ConnectionOpened:
        yield _Statement(subject, f"connection {event.session} is open")
    elif type(event) is protocol.DialFailed:
        yield _Statement(subject, f"cannot connect: {event.cause}")
    elif type(event) is protocol.SnapshotSaved:
        yield _Statement(subject, f"its part of snapshot {event.snapshot} is saved")
    yield from _from_table(_LEARNER_DESCRIPTIONS, entry)


def _describe_dial(entry: Entry, effect: protocol.Dial) -> _Statement:
    return _Statement(
        _learner(entry.actor.learner), REASONS["connection-dialing"].format(effect.delay_s, effect.attempt)
    )


def _describe_copy(entry: Entry, effect: protocol.CopyFragment) -> _Statement:
    round_id = effect.round
    sentence = f"copied fragment {round_id.fragment} at step {effect.copied_at} for {_attempt(round_id)}"
    for other in entry.effects:
        body = other.envelope.body if type(other) is protocol.Send else None
        if type(body) is protocol.Contribution and body.round == round_id:
            sentence += f" and sent {_count(body.steps, 'step')}, {_count(body.tokens, 'token')}"
            break
    else:
        sentence += "; not sent, without a connection"
    return _Statement(_learner(entry.actor.learner), sentence, (_fragment(round_id.fragment),))


def _describe_contribution(entry: Entry, effect: protocol.Send) -> _Statement | None:
    """Describe a contribution that is sent again. The description of its copy includes the first transmission."""
    body = effect.envelope.body
    assert type(body) is protocol.Contribution
    if any(type(other) is protocol.CopyFragment and other.round == body.round for other in entry.effects):
        return None
    sentence = f"sent its copy of fragment {body.round.fragment} for {_attempt(body.round)} again"
    return _Statement(_learner(entry.actor.learner), sentence, (_fragment(body.round.fragment),))


def _describe_adoption(entry: Entry, effect: protocol.AdoptFragment) -> _Statement:
    sentence = f"adopted version {effect.version} of fragment {effect.fragment} ({effect.mode}): "
    sentence += f"{_count(effect.merged_tokens, 'token')} merged, {effect.pending_tokens} pending"
    if effect.dropped_tokens:
        sentence += f", {effect.dropped_tokens} dropped"
    return _Statement(_learner(entry.actor.learner), sentence, (_fragment(effect.fragment),))


_LEARNER_DESCRIPTIONS: dict[type, _Describe] = {
    protocol.LogReason: _describe_say,
    protocol.CloseConnection: _describe_hangup,
    protocol.Dial: _describe_dial,
    protocol.CopyFragment: _describe_copy,
    protocol.AdoptFragment: _describe_adoption,
    protocol.SaveSnapshot: _describe_with("saves its part of snapshot {snapshot} at step {step}"),
    protocol.StartTraining: _describe_with("starts to train: {state_source}", RUN),
    protocol.Stop: _describe_with("stops: {reason}", RUN),
    protocol.Contribution: _describe_contribution,
    protocol.PublishAck: _describe_with("version {version} of fragment {fragment} has arrived"),
    protocol.Resync: _describe_with(
        "received an update of fragment {fragment} that does not fit version {received_version}; requests the value",
        ("fragment", "fragment"),
    ),
    protocol.StateRequest: _describe_with("requests the optimizer state of a peer"),
    protocol.OptimizerState: _describe_with("sends its optimizer state to learner {target}", ("learner", "target")),
}
