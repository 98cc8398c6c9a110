"""Where every token and every sample of the data went.

Tokens, per fragment: trained = merged + pending + dropped with a reason, at every moment. A token is trained once by a
learner but settles once in each fragment, at different times, so each fragment has a line of its own and `trained` is
the same in all of them.

Samples: which of them are leased to whom, and what became of them. The data of a run is one line of numbered samples,
0, 1, 2, ...; what a number means is the trainer's. The syncer leases intervals of it to incarnations, and a learner
goes through its leases in order, so one number says which samples it has had: `taken`, of the line that its leases make
when they are laid end to end. A sample is merged when a durable version of any fragment holds a contribution with
`taken` beyond it. What an incarnation that is gone for good has not merged goes back into the pool, and is leased again
before anything new.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.core.protocol import LeaseRecord
from atoll.core.types import (
    AcceptedContribution,
    FragmentId,
    Incarnation,
    Interval,
    LearnerId,
    LeaseHoldings,
    MergedUpTo,
)

MAX_CLOSED_CAUSES = 4096
"""Closed accounts whose reason is remembered."""


class LedgerLine(NamedTuple):
    """The ledger of one fragment. `dropped` is by reason."""

    trained: int
    merged: int
    pending: int
    dropped: dict[str, int]

    def is_balanced(self) -> bool:
        return self.pending >= 0 and self.trained == self.merged + self.pending + sum(self.dropped.values())


@dataclass(slots=True, eq=False)
class TokenAccount:
    """What the syncer knows of one incarnation's tokens."""

    incarnation: Incarnation
    trained: int = 0  # tokens that this incarnation has told of, never falling
    merged: dict[FragmentId, int] = field(default_factory=dict)  # of those, tokens in a durable version of the fragment
    dropped: dict[FragmentId, int] = field(default_factory=dict)  # of those, thrown away by adopting (overwrite, blend)


