"""Hypothesis state machines of both cores: valid, stale, duplicate and hostile events in any order.

The machines reply exactly once to every effect that needs a reply, as a driver does, and check invariants after each
event. Only records on disk survive a restart of the syncer.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from atoll.core.learner.core import LearnerComponents, LearnerCore
from atoll.core.learner.rounds import LearnerLeases, LearnerRounds
from atoll.core.protocol import Lease, Published
from atoll.core.states import ConnectionState
from atoll.core.syncer.core import SyncerComponents
from atoll.core.syncer.data_leases import DataLeases
from atoll.core.syncer.rounds import Rounds
from tests.core.learner_machine import LearnerMachine, QuietLearner
from tests.core.machine import Machine
from tests.core.syncer_machine import QuietSyncer, SyncerMachine

EXAMPLES = settings().max_examples  # of the profile: 100, and 25 in make test
TestSyncerCore = SyncerMachine.TestCase
TestSyncerCore.settings = settings(max_examples=5 * EXAMPLES // 2, stateful_step_count=60)
TestLearnerCore = LearnerMachine.TestCase
TestLearnerCore.settings = settings(max_examples=3 * EXAMPLES, stateful_step_count=60)


# --------------------------------------------------------------------------------------------------------------------
# A planted bug must be found


class BelowQuorum(Rounds):
    def _has_quorum(self, f: Any) -> bool:
        return True


class SkipsAVersion(Rounds):
    def on_version_saved(self, now: float, f: Any) -> None:
        super().on_version_saved(now, f)
        f.version += 1
        self._state.merges += 1


class ForgetsMergedSamples(DataLeases):
    def settle(self) -> None:
        for key in self._state.lease_closing:
            self._state.leases.holders[key].merged = self._state.leases.holders[key].before
        super().settle()


class LeasesTwice(LearnerLeases):
    def add(self, now: float, body: Lease) -> bool:
        if body.number < self._state.lease_count:
            self._state.leased_samples += body.end - body.begin
        return super().add(now, body)


class TrainsOnlyWhileConnected(LearnerCore):
    @property
    def training(self) -> bool:
        return super().training and self.state.link is ConnectionState.UP


class AdoptsOlderVersions(LearnerRounds):
    def record_arrival(self, body: Published) -> bool:
        if body.fragment in self._state.received:
            self._state.received[body.fragment] = body.version
            self._state.arrivals[body.fragment] = None
        return super().record_arrival(body)


@pytest.mark.parametrize(
    ("planted", "machine", "harness", "message"),
    [
        ({"parts": SyncerComponents(rounds=BelowQuorum)}, SyncerMachine, QuietSyncer, "below (the )?quorum"),
        (
            {"parts": SyncerComponents(rounds=SkipsAVersion)},
            SyncerMachine,
            QuietSyncer,
            r"is at version|version \d+ of \d+",
        ),
        pytest.param(
            {"parts": SyncerComponents(data_leases=ForgetsMergedSamples)},
            SyncerMachine,
            QuietSyncer,
            "is merged by",
            marks=pytest.mark.long,
        ),
        ({"parts": LearnerComponents(data_leases=LeasesTwice)}, LearnerMachine, QuietLearner, "a lease counts twice"),
        ({"core_type": TrainsOnlyWhileConnected}, LearnerMachine, QuietLearner, "a network event stopped the training"),
        (
            {"parts": LearnerComponents(rounds=AdoptsOlderVersions)},
            LearnerMachine,
            QuietLearner,
            "is not newer|arrivals do not match|adopted before it arrived",
        ),
    ],
)
def test_planted_bug_is_found(planted: dict[str, Any], machine: type[Machine], harness: type, message: str) -> None:
    kind = type("PlantedHarness", (harness,), planted)
    planted_machine = type("PlantedMachine", (machine,), {"kind": kind})
    quick = settings(max_examples=600, stateful_step_count=60, phases=[Phase.generate], print_blob=False)
    with pytest.raises(AssertionError, match=message):
        run_state_machine_as_test(planted_machine, settings=quick)
