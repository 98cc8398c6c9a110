"""Hypothesis talks to both cores: everything that can happen, in any order, honest, stale, doubled or hostile.

The machines answer every effect that wants an answer exactly once, as a driver does, and look after each event whether
the core still makes sense. What is written to disk survives a restart of the syncer; nothing else does.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from atoll.core.learner.core import LearnerCore
from atoll.core.protocol import Lease, Published
from atoll.core.states import Link
from atoll.core.syncer.core import SyncerCore
from tests.core.learner_machine import LearnerMachine, QuietLearner
from tests.core.machine import Machine
from tests.core.syncer_machine import QuietSyncer, SyncerMachine

EXAMPLES = settings().max_examples  # of the profile: 100, and 25 in make test
TestSyncerCore = SyncerMachine.TestCase
TestSyncerCore.settings = settings(max_examples=5 * EXAMPLES // 2, stateful_step_count=60)
TestLearnerCore = LearnerMachine.TestCase
TestLearnerCore.settings = settings(max_examples=3 * EXAMPLES, stateful_step_count=60)


# --------------------------------------------------------------------------------------------------------------------
# A machine that cannot fail checks nothing


class BelowQuorum(SyncerCore):
    def _has_quorum(self, f: Any) -> bool:
        return True


class SkipsAVersion(SyncerCore):
    def _version_saved(self, now: float, f: Any) -> None:
        super()._version_saved(now, f)
        f.version += 1
        self.merges += 1


class ForgetsWhatIsMerged(SyncerCore):
    def _settle_leases(self) -> None:
        for key in self.lease_closing:
            self.leases.holders[key].merged = self.leases.holders[key].before
        super()._settle_leases()


class LeasesTwice(LearnerCore):
    def _on_lease(self, now: float, envelope: Any, body: Lease) -> None:
        if body.number < self.lease_count:
            self.held += body.end - body.begin
        super()._on_lease(now, envelope, body)


class WaitsForTheLink(LearnerCore):
    @property
    def training(self) -> bool:
        return super().training and self.link is Link.UP


class AdoptsTheOlder(LearnerCore):
    def _on_published(self, now: float, envelope: Any, body: Published) -> None:
        if body.fragment in self.received:
            self.received[body.fragment] = body.version
            self.arrivals[body.fragment] = None
        super()._on_published(now, envelope, body)


@pytest.mark.parametrize(
    ("core", "machine", "talk", "complaint"),
    [
        (BelowQuorum, SyncerMachine, QuietSyncer, "below (the )?quorum"),
        (SkipsAVersion, SyncerMachine, QuietSyncer, r"is at version|version \d+ of \d+"),
        pytest.param(ForgetsWhatIsMerged, SyncerMachine, QuietSyncer, "is merged by", marks=pytest.mark.long),
        (LeasesTwice, LearnerMachine, QuietLearner, "a lease counts twice"),
        (WaitsForTheLink, LearnerMachine, QuietLearner, "because of something that the network did"),
        (AdoptsTheOlder, LearnerMachine, QuietLearner, "is not newer|arrivals are wrong|adopted before it arrived"),
    ],
)
def test_a_planted_bug_is_found(core: type, machine: type[Machine], talk: type, complaint: str) -> None:
    kind = type("Planted", (talk,), {"core_type": core})
    planted = type("PlantedMachine", (machine,), {"kind": kind})
    quick = settings(max_examples=600, stateful_step_count=60, phases=[Phase.generate], print_blob=False)
    with pytest.raises(AssertionError, match=complaint):
        run_state_machine_as_test(planted, settings=quick)
