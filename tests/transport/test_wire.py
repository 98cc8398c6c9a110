"""Round trips of messages and frames. Any other bytes raise WireError and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from atoll.core.protocol import Envelope, LearnerBody, Left, SyncerBody
from atoll.core.types import RoundId
from atoll.tape import format
from atoll.tensors.codecs import CODECS
from atoll.transport import wire
from atoll.transport.wire import (
    FRAME_HEAD_BYTES,
    MAX_HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    FragmentHeader,
    Frame,
    FrameHead,
    FrameKind,
    FrameParser,
    Sender,
    SliceHeader,
    WireError,
    as_bytes,
    decode_header,
    decode_message,
    digest,
    encode_frame_head,
    encode_header,
    encode_message,
    parse_json,
)
from tests.transport.samples import BAD_FRAMES, BAD_MESSAGES, FRAMES, MESSAGES, SampleFrame

SIDES = {"learner": LearnerBody, "syncer": SyncerBody}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBER = st.integers(-(2**63), 2**63 - 1)


def make_values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of an annotated type."""
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: NUMBER,
        float: st.floats(allow_nan=False) | NUMBER,
        str: TEXT,
        bool: st.booleans(),
        NoneType: st.none(),
        object: st.none() | st.booleans() | NUMBER | st.floats(allow_nan=False) | TEXT,
    }
    if hint in plain:
        return plain[hint]
    args = get_args(hint)
    if get_origin(hint) is UnionType:
        return st.one_of([make_values(arg) for arg in args])
    if get_origin(hint) is tuple:
        assert args[1:] == (...,)
        return st.lists(make_values(args[0]), max_size=4).map(tuple)
    hints = get_type_hints(hint)
    return st.builds(hint, **{name: make_values(hints[name]) for name in hint.__struct_fields__})


ENVELOPES = {
    side: st.builds(Envelope, *[NUMBER] * 7, st.one_of([make_values(body) for body in get_args(bodies)]))
    for side, bodies in SIDES.items()
}


@contextmanager
def refused(code: str) -> Iterator[None]:
    with pytest.raises(WireError) as caught:
        yield
    assert caught.value.code == code
    assert str(caught.value)
    assert len(str(caught.value)) < 500  # a peer must not fill our log


class Memory:
    """Accept every frame up to a size, and count the calls."""

    def __init__(self, max_bytes: int = 2**20) -> None:
        self.max_bytes = max_bytes
        self.heads: list[FrameHead] = []

    def __call__(self, head: FrameHead, header: bytes) -> bytearray:
        self.heads.append(head)
        if head.payload_bytes > self.max_bytes:
            raise WireError(f"{head.payload_bytes} bytes, the limit is {self.max_bytes}", "size")
        return bytearray(head.payload_bytes)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    positions = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(positions)]


def parse(data: bytes, kind: FrameKind, cuts: list[int] | None = None) -> Frame:
    parser = FrameParser(kind, Memory())
    for piece in split(data, cuts or []):
        parser.feed(piece)
    return parser.finish()


# --------------------------------------------------------------------------------------------------------------------
# Messages


@pytest.mark.parametrize("side", SIDES)
@given(data=st.data())
def test_message_round_trip(side, data):
    envelope = data.draw(ENVELOPES[side])
    arrived = decode_message(encode_message(envelope), side)
    assert format.encode(arrived) == format.encode(envelope)  # NaN is not equal to itself


def test_message_encoding_matches_tape():
    for message in MESSAGES:
        assert encode_message(message.envelope)[5:].decode() == format.encode(message.envelope)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.name)
def test_message_of_other_side_is_refused(message):
    other: Sender = "syncer" if message.sender == "learner" else "learner"
    data = encode_message(message.envelope)
    if type(message.envelope.body) in get_args(SIDES[other]):
        assert type(message.envelope.body).__name__ == "OptimizerState"  # the syncer forwards it
        decode_message(data, other)
    else:
        with refused("type"):
            decode_message(data, other)


@pytest.mark.parametrize("bad", BAD_MESSAGES, ids=lambda bad: bad.name)
def test_bad_message_is_refused_with_code(bad):
    with refused(bad.code):
        decode_message(bad.data, bad.sender)


def test_message_size_is_checked_first():
    empty = Envelope(1, 1, 1, 1, 1, 1, 0, Left(""))
    fits = structs.replace(empty, body=Left("x" * (MAX_MESSAGE_BYTES - len(encode_message(empty)))))
    over = structs.replace(fits, body=Left("x" * MAX_MESSAGE_BYTES))
    assert len(encode_message(fits)) == MAX_MESSAGE_BYTES
    assert decode_message(encode_message(fits), "learner") == fits
    with refused("size"):
        encode_message(over)
    with refused("size"):
        decode_message(bytes(MAX_MESSAGE_BYTES + 1), "learner")  # its magic is invalid too


