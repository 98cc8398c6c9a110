"""Where every token went: trained = merged + pending + dropped with a reason, per fragment, at every moment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.ledger import LedgerLine, SyncerLedger
from atoll.core.types import AcceptedContribution, MergedUpTo

FRAGMENTS = (0, 1)


def accepted(learner: int, incarnation: int, tokens: int, trained: int, dropped: int = 0) -> AcceptedContribution:
    return AcceptedContribution(learner, incarnation, 1, 1, tokens, trained, dropped, 1.0)


def test_ledger_line_is_balanced_if_every_token_is_counted():
    assert LedgerLine(100, 60, 30, {"left": 10}).is_balanced()
    assert not LedgerLine(100, 60, 30, {}).is_balanced()
    assert not LedgerLine(100, 110, -10, {}).is_balanced(), "nothing is pending less than nothing"


def test_tokens_are_pending_until_they_are_merged():
    books = SyncerLedger(FRAGMENTS)
    books.open(1, 1)
    books.record_trained(1, 300)
    books.merge(0, accepted(1, 1, tokens=200, trained=200))
    assert books.line(0) == LedgerLine(300, 200, 100, {})
    assert books.line(1) == LedgerLine(300, 0, 300, {}), "a token settles once in each fragment"


def test_trained_tokens_never_decrease():
    books = SyncerLedger(FRAGMENTS)
    books.open(1, 1)
    books.record_trained(1, 300)
    books.record_trained(1, 200)
    assert books.trained == 300


def test_contribution_counts_tokens_of_a_lost_report():
    books = SyncerLedger(FRAGMENTS)
    books.open(1, 1)
    books.merge(0, accepted(1, 1, tokens=200, trained=200))
    assert books.line(0) == LedgerLine(200, 200, 0, {})


def test_tokens_dropped_by_adopting_have_that_cause():
    books = SyncerLedger(FRAGMENTS)
    books.open(1, 1)
    books.merge(0, accepted(1, 1, tokens=100, trained=100))
    books.merge(0, accepted(1, 1, tokens=50, trained=200, dropped=50))
    assert books.line(0) == LedgerLine(200, 150, 0, {"overwritten-on-adopt": 50})


def test_unmerged_tokens_of_an_ended_incarnation_are_dropped():
    books = SyncerLedger(FRAGMENTS)
    books.open(1, 1)
    books.record_trained(1, 300)
    books.merge(0, accepted(1, 1, tokens=200, trained=200))
    books.close(1, "left")
    assert books.line(0) == LedgerLine(300, 200, 0, {"left": 100})
    assert books.line(1) == LedgerLine(300, 0, 0, {"left": 300})
    assert books.closed_trained == 300


def test_a_contribution_that_becomes_durable_after_its_incarnation_was_replaced_is_merged_after_all():
    books = SyncerLedger(FRAGMENTS)
    books.open(1, 1)
    books.record_trained(1, 300)
    books.close(1, "superseded")
    books.open(1, 2)
    books.record_trained(1, 10)
    books.merge(0, accepted(1, 1, tokens=200, trained=200))
    assert books.line(0) == LedgerLine(310, 200, 10, {"superseded": 100})


def test_a_learner_has_one_open_account():
    books = SyncerLedger(FRAGMENTS)
    books.open(1, 1)
    with pytest.raises(AssertionError, match="learner 1 has an open account"):
        books.open(1, 2)


def test_restart_restores_accounts_from_merged_up_to():
    books = SyncerLedger(FRAGMENTS)
    books.open(1, 2)
    mark = MergedUpTo(incarnation=2, base=3, copied_at=9, trained=400, dropped=100)
    books.restore(closed_trained=50, merged={0: 330, 1: 0}, merged_up_to={0: {1: mark}, 1: {}})
    assert books.line(0) == LedgerLine(450, 330, 0, {"before-restart": 20, "overwritten-on-adopt": 100})
    assert books.line(1) == LedgerLine(450, 0, 400, {"before-restart": 50})


def test_merged_up_to_of_an_older_incarnation_is_not_in_the_new_account():
    books = SyncerLedger(FRAGMENTS)
    books.open(1, 3)
    mark = MergedUpTo(incarnation=2, base=3, copied_at=9, trained=400, dropped=0)
    books.restore(closed_trained=500, merged={0: 400, 1: 0}, merged_up_to={0: {1: mark}, 1: {}})
    assert books.line(0) == LedgerLine(500, 400, 0, {"before-restart": 100})


# --------------------------------------------------------------------------------------------------------------------
# Properties


class Learner:
    """One incarnation, honest: it knows what it trained and, per fragment, what is settled."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.trained = 0
        self.settled = dict.fromkeys(FRAGMENTS, 0)
        self.dropped = dict.fromkeys(FRAGMENTS, 0)


