"""One process of the syncer, from its tape, which may still grow: its core replays every event.

Times are those of the run's clock. Views of the core are sampled on the way, so that one can travel in time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from atoll.core.ledger import LedgerLine
from atoll.core.policy import round_steps
from atoll.core.protocol import (
    Contribution,
    DiscardRound,
    LearnerDisconnected,
    LogReason,
    MergeRound,
    MessageArrived,
    OpenGrace,
    Persist,
    Persisted,
    PersistFailed,
    RefuseContribution,
    Send,
    ShardReconnected,
    VersionRecord,
)
from atoll.core.syncer.core import FragmentView, MemberView, SyncerCore, SyncerView
from atoll.tape.bounded_logs import EXACT_ROWS, MergeLog, MergeRow
from atoll.tape.format import Entry, Header
from atoll.tape.replay import create_core

MAX_LOG_LINES = 10_000
MAX_INVALID_VALUES = 1000
"""A month with a bad link has millions; the newest are kept."""

MAX_SAMPLES = 2048
INITIAL_SPACING_S = 0.5


class LogLine(NamedTuple):
    """A sentence of the syncer about the effect of a fault."""

    at: float
    code: str
    subject: tuple[str, int]
    sentence: str


class MemberStateChange(NamedTuple):
    """A learner got this standing with the syncer."""

    at: float
    state: str
    incarnation: int
    sentence: str


FAULT_CODES = frozenset(
    {
        *("member-quarantined", "member-timed-out", "persist-failed", "admission-failed", "round-abandoned"),
        *("shard-lost", "shard-version-mismatch", "shard-version-lost"),
    }
)


def mean_ledger_line(lines: Sequence[LedgerLine]) -> LedgerLine:
    """Return the means over the fragments of a run, in each of which a token settles by itself. They add up exactly."""
    count = max(1, len(lines))
    dropped: dict[str, int] = {}
    for line in lines:
        for why, tokens in line.dropped.items():
            dropped[why] = dropped.get(why, 0) + tokens
    dropped = {why: tokens // count for why, tokens in dropped.items()}
    trained = sum(line.trained for line in lines) // count
    merged = sum(line.merged for line in lines) // count
    return LedgerLine(
        trained, merged, trained - merged - sum(dropped.values()), dropped
    )  # what rounding leaves is pending


class SyncerTenure:
    """One process of the syncer, or of a shard of it."""

    def __init__(self, header: Header, keep: int | None = EXACT_ROWS) -> None:
        self._header: Header | None = header
        self._core: SyncerCore | None = None
        self.epoch = header.actor.generation
        self.first_entry_at: float | None = None
        self.last_entry_at = 0.0
        self._stage = ""
        self.merges = MergeLog(keep)
        self.merged_at: dict[int, float] = {}  # by fragment: when its newest version became durable
        self.merged_with: dict[int, float] = {}  # by learner: when the newest merge that has it became durable
        self.log_lines: deque[LogLine] = deque(maxlen=MAX_LOG_LINES)
        self.refused_counts: dict[str, int] = {}  # contributions, by reason
        self.invalid_values: deque[str] = deque(
            maxlen=MAX_INVALID_VALUES
        )  # what was wrong with values that arrived, whatever refused
        self.failed_writes = 0
        self.pauses: list[list[float]] = []  # begin and end; an open one ends with the newest entry
        self.controls: deque[LogLine] = deque(maxlen=MAX_LOG_LINES)  # what operators asked for
        self.member_states: dict[int, list[MemberStateChange]] = {}
        self.is_paused = False
        self._sealed_rounds: dict[int, tuple[int, int, float]] = {}  # by fragment: alive, asked, seconds of grace
        self._graces: dict[int, tuple[float, float]] = {}  # by fragment: when it was opened, and the slack
        self._pending_versions: dict[int, VersionRecord] = {}

    @property
    def core(self) -> SyncerCore:
        """Made when it is needed, and kept while the process may go on."""
        if self._core is None:
            assert self._header is not None, f"the syncer of epoch {self.epoch} has been replaced"
            core = create_core(self._header)
            assert isinstance(core, SyncerCore)
            self._core = core
        return self._core

    @property
    def is_over(self) -> bool:
        return self._header is None

    @property
    def stage(self) -> str:
        return self._core.state.stage.value if self._core is not None else self._stage

    def close(self) -> None:
        """Give up its core: another syncer has taken over, and what this one may still write does not count."""
        self._stage = self.stage
        self._header = self._core = None
        self._sealed_rounds, self._graces, self._pending_versions = {}, {}, {}

    def ledger_lines(self) -> list[LedgerLine]:
        """Its books, one line per fragment."""
        return [self.core.state.ledger.line(p) for p in self.core.state.fragments]

    def handle_entry(self, entry: Entry) -> None:
        event, core = entry.event, self.core
        core.handle(entry.at, event)  # type: ignore[arg-type]  # a syncer's tape holds a syncer's events
        self.first_entry_at, self.last_entry_at = (
            entry.at if self.first_entry_at is None else self.first_entry_at,
            entry.at,
        )
        if core.state.paused:
            if not self.is_paused:
                self.pauses.append([entry.at, entry.at])
            self.pauses[-1][1] = entry.at
        self.is_paused = core.state.paused
        if type(event) is MessageArrived:
            body = event.envelope.body
            self._record_member_state(entry.at, event.envelope.learner)
            if type(body) is Contribution and body.problem is not None:
                self.invalid_values.append(body.problem)
        elif type(event) is Persisted and event.key.kind == "version":
            self._record_merge(entry.at, self._pending_versions.pop(event.key.number))
        elif type(event) is ShardReconnected:
            for p, version in event.versions:
                if (
                    p in self._pending_versions
                    and self._pending_versions[p].version == version == core.state.fragments[p].version
                ):
                    self._record_merge(entry.at, self._pending_versions.pop(p))
        else:
            if type(event) is PersistFailed:
                self.failed_writes += 1
            for learner in (event.learner,) if type(event) is LearnerDisconnected else core.state.members:
                self._record_member_state(entry.at, learner)
        for effect in entry.effects:
            if type(effect) is Send:
                if type(effect.envelope.body) is RefuseContribution:
                    why = effect.envelope.body.reason
                    self.refused_counts[why.code] = self.refused_counts.get(why.code, 0) + 1
            elif type(effect) is LogReason:
                if effect.reason.code in FAULT_CODES:
                    self.log_lines.append(LogLine(entry.at, effect.reason.code, effect.subject, str(effect.reason)))
                elif effect.reason.code.startswith("control-"):
                    self.controls.append(LogLine(entry.at, effect.reason.code, effect.subject, str(effect.reason)))
            elif type(effect) is OpenGrace:
                lasts_s = effect.quorum_s + effect.sync_s
                slack_s = round_steps(core.state.config, lasts_s, effect.step_s) * effect.step_s - lasts_s
                self._graces[effect.round.fragment] = entry.at, slack_s
            elif type(effect) is MergeRound:
                fragment = effect.round.fragment
                opened = self._graces.get(fragment)
                waited_s = entry.at - opened[0] if opened is not None else 0.0
                self._sealed_rounds[fragment] = (
                    len(core.state.live),
                    len(core.state.fragments[fragment].pulled),
                    waited_s,
                )
            elif type(effect) is DiscardRound:
                self._pending_versions.pop(effect.round.fragment, None)
            elif type(effect) is Persist and type(effect.record) is VersionRecord:
                self._pending_versions[effect.record.fragment] = effect.record

    def _record_merge(self, at: float, record: VersionRecord) -> None:
        alive, asked, waited_s = self._sealed_rounds.pop(record.fragment, (0, 0, 0.0))
        opened = self._graces.pop(record.fragment, None)
        them = record.contributions
        whole = sum(each.weight for each in them) or 1.0
        self.merged_at[record.fragment] = at
        for each in them:
            self.merged_with[each.learner] = at
        self.merges.add(
            MergeRow(
                at,
                self.epoch,
                record.fragment,
                record.version,
                alive,
                asked,
                len(them),
                tuple((each.learner, each.incarnation) for each in them),
                tuple(each.weight / whole for each in them),
                sum(each.steps for each in them) / max(1, len(them)),
                waited_s,
                opened[1] if opened is not None else None,
            )
        )

    def _record_member_state(self, at: float, learner: int) -> None:
        member = self.core.state.members.get(learner)
        if member is None:
            return
        before = self.member_states.setdefault(learner, [])
        standing = member.state.value
        if not before or before[-1].state != standing or before[-1].incarnation != member.incarnation:
            sentence = str(member.reason) if member.reason is not None else ""
            before.append(MemberStateChange(at, standing, member.incarnation, sentence))


class SyncerSample(NamedTuple):
    """The syncer's own view at a moment."""

    at: float
    epoch: int
    view: SyncerView
    merged_at: dict[int, float]  # by fragment: when its newest version became durable
    merged_with: dict[int, float]  # by learner: when the newest merge that has it became durable
    quorum: int
    grace_margin: float

    @property
    def fragments(self) -> tuple[FragmentView, ...]:
        return self.view.fragments

    @property
    def members(self) -> dict[int, MemberView]:
        return {each.learner: each for each in self.view.members}

    @property
    def ledger(self) -> LedgerLine:
        """Of all fragments, as means: a token settles in each of them."""
        return mean_ledger_line(self.view.ledger)

    @property
    def is_balanced(self) -> bool:
        return all(line.is_balanced() for line in self.view.ledger)


