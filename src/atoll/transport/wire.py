"""Wire format between a learner and the syncer: control messages and bulk frames. No I/O here.

A control message is one envelope and one binary WebSocket message. A bulk frame is the body of an HTTP request or
response: a head of 36 bytes, a short header, and a payload that is never copied together with them. The byte tables
are in docs/wire.md, examples of every kind in tests/transport/vectors.

Input is not trusted. A length is checked before memory is allocated for it. Invalid input is a `WireError` that says
what was found and what was expected. It closes the connection of the peer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import IntEnum
from struct import Struct
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, get_args

from msgspec import ValidationError
from msgspec.structs import astuple
from xxhash import xxh3_128

from atoll.core.codec import parse_float, read, to_text
from atoll.core.protocol import Envelope, LearnerBody, SyncerBody
from atoll.core.types import RoundId

WIRE_VERSION = 4
"""Version of both formats. It increases when a reader of the old one would misread the new one."""

MAX_MESSAGE_BYTES = 4 * 2**20
MAX_HEADER_BYTES = 2**20
MAX_PAYLOAD_BYTES = 2**40
"""Upper bound for any payload. `accept` of a `FrameParser` applies the limit of the request."""

MIN_INTEGER, MAX_INTEGER = -(2**63), 2**63 - 1
"""Limit of integers: other languages cannot represent larger ones, and as floats they would become infinite."""

WireErrorCode: TypeAlias = Literal[
    "magic", "version", "size", "json", "type", "digest", "codec", "kind", "truncated", "trailing"
]

Buffer: TypeAlias = Any
"""Any contiguous object with the buffer protocol, or a CPU tensor of a type that numpy supports."""

_MESSAGE_MAGIC = b"ATLL"
_MESSAGE_HEAD = _MESSAGE_MAGIC + bytes([WIRE_VERSION])
_FRAME_MAGIC = b"ATLF"
_FIELDS = Struct("<4sBBBBIQ")
_DIGEST_BYTES = 16
FRAME_HEAD_BYTES = _FIELDS.size + _DIGEST_BYTES

CODEC_NUMBERS: Mapping[str, int] = {"f32": 0, "bf16": 1, "int8": 2, "int4": 3}
"""Codec numbers in a frame's head, by name of `atoll.tensors.codecs`. Bytes that are not a tensor use 0."""


class WireError(ValueError):
    """Invalid bytes. `code` is one of `CODES`, for counting. The message is for operators."""

    def __init__(self, message: str, code: WireErrorCode) -> None:
        super().__init__(message)
        self.message = message
        self.code: WireErrorCode = code


class FrameKind(IntEnum):
    """Content of a frame."""

    CONTRIBUTION = 1
    FRAGMENT = 2
    OPTIMIZER_STATE = 3
    MODEL = 4
    SLICE = 5


STATE_BYTES_PER_PARAMETER = 64
ENCODED_KINDS = frozenset({FrameKind.CONTRIBUTION, FrameKind.FRAGMENT})
"""Kinds whose payload may have a codec. All others use 0."""


def max_state_bytes(parameters: int) -> int:
    """Return the limit of an `OPTIMIZER_STATE` payload for a model of this many parameters, in bytes."""
    return STATE_BYTES_PER_PARAMETER * parameters + 2**24


# --------------------------------------------------------------------------------------------------------------------
# Control messages

Sender: TypeAlias = Literal["learner", "syncer"]
_BODIES: dict[str, frozenset[type]] = {
    "learner": frozenset(get_args(LearnerBody)),
    "syncer": frozenset(get_args(SyncerBody)),
}


def encode_message(envelope: Envelope) -> bytes:
    """Encode one envelope as a WebSocket message.

    >>> encode_message(Envelope(1, 1, 1, 0, 7, 3, 0, Ping(5)))
    b'ATLL\\x04["Envelope",1,1,1,0,7,3,0,["Ping",5]]'
    """
    try:
        text = to_text(envelope)
    except ValidationError as error:
        raise WireError(f"this cannot be sent: {error}", "type") from None
    data = _MESSAGE_HEAD + text.encode("ascii")
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(_too_large("a message", len(data), MAX_MESSAGE_BYTES), "size")
    if b"\\u" in data:
        _refuse_lone_surrogates(json.loads(text))
    return data


