"""Where every token went, per fragment: trained = merged + pending + dropped with a reason, at every moment.

A token is trained once by a learner but settles once in each fragment, at different times, so each fragment has a line
of its own and `trained` is the same in all of them.
"""

from __future__ import annotations

from typing import NamedTuple

from atoll.core.types import Accepted, FragmentId, Incarnation, LearnerId, Mark

MOST_CLOSED = 4096
"""Closed accounts whose reason is remembered."""


class Line(NamedTuple):
    """The ledger of one fragment. `dropped` is by reason."""

    trained: int
    merged: int
    pending: int
    dropped: dict[str, int]

    def balanced(self) -> bool:
        return self.pending >= 0 and self.trained == self.merged + self.pending + sum(self.dropped.values())


class Account:
    """What the syncer knows of one incarnation's tokens."""

    __slots__ = ("dropped", "incarnation", "merged", "trained")

    def __init__(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation
        self.trained = 0  # tokens that this incarnation has told of, never falling
        self.merged: dict[FragmentId, int] = {}  # of those, tokens in a durable version of the fragment
        self.dropped: dict[FragmentId, int] = {}  # of those, tokens that adopting threw away (overwrite, blend)


class SyncerLedger:
    """The syncer's books. Open accounts are of current incarnations; closed ones are folded into totals."""

    def __init__(self, fragments: tuple[FragmentId, ...]) -> None:
        self.accounts: dict[LearnerId, Account] = {}
        self.trained = 0  # of all accounts, open and closed
        self.closed_trained = 0
        self._fragments = fragments
        self._closed_merged: dict[FragmentId, int] = dict.fromkeys(fragments, 0)
        self._closed_dropped: dict[str, dict[FragmentId, int]] = {}
        self._closed_why: dict[tuple[LearnerId, Incarnation], str] = {}  # of accounts that were closed lately

    def open(self, learner: LearnerId, incarnation: Incarnation) -> None:
        assert learner not in self.accounts, f"learner {learner} has an open account"
        self.accounts[learner] = Account(incarnation)

    def tell(self, learner: LearnerId, trained: int) -> None:
        account = self.accounts[learner]
        if trained > account.trained:
            self.trained += trained - account.trained
            account.trained = trained

    def merge(self, fragment: FragmentId, accepted: Accepted) -> None:
        """A contribution is in a durable version."""
        account = self.accounts.get(accepted.learner)
        if account is not None and account.incarnation == accepted.incarnation:
            self.tell(accepted.learner, accepted.trained)
            account.merged[fragment] = account.merged.get(fragment, 0) + accepted.tokens
            account.dropped[fragment] = accepted.dropped
            return
        # The incarnation was replaced between acceptance and durability: what was written off is merged after all.
        self._closed_merged[fragment] += accepted.tokens
        why = self._closed_why.get((accepted.learner, accepted.incarnation))
        if why is None:  # closed so long ago that its reason is forgotten: take it from where most was written off
            why = max(self._closed_dropped, key=lambda each: self._closed_dropped[each][fragment])
        self._closed_dropped[why][fragment] -= accepted.tokens

    def close(self, learner: LearnerId, why: str) -> None:
        """The incarnation is gone for good: what it had not merged is dropped, and says why."""
        account = self.accounts.pop(learner)
        self.closed_trained += account.trained
        self._closed_why[(learner, account.incarnation)] = why
        if len(self._closed_why) > MOST_CLOSED:
            del self._closed_why[next(iter(self._closed_why))]
        lines = self._closed_dropped.setdefault(why, dict.fromkeys(self._fragments, 0))
        adopted_over = self._closed_dropped.setdefault("adopted over", dict.fromkeys(self._fragments, 0))
        for fragment in self._fragments:
            merged, dropped = account.merged.get(fragment, 0), account.dropped.get(fragment, 0)
            self._closed_merged[fragment] += merged
            adopted_over[fragment] += dropped
            lines[fragment] += account.trained - merged - dropped

    def merged(self, fragment: FragmentId) -> int:
        return self._closed_merged[fragment] + sum(a.merged.get(fragment, 0) for a in self.accounts.values())

    def line(self, fragment: FragmentId) -> Line:
        dropped = {why: lines[fragment] for why, lines in self._closed_dropped.items() if lines[fragment]}
        open_dropped = sum(a.dropped.get(fragment, 0) for a in self.accounts.values())
        if open_dropped:
            dropped["adopted over"] = dropped.get("adopted over", 0) + open_dropped
        merged = self.merged(fragment)
        pending = sum(
            a.trained - a.merged.get(fragment, 0) - a.dropped.get(fragment, 0) for a in self.accounts.values()
        )
        return Line(self.trained, merged, pending, dropped)

    def restore(
        self, closed_trained: int, merged: dict[FragmentId, int], marks: dict[FragmentId, dict[LearnerId, Mark]]
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
        lines = self._closed_dropped.setdefault("gone before a restart", dict.fromkeys(self._fragments, 0))
        for fragment, total in merged.items():
            open_merged = sum(a.merged.get(fragment, 0) for a in self.accounts.values())
            self._closed_merged[fragment] = total - open_merged
            lines[fragment] = closed_trained - self._closed_merged[fragment]
