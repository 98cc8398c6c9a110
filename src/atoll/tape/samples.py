"""History of every sample and every token of a run, computed from its tapes.

A sample has one `SampleLease` for each incarnation to which it was leased. The outcome is `merged` with the first
version that contains the sample, `returned` if its incarnation is gone, or `held` while the lease lasts. A sample is
`waiting` if its last lease was returned. So leased = merged + held + waiting. A sample that is merged twice is a bug.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from atoll.core.ledger import HolderKey, LedgerLine, count_samples
from atoll.core.protocol import (
    AdoptFragment,
    DiscardRound,
    LeaseRecord,
    MembersRecord,
    Persist,
    Persisted,
    Record,
    RecordKey,
    ShardReconnected,
    StepTaken,
    VersionRecord,
)
from atoll.core.syncer.state import RestoredState
from atoll.core.types import SYNCER, FragmentId, Interval, RunConfig, Version
from atoll.tape.format import Actor, Entry

MAX_PROBLEMS = 20
"""Limit on reported problems, because one bug often causes many of them."""


class SampleLease(NamedTuple):
    """Lease of samples to one incarnation. If `trained`, the incarnation has taken steps on them."""

    learner: int
    incarnation: int
    trained: bool
    outcome: str  # "merged", "returned" or "held"
    cause: str = ""  # cause of a return
    fragment: FragmentId | None = None  # fragment of the first merge
    version: Version | None = None

    def matches(self, other: SampleLease) -> bool:
        """Return whether two leases are equal except for the version."""
        return self[:5] == other[:5]


class SampleRange(NamedTuple):
    """Interval of samples with the same history."""

    begin: int
    end: int
    leases: tuple[SampleLease, ...]

    @property
    def status(self) -> str:
        outcomes = [lease.outcome for lease in self.leases]
        if "merged" in outcomes:
            return "merged"
        return "held" if "held" in outcomes else "waiting"


class _MergedSamples(NamedTuple):
    consumed: int
    fragment: FragmentId
    version: Version


class DataHistory:
    """History of samples and tokens, from entries in causal order. Query it after the last entry."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.leases: dict[HolderKey, list[Interval]] = {}  # leases in order, by holder
        self.next_sample = 0  # the first sample that was never leased
        self.taken_samples: dict[HolderKey, int] = {}  # samples taken, from the learner's own tape
        self.trained_tokens: dict[HolderKey, int] = {}
        self.repeated: dict[HolderKey, int] = {}  # steps on repeated samples
        self.problems: list[str] = []
        self._leased: dict[tuple[HolderKey, int], int] = {}  # order of the leases
        self._merges: dict[HolderKey, list[_MergedSamples]] = {}  # in increasing order of samples
        self._members: MembersRecord | None = None
        self._exited: dict[HolderKey, str] = {}  # incarnations that have "left" or are "lost"
        self._versions: dict[FragmentId, Version] = dict.fromkeys(config.fragment_ids(), 0)
        self._merged_tokens: dict[tuple[HolderKey, FragmentId], int] = {}
        self._dropped_tokens: dict[tuple[HolderKey, FragmentId], int] = {}
        self._total_tokens: dict[FragmentId, int] = dict.fromkeys(config.fragment_ids(), 0)
        self._saving: dict[tuple[Actor, RecordKey], Record] = {}

    # ---------------------------------------------------------------------------------------------------- observing

    def on_process_started(self, actor: Actor, restored: RestoredState | None) -> None:
        """Handle the records that a syncer restored. They are durable, even without an acknowledgment on a tape."""
        if actor.learner != SYNCER or restored is None:
            return
        for record in (*restored.versions.values(), restored.members, restored.leases):
            if record is not None:
                self._durable(record)

    def observe(self, entry: Entry) -> None:
        event = entry.event
        key = (entry.actor.learner, entry.actor.generation)
        if type(event) is StepTaken:
            self.taken_samples[key] = self.taken_samples.get(key, 0) + event.new_samples
            self.trained_tokens[key] = self.trained_tokens.get(key, 0) + event.tokens
            if self.taken_samples[key] and not event.new_samples:
                self.repeated[key] = self.repeated.get(key, 0) + event.steps
        elif type(event) is Persisted:
            self._on_saved(entry.actor, event.key)
        elif type(event) is ShardReconnected:
            for record_key in event.records():
                self._on_saved(entry.actor, record_key)
        for effect in entry.effects:
            if type(effect) is Persist:
                self._saving[(entry.actor, effect.record.key())] = effect.record
            elif type(effect) is DiscardRound:
                self._saving.pop((entry.actor, effect.key()), None)
            elif type(effect) is AdoptFragment and effect.dropped_tokens:
                slot = (key, effect.fragment)
                self._dropped_tokens[slot] = self._dropped_tokens.get(slot, 0) + effect.dropped_tokens

    def _on_saved(self, actor: Actor, key: RecordKey) -> None:
        record = self._saving.pop((actor, key), None)
        if record is not None:
            self._durable(record)

    def _durable(self, record: Record) -> None:
        if type(record) is VersionRecord:
            if record.version > self._versions[record.fragment]:
                self._version(record)
        elif type(record) is MembersRecord:
            if self._members is None or record.serial > self._members.serial:
                self._members = record
                for key in record.incarnations:
                    if key[0] in record.left:
                        self._exited.setdefault(key, "lost" if key[0] in record.lost else "left")
        elif type(record) is LeaseRecord:
            self._leases(record)

    def _version(self, record: VersionRecord) -> None:
        p = record.fragment
        if record.version != self._versions[p] + 1:
            self._add_problem(
                f"version {record.version} of fragment {p} follows version {self._versions[p]} on the tapes"
            )
        self._versions[p] = record.version
        for a in record.contributions:
            key = (a.learner, a.incarnation)
            self._merged_tokens[(key, p)] = self._merged_tokens.get((key, p), 0) + a.tokens
            self._total_tokens[p] += a.tokens
            merges = self._merges.setdefault(key, [])
            if a.consumed_samples > (merges[-1].consumed if merges else 0):
                merges.append(_MergedSamples(a.consumed_samples, p, record.version))
        if self._total_tokens[p] != record.merged_tokens:
            counted, recorded = self._total_tokens[p], record.merged_tokens
            self._add_problem(
                f"version {record.version} of fragment {p} has {recorded} merged tokens, its contributions {counted}"
            )

    def _leases(self, record: LeaseRecord) -> None:
        self.next_sample = max(self.next_sample, record.next_sample)
        for holding in record.holdings:
            key = (holding.learner, holding.incarnation)
            leases = self.leases.setdefault(key, [])
            for number, interval in enumerate(holding.intervals, holding.first_lease):
                if number == len(leases):
                    leases.append(interval)
                    self._leased[(key, number)] = len(self._leased)
                elif number > len(leases) or leases[number] != interval:
                    self._add_problem(f"lease {number} of {Actor(*key)} differs between two records")

    def _add_problem(self, sentence: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(sentence)

    # ---------------------------------------------------------------------------------------------------- samples

    def exit_cause(self, key: HolderKey) -> str:
        """Return why an incarnation has permanently ended; empty if it has not."""
        if self._members is None:
            return ""
        if key in self._exited:
            return self._exited[key]
        current = dict(self._members.incarnations).get(key[0], 0)
        return f"replaced by incarnation {current}" if key[1] < current else ""

    def _sample_leases(self, key: HolderKey) -> Iterator[tuple[Interval, int, SampleLease]]:
        """Yield the parts of its leases with one outcome each, with their order."""
        merges, exit_cause = self._merges.get(key, []), self.exit_cause(key)
        merged = merges[-1].consumed if merges else 0
        consumed = max(self.taken_samples.get(key, 0), merged)  # the learner's own tape may be lost
        cuts = sorted({m.consumed for m in merges} | {consumed})
        offset = 0
        for number, (begin, end) in enumerate(self.leases[key]):
            at = begin
            for cut in [*(c for c in cuts if offset < c < offset + end - begin), offset + end - begin]:
                until = begin + cut - offset
                first = offset + at - begin  # among the samples of the holder
                merge = next((m for m in merges if m.consumed > first), None)
                if merge is not None:
                    lease = SampleLease(*key, True, "merged", "", merge.fragment, merge.version)
                else:
                    lease = SampleLease(*key, first < consumed, "returned" if exit_cause else "held", exit_cause)
                yield (at, until), self._leased[(key, number)], lease
                at = until
            offset += end - begin

    def ranges(self) -> list[SampleRange]:
        """Return all leased samples in order, divided by history. Add inconsistencies to `problems`."""
        for key, leases in self.leases.items():
            leased = count_samples(leases)
            if self.taken_samples.get(key, 0) > leased:
                self._add_problem(
                    f"{Actor(*key)} consumed {self.taken_samples[key]} samples, {leased} were leased to it"
                )
        pieces = [piece for key in self.leases for piece in self._sample_leases(key)]
        edges = sorted({edge for interval, _, _ in pieces for edge in interval} | {0, self.next_sample})
        indexes = {edge: index for index, edge in enumerate(edges)}
        histories: list[list[tuple[int, SampleLease]]] = [[] for _ in edges]
        for (begin, end), leased_at, lease in pieces:
            for index in range(indexes[begin], indexes[end]):
                histories[index].append((leased_at, lease))
        found: list[SampleRange] = []
        for index, (begin, end) in enumerate(itertools.pairwise(edges)):
            history = tuple(lease for _, lease in sorted(histories[index], key=lambda each: each[0]))
            self._check_history(begin, history)
            if found and found[-1].leases == history:
                found[-1] = found[-1]._replace(end=end)
            else:
                found.append(SampleRange(begin, end, history))
        return found

    def _check_history(self, sample: int, history: tuple[SampleLease, ...]) -> None:
        """Check that a sample has a lease, and that all its leases but the last were returned."""
        if not history:
            self._add_problem(f"sample {sample} was never leased, but later samples were")
        for lease, after in itertools.pairwise(history):
            if lease.outcome != "returned":
                first, second = Actor(*lease[:2]), Actor(*after[:2])
                self._add_problem(f"sample {sample} is {lease.outcome} by {first}, but was leased to {second} later")

    # ---------------------------------------------------------------------------------------------------- tokens

    def untaped_actors(self) -> list[Actor]:
        """Return the actors with merged tokens but without steps on any tape."""
        return sorted({Actor(*key) for key, _ in self._merged_tokens if key not in self.trained_tokens})

    def token_ledger(self) -> dict[FragmentId, LedgerLine]:
        """Return the ledger of every fragment: trained = merged + pending + dropped by reason.

        Add inconsistencies to `problems`. The trained tokens of a learner without a tape are its merged tokens.
        """
        keys = set(self.trained_tokens) | {key for key, _ in self._merged_tokens}
        found: dict[FragmentId, LedgerLine] = {}
        for p in self.config.fragment_ids():
            merged = pending = 0
            dropped: dict[str, int] = {}
            for key in keys:
                own = self._merged_tokens.get((key, p), 0)
                over = self._dropped_tokens.get((key, p), 0)
                rest = max(self.trained_tokens.get(key, 0), own + over) - own - over
                merged += own
                exit_cause = self.exit_cause(key)
                # The same causes as in the syncer.
                reason = exit_cause if exit_cause in ("left", "lost") else "superseded"
                for cause, lost in (("overwritten-on-adopt", over), (reason, rest if exit_cause else 0)):
                    if lost:
                        dropped[cause] = dropped.get(cause, 0) + lost
                pending += 0 if exit_cause else rest
                if key in self.trained_tokens and own + over > self.trained_tokens[key]:
                    self._add_problem(
                        f"fragment {p} has {own} tokens of {Actor(*key)}, which trained {self.trained_tokens[key]}"
                    )
            found[p] = LedgerLine(
                merged + pending + sum(dropped.values()), merged, pending, dict(sorted(dropped.items()))
            )
        if len({line.trained for line in found.values()}) > 1 and not self.untaped_actors():
            self._add_problem("the trained tokens differ between fragments")
        return found