def decode_message(data: Buffer, sender: Sender) -> Envelope:
    """Decode an envelope that this side has sent."""
    view = as_bytes(data)
    if view.nbytes > MAX_MESSAGE_BYTES:
        raise WireError(_too_large("a message", view.nbytes, MAX_MESSAGE_BYTES), "size")
    head = bytes(view[: len(_MESSAGE_HEAD)])
    _check_start(head, _MESSAGE_MAGIC, "a message")
    if len(head) < len(_MESSAGE_HEAD):
        raise WireError(f"a message of {view.nbytes} bytes ends before its text begins", "truncated")
    raw = parse_json(view[len(_MESSAGE_HEAD) :], is_value=True)
    try:
        envelope: Envelope = read(raw, Envelope)
    except ValidationError as error:
        raise WireError(f"not a message: {error}", "type") from None
    if type(envelope.body) not in _BODIES[sender]:
        raise WireError(f"a {sender} does not send {type(envelope.body).__name__}", "type")
    return envelope


# --------------------------------------------------------------------------------------------------------------------
# JSON


def parse_json(data: Buffer, max_bytes: int = MAX_MESSAGE_BYTES, is_value: bool = False) -> Any:
    """Parse strict JSON: UTF-8, no NaN, integers of 64 bits, no lone surrogates.

    `is_value`: it is to be read by `codec.read`.
    """
    view = as_bytes(data)
    if view.nbytes > max_bytes:
        raise WireError(_too_large("a text", view.nbytes, max_bytes), "size")
    try:
        text = str(view, "utf-8")
        raw = (_VALUE_JSON if is_value else _PLAIN_JSON).decode(text)
    except WireError:
        raise
    except (ValueError, RecursionError) as error:
        raise WireError(f"bad JSON: {error}", "json") from None
    if "\\u" in text:
        _refuse_lone_surrogates(raw)
    return raw


