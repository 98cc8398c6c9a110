"""Tape format: every event that a process handled and every effect it produced, one line per entry.

One process writes one tape. The first line is the header, and every other line is one entry. Each line is a JSON array

    ["1f0c93ab", payload]

of a checksum (CRC-32 of the payload bytes) and the payload: `["Header", {...}, shapes]` or
`[at, tick, event, [effect, ...]]`. `codec` defines the encoding of values. `shapes` names the fields of every
type, so that other programs can read a tape.

`ordering` defines the order of entries across tapes, and `files` the tape files.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args, get_type_hints

from msgspec import Struct, ValidationError

from atoll.core import ledger, protocol
from atoll.core.codec import Number, parse_float, read, to_text
from atoll.core.protocol import Effect, Event
from atoll.core.reasons import Reason
from atoll.core.syncer.state import RestoredState
from atoll.core.types import (
    SYNCER,
    AcceptedContribution,
    LearnerId,
    LeaseHoldings,
    Limits,
    MergedUpTo,
    RoundId,
    RunConfig,
)

FORMAT_VERSION = 2
"""Version of the tape format, not of the protocol. It increases with each incompatible change."""


class TapeError(ValueError):
    """Error in writing or reading a tape. `location` is the file and line, if known."""

    def __init__(self, problem: str, location: str = "") -> None:
        super().__init__(f"{location}: {problem}" if location else problem)
        self.problem = problem
        self.location = location


class Actor(NamedTuple):
    """Name of a process: a syncer epoch or a learner incarnation."""

    learner: LearnerId  # SYNCER for the syncer
    generation: int  # epoch or incarnation

    def __str__(self) -> str:
        if self.learner == SYNCER:
            return f"syncer epoch {self.generation}"
        return f"learner {self.learner} incarnation {self.generation}"


class Entry(NamedTuple):
    """Record of one call of `handle`. `tick` counts the calls of this process from 1 and is its logical clock."""

    at: float
    actor: Actor
    tick: int
    event: Event
    effects: tuple[Effect, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a tape: its process and all inputs of its core. A replay needs nothing else."""

    format_version: int
    atoll_version: str
    actor: Actor
    config: RunConfig
    seed: int | None  # seed of a simulated run; None in a real run
    restored: RestoredState | None = None  # state that a syncer loaded from its directory
    note: str = ""


TAPE_TYPES: tuple[type, ...] = (
    # settings and restored state
    Header,
    Actor,
    RunConfig,
    Limits,
    RestoredState,
    # values
    RoundId,
    MergedUpTo,
    AcceptedContribution,
    LeaseHoldings,
    Reason,
    ledger.LedgerLine,
    # messages, records, events and effects
    *get_args(protocol.Body),
    protocol.Envelope,
    protocol.RecordKey,
    *get_args(protocol.Record),
    *get_args(Event),
    *get_args(Effect),
)
"""All types that may occur on a tape."""

_JSON = json.JSONDecoder(object_hook=parse_float)
_TYPES: dict[str, type] = {kind.__name__: kind for kind in TAPE_TYPES}
_SHAPES = {name: tuple(get_type_hints(kind)) for name, kind in _TYPES.items()}


