"""What a syncer and its shards say to each other: effects one way, events the other, and a few words of their own.

One text message of a WebSocket is one value in the encoding of tapes. The shard dials, says `ShardHello`, and hears
`SyncerHello`. It writes down whom it serves from now on, and then sends its `ShardInventory`: after that no syncer of before
can make it hold anything else. From then on it carries out what it is sent for its fragments, in order, and tells what
came of it.
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
"""A plan of a large model travels in one."""


class StoredFragment(Value, frozen=True):
    """The newest durable version of one fragment, and its record; a fragment that was never merged has none."""

    fragment: FragmentId
    version: Version
    record: protocol.VersionRecord | None


class ShardHello(Value, frozen=True):
    """`address`: where learners reach it. `run_id` is empty while it has no part of a run.

    `is_founded`: a syncer has said that it has a record of that run. Otherwise it may have ended before it had one, and
    what is held here is of no run.
    """

    shard: int
    shards: int
    address: str
    run_id: str
    founded_at: Number
    is_founded: bool


class ShardInventory(Value, frozen=True):
    """All fragments that are here. `founded_at` tells which model: founding a run may be tried more than once."""

    founded_at: Number
    fragments: tuple[StoredFragment, ...]


class SyncerHello(Value, frozen=True):
    """`run_id`: of the run of which this syncer has a record; empty before. Said again when it has one."""

    epoch: int
    run_id: str


class CreateFragments(Value, frozen=True):
    """The run has a model: fetch the initial values of these fragments, and say what is held when they are durable."""

    settings: str
    fragments: tuple[FragmentId, ...]


class RollBack(Value, frozen=True):
    """The run has ended with these versions, and nobody has ever seen the later ones: forget those, and say what is
    held then."""

    versions: tuple[tuple[FragmentId, Version], ...]


class OpenLinks(Value, frozen=True):
    """All links of learners: values that belong to another one are refused."""

    links: tuple[tuple[LearnerId, Incarnation, int], ...]


class PinVersion(Value, frozen=True):
    """A learner was told of this version: serve it until `UnpinVersion`, as often as it was said."""

    fragment: FragmentId
    version: Version


class UnpinVersion(Value, frozen=True):
    fragment: FragmentId
    version: Version


class PinSnapshot(Value, frozen=True):
    """A snapshot is being taken, with these versions of all fragments: keep those that are here. Its record comes
    later, with `Persist`, or `UnpinSnapshot`."""

    snapshot: int
    versions: tuple[Version, ...]


class UnpinSnapshot(Value, frozen=True):
    """It is durable, or did not come about."""

    snapshot: int


class DropContribution(Value, frozen=True):
    """The contribution of which the shard told was not taken: its bytes are of no use."""

    learner: LearnerId
    incarnation: Incarnation
    round: types.RoundId


class MergeReport(Value, frozen=True):
    """What the merge was like whose version is now durable."""

    fragment: FragmentId
    version: Version
    stats: MergeStats


class ShardTraffic(Value, frozen=True):
    """Of values, since the shard started."""

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
    """`sender`: shard or head. Whatever does not fit is a `WireError`."""
    raw = parse_json(text.encode(), MAX_SHARD_MESSAGE_BYTES, is_value=True)
    try:
        return read(raw, ShardToSyncer if sender == "shard" else SyncerToShard)
    except ValidationError as error:
        raise WireError(f"not a word of a {sender}: {error}", "type") from None


def settings_to_text(settings: dict[str, Any]) -> str:
    return json.dumps(settings, separators=(",", ":"))