def encode_header(header: Mapping[str, Any]) -> bytes:
    """Encode the header of a frame whose header is a JSON object."""
    data = json.dumps(header, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(data) > MAX_HEADER_BYTES:
        raise WireError(_too_large("a header", len(data), MAX_HEADER_BYTES), "size")
    return data


def decode_header(data: Buffer, fields: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """Decode a JSON object with exactly these fields and their types (`type(None)` where null is allowed).

    >>> decode_header(b'{"fragment":7}', {"fragment": int})
    {'fragment': 7}
    """
    raw = parse_json(data, MAX_HEADER_BYTES)
    if type(raw) is not dict:
        raise WireError(f"a header is a JSON object, found {_abbreviate(raw)}", "type")
    for name in raw:
        if name not in fields:
            raise WireError(f"the header has no field {_abbreviate(name)}, only {', '.join(fields)}", "type")
    for name, types in fields.items():
        if name not in raw:
            raise WireError(f"the header lacks its field {name!r}", "type")
        allowed = types if isinstance(types, tuple) else (types,)
        if type(raw[name]) not in allowed:  # not isinstance: True must not count as an integer
            names = " or ".join("null" if t is type(None) else t.__name__ for t in allowed)
            raise WireError(f"the header's {name} is {_abbreviate(raw[name])}, expected {names}", "type")
    return raw


class FragmentHeader(NamedTuple):
    """The header of a `FRAGMENT` frame. If `base` is None, the payload is the whole value, otherwise an update.

    The payload starts at byte `begin` of the `total_bytes` of the encoded fragment.
    """

    fragment: int
    version: int
    base: int | None
    value_digest: str  # `digest` of the published value as f32, in hex
    begin: int
    total_bytes: int

    def encode(self) -> bytes:
        return encode_header(self._asdict())

    @classmethod
    def decode(cls, data: Buffer) -> FragmentHeader:
        raw = decode_header(data, _FRAGMENT_FIELDS)
        text = raw["value_digest"]
        if len(text) != 32 or not set(text) <= set("0123456789abcdef"):
            raise WireError(f"value_digest is 32 hexadecimal digits, found {_abbreviate(text)}", "type")
        _check_range(raw["begin"], raw["total_bytes"])
        return cls(**raw)


class SliceHeader(NamedTuple):
    """The header of a `SLICE` frame: bytes from `begin` on of a contribution of `total_bytes`."""

    learner: int
    incarnation: int
    session: int
    round: RoundId
    begin: int
    total_bytes: int

    def encode(self) -> bytes:
        return encode_header(self._asdict() | {"round": astuple(self.round)})

    @classmethod
    def decode(cls, data: Buffer) -> SliceHeader:
        raw = decode_header(data, _SLICE_FIELDS)
        numbers = raw["round"]
        if len(numbers) != 4 or any(type(number) is not int for number in numbers):
            raise WireError(f"a round must be 4 integers, got {_abbreviate(numbers)}", "type")
        _check_range(raw["begin"], raw["total_bytes"])
        return cls(**(raw | {"round": RoundId(*numbers)}))


_FRAGMENT_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "fragment": int,
    "version": int,
    "base": (int, type(None)),
    "value_digest": str,
    "begin": int,
    "total_bytes": int,
}
_SLICE_FIELDS = {"learner": int, "incarnation": int, "session": int, "round": list, "begin": int, "total_bytes": int}


def _check_range(begin: int, total_bytes: int) -> None:
    if not 0 <= begin <= total_bytes <= MAX_PAYLOAD_BYTES:
        raise WireError(f"invalid range: it begins at byte {begin} of {total_bytes}", "size")


def _refuse_constant(constant: str) -> NoReturn:
    raise WireError(f"bad JSON: {constant} is not a JSON number", "json")


def _parse_integer(digits: str) -> int:
    if len(digits) > 20 or not MIN_INTEGER <= (number := int(digits)) <= MAX_INTEGER:
        raise WireError(f"bad JSON: the number {digits[:20]}... has more than 64 bits", "json")
    return number


_PLAIN_JSON = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_parse_integer)
_VALUE_JSON = json.JSONDecoder(object_hook=parse_float, parse_constant=_refuse_constant, parse_int=_parse_integer)