Step = tuple[str, int, int, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["train", "report", "merge", "merge", "drop", "replace", "accept", "durable"]),
        st.integers(1, 3),
        st.sampled_from(FRAGMENTS),
        st.integers(1, 100),
    ),
    max_size=60,
)


def play(script: list[Step]) -> tuple[SyncerLedger, dict[int, Learner], dict[int, int]]:
    """The books of a syncer after this history, and what is true. Accepted contributions become durable later; an
    incarnation may be replaced in between."""
    books = SyncerLedger(FRAGMENTS)
    learners = {i: Learner(1) for i in (1, 2, 3)}
    merged = dict.fromkeys(FRAGMENTS, 0)
    waiting: dict[tuple[int, int], AcceptedContribution] = {}
    for i in learners:
        books.open(i, 1)
    for what, i, p, tokens in script:
        learner = learners[i]
        if what == "train":
            learner.trained += tokens
        elif what == "report":
            books.record_trained(i, learner.trained)
        elif what == "drop":
            learner.dropped[p] += learner.trained - learner.settled[p]
            learner.settled[p] = learner.trained
        elif what == "replace":
            books.close(i, "superseded")
            learners[i] = Learner(learner.incarnation + 1)
            books.open(i, learner.incarnation + 1)
        elif what in ("merge", "accept") and learner.trained > learner.settled[p] and (i, p) not in waiting:
            body = accepted(
                i, learner.incarnation, learner.trained - learner.settled[p], learner.trained, learner.dropped[p]
            )
            books.record_trained(i, learner.trained)
            learner.settled[p] = learner.trained
            waiting[(i, p)] = body
        if what in ("merge", "durable") and (i, p) in waiting:
            body = waiting.pop((i, p))
            books.merge(p, body)
            merged[p] += body.tokens
    return books, learners, merged


@given(steps)
def test_token_ledger_is_balanced_at_every_moment(script):
    books, _, merged = play(script)
    for p in FRAGMENTS:
        line = books.line(p)
        assert line.is_balanced(), line
        assert line.merged == merged[p] == books.merged(p)
        assert line.trained == books.trained
        assert all(tokens > 0 for tokens in line.dropped.values()), line


@given(steps)
def test_a_restart_changes_nothing_that_matters(script):
    """Restore durable totals; later reports are repeated."""
    books, learners, merged = play(script)
    marks: dict[int, dict[int, MergedUpTo]] = {p: {} for p in FRAGMENTS}
    again = SyncerLedger(FRAGMENTS)
    for i, learner in learners.items():
        again.open(i, learner.incarnation)
        account = books.accounts[i]
        for p in FRAGMENTS:
            if p in account.merged:
                settled = account.merged[p] + account.dropped[p]
                marks[p][i] = MergedUpTo(learner.incarnation, 0, 1, settled, account.dropped[p])
    again.restore(books.closed_trained, merged, marks)
    for i, account in books.accounts.items():
        again.record_trained(i, account.trained)
    for p in FRAGMENTS:
        before, after = books.line(p), again.line(p)
        assert after.is_balanced(), after
        assert (after.trained, after.merged, after.pending) == (before.trained, before.merged, before.pending)
        assert sum(after.dropped.values()) == sum(before.dropped.values())
