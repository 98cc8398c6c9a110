"""Common base of the state machines of `test_state_machines`: time, invalid messages, and a check of the view."""

from __future__ import annotations

import json
import math
from enum import Enum
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from atoll.core.protocol import (
    Contribution,
    DownloadTime,
    DrainRequest,
    FinishAck,
    OptimizerState,
    Ping,
    PublishAck,
    Ready,
    Report,
    Resync,
    SnapshotPart,
    StateRequest,
    TimerFired,
)
from atoll.core.reasons import because
from atoll.core.types import RoundId

LEARNERS = st.integers(1, 3)
FRAGMENTS = st.integers(0, 2)
WAITS_S = st.sampled_from([0.0, 0.01, 0.5, 1.0, 5.0, 40.0, 700.0, -3.0, -1e6])
EXTREME = st.sampled_from([-(10**9), -1, 0, 1, 2, 7, 10**6, 10**12])
MAX_STORY_LINES = 60
INVALID_MESSAGES = st.one_of(
    st.builds(Report, EXTREME, EXTREME.map(lambda n: min(n, 10**6)), st.sampled_from([-1.0, 0.0, math.nan, math.inf])),
    st.builds(PublishAck, EXTREME, EXTREME),
    st.builds(Resync, EXTREME, EXTREME),
    st.builds(
        Contribution,
        st.builds(RoundId, EXTREME, EXTREME, EXTREME, EXTREME),
        EXTREME,
        EXTREME,
        EXTREME,
        EXTREME,
        EXTREME,
        st.sampled_from([None, "values are not finite"]),
    ),
    st.builds(
        SnapshotPart,
        EXTREME,
        EXTREME,
        EXTREME,
        st.tuples(EXTREME),
        st.tuples(st.builds(RoundId, EXTREME, EXTREME, EXTREME, EXTREME)),
    ),
    st.builds(OptimizerState, LEARNERS, EXTREME, EXTREME, EXTREME, st.tuples(EXTREME)),
    st.builds(StateRequest, st.tuples(EXTREME)),
    st.builds(Ready, st.just(because("state-kept"))),
    st.builds(DownloadTime, st.sampled_from([-1.0, 0.0, 1e-3, 1e9, math.nan, math.inf])),
    st.builds(DrainRequest, EXTREME, EXTREME.map(lambda n: min(n, 10**6)), st.lists(EXTREME, max_size=3).map(tuple)),
    st.builds(FinishAck, EXTREME),
    st.builds(Ping, EXTREME),
)
"""Invalid or unexpected messages of a learner."""


def to_json(value: Any) -> Any:
    """Return a view as plain JSON values."""
    if hasattr(value, "_asdict"):
        return {key: to_json(inner) for key, inner in value._asdict().items()}
    if isinstance(value, dict):
        return {str(key): to_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(inner) for inner in value]
    assert value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)), repr(value)
    return value


def check_view(core: Any) -> Any:
    """Return the view. Assert that JSON can represent it and that the next deadline is not in the past."""
    view = core.view()
    json.dumps(to_json(view), allow_nan=False)
    deadline = core.next_deadline()
    assert deadline is None or (math.isfinite(deadline) and deadline >= core.state.now), (
        f"deadline {deadline} at {core.state.now}"
    )
    return view


class Machine(RuleBasedStateMachine):
    """Base of both state machines: time, and the story that is printed on a failure."""

    harness: Any

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.is_started = False

    def handle(self, event: Any) -> list[Any]:
        raise NotImplementedError

    def check(self, condition: bool, message: str) -> None:
        if not condition:
            raise AssertionError("\n".join([message, *self.harness.story[-MAX_STORY_LINES:]]))

    @rule(seconds=WAITS_S)
    def time_passes(self, seconds):
        """Move the clock, also backwards."""
        self.now = max(self.now + seconds, 0.0)

    @rule()
    def timer_fires(self):
        deadline = self.harness.core.next_deadline()
        if deadline is not None:
            self.now = max(self.now, deadline)
            self.handle(TimerFired())