def take_sample(tenure: SyncerTenure, at: float) -> SyncerSample:
    config = tenure.core.state.config
    return SyncerSample(
        at,
        tenure.epoch,
        tenure.core.view(),
        dict(tenure.merged_at),
        dict(tenure.merged_with),
        config.quorum,
        config.grace_margin,
    )


class SampleHistory:
    """Samples at even distances. When there are too many, every other one is dropped and the distance doubles: a slider
    has no finer steps than that anyway."""

    def __init__(self, max_samples: int = MAX_SAMPLES) -> None:
        self._max_samples = max_samples
        self._samples: list[SyncerSample] = []
        self._spacing_s = INITIAL_SPACING_S
        self._due = float("-inf")

    def __len__(self) -> int:
        return len(self._samples)

    def is_due(self, at: float) -> bool:
        return at >= self._due

    def add(self, sample: SyncerSample) -> None:
        self._samples.append(sample)
        if len(self._samples) >= self._max_samples:
            self._samples = self._samples[::2]
            self._spacing_s *= 2
        self._due = self._samples[-1].at + self._spacing_s

    def before(self, at: float) -> SyncerSample | None:
        """The newest that is not after this moment."""
        index = bisect_right(self._samples, at, key=lambda each: each.at)
        return self._samples[index - 1] if index else None

    def all(self) -> list[SyncerSample]:
        return self._samples
