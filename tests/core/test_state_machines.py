"""Hypothesis talks to both cores: everything that can happen, in any order, honest, stale, doubled or hostile.

The machines answer every effect that wants an answer exactly once, as a driver does, and look after each event whether
the core still makes sense. What is written to disk survives a restart of the syncer; nothing else does.
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
# A machine that cannot fail checks nothing


class BelowQuorum(Rounds):
    def _has_quorum(self, f: Any) -> bool:
        return True


class SkipsAVersion(Rounds):
    def on_version_saved(self, now: float, f: Any) -> None:
        super().on_version_saved(now, f)
        f.version += 1
        self._state.merges += 1


class ForgetsWhatIsMerged(DataLeases):
    def settle(self) -> None:
        for key in self._state.lease_closing:
            self._state.leases.holders[key].merged = self._state.leases.holders[key].before
        super().settle()


class LeasesTwice(LearnerLeases):
    def add(self, now: float, body: Lease) -> bool:
        if body.number < self._state.lease_count:
            self._state.leased_samples += body.end - body.begin
        return super().add(now, body)


class WaitsForTheLink(LearnerCore):
    @property
    def training(self) -> bool:
        return super().training and self.state.link is ConnectionState.UP


class AdoptsTheOlder(LearnerRounds):
    def record_arrival(self, body: Published) -> bool:
        if body.fragment in self._state.received:
            self._state.received[body.fragment] = body.version
            self._state.arrivals[body.fragment] = None
        return super().record_arrival(body)


@pytest.mark.parametrize(
    ("planted", "machine", "talk", "complaint"),
    [
        ({"parts": SyncerComponents(rounds=BelowQuorum)}, SyncerMachine, QuietSyncer, "below (the )?quorum"),
        (
            {"parts": SyncerComponents(rounds=SkipsAVersion)},
            SyncerMachine,
            QuietSyncer,
            r"is at version|version \d+ of \d+",
        ),
        pytest.param(
            {"parts": SyncerComponents(data_leases=ForgetsWhatIsMerged)},
            SyncerMachine,
            QuietSyncer,
            "is merged by",
            marks=pytest.mark.long,
        ),
        ({"parts": LearnerComponents(data_leases=LeasesTwice)}, LearnerMachine, QuietLearner, "a lease counts twice"),
        ({"core_type": WaitsForTheLink}, LearnerMachine, QuietLearner, "because of something that the network did"),
        (
            {"parts": LearnerComponents(rounds=AdoptsTheOlder)},
            LearnerMachine,
            QuietLearner,
            "is not newer|arrivals do not match|adopted before it arrived",
        ),
    ],
)
def test_a_planted_bug_is_found(planted: dict[str, Any], machine: type[Machine], talk: type, complaint: str) -> None:
    kind = type("PlantedTalk", (talk,), planted)
    planted_machine = type("PlantedMachine", (machine,), {"kind": kind})
    quick = settings(max_examples=600, stateful_step_count=60, phases=[Phase.generate], print_blob=False)
    with pytest.raises(AssertionError, match=complaint):
        run_state_machine_as_test(planted_machine, settings=quick)
