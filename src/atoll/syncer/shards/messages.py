"""Messages between a syncer and its shards: effects in one direction, events in the other, and a few of their own.

One text message of a WebSocket is one value in the encoding of tapes. The shard connects and sends `ShardHello`. The
syncer replies with `SyncerHello`. The shard writes down which syncer it serves, and then sends its `ShardInventory`:
after that, no earlier syncer can change what it stores. From then on it executes the messages for its fragments in
order, and reports the results.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from msgspec import ValidationError

from atoll.core import protocol, types
from atoll.core.codec import Number, Value, read, to_text
from atoll.core.types import FragmentId, Incarnation, LearnerId, Version
from atoll.tensors.syncer_fragment import MergeStats
from atoll.transport.wire import WireError, parse_json

MAX_SHARD_MESSAGE_BYTES = 64 * 2**20
"""Large enough for the plan of a large model, which is sent in one message."""


class StoredFragment(Value, frozen=True):
    """The newest durable version of one fragment, and its record. A fragment without a merge has no record."""

    fragment: FragmentId
    version: Version
    record: protocol.VersionRecord | None


class ShardHello(Value, frozen=True):
    """First message of a shard.

    `address` is for learners. `run_id` is empty while the shard stores no run. `is_founded` means that a syncer has
    announced its record of that run. Otherwise that syncer may have ended before it had one, and the stored fragments
    belong to no run.
    """

    shard: int
    shards: int
    address: str
    run_id: str
    founded_at: Number
    is_founded: bool


class ShardInventory(Value, frozen=True):
    """All fragments of a shard. `founded_at` identifies the model: creating a run may take several attempts."""

    founded_at: Number
    fragments: tuple[StoredFragment, ...]


class SyncerHello(Value, frozen=True):
    """First message of a syncer. `run_id` is empty until the syncer has a record of a run; then it is sent again."""

    epoch: int
    run_id: str


class CreateFragments(Value, frozen=True):
    """Download the initial values of these fragments, make them durable, and send the inventory."""

    settings: str
    fragments: tuple[FragmentId, ...]


class RollBack(Value, frozen=True):
    """Return to these versions, with which the run ended, and send the inventory. Later ones were never published."""

    versions: tuple[tuple[FragmentId, Version], ...]


class OpenLinks(Value, frozen=True):
    """All links of learners. Values for other links are refused."""

    links: tuple[tuple[LearnerId, Incarnation, int], ...]


class PinVersion(Value, frozen=True):
    """Serve this version until `UnpinVersion`: it was announced to a learner. Pins are counted."""

    fragment: FragmentId
    version: Version


class UnpinVersion(Value, frozen=True):
    fragment: FragmentId
    version: Version


class PinSnapshot(Value, frozen=True):
    """Keep these versions for a snapshot in progress. `Persist` with its record follows, or `UnpinSnapshot`."""

    snapshot: int
    versions: tuple[Version, ...]


class UnpinSnapshot(Value, frozen=True):
    """Release the versions of a snapshot that is durable or abandoned."""

    snapshot: int


class DropContribution(Value, frozen=True):
    """Drop the values of this contribution: the core did not accept it."""

    learner: LearnerId
    incarnation: Incarnation
    round: types.RoundId


class MergeReport(Value, frozen=True):
    """Statistics of the merge of a version that is now durable."""

    fragment: FragmentId
    version: Version
    stats: MergeStats


class ShardTraffic(Value, frozen=True):
    """Bytes of values since the shard started."""

    bytes_up: int
    bytes_down: int


ShardToSyncer: TypeAlias = (
    ShardHello
    | ShardInventory
    | MergeReport
    | ShardTraffic
    | protocol.MessageArrived
    | protocol.MergeDone
    | protocol.MergeFailed
    | protocol.Persisted
    | protocol.PersistFailed
)
SyncerToShard: TypeAlias = (
    SyncerHello
    | CreateFragments
    | RollBack
    | OpenLinks
    | PinVersion
    | UnpinVersion
    | PinSnapshot
    | UnpinSnapshot
    | DropContribution
    | protocol.Accumulate
    | protocol.MergeRound
    | protocol.DiscardRound
    | protocol.Persist
)


def encode(message: ShardToSyncer | SyncerToShard) -> str:
    return to_text(message)


def decode(text: str, sender: str) -> Any:
    """Decode a message from `sender`: "shard" or "syncer".

    Raises:
        WireError: The text is not a message of this sender.
    """
    raw = parse_json(text.encode(), MAX_SHARD_MESSAGE_BYTES, is_value=True)
    try:
        return read(raw, ShardToSyncer if sender == "shard" else SyncerToShard)
    except ValidationError as error:
        raise WireError(f"not a message of a {sender}: {error}", "type") from None


def settings_to_text(settings: dict[str, Any]) -> str:
    return json.dumps(settings, separators=(",", ":"))
