"""Hypothesis talks to both cores: everything that can happen, in any order, honest, stale, doubled or hostile.

The machines answer every effect that wants an answer exactly once, as a driver does, and look after each event whether
the core still makes sense. What is written to disk survives a restart of the syncer; nothing else does.
"""

from __future__ import annotations

from hypothesis import settings

from tests.core.learner_machine import LearnerMachine
from tests.core.syncer_machine import SyncerMachine

TestSyncerCore = SyncerMachine.TestCase
TestSyncerCore.settings = settings(max_examples=150, stateful_step_count=60)
TestLearnerCore = LearnerMachine.TestCase
TestLearnerCore.settings = settings(max_examples=250, stateful_step_count=60)
