"""Where every sample and every token of a run went, from its tapes alone.

A sample has a stay with each incarnation that it was leased to, in order. A stay ends merged, with the first version
that holds it, or returned, because its incarnation was gone, or it lasts: held. A sample is waiting where its last stay
has ended returned. So leased = merged + held + waiting, and whoever finds a sample merged twice has found a bug.
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
"""What is wrong in one place is often wrong in many."""


class SampleLease(NamedTuple):
    """Of samples with one incarnation. `trained`: it has taken steps on them."""

    learner: int
    incarnation: int
    trained: bool
    outcome: str  # merged, returned or held
    cause: str = ""  # of a return
    fragment: FragmentId | None = None  # where it was merged first
    version: Version | None = None

    def matches(self, other: SampleLease) -> bool:
        """But for the version."""
        return self[:5] == other[:5]


class SampleRange(NamedTuple):
    """Samples that have the same history."""

    begin: int
    end: int
    leases: tuple[SampleLease, ...]

    @property
    def status(self) -> str:
        fates = [stay.outcome for stay in self.leases]
        if "merged" in fates:
            return "merged"
        return "held" if "held" in fates else "waiting"


class _MergedSamples(NamedTuple):
    taken: int
    fragment: FragmentId
    version: Version


class DataHistory:
    """Observes entries in a causal order; asked when all are in."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.leases: dict[HolderKey, list[Interval]] = {}  # leases by number
        self.next_sample = 0  # the first sample that was never leased
        self.taken_samples: dict[HolderKey, int] = {}  # by the learner's own tape
        self.trained_tokens: dict[HolderKey, int] = {}  # tokens
        self.repeated: dict[HolderKey, int] = {}  # steps on samples that it had had
        self.problems: list[str] = []
        self._leased: dict[tuple[HolderKey, int], int] = {}  # when, as a count
        self._merges: dict[HolderKey, list[_MergedSamples]] = {}  # each further than the one before
        self._members: MembersRecord | None = None
        self._exited: dict[HolderKey, str] = {}  # incarnations that left or were lost, and which of the two
        self._versions: dict[FragmentId, Version] = dict.fromkeys(config.fragment_ids(), 0)
        self._merged_tokens: dict[tuple[HolderKey, FragmentId], int] = {}
        self._dropped_tokens: dict[tuple[HolderKey, FragmentId], int] = {}
        self._total_tokens: dict[FragmentId, int] = dict.fromkeys(config.fragment_ids(), 0)
        self._saving: dict[tuple[Actor, RecordKey], Record] = {}

    # ---------------------------------------------------------------------------------------------------- observing

    def on_process_started(self, actor: Actor, restored: RestoredState | None) -> None:
        """What a syncer found was durable, whether its predecessor heard of it or not."""
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
            self._saved(entry.actor, event.key)
        elif type(event) is ShardReconnected:
            for record_key in event.records():
                self._saved(entry.actor, record_key)
        for effect in entry.effects:
            if type(effect) is Persist:
                self._saving[(entry.actor, effect.record.key())] = effect.record
            elif type(effect) is DiscardRound:
                self._saving.pop((entry.actor, effect.key()), None)
            elif type(effect) is AdoptFragment and effect.dropped_tokens:
                place = (key, effect.fragment)
                self._dropped_tokens[place] = self._dropped_tokens.get(place, 0) + effect.dropped_tokens

    def _saved(self, actor: Actor, key: RecordKey) -> None:
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
            if a.consumed_samples > (merges[-1].taken if merges else 0):
                merges.append(_MergedSamples(a.consumed_samples, p, record.version))
        if self._total_tokens[p] != record.merged_tokens:
            counted, told = self._total_tokens[p], record.merged_tokens
            self._add_problem(
                f"version {record.version} of fragment {p} tells of {told} tokens, its contributions of {counted}"
            )

    def _leases(self, record: LeaseRecord) -> None:
        self.next_sample = max(self.next_sample, record.next_sample)
        for holding in record.holdings:
            key = (holding.learner, holding.incarnation)
            line = self.leases.setdefault(key, [])
            for number, interval in enumerate(holding.intervals, holding.first_lease):
                if number == len(line):
                    line.append(interval)
                    self._leased[(key, number)] = len(self._leased)
                elif number > len(line) or line[number] != interval:
                    self._add_problem(f"lease {number} of {Actor(*key)} has changed from one record to the next")

    def _add_problem(self, sentence: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(sentence)

    # ---------------------------------------------------------------------------------------------------- samples

    def exit_cause(self, key: HolderKey) -> str:
        """Why this incarnation is gone for good; nothing if it is not."""
        if self._members is None:
            return ""
        if key in self._exited:
            return self._exited[key]
        current = dict(self._members.incarnations).get(key[0], 0)
        return f"replaced by incarnation {current}" if key[1] < current else ""

    def _sample_leases(self, key: HolderKey) -> Iterator[tuple[Interval, int, SampleLease]]:
        """Pieces of its leases, each with one fate, and when they were leased."""
        merges, why = self._merges.get(key, []), self.exit_cause(key)
        merged = merges[-1].taken if merges else 0
        taken = max(self.taken_samples.get(key, 0), merged)  # its own tape may be lost
        cuts = sorted({m.taken for m in merges} | {taken})
        place = 0
        for number, (begin, end) in enumerate(self.leases[key]):
            at = begin
            for cut in [*(c for c in cuts if place < c < place + end - begin), place + end - begin]:
                until = begin + cut - place
                first = place + at - begin  # in the line
                merge = next((m for m in merges if m.taken > first), None)
                if merge is not None:
                    stay = SampleLease(*key, True, "merged", "", merge.fragment, merge.version)
                else:
                    stay = SampleLease(*key, first < taken, "returned" if why else "held", why)
                yield (at, until), self._leased[(key, number)], stay
                at = until
            place += end - begin

    def ranges(self) -> list[SampleRange]:
        """All samples that were ever leased, in order, cut where their history differs. Finds what is wrong."""
        for key, line in self.leases.items():
            leased = count_samples(line)
            if self.taken_samples.get(key, 0) > leased:
                self._add_problem(f"{Actor(*key)} took {self.taken_samples[key]} samples, {leased} were leased to it")
        pieces = [piece for key in self.leases for piece in self._sample_leases(key)]
        edges = sorted({edge for interval, _, _ in pieces for edge in interval} | {0, self.next_sample})
        places = {edge: place for place, edge in enumerate(edges)}
        stays: list[list[tuple[int, SampleLease]]] = [[] for _ in edges]
        for (begin, end), leased_at, stay in pieces:
            for place in range(places[begin], places[end]):
                stays[place].append((leased_at, stay))
        found: list[SampleRange] = []
        for place, (begin, end) in enumerate(itertools.pairwise(edges)):
            history = tuple(stay for _, stay in sorted(stays[place], key=lambda each: each[0]))
            self._check_history(begin, history)
            if found and found[-1].leases == history:
                found[-1] = found[-1]._replace(end=end)
            else:
                found.append(SampleRange(begin, end, history))
        return found

    def _check_history(self, sample: int, history: tuple[SampleLease, ...]) -> None:
        """Every stay but the last has ended returned, and there is one at all."""
        if not history:
            self._add_problem(f"sample {sample} was leased to nobody, and later ones were")
        for stay, after in itertools.pairwise(history):
            if stay.outcome != "returned":
                who, then = Actor(*stay[:2]), Actor(*after[:2])
                self._add_problem(f"sample {sample} is {stay.outcome} with {who}, and was leased to {then} after that")

    # ---------------------------------------------------------------------------------------------------- tokens

    def untaped_actors(self) -> list[Actor]:
        """Of whom something was merged, and no step is on any tape: it keeps none, or not here."""
        return sorted({Actor(*key) for key, _ in self._merged_tokens if key not in self.trained_tokens})

    def token_ledger(self) -> dict[FragmentId, LedgerLine]:
        """Trained = merged + pending + dropped by reason, of every fragment. Finds what is wrong. Of one who is
        untaped, what was merged is all that is known to be trained."""
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
                why = self.exit_cause(key)
                reason = why if why in ("left", "lost") else "superseded"  # as the syncer has it
                for cause, lost in (("overwritten-on-adopt", over), (reason, rest if why else 0)):
                    if lost:
                        dropped[cause] = dropped.get(cause, 0) + lost
                pending += 0 if why else rest
                if key in self.trained_tokens and own + over > self.trained_tokens[key]:
                    self._add_problem(
                        f"fragment {p} holds {own} tokens of {Actor(*key)}, which trained {self.trained_tokens[key]}"
                    )
            found[p] = LedgerLine(
                merged + pending + sum(dropped.values()), merged, pending, dict(sorted(dropped.items()))
            )
        if len({line.trained for line in found.values()}) > 1 and not self.untaped_actors():
            self._add_problem("fragments disagree about how many tokens were trained")
        return found
