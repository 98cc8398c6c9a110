"""What the two machines of `test_state_machines` have in common: time, nonsense, and a look at the core."""

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
WILD = st.sampled_from([-(10**9), -1, 0, 1, 2, 7, 10**6, 10**12])
STORY = 60
NONSENSE = st.one_of(
    st.builds(Report, WILD, WILD.map(lambda n: min(n, 10**6)), st.sampled_from([-1.0, 0.0, math.nan, math.inf])),
    st.builds(PublishAck, WILD, WILD),
    st.builds(Resync, WILD, WILD),
    st.builds(
        Contribution,
        st.builds(RoundId, WILD, WILD, WILD, WILD),
        WILD,
        WILD,
        WILD,
        WILD,
        WILD,
        st.sampled_from([None, "values are not finite"]),
    ),
    st.builds(SnapshotPart, WILD, WILD, WILD, st.tuples(WILD), st.tuples(st.builds(RoundId, WILD, WILD, WILD, WILD))),
    st.builds(OptimizerState, LEARNERS, WILD, WILD, WILD, st.tuples(WILD)),
    st.builds(StateRequest, st.tuples(WILD)),
    st.builds(Ready, st.just(because("state-kept"))),
    st.builds(DownloadTime, st.sampled_from([-1.0, 0.0, 1e-3, 1e9, math.nan, math.inf])),
    st.builds(DrainRequest, WILD, WILD.map(lambda n: min(n, 10**6)), st.lists(WILD, max_size=3).map(tuple)),
    st.builds(FinishAck, WILD),
    st.builds(Ping, WILD),
)
"""Messages that no honest learner sends, or not now."""


def plain(value: Any) -> Any:
    """A view as JSON would have it."""
    if hasattr(value, "_asdict"):
        return {key: plain(inner) for key, inner in value._asdict().items()}
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    assert value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)), repr(value)
    return value


def look(core: Any) -> Any:
    """A view can be written as JSON, and the next deadline is a time that is still to come."""
    view = core.view()
    json.dumps(plain(view), allow_nan=False)
    deadline = core.next_deadline()
    assert deadline is None or (math.isfinite(deadline) and deadline >= core.state.now), (
        f"deadline {deadline} at {core.state.now}"
    )
    return view


class Machine(RuleBasedStateMachine):
    """Base of both machines: time, and the story that is printed on a failure."""

    talk: Any

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.begun = False

    def happens(self, event: Any) -> list[Any]:
        raise NotImplementedError

    def checked(self, what: bool, sentence: str) -> None:
        if not what:
            raise AssertionError("\n".join([sentence, *self.talk.story[-STORY:]]))

    @rule(seconds=WAITS_S)
    def time_passes(self, seconds):
        """Also backwards: a clock may be set."""
        self.now = max(self.now + seconds, 0.0)

    @rule()
    def a_timer_fires(self):
        deadline = self.talk.core.next_deadline()
        if deadline is not None:
            self.now = max(self.now, deadline)
            self.happens(TimerFired())
