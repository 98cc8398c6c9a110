"""State of a syncer process, from its tape, which may still grow. Its core replays every event.

Times are on the clock of the run. Samples of the core make its state at earlier times available.
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
"""Limits on stored lines. A month with an unreliable connection has millions, so only the newest are stored."""

MAX_SAMPLES = 2048
INITIAL_SPACING_S = 0.5


class LogLine(NamedTuple):
    """Log line of the syncer about the effect of a fault or a request by an operator."""

    at: float
    code: str
    subject: tuple[str, int]
    sentence: str


class MemberStateChange(NamedTuple):
    """Change of the member state of a learner at the syncer."""

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
    """Return the mean ledger line over all fragments. Its parts add up exactly."""
    count = max(1, len(lines))
    dropped: dict[str, int] = {}
    for line in lines:
        for cause, tokens in line.dropped.items():
            dropped[cause] = dropped.get(cause, 0) + tokens
    dropped = {cause: tokens // count for cause, tokens in dropped.items()}
    trained = sum(line.trained for line in lines) // count
    merged = sum(line.merged for line in lines) // count
    pending = trained - merged - sum(dropped.values())  # includes the rounding difference
    return LedgerLine(trained, merged, pending, dropped)


class SyncerTenure:
    """State of one syncer process or shard process."""

    def __init__(self, header: Header, keep: int | None = EXACT_ROWS) -> None:
        self._header: Header | None = header
        self._core: SyncerCore | None = None
        self.epoch = header.actor.generation
        self.first_entry_at: float | None = None
        self.last_entry_at = 0.0
        self._stage = ""
        self.merges = MergeLog(keep)
        self.merged_at: dict[int, float] = {}  # by fragment: time at which its newest version became durable
        # By learner: time at which the newest merge with its contribution became durable.
        self.merged_with: dict[int, float] = {}
        self.log_lines: deque[LogLine] = deque(maxlen=MAX_LOG_LINES)
        self.refused_counts: dict[str, int] = {}  # refused contributions, by reason
        self.invalid_values: deque[str] = deque(maxlen=MAX_INVALID_VALUES)  # problems with received values
        self.failed_writes = 0
        self.pauses: list[list[float]] = []  # [begin, end]; the current one ends at the newest entry
        self.controls: deque[LogLine] = deque(maxlen=MAX_LOG_LINES)  # requests by operators
        self.member_states: dict[int, list[MemberStateChange]] = {}
        self.is_paused = False
        self._sealed_rounds: dict[int, tuple[int, int, float]] = {}  # by fragment: alive, pulled, seconds of grace
        self._graces: dict[int, tuple[float, float]] = {}  # by fragment: opening time, slack
        self._pending_versions: dict[int, VersionRecord] = {}

    @property
    def core(self) -> SyncerCore:
        """Core of the process, created on demand and kept until `close`."""
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
        """Release the core after another syncer has taken over. Later entries do not count."""
        self._stage = self.stage
        self._header = self._core = None
        self._sealed_rounds, self._graces, self._pending_versions = {}, {}, {}

    def ledger_lines(self) -> list[LedgerLine]:
        """Return one ledger line per fragment."""
        return [self.core.state.ledger.fragment_totals(p) for p in self.core.state.fragments]

    def handle_entry(self, entry: Entry) -> None:
        event, core = entry.event, self.core
        core.handle(entry.at, event)  # type: ignore[arg-type]  # a tape of a syncer has only syncer events
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
                    code = effect.envelope.body.reason.code
                    self.refused_counts[code] = self.refused_counts.get(code, 0) + 1
            elif type(effect) is LogReason:
                if effect.reason.code in FAULT_CODES:
                    self.log_lines.append(LogLine(entry.at, effect.reason.code, effect.subject, str(effect.reason)))
                elif effect.reason.code.startswith("control-"):
                    self.controls.append(LogLine(entry.at, effect.reason.code, effect.subject, str(effect.reason)))
            elif type(effect) is OpenGrace:
                round_s = effect.quorum_s + effect.sync_s
                slack_s = round_steps(core.state.config, round_s, effect.step_s) * effect.step_s - round_s
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
        alive, pulled, waited_s = self._sealed_rounds.pop(record.fragment, (0, 0, 0.0))
        opened = self._graces.pop(record.fragment, None)
        contributions = record.contributions
        total_weight = sum(each.weight for each in contributions) or 1.0
        self.merged_at[record.fragment] = at
        for each in contributions:
            self.merged_with[each.learner] = at
        self.merges.add(
            MergeRow(
                at,
                self.epoch,
                record.fragment,
                record.version,
                alive,
                pulled,
                len(contributions),
                tuple((each.learner, each.incarnation) for each in contributions),
                tuple(each.weight / total_weight for each in contributions),
                sum(each.steps for each in contributions) / max(1, len(contributions)),
                waited_s,
                opened[1] if opened is not None else None,
            )
        )

    def _record_member_state(self, at: float, learner: int) -> None:
        member = self.core.state.members.get(learner)
        if member is None:
            return
        changes = self.member_states.setdefault(learner, [])
        state = member.state.value
        if not changes or changes[-1].state != state or changes[-1].incarnation != member.incarnation:
            sentence = str(member.reason) if member.reason is not None else ""
            changes.append(MemberStateChange(at, state, member.incarnation, sentence))


class SyncerSample(NamedTuple):
    """View of the syncer at one time."""

    at: float
    epoch: int
    view: SyncerView
    merged_at: dict[int, float]  # by fragment: time at which its newest version became durable
    merged_with: dict[int, float]  # by learner: time at which the newest merge with its contribution became durable
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
        """Mean ledger line of all fragments."""
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
    """Samples at equal time intervals. At the limit, every other sample is dropped and the interval doubles."""

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
        """Return the newest sample at or before this time."""
        index = bisect_right(self._samples, at, key=lambda each: each.at)
        return self._samples[index - 1] if index else None

    def all(self) -> list[SyncerSample]:
        return self._samples