def _refuse_lone_surrogates(raw: Any) -> None:
    """Refuse lone surrogates: such a string cannot be printed or written, and would fail far from here."""
    try:
        json.dumps(raw, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise WireError("bad JSON: a string contains a lone surrogate", "json") from None


# --------------------------------------------------------------------------------------------------------------------
# Frames


class FrameHead(NamedTuple):
    """The first 36 bytes of a frame."""

    kind: FrameKind
    codec: int
    header_bytes: int
    payload_bytes: int
    digest: bytes


class Frame(NamedTuple):
    """A complete frame with a valid digest. `payload` is the memory that `accept` returned."""

    head: FrameHead
    header: bytes
    payload: memoryview


Accept: TypeAlias = Callable[[FrameHead, bytes], Buffer]


def encode_frame_head(
    kind: FrameKind, codec: int, header: bytes, payload: Buffer | list[Buffer] | tuple[Buffer, ...]
) -> bytes:
    """Encode the head of a frame, sent before header and payload. The payload may be in several pieces."""
    pieces = [as_bytes(piece) for piece in (payload if isinstance(payload, list | tuple) else [payload])]
    size = sum(piece.nbytes for piece in pieces)
    assert codec in CODEC_NUMBERS.values(), f"no codec has the number {codec}"
    assert codec == 0 or kind in ENCODED_KINDS, f"{kind!r} has no codec"
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(_too_large("a header", len(header), MAX_HEADER_BYTES), "size")
    if size > MAX_PAYLOAD_BYTES:
        raise WireError(_too_large("a payload", size, MAX_PAYLOAD_BYTES), "size")
    fields = _FIELDS.pack(_FRAME_MAGIC, WIRE_VERSION, kind, codec, 0, len(header), size)
    return fields + digest(fields, header, *pieces)


def encode_streamed_frame_head(
    kind: FrameKind, header: bytes, size: int, flow: Callable[[Callable[[Buffer], None]], None]
) -> bytes:
    """Encode the head of a frame whose payload is never in memory at once: `flow` produces all of it in pieces."""
    assert len(header) <= MAX_HEADER_BYTES and size <= MAX_PAYLOAD_BYTES, "it would not be read"
    fields = _FIELDS.pack(_FRAME_MAGIC, WIRE_VERSION, kind, 0, 0, len(header), size)
    state = xxh3_128(fields)
    state.update(header)
    flow(lambda piece: state.update(as_bytes(piece)))
    return fields + state.digest()


def digest(*buffers: Buffer) -> bytes:
    """Return the XXH3 digest, 128 bits, of these buffers in order, most significant byte first (as `xxhsum -H2`)."""
    state = xxh3_128()
    for buffer in buffers:
        state.update(as_bytes(buffer))
    return state.digest()


def as_bytes(buffer: Buffer) -> memoryview:
    """Return the memory of a buffer as single bytes, without a copy."""
    if hasattr(buffer, "numpy"):  # a tensor has no buffer protocol, but shares its memory with a numpy array
        buffer = (buffer.detach() if buffer.requires_grad else buffer).numpy()
    view = memoryview(buffer)
    if view.nbytes == 0:
        return memoryview(b"")  # a view with a zero in its shape cannot be cast
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")


class FrameParser:
    """Parse one frame from chunks of any size.

    `accept(head, header)` is called once, after head and header have arrived and their lengths are within the limits.
    It raises `WireError` to refuse the frame, and otherwise returns writable memory of exactly `head.payload_bytes`.
    Before that, no memory is allocated except for the header, as it arrives.

    A body may hold several frames: then `several=True`, and what the last `feed` had beyond the frame is in `rest`.
    Without it, anything after the frame is an error.
    """

    def __init__(self, kind: FrameKind, accept: Accept, *, several: bool = False) -> None:
        self.is_done = False  # the last byte has arrived; `finish` verifies the digest
        self._kind = kind
        self._accept = accept
        self._several = several
        self._gathered = bytearray()  # bytes of the head, then of the header
        self._head: FrameHead | None = None
        self._header: bytes | None = None
        self._payload = memoryview(b"")
        self._filled = 0  # bytes of the payload that have arrived
        self._hash = xxh3_128()
        self._rest = b""
        self._error: WireError | None = None

    @property
    def accepted_bytes(self) -> int:
        """Return the size of the payload; 0 before `accept` has returned memory for it."""
        return self._payload.nbytes

    @property
    def rest(self) -> bytes:
        """Bytes after the frame. Reading them is the caller's consent: `finish` does not refuse them any more."""
        self._several = True
        return self._rest

    def feed(self, data: Buffer) -> None:
        if self._error is not None:
            raise self._error
        try:
            view = as_bytes(data)
            if self._header is None:
                view = self._start(view)
            if view.nbytes and not self.is_done:
                view = self._fill(view)
            if view.nbytes:
                self._store_rest(view)
        except WireError as error:
            self._error = error
            raise

    def finish(self) -> Frame:
        """Return the frame. Raise WireError if bytes are missing, invalid or too many."""
        if self._error is not None:
            raise self._error
        if self._head is None:
            _check_start(bytes(self._gathered[:5]), _FRAME_MAGIC, "a frame")
            raise WireError(
                f"a frame ends in its head, after {len(self._gathered)} of {FRAME_HEAD_BYTES} bytes", "truncated"
            )
        head = self._head
        if self._header is None:
            raise WireError(
                f"a frame ends in its header, after {len(self._gathered)} of {head.header_bytes} bytes", "truncated"
            )
        if not self.is_done:
            raise WireError(
                f"a frame ends in its payload, after {self._filled} of {head.payload_bytes} bytes", "truncated"
            )
        if self._rest and not self._several:
            raise WireError(f"{len(self._rest)} bytes follow after the end of a frame", "trailing")
        if self._hash.digest() != head.digest:
            found = self._hash.hexdigest()
            raise WireError(f"the digest of a frame's bytes is {found}, its head says {head.digest.hex()}", "digest")
        return Frame(head, self._header, self._payload)

    def _start(self, view: memoryview) -> memoryview:
        """Parse head and header, and return the rest of the view, which is payload."""
        if self._head is None:
            view = self._gather(view, FRAME_HEAD_BYTES)
            if len(self._gathered) < FRAME_HEAD_BYTES:
                return view
            self._head = _read_head(bytes(self._gathered), self._kind)
            self._hash.update(self._gathered[: _FIELDS.size])
            self._gathered.clear()
        head = self._head
        view = self._gather(view, head.header_bytes)
        if len(self._gathered) < head.header_bytes:
            return view
        self._header = bytes(self._gathered)
        self._gathered.clear()
        self._hash.update(self._header)
        payload = as_bytes(self._accept(head, self._header))
        if payload.nbytes != head.payload_bytes:
            raise WireError(
                f"the payload of this frame has {head.payload_bytes} bytes, expected {payload.nbytes}", "size"
            )
        assert not payload.readonly or not payload.nbytes, "accept has to return memory that can be written"
        self._payload = payload
        self.is_done = not head.payload_bytes
        return view

    def _gather(self, view: memoryview, size: int) -> memoryview:
        missing = size - len(self._gathered)
        self._gathered += view[:missing]
        return view[missing:]

    def _fill(self, view: memoryview) -> memoryview:
        taken = view[: self._payload.nbytes - self._filled]
        end = self._filled + taken.nbytes
        self._payload[self._filled : end] = taken
        self._hash.update(taken)
        self._filled = end
        self.is_done = end == self._payload.nbytes
        return view[taken.nbytes :]

    def _store_rest(self, view: memoryview) -> None:
        if self._rest or not self._several:
            raise WireError(f"{len(self._rest) + view.nbytes} bytes follow after the end of a frame", "trailing")
        self._rest = bytes(view)


def _read_head(data: bytes, expected: FrameKind) -> FrameHead:
    _check_start(data, _FRAME_MAGIC, "a frame")
    _, _, kind, codec, flags, header_bytes, payload_bytes = _FIELDS.unpack_from(data)
    if flags:
        raise WireError(f"a frame has unknown flags {flags:#04x}; this version of Atoll uses none", "version")
    if kind not in FrameKind.__members__.values():
        raise WireError(f"unknown frame kind {kind}", "kind")
    if kind != expected:
        raise WireError(
            f"a frame of kind {kind} ({FrameKind(kind).name}), expected {expected} ({expected.name})", "kind"
        )
    if codec not in CODEC_NUMBERS.values():
        raise WireError(f"unknown codec number {codec}", "codec")
    if codec and expected not in ENCODED_KINDS:
        raise WireError(f"a frame of kind {kind} ({expected.name}) must have codec 0, got {codec}", "codec")
    if header_bytes > MAX_HEADER_BYTES:
        raise WireError(_too_large("a header", header_bytes, MAX_HEADER_BYTES), "size")
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise WireError(_too_large("a payload", payload_bytes, MAX_PAYLOAD_BYTES), "size")
    return FrameHead(expected, codec, header_bytes, payload_bytes, data[_FIELDS.size :])


def _check_start(head: bytes, magic: bytes, what: str) -> None:
    """Check the available bytes of the magic and the version."""
    start = head[: len(magic)]
    if start != magic[: len(start)]:
        raise WireError(f"{what} begins with {magic!r}, found {start!r}: the peer is not Atoll", "magic")
    if len(head) > len(magic) and head[len(magic)] != WIRE_VERSION:
        raise WireError(
            f"{what} of wire version {head[len(magic)]}, this Atoll speaks {WIRE_VERSION}:"
            " install the same version of Atoll on both sides",
            "version",
        )


def _too_large(what: str, size: int, max_bytes: int) -> str:
    return f"{what} of {size} bytes, the limit is {max_bytes}"


def _abbreviate(raw: Any) -> str:
    try:
        text = repr(raw)
    except RecursionError:
        return "something deeply nested"
    return text if len(text) <= 60 else f"{text[:57]}..."
