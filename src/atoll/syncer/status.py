"""What the syncer shows of a run: the core's own view, and what learners tell of themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.core.reasons import Reason

if TYPE_CHECKING:
    from atoll.syncer.process import SyncerProcess


def status(syncer: SyncerProcess) -> dict[str, Any]:
    """For the live view and for scripts; every count is the core's."""
    shared = {
        "run": syncer.settings.config.run_id,
        "epoch": syncer.store.epoch,
        "founded": syncer.core is not None,
        "wall_s": syncer.clock.now() if syncer.core is not None else 0.0,
        "bytes": dict(zip(("up", "down"), syncer.traffic, strict=True)),
        "refused": dict(syncer.refused),
        "halted": syncer.halted_because,
    }
    if syncer.core is None:
        return shared | {"stage": "waiting for a model", "progress": 0.0, "merges": 0, "trained": 0, "learners": []}
    view = syncer.core.view()
    learners = [
        syncer.metrics.of(member.learner)
        | {
            "learner": member.learner,
            "incarnation": member.incarnation,
            "standing": member.standing,
            "step": member.step,
            "strikes": member.strikes,
            "reason": member.reason,
            "link": "up" if any(key[0] == member.learner for key in syncer.links) else "down",
        }
        for member in view.members
    ]
    here = syncer.merged_contributions, max(1, view.merges - syncer.merges_before)
    return shared | {
        "stage": view.stage,
        "progress": view.progress,
        "merges": view.merges,
        "trained": view.trained,
        "alive": view.alive,
        "asked": view.asked,
        "merged": view.merged,
        "paused": view.paused,
        "quorum": view.quorum,
        "grace": view.grace_margin,
        "rounds_in_flight": view.rounds_in_flight,
        "flight_limit": view.flight_limit,
        "step_s": view.step_s,
        "quorum_s": view.quorum_s,
        "sync_s": view.sync_s,
        "contributions_per_merge": here[0] / here[1],
        "fragments": [fragment._asdict() for fragment in view.fragments],
        "learners": learners,
        "ledger": [line._asdict() for line in view.ledger],
        "leases": view.leases._asdict(),
        "ignored": view.ignored,
    }


TOLD = ("loss", "step", "tokens", "tokens_per_s", "step_s", "boundary_s", "bytes_up", "bytes_down", "goodput")
"""What a learner may tell of itself. Anything else that it sends is not shown; the step that is shown is the core's."""


MOST_SNAPSHOTS = 64

SNAPSHOT_STATES = {
    "snapshot-started": "being taken",
    "snapshot-asked": "being taken",
    "snapshot-durable": "durable",
    "snapshot-abandoned": "abandoned",
}
"""By the reason code of the core."""


class SnapshotNews:
    """What became of the newest snapshots, for those who asked for one: the state, and the last sentence about it;
    `left_out` are sentences too."""

    def __init__(self) -> None:
        self._news: dict[int, dict[str, Any]] = {}

    def note(self, reason: Reason) -> None:
        if reason.code == "snapshot-left-out":
            found = self._news.get(_number(reason.args[1]))
            if found is not None:
                found["left_out"].append(str(reason))
        if reason.code not in SNAPSHOT_STATES:
            return
        number = _number(reason.args[0])
        known = self._news.setdefault(number, {"snapshot": number, "left_out": []})
        known |= {"state": SNAPSHOT_STATES[reason.code], "said": str(reason)}
        while len(self._news) > MOST_SNAPSHOTS:
            del self._news[next(iter(self._news))]

    def of(self, number: int) -> dict[str, Any] | None:
        return self._news.get(number)


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value
