"""The story of one learner, one fragment or the whole run, in plain sentences.

Built from what cores say (`Say`), from the reasons inside effects, and from a few sentences of our own for what needs
no decision: copies, contributions, versions, adoptions, starts and ends. It reads any entries in a causal order: the
tapes of a run, or the memory of a test that has just failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import asdict

from atoll.core import protocol as said
from atoll.core.reasons import REASONS, Reason
from atoll.core.types import SYNCER, FragmentId, LearnerId, RoundId, RunConfig
from atoll.tape.format import Actor, Entry

Subject: TypeAlias = tuple[str, int]
"""("learner", 3), ("fragment", 7) or ("run", 0)."""

RUN: Subject = ("run", 0)


class StoryLine(NamedTuple):
    """One sentence: when, from whose tape, about whom."""

    at: float
    actor: Actor
    tick: int
    subject: Subject
    sentence: str

    def __str__(self) -> str:
        return f"{self.at:.3f} s  {format_subject(self.subject)}: {self.sentence}"


def format_subject(subject: Subject) -> str:
    """
    >>> shown(("fragment", 7)), shown(("run", 0))
    ('fragment 7', 'the run')
    """
    return "the run" if subject == RUN else f"{subject[0]} {subject[1]}"


def build_story(entries: Iterable[Entry], subject: Subject, config: RunConfig | None = None) -> Iterator[StoryLine]:
    """The lines about one subject. With `config`, the opening of a round names its quorum."""
    teller = _StoryBuilder(config)
    for entry in entries:
        for told in teller.tell(entry):
            if told.about == subject or told.concerns is None or subject in told.concerns:
                yield StoryLine(entry.at, entry.actor, entry.tick, told.about, told.sentence)


def format_reason(reason: Reason) -> str:
    """The sentence, or code and arguments where this Atoll does not know it: a story must not end in a traceback."""
    try:
        return str(reason)
    except (LookupError, TypeError, ValueError):
        return " ".join([reason.code, *map(str, reason.args)])


class _Statement(NamedTuple):
    """A sentence about one subject. `concerns`: in whose story it stands too; None: in every one."""

    about: Subject
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
    """What is remembered of one process, to tell how it ended."""

    last_at: float = 0.0
    over: bool = False  # it has said that it stops, or its end was told


class _StoryBuilder:
    def __init__(self, config: RunConfig | None) -> None:
        self.config = config
        self.quorum = config.quorum if config is not None else 0  # in force
        self.processes: dict[Actor, _Process] = {}
        self.opened: dict[FragmentId, RoundId] = {}  # newest round whose opening was told

    def tell(self, entry: Entry) -> Iterator[_Statement]:
        if type(entry.event) is said.Started:
            yield self._started(entry)
        process = self.processes.setdefault(entry.actor, _Process())
        process.last_at = entry.at
        if entry.actor.learner == SYNCER:
            yield from self._syncer(entry)
        else:
            yield from _learner_lines(entry)
        if any(type(effect) in (said.Stop, said.Halt) for effect in entry.effects):
            process.over = True

    def _started(self, entry: Entry) -> _Statement:
        """A process that was killed cannot say so: the start of its successor does."""
        learner, start = entry.actor
        word = "epoch" if learner == SYNCER else "incarnation"
        sentence = f"{word} {start} started"
        for actor, process in sorted(self.processes.items()):
            if actor.learner == learner and not process.over:
                process.over = True
                sentence += (
                    f"; {word} {actor.generation}, last heard at {process.last_at:.3f} s, never said that it stops"
                )
        if learner == SYNCER:
            self.quorum = self.config.quorum if self.config is not None else 0  # it is told again of what is changed
            return _Statement(RUN, f"syncer {sentence}", None)
        return _Statement(_learner(learner), sentence, (RUN,))

    def _syncer(self, entry: Entry) -> Iterator[_Statement]:
        if type(entry.event) is said.ControlRequested and entry.event.kind == "quorum":
            assert entry.event.value is not None
            self.quorum = int(entry.event.value)
        ignored = _ignored(entry)
        if ignored is not None:
            yield ignored
        yield from _shard_lines(entry)
        sent: dict[tuple[FragmentId, int], list[LearnerId]] = {}
        asked: dict[RoundId, list[LearnerId]] = {}
        for effect in entry.effects:
            body = effect.envelope.body if type(effect) is said.Send else None
            if type(effect) is said.Send and type(body) is said.Published:
                sent.setdefault((body.fragment, body.version), []).append(effect.envelope.learner)
            elif type(effect) is said.Send and type(body) is said.Pull:
                asked.setdefault(body.round, []).append(effect.envelope.learner)
        durable = _durable(entry)
        if durable is not None:
            to = _count(len(sent.pop(durable, ())), "learner")
            yield _Statement(_fragment(durable[0]), f"version {durable[1]} is durable and sent to {to}")
        yield from _from_table(_SYNCER_DESCRIPTIONS, entry)
        for (fragment, version), learners in sent.items():
            concerns = tuple(map(_learner, learners))
            yield _Statement(_fragment(fragment), f"version {version} sent to {_names(learners)}", concerns)
        for round_id, learners in asked.items():
            yield self._asked(round_id, learners)

    def _asked(self, round_id: RoundId, learners: list[LearnerId]) -> _Statement:
        about, concerns = _fragment(round_id.fragment), tuple(map(_learner, learners))
        if self.opened.get(round_id.fragment) == round_id:
            return _Statement(about, f"version {round_id.base}: asked again {_names(learners)}", concerns)
        self.opened[round_id.fragment] = round_id
        if self.config is None:
            sentence = f"opened on version {round_id.base}: {_count(len(learners), 'learner')} asked"
        else:
            sentence = REASONS["round-opened"].format(round_id.base, len(learners), self.quorum)
        return _Statement(about, sentence, concerns)


def _names(learners: list[LearnerId]) -> str:
    return f"{'learner' if len(learners) == 1 else 'learners'} {', '.join(map(str, learners))}"


def _durable(entry: Entry) -> tuple[FragmentId, int] | None:
    event = entry.event
    if type(event) is said.Persisted and event.key.kind == "version":
        return event.key.number, event.key.version
    return None


def _shard_lines(entry: Entry) -> Iterator[_Statement]:
    """Of the run; its fragments are told of one by one."""
    event = entry.event
    if type(event) is said.ShardLost:
        yield _Statement(RUN, f"the shard of {_fragments(event.fragments)} is away: {event.cause}")
    elif type(event) is said.ShardReconnected:
        yield _Statement(RUN, f"the shard of {_fragments(p for p, _ in event.versions)} is back")


def _fragments(fragments: Iterable[FragmentId]) -> str:
    each = list(map(str, fragments))
    return f"{'fragment' if len(each) == 1 else 'fragments'} {', '.join(each)}"


def _ignored(entry: Entry) -> _Statement | None:
    """What arrived and got no answer is worth a line: it is where things go wrong."""
    if type(entry.event) is not said.MessageArrived:
        return None
    envelope = entry.event.envelope
    body, learner = envelope.body, envelope.learner
    if type(body) is said.Contribution and not _is_answered(entry, body):
        sentence = f"a contribution of learner {learner} to {_attempt(body.round)} was ignored"
        return _Statement(_fragment(body.round.fragment), sentence, (_learner(learner),))
    if type(body) is said.Hello and not entry.effects:
        sentence = f"a hello of incarnation {envelope.incarnation} on link {envelope.session} was not answered"
        return _Statement(_learner(learner), sentence)
    return None


def _is_answered(entry: Entry, body: said.Contribution) -> bool:
    for effect in entry.effects:
        if type(effect) is said.Accumulate and effect.round == body.round:
            return True
        if type(effect) is said.Send and type(effect.envelope.body) is said.RefuseContribution:
            return True
    return False


def _attempt(round_id: RoundId) -> str:
    return f"attempt {round_id.attempt} on version {round_id.base}"


def _from_table(table: dict[type, _Describe], entry: Entry) -> Iterator[_Statement]:
    """The lines of an entry's effects and of the bodies that they send, in order.

    Whoever hangs up has said why in the same breath; it is told once.
    """
    hung_up = {(e.learner, e.reason) for e in entry.effects if type(e) is said.CloseConnection}
    for effect in entry.effects:
        if (
            type(effect) is said.LogReason
            and effect.subject[0] == "learner"
            and (effect.subject[1], effect.reason) in hung_up
        ):
            continue
        what = effect.envelope.body if type(effect) is said.Send else effect
        tell = table.get(type(what))
        told = tell(entry, effect) if tell is not None else None
        if told is not None:
            yield told


# --------------------------------------------------------------------------------------------------------------------
# Sentences from the syncer's tape


def _describe_say(entry: Entry, effect: said.LogReason) -> _Statement:
    # Whoever comes and goes concerns the run; what a learner says of its own links does not.
    told_by_syncer = entry.actor.learner == SYNCER
    concerns = (RUN,) if told_by_syncer and effect.subject[0] == "learner" else ()
    return _Statement(effect.subject, format_reason(effect.reason), concerns)


def _describe_hangup(entry: Entry, effect: said.CloseConnection) -> _Statement:
    sentence = f"{_subject_name(entry)} drops link {effect.session}: {format_reason(effect.reason)}"
    return _Statement(_learner(effect.learner), sentence, (RUN,) if entry.actor.learner == SYNCER else ())


def _subject_name(entry: Entry) -> str:
    return "the syncer" if entry.actor.learner == SYNCER else "it"


def _describe_accumulate(entry: Entry, effect: said.Accumulate) -> _Statement:
    a = effect.contribution
    sentence = f"contribution of learner {a.learner} accepted: {_count(a.steps, 'step')}, {_count(a.tokens, 'token')}"
    return _Statement(_fragment(effect.round.fragment), sentence, (_learner(a.learner),))


def _describe_refusal(entry: Entry, effect: said.Send) -> _Statement:
    learner, body = effect.envelope.learner, effect.envelope.body
    assert type(body) is said.RefuseContribution
    sentence = f"contribution of learner {learner} refused: {format_reason(body.reason)}"
    return _Statement(_fragment(body.round.fragment), sentence, (_learner(learner),))


def _describe_decision(entry: Entry, effect: said.OpenGrace | said.MergeRound | said.DiscardRound) -> _Statement:
    return _Statement(_fragment(effect.round.fragment), format_reason(effect.reason))


def _describe_persist(entry: Entry, effect: said.Persist) -> _Statement | None:
    """Other records are made durable in the same breath in which it is said why."""
    record = effect.record
    if type(record) is not said.VersionRecord:
        return None
    return _Statement(_fragment(record.fragment), REASONS["persisting"].format(record.version))


def _describe_in_flight(entry: Entry, effect: said.RecordInFlight) -> _Statement:
    sentence = f"the contribution of learner {effect.learner} was in flight at snapshot {effect.snapshot} and is kept"
    return _Statement(_fragment(effect.round.fragment), sentence, (_learner(effect.learner), RUN))


def _describe_halt(entry: Entry, effect: said.Halt) -> _Statement:
    return _Statement(RUN, f"syncer epoch {entry.actor.generation} halts: {format_reason(effect.reason)}", None)


def _describe_with(sentence: str, *concerns: tuple[str, str | int]) -> _Describe:
    """Return a line about the learner of an effect, or of a body that is sent, with the fields of it in the braces.

    `concerns`: in whose story it stands too, by kind and number, or the field that has the number.
    """

    def tell(entry: Entry, effect: said.Effect) -> _Statement:
        learner = effect.envelope.learner if type(effect) is said.Send else entry.actor.learner
        fields = asdict(effect.envelope.body if type(effect) is said.Send else effect)
        words = {name: format_reason(each) if type(each) is Reason else each for name, each in fields.items()}
        others = tuple((kind, fields[of] if isinstance(of, str) else of) for kind, of in concerns)
        return _Statement(_learner(learner), sentence.format(**words), others)

    return tell


_SYNCER_DESCRIPTIONS: dict[type, _Describe] = {
    said.LogReason: _describe_say,
    said.CloseConnection: _describe_hangup,
    said.Accumulate: _describe_accumulate,
    said.RefuseContribution: _describe_refusal,
    said.OpenGrace: _describe_decision,
    said.MergeRound: _describe_decision,
    said.DiscardRound: _describe_decision,
    said.Persist: _describe_persist,
    said.RecordInFlight: _describe_in_flight,
    said.Halt: _describe_halt,
    said.Welcome: _describe_with("welcomed at {progress:.1%} of the budget"),
    said.Refuse: _describe_with("refused: {reason}"),
    said.ProvideState: _describe_with("asked for its inner state, for learner {target}", ("learner", "target")),
    said.OptimizerState: _describe_with("gets the inner state of learner {source} passed on"),
    said.NoPeer: _describe_with("gets no inner state: {reason}"),
    said.Lease: _describe_with("lease {number}: samples from {begin} to before {end}"),
    said.Finish: _describe_with("told that the run is finished at {merges} merges"),
}

# --------------------------------------------------------------------------------------------------------------------
# Sentences from a learner's tape


def _learner_lines(entry: Entry) -> Iterator[_Statement]:
    about, event = _learner(entry.actor.learner), entry.event
    if type(event) is said.ConnectionOpened:
        yield _Statement(about, f"link {event.session} is open")
    elif type(event) is said.DialFailed:
        yield _Statement(about, f"dialing failed: {event.cause}")
    elif type(event) is said.SnapshotSaved:
        yield _Statement(about, f"its part of snapshot {event.snapshot} is saved")
    yield from _from_table(_LEARNER_DESCRIPTIONS, entry)


def _describe_dial(entry: Entry, effect: said.Dial) -> _Statement:
    return _Statement(
        _learner(entry.actor.learner), REASONS["connection-dialing"].format(effect.delay_s, effect.attempt)
    )


def _describe_copy(entry: Entry, effect: said.CopyFragment) -> _Statement:
    round_id = effect.round
    sentence = f"copied fragment {round_id.fragment} at step {effect.copied_at} for {_attempt(round_id)}"
    for other in entry.effects:
        body = other.envelope.body if type(other) is said.Send else None
        if type(body) is said.Contribution and body.round == round_id:
            sentence += f" and sent {_count(body.steps, 'step')}, {_count(body.tokens, 'token')}"
            break
    else:
        sentence += "; there is no link to send it"
    return _Statement(_learner(entry.actor.learner), sentence, (_fragment(round_id.fragment),))


def _describe_contribution(entry: Entry, effect: said.Send) -> _Statement | None:
    """A contribution whose copy was made earlier; one that was made just now is told with its copy."""
    body = effect.envelope.body
    assert type(body) is said.Contribution
    if any(type(other) is said.CopyFragment and other.round == body.round for other in entry.effects):
        return None
    sentence = f"sent its copy of fragment {body.round.fragment} for {_attempt(body.round)} again"
    return _Statement(_learner(entry.actor.learner), sentence, (_fragment(body.round.fragment),))


def _describe_adoption(entry: Entry, effect: said.AdoptFragment) -> _Statement:
    sentence = f"adopted version {effect.version} of fragment {effect.fragment} ({effect.mode}): "
    sentence += f"{_count(effect.merged_tokens, 'token')} merged, {effect.pending_tokens} pending"
    if effect.dropped_tokens:
        sentence += f", {effect.dropped_tokens} dropped"
    return _Statement(_learner(entry.actor.learner), sentence, (_fragment(effect.fragment),))


_LEARNER_DESCRIPTIONS: dict[type, _Describe] = {
    said.LogReason: _describe_say,
    said.CloseConnection: _describe_hangup,
    said.Dial: _describe_dial,
    said.CopyFragment: _describe_copy,
    said.AdoptFragment: _describe_adoption,
    said.SaveSnapshot: _describe_with("saves its part of snapshot {snapshot} at step {step}"),
    said.StartTraining: _describe_with("starts to train: {state_source}", RUN),
    said.Stop: _describe_with("stops: {reason}", RUN),
    said.Contribution: _describe_contribution,
    said.PublishAck: _describe_with("version {version} of fragment {fragment} is here"),
    said.Resync: _describe_with(
        "got an update of fragment {fragment} that does not fit its version {received_version}; asks for the value",
        ("fragment", "fragment"),
    ),
    said.StateRequest: _describe_with("asks for the inner state of a peer"),
    said.OptimizerState: _describe_with("gives its inner state to learner {target}", ("learner", "target")),
}
