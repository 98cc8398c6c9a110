"""What became of the snapshots that this syncer has begun, for whoever asked for one and waits."""

from __future__ import annotations

from typing import Any

from atoll.core.reasons import Reason

MOST_REMEMBERED = 64

STATES = {
    "snapshot-started": "being taken",
    "snapshot-asked": "being taken",
    "snapshot-durable": "durable",
    "snapshot-abandoned": "abandoned",
}
"""By what the core says."""


class SnapshotNews:
    """The newest snapshots, each with its state and the sentence that was said last; `left_out` are sentences too."""

    def __init__(self) -> None:
        self._news: dict[int, dict[str, Any]] = {}

    def note(self, reason: Reason) -> None:
        if reason.code == "snapshot-left-out":
            found = self._news.get(_number(reason.args[1]))
            if found is not None:
                found["left_out"].append(str(reason))
        if reason.code not in STATES:
            return
        number = _number(reason.args[0])
        known = self._news.setdefault(number, {"snapshot": number, "left_out": []})
        known |= {"state": STATES[reason.code], "said": str(reason)}
        while len(self._news) > MOST_REMEMBERED:
            del self._news[next(iter(self._news))]

    def of(self, number: int) -> dict[str, Any] | None:
        return self._news.get(number)


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value