def test_unreadable_message_is_not_encoded():
    with refused("json"):
        encode_message(Envelope(1, 1, 1, 1, 1, 1, 0, Left("half \ud83c")))
    with refused("type"):
        encode_message(Envelope(1, 1, 1, 1, 1, 1, 0, RoundId(1, 1, 1, 1)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 900 + "]" * 900,
        '["Envelope",1,1,1,1,1,1,0,' + "[" * 900 + "]" * 901,
        '["Envelope",1,1,1,1,1,1,0,["Report",1,1,{"float":[]}]]',
        '["Envelope",1,1,1,1,1,1,0,["Report",1,1,' + '{"float":' * 400 + "1" + "}" * 400 + "]]",
    ],
)
def test_deep_nesting_is_refused_at_every_depth_of_the_stack(text):
    """The JSON parser and the error message each have a recursion limit."""

    def at_depth(depth: int) -> None:
        if depth:
            at_depth(depth - 1)
        else:
            with pytest.raises(WireError):
                decode_message(b"ATLL\x04" + text.encode(), "learner")

    for depth in range(0, 300, 10):
        at_depth(depth)


@pytest.mark.parametrize("filling", ["[],", '"",', "{},", "0,", '"\\u00e4",', "1e5,"])
def test_memory_for_a_message_is_bounded(filling):
    inner = filling * ((MAX_MESSAGE_BYTES // 8) // len(filling))
    data = b'ATLL\x04["Envelope",1,1,1,1,1,1,0,[' + inner.encode() + b"0]]"
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode_message(data, "learner")
        assert tracemalloc.get_traced_memory()[1] < 60 * len(data)
    finally:
        tracemalloc.stop()


@given(data=st.binary(max_size=200), side=st.sampled_from(["learner", "syncer"]))
def test_any_bytes_are_parsed_or_refused(data, side):
    for start in (b"", b"ATLL\x04", b'ATLL\x04["Envelope",'):
        with suppress(WireError):
            decode_message(start + data, side)


JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | st.floats() | TEXT | st.sampled_from(["Envelope", "Hello", "Ping", "RoundId"]),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(TEXT | st.just("float"), inner, max_size=2),
    max_leaves=30,
)


@given(raw=JSON, side=st.sampled_from(["learner", "syncer"]))
def test_any_json_is_parsed_or_refused(raw, side):
    for value in (raw, ["Envelope", 1, 1, 1, 1, 1, 1, 0, raw]):
        with suppress(WireError):
            decode_message(b"ATLL\x04" + json.dumps(value).encode(), side)


@given(message=st.sampled_from(MESSAGES), at=st.integers(0), new=st.binary(max_size=3), drop=st.integers(0, 3))
def test_changed_message_is_parsed_or_refused(message, at, new, drop):
    data = encode_message(message.envelope)
    at %= len(data) + 1
    with suppress(WireError):
        decode_message(data[:at] + new + data[at + drop :], message.sender)


# --------------------------------------------------------------------------------------------------------------------
# JSON and headers


@pytest.mark.parametrize(
    "text", ["NaN", "-Infinity", "[1e400", "9223372036854775808", "-" + "9" * 5000, '"\\udc00"', ""]
)
def test_non_portable_json_is_refused(text):
    with refused("json"):
        parse_json(text.encode())


@pytest.mark.parametrize("text", ["9223372036854775807", "-9223372036854775808", '"\\ud83c\\udf0a"', '"🌊"', "1.5"])
def test_portable_json_is_parsed(text):
    assert parse_json(text.encode()) == json.loads(text)


def test_header_has_exactly_its_fields():
    fields: dict[str, type | tuple[type, ...]] = {"fragment": int, "base": (int, type(None))}
    assert decode_header(b'{"fragment":7,"base":null}', fields) == {"fragment": 7, "base": None}
    for text in ("[]", "{}", '{"fragment":7}', '{"fragment":7,"base":1,"more":1}', '{"fragment":true,"base":1}'):
        with refused("type"):
            decode_header(text.encode(), fields)
    with refused("size"):
        decode_header(b" " * (MAX_HEADER_BYTES + 1), fields)
    with refused("size"):
        encode_header({"text": "x" * MAX_HEADER_BYTES})


def test_fragment_header_round_trip():
    for base in (11, None):
        header = FragmentHeader(2, 12, base, "0123456789abcdef" * 2, 4, 20)
        assert FragmentHeader.decode(header.encode()) == header
    for text in ("0" * 31, "0" * 33, "0" * 31 + "G", "0" * 31 + "A"):
        with refused("type"):
            FragmentHeader.decode(FragmentHeader(2, 12, None, text, 0, 4).encode())
    for begin, of in ((-1, 4), (5, 4), (0, MAX_PAYLOAD_BYTES + 1)):
        with refused("size"):
            FragmentHeader.decode(FragmentHeader(2, 12, None, "0" * 32, begin, of).encode())


def test_slice_header_round_trip():
    header = SliceHeader(4, 2, 3, RoundId(7, 11, 1, 2), 4, 20)
    assert SliceHeader.decode(header.encode()) == header
    for numbers in ([], [1, 2, 3], [1, 2, 3, True], [1, 2, 3, "4"], [1, 2, 3, 4, 5]):
        with refused("type"):
            SliceHeader.decode(encode_header(header._asdict() | {"round": numbers}))
    with refused("size"):
        SliceHeader.decode(header._replace(begin=21).encode())


# --------------------------------------------------------------------------------------------------------------------
# Frames


@given(
    kind=st.sampled_from(FrameKind),
    codec=st.integers(0, 3),
    header=st.binary(max_size=60),
    payload=st.binary(max_size=300),
    cuts=st.lists(st.integers(0), max_size=12),
)
def test_frame_round_trip_with_any_chunks(kind, codec, header, payload, cuts):
    frame = SampleFrame("", kind, codec if kind in wire.ENCODED_KINDS else 0, header, payload)
    arrived = parse(frame.data(), kind, cuts)
    assert arrived.head[:4] == (kind, frame.codec, len(header), len(payload))
    assert (arrived.header, bytes(arrived.payload)) == (header, payload)


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame.name)
def test_changed_byte_or_length_of_frame_is_refused(frame):
    data = frame.data()
    for place in range(len(data)):
        for bit in (0, 3, 7):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            with pytest.raises(WireError):
                parse(bytes(changed), frame.kind)
        with refused("truncated"):
            parse(data[:place], frame.kind)
    with refused("trailing"):
        parse(data + b"x", frame.kind)
    with refused("trailing"):
        parse(data + b"x", frame.kind, [len(data)])
    assert parse(data, frame.kind, list(range(len(data)))).header == frame.header