class SyncerLedger:
    """The syncer's books. Open accounts are of current incarnations; closed ones are folded into totals."""

    def __init__(self, fragments: tuple[FragmentId, ...]) -> None:
        self.accounts: dict[LearnerId, TokenAccount] = {}
        self.trained = 0  # of all accounts, open and closed
        self.closed_trained = 0
        self._fragments = fragments
        self._closed_merged: dict[FragmentId, int] = dict.fromkeys(fragments, 0)
        self._closed_dropped: dict[str, dict[FragmentId, int]] = {}
        self._closed_causes: dict[tuple[LearnerId, Incarnation], str] = {}  # of accounts that were closed lately

    def open(self, learner: LearnerId, incarnation: Incarnation) -> None:
        assert learner not in self.accounts, f"learner {learner} has an open account"
        self.accounts[learner] = TokenAccount(incarnation)

    def tell(self, learner: LearnerId, trained: int) -> None:
        account = self.accounts[learner]
        if trained > account.trained:
            self.trained += trained - account.trained
            account.trained = trained

    def merge(self, fragment: FragmentId, accepted: AcceptedContribution) -> None:
        """A contribution is in a durable version."""
        account = self.accounts.get(accepted.learner)
        if account is not None and account.incarnation == accepted.incarnation:
            self.tell(accepted.learner, accepted.trained)
            account.merged[fragment] = account.merged.get(fragment, 0) + accepted.tokens
            account.dropped[fragment] = accepted.dropped
            return
        # The incarnation was replaced between acceptance and durability: what was written off is merged after all.
        self._closed_merged[fragment] += accepted.tokens
        why = self._closed_causes.get((accepted.learner, accepted.incarnation))
        if why is None:  # closed so long ago that its reason is forgotten: take it from where most was written off
            why = max(self._closed_dropped, key=lambda each: self._closed_dropped[each][fragment])
        self._closed_dropped[why][fragment] -= accepted.tokens

    def close(self, learner: LearnerId, why: str) -> None:
        """The incarnation is gone for good: what it had not merged is dropped, and says why."""
        account = self.accounts.pop(learner)
        self.closed_trained += account.trained
        self._closed_causes[(learner, account.incarnation)] = why
        if len(self._closed_causes) > MAX_CLOSED_CAUSES:
            del self._closed_causes[next(iter(self._closed_causes))]
        lines = self._closed_dropped.setdefault(why, dict.fromkeys(self._fragments, 0))
        adopted_over = self._closed_dropped.setdefault("overwritten-on-adopt", dict.fromkeys(self._fragments, 0))
        for fragment in self._fragments:
            merged, dropped = account.merged.get(fragment, 0), account.dropped.get(fragment, 0)
            self._closed_merged[fragment] += merged
            adopted_over[fragment] += dropped
            lines[fragment] += account.trained - merged - dropped

    def merged(self, fragment: FragmentId) -> int:
        return self._closed_merged[fragment] + sum(a.merged.get(fragment, 0) for a in self.accounts.values())

    def line(self, fragment: FragmentId) -> LedgerLine:
        dropped = {why: lines[fragment] for why, lines in self._closed_dropped.items() if lines[fragment]}
        open_dropped = sum(a.dropped.get(fragment, 0) for a in self.accounts.values())
        if open_dropped:
            dropped["overwritten-on-adopt"] = dropped.get("overwritten-on-adopt", 0) + open_dropped
        merged = self.merged(fragment)
        pending = sum(
            a.trained - a.merged.get(fragment, 0) - a.dropped.get(fragment, 0) for a in self.accounts.values()
        )
        return LedgerLine(self.trained, merged, pending, dropped)

    def restore(
        self, closed_trained: int, merged: dict[FragmentId, int], marks: dict[FragmentId, dict[LearnerId, MergedUpTo]]
    ) -> None:
        """After a restart: open accounts (already opened) take up where their last marks stand.

        Everything up to the copy that a mark names is merged or dropped, so a mark is a whole account line.
        """
        for fragment, by_learner in marks.items():
            for learner, mark in by_learner.items():
                account = self.accounts.get(learner)
                if account is not None and account.incarnation == mark.incarnation:
                    self.tell(learner, mark.trained)
                    account.merged[fragment] = mark.trained - mark.dropped
                    account.dropped[fragment] = mark.dropped
        self.closed_trained = closed_trained
        self.trained += closed_trained
        lines = self._closed_dropped.setdefault("before-restart", dict.fromkeys(self._fragments, 0))
        for fragment, total in merged.items():
            open_merged = sum(a.merged.get(fragment, 0) for a in self.accounts.values())
            self._closed_merged[fragment] = total - open_merged
            lines[fragment] = closed_trained - self._closed_merged[fragment]


MAX_UNMERGED_LEASES = 1024
"""Leases of one incarnation that are not merged yet. Beyond it a learner gets no more until something is."""

MAX_LEASES_PER_REPLY = 16
"""Leases that one request is answered with: a pool of crumbs is handed out in several."""

HolderKey = tuple[LearnerId, Incarnation]


class LeaseTotals(NamedTuple):
    """Where all samples are that were ever leased: leased = pool + held + merged."""

    leased: int
    pool: int  # returned, and leased to nobody
    held: int  # by current incarnations, not merged yet
    merged: int

    def is_balanced(self) -> bool:
        return min(self) >= 0 and self.leased == self.pool + self.held + self.merged


@dataclass(slots=True, eq=False)
class LeaseHolder:
    """One incarnation's leases, as the syncer knows them."""

    learner: LearnerId
    incarnation: Incarnation
    count: int = 0  # leases it was ever given: the number of the next one
    durable: int = 0  # of those, leases that are durable and may be sent
    first: int = 0  # number of the first interval that is listed; all before it are merged
    before: int = 0  # samples of leases that are no longer listed
    intervals: list[Interval] = field(default_factory=list)
    total: int = 0  # samples of all its leases
    merged: int = 0  # of those, from the beginning, in a durable version

    def drop_merged(self) -> None:
        """Leases that are merged to their end are no longer listed, so that records stay small."""
        while self.intervals:
            begin, end = self.intervals[0]
            if self.before + end - begin > self.merged:
                return
            del self.intervals[0]
            self.before += end - begin
            self.first += 1

    def unmerged(self) -> list[Interval]:
        left: list[Interval] = []
        place = self.before
        for begin, end in self.intervals:
            done = max(0, min(self.merged - place, end - begin))
            if begin + done < end:
                left.append((begin + done, end))
            place += end - begin
        return left


