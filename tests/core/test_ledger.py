"""Token ledger: trained = merged + pending + dropped, with a cause, per fragment, at every moment."""

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
    assert not LedgerLine(100, 110, -10, {}).is_balanced(), "pending tokens are not negative"


def test_tokens_are_pending_until_they_are_merged():
    ledger = SyncerLedger(FRAGMENTS)
    ledger.open(1, 1)
    ledger.record_trained(1, 300)
    ledger.merge(0, accepted(1, 1, tokens=200, trained=200))
    assert ledger.fragment_totals(0) == LedgerLine(300, 200, 100, {})
    assert ledger.fragment_totals(1) == LedgerLine(300, 0, 300, {}), "a token settles once in each fragment"


def test_trained_tokens_never_decrease():
    ledger = SyncerLedger(FRAGMENTS)
    ledger.open(1, 1)
    ledger.record_trained(1, 300)
    ledger.record_trained(1, 200)
    assert ledger.trained == 300


def test_contribution_counts_tokens_of_a_lost_report():
    ledger = SyncerLedger(FRAGMENTS)
    ledger.open(1, 1)
    ledger.merge(0, accepted(1, 1, tokens=200, trained=200))
    assert ledger.fragment_totals(0) == LedgerLine(200, 200, 0, {})


def test_tokens_dropped_by_adopting_have_that_cause():
    ledger = SyncerLedger(FRAGMENTS)
    ledger.open(1, 1)
    ledger.merge(0, accepted(1, 1, tokens=100, trained=100))
    ledger.merge(0, accepted(1, 1, tokens=50, trained=200, dropped=50))
    assert ledger.fragment_totals(0) == LedgerLine(200, 150, 0, {"overwritten-on-adopt": 50})


def test_unmerged_tokens_of_an_ended_incarnation_are_dropped():
    ledger = SyncerLedger(FRAGMENTS)
    ledger.open(1, 1)
    ledger.record_trained(1, 300)
    ledger.merge(0, accepted(1, 1, tokens=200, trained=200))
    ledger.close(1, "left")
    assert ledger.fragment_totals(0) == LedgerLine(300, 200, 0, {"left": 100})
    assert ledger.fragment_totals(1) == LedgerLine(300, 0, 0, {"left": 300})
    assert ledger.closed_trained == 300


def test_contribution_durable_after_its_incarnation_was_replaced_is_merged():
    ledger = SyncerLedger(FRAGMENTS)
    ledger.open(1, 1)
    ledger.record_trained(1, 300)
    ledger.close(1, "superseded")
    ledger.open(1, 2)
    ledger.record_trained(1, 10)
    ledger.merge(0, accepted(1, 1, tokens=200, trained=200))
    assert ledger.fragment_totals(0) == LedgerLine(310, 200, 10, {"superseded": 100})


def test_learner_has_one_open_account():
    ledger = SyncerLedger(FRAGMENTS)
    ledger.open(1, 1)
    with pytest.raises(AssertionError, match="learner 1 has an open account"):
        ledger.open(1, 2)


def test_restart_restores_accounts_from_merged_up_to():
    ledger = SyncerLedger(FRAGMENTS)
    ledger.open(1, 2)
    merged_up_to = MergedUpTo(incarnation=2, base=3, copied_at=9, trained=400, dropped=100)
    ledger.restore(closed_trained=50, merged={0: 330, 1: 0}, merged_up_to={0: {1: merged_up_to}, 1: {}})
    assert ledger.fragment_totals(0) == LedgerLine(450, 330, 0, {"before-restart": 20, "overwritten-on-adopt": 100})
    assert ledger.fragment_totals(1) == LedgerLine(450, 0, 400, {"before-restart": 50})


def test_merged_up_to_of_an_older_incarnation_is_not_in_the_new_account():
    ledger = SyncerLedger(FRAGMENTS)
    ledger.open(1, 3)
    merged_up_to = MergedUpTo(incarnation=2, base=3, copied_at=9, trained=400, dropped=0)
    ledger.restore(closed_trained=500, merged={0: 400, 1: 0}, merged_up_to={0: {1: merged_up_to}, 1: {}})
    assert ledger.fragment_totals(0) == LedgerLine(500, 400, 0, {"before-restart": 100})


# --------------------------------------------------------------------------------------------------------------------
# Properties


class Learner:
    """One valid incarnation, with its trained tokens and, per fragment, its settled tokens."""

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
    """Return the ledger of a syncer after this history, and the expected totals.

    Accepted contributions become durable later. Their incarnation may be replaced before that.
    """
    ledger = SyncerLedger(FRAGMENTS)
    learners = {i: Learner(1) for i in (1, 2, 3)}
    merged = dict.fromkeys(FRAGMENTS, 0)
    waiting: dict[tuple[int, int], AcceptedContribution] = {}
    for i in learners:
        ledger.open(i, 1)
    for action, i, p, tokens in script:
        learner = learners[i]
        if action == "train":
            learner.trained += tokens
        elif action == "report":
            ledger.record_trained(i, learner.trained)
        elif action == "drop":
            learner.dropped[p] += learner.trained - learner.settled[p]
            learner.settled[p] = learner.trained
        elif action == "replace":
            ledger.close(i, "superseded")
            learners[i] = Learner(learner.incarnation + 1)
            ledger.open(i, learner.incarnation + 1)
        elif action in ("merge", "accept") and learner.trained > learner.settled[p] and (i, p) not in waiting:
            body = accepted(
                i, learner.incarnation, learner.trained - learner.settled[p], learner.trained, learner.dropped[p]
            )
            ledger.record_trained(i, learner.trained)
            learner.settled[p] = learner.trained
            waiting[(i, p)] = body
        if action in ("merge", "durable") and (i, p) in waiting:
            body = waiting.pop((i, p))
            ledger.merge(p, body)
            merged[p] += body.tokens
    return ledger, learners, merged


@given(steps)
def test_token_ledger_is_balanced_at_every_moment(script):
    ledger, _, merged = play(script)
    for p in FRAGMENTS:
        line = ledger.fragment_totals(p)
        assert line.is_balanced(), line
        assert line.merged == merged[p] == ledger.merged(p)
        assert line.trained == ledger.trained
        assert all(tokens > 0 for tokens in line.dropped.values()), line


@given(steps)
def test_restored_ledger_has_the_same_totals(script):
    """Restore the durable totals and repeat later reports."""
    ledger, learners, merged = play(script)
    merged_up_to: dict[int, dict[int, MergedUpTo]] = {p: {} for p in FRAGMENTS}
    restored = SyncerLedger(FRAGMENTS)
    for i, learner in learners.items():
        restored.open(i, learner.incarnation)
        account = ledger.accounts[i]
        for p in FRAGMENTS:
            if p in account.merged:
                settled = account.merged[p] + account.dropped[p]
                merged_up_to[p][i] = MergedUpTo(learner.incarnation, 0, 1, settled, account.dropped[p])
    restored.restore(ledger.closed_trained, merged, merged_up_to)
    for i, account in ledger.accounts.items():
        restored.record_trained(i, account.trained)
    for p in FRAGMENTS:
        before, after = ledger.fragment_totals(p), restored.fragment_totals(p)
        assert after.is_balanced(), after
        assert (after.trained, after.merged, after.pending) == (before.trained, before.merged, before.pending)
        assert sum(after.dropped.values()) == sum(before.dropped.values())