class _EntryRow(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Entry as it is written, without the actor, which is in the header."""

    at: Number
    tick: int
    event: Event
    effects: tuple[Effect, ...]


# --------------------------------------------------------------------------------------------------------------------
# Values


def encode(value: object) -> str:
    """Return a registered value as JSON. Equal texts mean equal types and fields, recursively.

    >>> encode(StepTaken(1, 4096, 0.5))
    '["StepTaken",1,4096,0.5,0]'
    """
    if _TYPES.get(type(value).__name__) is not type(value):
        raise TapeError(f"type {type(value).__name__!r} is not registered")
    try:
        return to_text(value)
    except ValidationError as error:
        raise TapeError(f"{type(value).__name__}: {error}") from None


def decode(text: str) -> Any:
    """Return the value that `encode` wrote."""
    raw = _parse_json(text)
    name = raw[0] if type(raw) is list and raw and type(raw[0]) is str else None
    if name not in _TYPES:
        raise TapeError(f"expected an array that begins with the name of a type, found {text:.60}")
    try:
        return read(raw, _TYPES[name])
    except ValidationError as error:
        raise TapeError(f"{name}: {error}") from None


def canonical(value: object) -> str:
    """Return a text for comparing events and effects, one or a sequence. Values with NaN compare equal as text."""
    if type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        return f"[{','.join([encode(each) for each in value])}]"
    return encode(value)


# --------------------------------------------------------------------------------------------------------------------
# Lines


def encode_header(header: Header) -> bytes:
    """Return the first line of a tape, with its line end."""
    return _add_checksum(f"{encode(header)[:-1]},{json.dumps(_SHAPES, separators=(',', ':'))}]")


def encode_entry(entry: Entry) -> bytes:
    """Return the line of an entry, with its line end, without its actor."""
    at, _, tick, event, effects = entry
    try:
        return _add_checksum(to_text(_EntryRow(at, tick, event, effects)))
    except ValidationError as error:
        raise TapeError(f"{entry.actor}, tick {tick}: {error}") from None


def decode_header(line: bytes) -> Header:
    """Return the header from the first line of a tape, given without its line end."""
    raw = _verify_checksum(line)
    if type(raw) is not list or not raw or raw[0] != "Header":
        raise TapeError("no header: the first line must be the header of the tape")
    if len(raw) != 3 or type(raw[1]) is not dict or type(raw[2]) is not dict:
        raise TapeError("the header is malformed")
    version, atoll = raw[1].get("format_version"), raw[1].get("atoll_version")
    if type(version) is not int:
        raise TapeError("the header has no format version")
    if version > FORMAT_VERSION:
        raise TapeError(
            f"written by a newer Atoll: format {version} of Atoll {atoll}, this one reads format {FORMAT_VERSION};"
            " read it with that version"
        )
    if version < 1:
        raise TapeError(f"format version {version} does not exist")
    if version < FORMAT_VERSION:
        raise TapeError(
            f"written by an older Atoll: format {version} of Atoll {atoll}, this one reads format {FORMAT_VERSION};"
            " read it with that version"
        )
    for name, fields in raw[2].items():
        known = _SHAPES.get(name)
        if known is None:
            raise TapeError(f"written by another Atoll, {atoll}: unknown type {name!r}; read it with that version")
        if list(known) != fields:
            raise TapeError(f"written by another Atoll, {atoll}: {name} has the fields {fields}, here {list(known)}")
    try:
        header: Header = read(raw[:2], Header)
    except ValidationError as error:
        raise TapeError(str(error)) from None
    return header


def decode_entry(line: bytes, actor: Actor) -> Entry:
    """Return the entry of a line, given without its line end, of the tape of this actor."""
    raw = _verify_checksum(line)
    if type(raw) is not list or len(raw) != 4:
        if type(raw) is list and raw[:1] == ["Header"]:
            raise TapeError("a second header: two tapes were written into one file")
        raise TapeError("an entry must have four parts: time, tick, event and effects")
    tick = raw[1]
    if type(tick) is not int or tick < 1:
        raise TapeError("a tick must be an integer of at least 1")
    try:
        written: _EntryRow = read(raw, _EntryRow)
    except ValidationError as error:
        raise TapeError(f"tick {tick}: {error}") from None
    return Entry(written.at, actor, tick, written.event, written.effects)


def _add_checksum(payload: str) -> bytes:
    data = payload.encode("ascii")
    return b'["%08x",%b]\n' % (zlib.crc32(data), data)


def _verify_checksum(line: bytes) -> Any:
    """Return the payload of a line, after checking its checksum."""
    if line[:2] != b'["' or line[10:12] != b'",' or line[-1:] != b"]":
        raise TapeError(f"not a line of a tape: {line[:40]!r}{'...' if len(line) > 40 else ''}")
    payload = line[12:-1]
    if line[2:10] != b"%08x" % zlib.crc32(payload):
        raise TapeError("checksum mismatch: the line was damaged after it was written")
    return _parse_json(payload)


def _parse_json(text: str | bytes) -> Any:
    try:
        return _JSON.decode(text if isinstance(text, str) else text.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise TapeError(f"invalid JSON: {error}") from None