class LeaseLedger:
    """The syncer's books. Only what is in a durable `LeaseRecord` may be told to a learner."""

    def __init__(self) -> None:
        self.next = 0  # the first sample that was never leased
        self.pool: list[Interval] = []  # returned; in the order of the line, neighbours joined
        self.holders: dict[HolderKey, LeaseHolder] = {}
        self.closed_merged = 0  # samples of incarnations that are gone, merged

    def holder(self, key: HolderKey) -> LeaseHolder:
        found = self.holders.get(key)
        if found is None:
            found = self.holders[key] = LeaseHolder(*key)
        return found

    def grant(self, holder: LeaseHolder, wanted: int, lease_samples: int) -> int:
        """Leases for `holder` until it has `wanted` samples in all; what was returned goes first. How many."""
        holder.drop_merged()
        given = 0
        while holder.total < wanted and given < MAX_LEASES_PER_REPLY and len(holder.intervals) < MAX_UNMERGED_LEASES:
            begin, end = self._cut(lease_samples)
            holder.intervals.append((begin, end))
            holder.total += end - begin
            holder.count += 1
            given += 1
        return given

    def _cut(self, samples: int) -> Interval:
        if not self.pool:
            self.next += samples
            return self.next - samples, self.next
        begin, end = self.pool[0]
        cut = min(begin + samples, end)
        if cut < end:
            self.pool[0] = (cut, end)
        else:
            del self.pool[0]
        return begin, cut

    def merge(self, key: HolderKey, taken: int) -> None:
        """A durable version holds this incarnation's samples up to `taken`."""
        holder = self.holders.get(key)
        if holder is not None and taken > holder.merged:
            holder.merged = taken

    def close(self, key: HolderKey) -> int:
        """The incarnation is gone and nothing of it is under way: what it has not merged returns. How many samples."""
        holder = self.holders.pop(key)
        returned = holder.unmerged()
        self.closed_merged += holder.total - count_samples(returned)
        self.pool = join_intervals([*self.pool, *returned])
        return count_samples(returned)

    def unmerged(self) -> tuple[Interval, ...]:
        """Everything that was leased and is in no durable version, whoever has it."""
        return tuple(join_intervals([*self.pool, *(i for h in self.holders.values() for i in h.unmerged())]))

    # ---------------------------------------------------------------------------------------------------- records

    def record(self, serial: int) -> LeaseRecord:
        holdings = tuple(
            LeaseHoldings(h.learner, h.incarnation, h.first, h.before, tuple(h.intervals))
            for _, h in sorted(self.holders.items())
        )
        return LeaseRecord(serial, self.next, tuple(self.pool), holdings, self.closed_merged)

    def restore(self, record: LeaseRecord) -> None:
        """What was durable. Marks and closed incarnations are told afterwards, by `merge` and `close`."""
        self.next = record.next_sample
        self.pool = list(record.pool)
        self.closed_merged = record.closed_merged
        for holding in record.holdings:
            holder = self.holder((holding.learner, holding.incarnation))
            holder.first, holder.before = holding.first_lease, holding.samples_before
            holder.intervals = list(holding.intervals)
            holder.total = holding.samples_before + count_samples(holding.intervals)
            holder.merged = holding.samples_before  # at least
            holder.count = holder.durable = holding.first_lease + len(holding.intervals)

    # ---------------------------------------------------------------------------------------------------- checking

    def sums(self) -> LeaseTotals:
        merged = sum(h.merged for h in self.holders.values())
        held = sum(h.total for h in self.holders.values()) - merged
        return LeaseTotals(self.next, count_samples(self.pool), held, merged + self.closed_merged)

    def check(self) -> None:
        """Raises AssertionError with what does not hold."""
        assert self.sums().is_balanced(), f"leases out of balance: {self.sums()}"
        listed = list(self.pool)
        for holder in self.holders.values():
            assert holder.before <= holder.merged <= holder.total, f"{holder.learner}: merged beyond its leases"
            assert holder.durable <= holder.count == holder.first + len(holder.intervals)
            assert holder.total == holder.before + count_samples(holder.intervals)
            listed += holder.intervals
        listed.sort()
        for (_, end), (begin, _) in itertools.pairwise(listed):
            assert end <= begin, f"sample {begin} is leased twice"
        assert not listed or listed[-1][1] <= self.next