@given(
    frame=st.sampled_from(FRAMES),
    edits=st.lists(st.tuples(st.integers(0), st.binary(max_size=8), st.integers(0, 8)), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0), max_size=5),
)
@example(FRAMES[0], [(12, b"\xff" * 8, 8)], [])  # the length of the payload
def test_changed_frame_is_refused_or_identical(frame, edits, cuts):
    data = frame.data()
    for at, new, drop in edits:
        at %= len(data) + 1
        data = data[:at] + new + data[at + drop :]
    if data == frame.data():
        assert parse(data, frame.kind, cuts).header == frame.header
    else:
        with pytest.raises(WireError):
            parse(data, frame.kind, cuts)


@given(data=st.binary(max_size=200), kind=st.sampled_from(FrameKind), cuts=st.lists(st.integers(0), max_size=5))
def test_any_bytes_are_refused_as_a_frame(data, kind, cuts):
    for start in (b"", b"ATLF\x04", b"ATLF\x04" + bytes([kind]) + bytes(6)):
        with pytest.raises(WireError):
            parse(start + data, kind, cuts)


@pytest.mark.parametrize("bad", BAD_FRAMES, ids=lambda bad: bad.name)
def test_bad_frame_is_refused_with_any_chunks(bad):
    for cuts in ([], [36], [len(bad.data) // 2], list(range(len(bad.data)))):
        parser = FrameParser(bad.kind, lambda head, header: bytearray(bad.room))
        with refused(bad.code):
            for piece in split(bad.data, cuts):
                parser.feed(piece)
            parser.finish()


def test_parser_allocates_nothing_before_accept():
    """The head announces half a TiB. `accept` checks that first, and memory for a header grows as it arrives."""
    head = bytearray(encode_frame_head(FrameKind.MODEL, 0, b"h" * MAX_HEADER_BYTES, b""))
    head[12:20] = (2**39).to_bytes(8, "little")
    memory = Memory()
    tracemalloc.start()
    try:
        parser = FrameParser(FrameKind.MODEL, memory)
        parser.feed(head)
        parser.feed(b"h" * 1000)
        assert tracemalloc.get_traced_memory()[1] < 50_000
        assert memory.heads == []
        with refused("size"):
            parser.feed(b"h" * MAX_HEADER_BYTES)
        assert [head.payload_bytes for head in memory.heads] == [2**39]
        assert tracemalloc.get_traced_memory()[1] < 5 * MAX_HEADER_BYTES
    finally:
        tracemalloc.stop()


def test_invalid_head_is_refused_before_accept():
    memory = Memory()
    for bad in BAD_FRAMES:
        if bad.code in ("magic", "version", "kind", "codec"):
            parser = FrameParser(bad.kind, memory)
            with refused(bad.code):
                parser.feed(bad.data)
                parser.finish()
    assert memory.heads == []


def test_refused_frame_stays_refused():
    def accept(head: FrameHead, header: bytes) -> bytearray:
        raise WireError("not today", "type")

    parser = FrameParser(FRAMES[0].kind, accept)
    with refused("type"):
        parser.feed(FRAMES[0].data())
    with refused("type"):
        parser.feed(b"")
    with refused("type"):
        parser.finish()


def test_body_with_several_frames_is_parsed():
    sent = [frame for frame in FRAMES if frame.kind is FrameKind.MODEL]
    body = b"".join(frame.data() for frame in sent)
    for size in (1, 7, 40, len(body)):
        arrived: list[Frame] = []
        parser = FrameParser(FrameKind.MODEL, Memory(), several=True)
        for piece in split(body, list(range(0, len(body), size))):
            parser.feed(piece)
            while parser.is_done:
                arrived.append(parser.finish())
                rest = parser.rest
                parser = FrameParser(FrameKind.MODEL, Memory(), several=True)
                parser.feed(rest)
        assert [(f.header, bytes(f.payload)) for f in arrived] == [(f.header, f.payload) for f in sent]


def test_reading_rest_accepts_trailing_bytes():
    parser = FrameParser(FRAMES[0].kind, Memory(), several=True)
    parser.feed(FRAMES[0].data() + b"next")
    assert parser.is_done
    assert parser.rest == b"next"
    parser.finish()
    with refused("trailing"):
        parser.feed(b"more")  # `finish` must be called first


def test_payload_is_tensor_array_or_bytes_without_copy():
    values = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    raw = values.numpy().tobytes()
    for payload in (
        values,
        values.numpy(),
        raw,
        bytearray(raw),
        memoryview(raw),
        [raw[:5], raw[5:]],
        (values[0], raw[12:]),
    ):
        assert encode_frame_head(FrameKind.MODEL, 0, b"{}", payload) == encode_frame_head(
            FrameKind.MODEL, 0, b"{}", raw
        )
    room = torch.empty(24, dtype=torch.uint8)
    parser = FrameParser(FrameKind.MODEL, lambda head, header: room)
    parser.feed(encode_frame_head(FrameKind.MODEL, 0, b"{}", values) + b"{}")
    parser.feed(np.frombuffer(raw, dtype=np.float32))
    parser.finish()
    assert torch.equal(room.view(torch.float32).reshape(2, 3), values)
    assert as_bytes(torch.empty(0)).nbytes == 0
    assert as_bytes(torch.tensor(1.0)).nbytes == 4
    with pytest.raises(TypeError):
        as_bytes(np.zeros((4, 4))[:, 1])  # not contiguous: it would be copied


def test_too_large_frame_is_not_encoded():
    with refused("size"):
        encode_frame_head(FrameKind.MODEL, 0, bytes(MAX_HEADER_BYTES + 1), b"")


def test_frame_head_matches_table():
    header, payload = b'{"fragment":2}', b"\1\2\3\4"
    fields = b"ATLF" + bytes([4, 4, 0, 0]) + (14).to_bytes(4, "little") + (4).to_bytes(8, "little")
    head = encode_frame_head(FrameKind.MODEL, 0, header, payload)
    assert head == fields + digest(fields + header + payload)
    assert len(head) == FRAME_HEAD_BYTES == 36


def test_codec_numbers_are_stable():
    assert {codec.name: codec.wire_id for codec in CODECS} == wire.CODEC_NUMBERS


def test_only_message_types_are_decoded():
    """Records and events are valid on a tape, but not in a message."""
    with refused("type"):
        decode_message(b'ATLL\x04["Envelope",1,1,1,1,1,1,0,["ManifestRecord",[],1,1]]', "syncer")


def test_wire_needs_no_torch():
    code = "import sys, atoll.transport.wire; sys.exit('torch' in sys.modules or 'aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
