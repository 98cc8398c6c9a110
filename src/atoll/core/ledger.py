"""Ledgers of tokens and of samples.

Tokens: for each fragment, trained = merged + pending + dropped holds at every moment, and every dropped token has a
cause. A learner trains a token once, but the token settles in each fragment at a different time. So each fragment has
its own line, and `trained` is the same in all lines.

Samples: the data of a run is a sequence of samples numbered 0, 1, 2, ... Only the trainer knows what a number means.
The syncer leases intervals to incarnations. A learner consumes its leases in order, so a single counter says which
samples it has consumed. A sample is merged when a durable version of any fragment contains a contribution whose counter
is beyond it. The unmerged samples of an ended incarnation return to the pool and are leased again before new samples.
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
"""Closed accounts whose cause is stored."""


class LedgerLine(NamedTuple):
    """Token totals of one fragment. `dropped` maps each cause to its tokens."""

    trained: int
    merged: int
    pending: int
    dropped: dict[str, int]

    def is_balanced(self) -> bool:
        return self.pending >= 0 and self.trained == self.merged + self.pending + sum(self.dropped.values())


@dataclass(slots=True, eq=False)
class TokenAccount:
    """Tokens of one incarnation, as the syncer knows them."""

    incarnation: Incarnation
    trained: int = 0  # reported tokens, never decreasing
    # By fragment: how many of the trained tokens a durable version includes.
    merged: dict[FragmentId, int] = field(default_factory=dict)
    # By fragment: how many of the trained tokens adoptions have dropped (overwrite, blend).
    dropped: dict[FragmentId, int] = field(default_factory=dict)


class SyncerLedger:
    """Token ledger of the syncer, with open accounts of current incarnations and totals of closed accounts."""

    def __init__(self, fragments: tuple[FragmentId, ...]) -> None:
        self.accounts: dict[LearnerId, TokenAccount] = {}
        self.trained = 0  # tokens trained in all accounts, open and closed
        self.closed_trained = 0
        self._fragments = fragments
        self._closed_merged: dict[FragmentId, int] = dict.fromkeys(fragments, 0)
        self._closed_dropped: dict[str, dict[FragmentId, int]] = {}
        self._closed_causes: dict[tuple[LearnerId, Incarnation], str] = {}  # drop causes of recently closed accounts

    def open(self, learner: LearnerId, incarnation: Incarnation) -> None:
        assert learner not in self.accounts, f"learner {learner} has an open account"
        self.accounts[learner] = TokenAccount(incarnation)

    def record_trained(self, learner: LearnerId, trained: int) -> None:
        account = self.accounts[learner]
        if trained > account.trained:
            self.trained += trained - account.trained
            account.trained = trained

    def merge(self, fragment: FragmentId, accepted: AcceptedContribution) -> None:
        """Record that a durable version contains a contribution."""
        account = self.accounts.get(accepted.learner)
        if account is not None and account.incarnation == accepted.incarnation:
            self.record_trained(accepted.learner, accepted.trained)
            account.merged[fragment] = account.merged.get(fragment, 0) + accepted.tokens
            account.dropped[fragment] = accepted.dropped
            return
        # The incarnation was replaced between acceptance and durability: the dropped tokens are merged after all.
        self._closed_merged[fragment] += accepted.tokens
        cause = self._closed_causes.get((accepted.learner, accepted.incarnation))
        if cause is None:  # no longer stored: take the tokens from the cause with the most dropped tokens
            cause = max(self._closed_dropped, key=lambda each: self._closed_dropped[each][fragment])
        self._closed_dropped[cause][fragment] -= accepted.tokens

    def close(self, learner: LearnerId, cause: str) -> None:
        """Close the account of an ended incarnation and drop its unmerged tokens with this cause."""
        account = self.accounts.pop(learner)
        self.closed_trained += account.trained
        self._closed_causes[(learner, account.incarnation)] = cause
        if len(self._closed_causes) > MAX_CLOSED_CAUSES:
            del self._closed_causes[next(iter(self._closed_causes))]
        lines = self._closed_dropped.setdefault(cause, dict.fromkeys(self._fragments, 0))
        adopted_over = self._closed_dropped.setdefault("overwritten-on-adopt", dict.fromkeys(self._fragments, 0))
        for fragment in self._fragments:
            merged, dropped = account.merged.get(fragment, 0), account.dropped.get(fragment, 0)
            self._closed_merged[fragment] += merged
            adopted_over[fragment] += dropped
            lines[fragment] += account.trained - merged - dropped

    def merged(self, fragment: FragmentId) -> int:
        return self._closed_merged[fragment] + sum(a.merged.get(fragment, 0) for a in self.accounts.values())

    def fragment_totals(self, fragment: FragmentId) -> LedgerLine:
        """Return the token totals of one fragment."""
        dropped = {cause: lines[fragment] for cause, lines in self._closed_dropped.items() if lines[fragment]}
        open_dropped = sum(a.dropped.get(fragment, 0) for a in self.accounts.values())
        if open_dropped:
            dropped["overwritten-on-adopt"] = dropped.get("overwritten-on-adopt", 0) + open_dropped
        merged = self.merged(fragment)
        pending = sum(
            a.trained - a.merged.get(fragment, 0) - a.dropped.get(fragment, 0) for a in self.accounts.values()
        )
        return LedgerLine(self.trained, merged, pending, dropped)

    def restore(
        self,
        closed_trained: int,
        merged: dict[FragmentId, int],
        merged_up_to: dict[FragmentId, dict[LearnerId, MergedUpTo]],
    ) -> None:
        """Restore totals and the accounts that are already open from durable records.

        All tokens up to the copy of a `MergedUpTo` are merged or dropped, so it determines the account of its fragment.
        """
        for fragment, by_learner in merged_up_to.items():
            for learner, last in by_learner.items():
                account = self.accounts.get(learner)
                if account is not None and account.incarnation == last.incarnation:
                    self.record_trained(learner, last.trained)
                    account.merged[fragment] = last.trained - last.dropped
                    account.dropped[fragment] = last.dropped
        self.closed_trained = closed_trained
        self.trained += closed_trained
        lines = self._closed_dropped.setdefault("before-restart", dict.fromkeys(self._fragments, 0))
        for fragment, total in merged.items():
            open_merged = sum(a.merged.get(fragment, 0) for a in self.accounts.values())
            self._closed_merged[fragment] = total - open_merged
            lines[fragment] = closed_trained - self._closed_merged[fragment]


MAX_UNMERGED_LEASES = 1024
"""Unmerged leases of one incarnation. A learner with so many gets no more until some are merged."""

MAX_LEASES_PER_REPLY = 16
"""Leases in the reply to one request. A pool of many small intervals takes several requests."""

HolderKey = tuple[LearnerId, Incarnation]


class LeaseTotals(NamedTuple):
    """Totals of all samples that were ever leased: leased = pool + held + merged."""

    leased: int
    pool: int  # returned and not leased again
    held: int  # unmerged samples of current incarnations
    merged: int

    def is_balanced(self) -> bool:
        return min(self) >= 0 and self.leased == self.pool + self.held + self.merged


@dataclass(slots=True, eq=False)
class LeaseHolder:
    """Leases of one incarnation, as the syncer knows them."""

    learner: LearnerId
    incarnation: Incarnation
    count: int = 0  # granted leases: the number of the next one
    durable: int = 0  # leases of those that are durable and may be sent
    first: int = 0  # number of the first listed interval; all earlier leases are merged
    before: int = 0  # samples of leases that are no longer listed
    intervals: list[Interval] = field(default_factory=list)
    total: int = 0  # samples of all its leases
    merged: int = 0  # samples of those that a durable version includes, counted from the first one

    def drop_merged(self) -> None:
        """Remove fully merged leases from the list, so that records stay small."""
        while self.intervals:
            begin, end = self.intervals[0]
            if self.before + end - begin > self.merged:
                return
            del self.intervals[0]
            self.before += end - begin
            self.first += 1

    def unmerged(self) -> list[Interval]:
        found: list[Interval] = []
        position = self.before
        for begin, end in self.intervals:
            done = max(0, min(self.merged - position, end - begin))
            if begin + done < end:
                found.append((begin + done, end))
            position += end - begin
        return found


class LeaseLedger:
    """Lease ledger of the syncer. A lease may be sent only after a `LeaseRecord` with it is durable."""

    def __init__(self) -> None:
        self.next = 0  # first sample that was never leased
        self.pool: list[Interval] = []  # returned intervals, sorted and joined
        self.holders: dict[HolderKey, LeaseHolder] = {}
        self.closed_merged = 0  # merged samples of ended incarnations

    def holder(self, key: HolderKey) -> LeaseHolder:
        found = self.holders.get(key)
        if found is None:
            found = self.holders[key] = LeaseHolder(*key)
        return found

    def grant(self, holder: LeaseHolder, target: int, lease_samples: int) -> int:
        """Grant leases until `holder` has `target` samples in total, from the pool first. Return how many leases."""
        holder.drop_merged()
        granted = 0
        while holder.total < target and granted < MAX_LEASES_PER_REPLY and len(holder.intervals) < MAX_UNMERGED_LEASES:
            begin, end = self._cut(lease_samples)
            holder.intervals.append((begin, end))
            holder.total += end - begin
            holder.count += 1
            granted += 1
        return granted

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

    def merge(self, key: HolderKey, consumed_samples: int) -> None:
        """Record that a durable version contains the first `consumed_samples` samples of this incarnation."""
        holder = self.holders.get(key)
        if holder is not None and consumed_samples > holder.merged:
            holder.merged = consumed_samples

    def close(self, key: HolderKey) -> int:
        """Return the unmerged samples of an ended incarnation to the pool, and return how many there are.

        No open round may contain a contribution of the incarnation.
        """
        holder = self.holders.pop(key)
        returned = holder.unmerged()
        self.closed_merged += holder.total - count_samples(returned)
        self.pool = join_intervals([*self.pool, *returned])
        return count_samples(returned)

    def unmerged(self) -> tuple[Interval, ...]:
        """Return all leased samples that no durable version includes."""
        return tuple(join_intervals([*self.pool, *(i for h in self.holders.values() for i in h.unmerged())]))

    # ---------------------------------------------------------------------------------------------------- records

    def record(self, serial: int) -> LeaseRecord:
        holdings = tuple(
            LeaseHoldings(h.learner, h.incarnation, h.first, h.before, tuple(h.intervals))
            for _, h in sorted(self.holders.items())
        )
        return LeaseRecord(serial, self.next, tuple(self.pool), holdings, self.closed_merged)

    def restore(self, record: LeaseRecord) -> None:
        """Restore a durable record. Then call `merge` and `close` for merged samples and ended incarnations."""
        self.next = record.next_sample
        self.pool = list(record.pool)
        self.closed_merged = record.closed_merged
        for holding in record.holdings:
            holder = self.holder((holding.learner, holding.incarnation))
            holder.first, holder.before = holding.first_lease, holding.samples_before
            holder.intervals = list(holding.intervals)
            holder.total = holding.samples_before + count_samples(holding.intervals)
            holder.merged = holding.samples_before  # lower bound
            holder.count = holder.durable = holding.first_lease + len(holding.intervals)

    # ---------------------------------------------------------------------------------------------------- checking

    def sums(self) -> LeaseTotals:
        merged = sum(h.merged for h in self.holders.values())
        held = sum(h.total for h in self.holders.values()) - merged
        return LeaseTotals(self.next, count_samples(self.pool), held, merged + self.closed_merged)

    def check(self) -> None:
        """Raise AssertionError if an invariant is violated."""
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
    """Sample numbers of one step. The first `fresh` of them are used for the first time."""

    numbers: tuple[int, ...]
    fresh: int


class SampleCursor:
    """Position of a learner in its leases. Each sample is taken once; without new samples, recent ones are repeated.

    >>> cursor = SampleCursor(lease_samples=4)
    >>> leases = {0: (0, 4), 1: (8, 12)}
    >>> cursor.take(leases, 3), cursor.take(leases, 3)
    ((0, 1, 2), (3, 8, 9))
    >>> cursor.take(leases, 3) is None
    True
    >>> cursor.next(leases, 3)
    StepSamples(numbers=(2, 3, 8), fresh=0)
    """

    def __init__(self, lease_samples: int) -> None:
        self.consumed = 0
        self._number = 0  # number of the current lease
        self._offset = 0  # samples taken from the current lease
        self._max_recent = lease_samples
        self._recent: deque[Interval] = deque()  # last samples taken, about one lease
        self._recent_samples = 0
        self._repeated = 0  # samples repeated since the last new one

    def next(self, leases: Mapping[int, Interval], count: int) -> StepSamples:
        """Return the samples of one step: `count` new ones if there are enough, otherwise recent ones.

        A cursor without recent samples takes the new ones that there are and repeats those.
        """
        numbers = self.take(leases, count)
        if numbers is not None:
            return StepSamples(numbers, count)
        first: tuple[int, ...] = ()
        if not self._recent_samples:
            available = min(count, count_samples(tuple(leases.values())))  # copy: another thread may add a lease
            first = self.take(leases, available) or ()
        return StepSamples(first + self.repeat(count - len(first)), len(first))

    def replayed(self, leases: Mapping[int, Interval], count: int, fresh: int) -> tuple[int, ...]:
        """Return the samples of a recorded step, of which `fresh` were new."""
        first = self.take(leases, fresh)
        assert first is not None, f"the step took {fresh} new samples, more than were leased"
        return first + self.repeat(count - fresh)

    def take(self, leases: Mapping[int, Interval], count: int) -> tuple[int, ...] | None:
        """Take the next `count` samples. If there are fewer, return None and take nothing."""
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
            if piece[1] == end:  # immediately: a used-up lease may be removed before the next call
                number, offset = number + 1, 0
        self._number, self._offset = number, offset
        self.consumed += count
        if pieces:
            self._remember(pieces)
        return tuple(sample for begin, end in pieces for sample in range(begin, end))

    def repeat(self, count: int) -> tuple[int, ...]:
        """Return samples that were taken before, cycling through about one lease of them."""
        if not count:
            return ()
        assert self._recent_samples, "no samples were taken that could be repeated"
        recent = [sample for begin, end in self._recent for sample in range(begin, end)]
        found = tuple(recent[(self._repeated + i) % len(recent)] for i in range(count))
        self._repeated += count
        return found

    def _remember(self, pieces: list[Interval]) -> None:
        self._repeated = 0
        for piece in pieces:
            self._recent.append(piece)
            self._recent_samples += piece[1] - piece[0]
        while self._recent_samples > self._max_recent:
            begin, end = self._recent.popleft()
            new_begin = max(begin, end - (self._max_recent - (self._recent_samples - (end - begin))))
            self._recent_samples -= (new_begin if new_begin < end else end) - begin
            if new_begin < end:
                self._recent.appendleft((new_begin, end))


def count_samples(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


def join_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Sort intervals and join adjacent ones.

    >>> join_intervals([(4, 8), (0, 2), (8, 9)])
    [(0, 2), (4, 9)]
    """
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        elif begin < end:
            found.append((begin, end))
    return found