class StepSamples(NamedTuple):
    """Of one step. `fresh` of the numbers are had for the first time, from the first on."""

    numbers: tuple[int, ...]
    fresh: int


class SampleCursor:
    """A learner's way through its leases: each number goes out once; when there are no more, some go out again.

    >>> line = SampleLine(lease_samples=4)
    >>> leases = {0: (0, 4), 1: (8, 12)}
    >>> line.take(leases, 3), line.take(leases, 3)
    ((0, 1, 2), (3, 8, 9))
    >>> line.take(leases, 3) is None
    True
    >>> line.next(leases, 3)
    Samples(numbers=(2, 3, 8), fresh=0)
    """

    def __init__(self, lease_samples: int) -> None:
        self.taken = 0
        self._number = 0  # of the lease that it stands in
        self._offset = 0  # samples of that lease that it has taken
        self._keep = lease_samples
        self._had: deque[Interval] = deque()  # the last that it took, about one lease
        self._had_samples = 0
        self._again = 0  # numbers that were repeated since the last new one

    def next(self, leases: Mapping[int, Interval], count: int) -> StepSamples:
        """Numbers for one step: new ones if so many are there, and otherwise some that it has had. Whoever has had none
        takes what there is, and repeats that."""
        numbers = self.take(leases, count)
        if numbers is not None:
            return StepSamples(numbers, count)
        first: tuple[int, ...] = ()
        if not self._had_samples:
            here = min(count, count_samples(tuple(leases.values())))  # another thread may be adding one
            first = self.take(leases, here) or ()
        return StepSamples(first + self.again(count - len(first)), len(first))

    def replayed(self, leases: Mapping[int, Interval], count: int, fresh: int) -> tuple[int, ...]:
        """The numbers of a step of which it is known how many were new."""
        first = self.take(leases, fresh)
        assert first is not None, f"{fresh} samples were taken, and so many were not leased"
        return first + self.again(count - fresh)

    def take(self, leases: Mapping[int, Interval], count: int) -> tuple[int, ...] | None:
        """The next `count` numbers; None where fewer are there, and nothing is taken then."""
        pieces: list[Interval] = []
        number, offset, missing = self._number, self._offset, count
        while missing:
            lease = leases.get(number)
            if lease is None:
                return None
            begin, end = lease[0] + offset, lease[1]
            piece = (begin, min(end, begin + missing))
            pieces.append(piece)
            missing -= piece[1] - piece[0]
            offset += piece[1] - piece[0]
            if piece[1] == end:  # at once: a lease that is used up may be gone when we look again
                number, offset = number + 1, 0
        self._number, self._offset = number, offset
        self.taken += count
        if pieces:
            self._remember(pieces)
        return tuple(sample for begin, end in pieces for sample in range(begin, end))

    def again(self, count: int) -> tuple[int, ...]:
        """Numbers that it has had already: about its last lease, from the beginning, round and round."""
        if not count:
            return ()
        assert self._had_samples, "nothing was taken yet that could be repeated"
        had = [sample for begin, end in self._had for sample in range(begin, end)]
        found = tuple(had[(self._again + i) % len(had)] for i in range(count))
        self._again += count
        return found

    def _remember(self, pieces: list[Interval]) -> None:
        self._again = 0
        for piece in pieces:
            self._had.append(piece)
            self._had_samples += piece[1] - piece[0]
        while self._had_samples > self._keep:
            begin, end = self._had.popleft()
            kept = max(begin, end - (self._keep - (self._had_samples - (end - begin))))
            self._had_samples -= (kept if kept < end else end) - begin
            if kept < end:
                self._had.appendleft((kept, end))


def count_samples(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


def join_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """In order, neighbours as one.

    >>> joined([(4, 8), (0, 2), (8, 9)])
    [(0, 2), (4, 9)]
    """
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        elif begin < end:
            found.append((begin, end))
    return found
