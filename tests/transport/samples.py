"""Sample messages and frames, valid and invalid. The golden vectors are made of these."""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

from atoll.core import protocol as p
from atoll.core.codec import Value
from atoll.core.reasons import Reason, because
from atoll.core.types import MergedUpTo, RoundId
from atoll.transport.wire import (
    WIRE_VERSION,
    FragmentHeader,
    FrameKind,
    Sender,
    SliceHeader,
    WireErrorCode,
    digest,
    encode_frame_head,
    encode_header,
    encode_message,
)

ROUND = RoundId(fragment=2, base=11, epoch=3, attempt=1)
MARK = MergedUpTo(incarnation=1, base=10, copied_at=480, trained=1_966_080, dropped=0, consumed_samples=3840)


class SampleMessage(NamedTuple):
    name: str
    sender: Sender
    envelope: p.Envelope


def _make_sample(sender: Sender, body: p.Body, name: str = "") -> SampleMessage:
    # A learner does not know the epoch before its welcome. Ticks of syncer and learner are independent.
    epoch, tick, seen = (0 if isinstance(body, p.Hello) else 3, 517, 902) if sender == "learner" else (3, 902, 517)
    envelope = p.Envelope(4, 1, 2, epoch, tick, seen, 0, body)
    return SampleMessage(name or f"{sender}: {type(body).__name__}", sender, envelope)


MESSAGES: tuple[SampleMessage, ...] = (
    _make_sample(
        "learner", p.Hello("run", ("head 256x64 float32 weight", "plan balanced 3"), (-1, -1, -1), 0, 0, False)
    ),
    _make_sample("learner", p.Report(504, 2_064_384, 0.125, 4032)),
    _make_sample("learner", p.Report(505, 2_068_480, 2), "learner: Report, an integer in a field of fractions"),
    _make_sample("learner", p.Report(506, 2**63 - 1, float("nan")), "learner: Report, the largest integer and NaN"),
    _make_sample("learner", p.Contribution(ROUND, 504, 24, 98_304, 2_064_384, 0, None, 4032)),
    _make_sample(
        "learner",
        p.Contribution(ROUND, 504, 24, 98_304, 2_064_384, 4096, "not finite"),
        "learner: Contribution with a problem",
    ),
    _make_sample("learner", p.PublishAck(2, 12)),
    _make_sample("learner", p.Resync(2, 9)),
    _make_sample("learner", p.SnapshotPart(1, 504, 2_064_384, (12, 12, 11), (ROUND,))),
    _make_sample(
        "learner",
        p.SnapshotPart(1, 504, 2_064_384, (12, 12, 11), (), "No space left on device"),
        "learner: failed part",
    ),
    _make_sample("learner", p.StateRequest((2, 3))),
    _make_sample("learner", p.OptimizerState(4, 5, 1, 504, (12, 12, 11))),
    _make_sample("learner", p.Ready(because("state-from-peer", 2))),
    _make_sample("learner", p.Left("Ctrl-C")),
    _make_sample("learner", p.Left("größer als 2³¹ 🌊"), "learner: Left, with characters beyond ASCII"),
    _make_sample("learner", p.DrainRequest(504, 2_064_384, (0, 2))),
    _make_sample("learner", p.LeaseRequest(8, 4032)),
    _make_sample("learner", p.PausedAck(2, False)),
    _make_sample("learner", p.DownloadTime(2.5)),
    _make_sample("learner", p.FinishAck(72)),
    _make_sample("learner", p.Ping(8)),
    _make_sample("syncer", p.Welcome((12, 12, 11), 0.25, 0.125)),
    _make_sample("syncer", p.Refuse(because("refused-fingerprint", "head 256x64 float32 weight"), 1, True)),
    _make_sample("syncer", p.Pull(ROUND)),
    _make_sample("syncer", p.RefuseContribution(ROUND, because("contribution-late"))),
    _make_sample("syncer", p.Published(2, 12, 11, MARK, 0.25)),
    _make_sample("syncer", p.Published(2, 12, None, None, 0.25), "syncer: Published, the whole value"),
    _make_sample("syncer", p.Marker(1)),
    _make_sample("syncer", p.ProvideState(5, 1, (12, 12, 11))),
    _make_sample("syncer", p.OptimizerState(2, 4, 1, 498, (12, 12, 11))),
    _make_sample("syncer", p.PeerChosen(2)),
    _make_sample("syncer", p.NoPeer(Reason("a-sentence-of-a-later-version", (1, 0.5, None, True, "text")), False)),
    _make_sample("syncer", p.Lease(8, 12_288, 13_056)),
    _make_sample("syncer", p.SetPaused(1, True)),
    _make_sample("syncer", p.Drain("drained by ada@desk")),
    _make_sample("syncer", p.Finish((13, 13, 12), 72)),
    _make_sample("syncer", p.Pong(8)),
)


class BadMessage(NamedTuple):
    name: str
    sender: Sender
    data: bytes
    code: WireErrorCode


def _encode_sample(name: str) -> bytes:
    return next(encode_message(message.envelope) for message in MESSAGES if message.name == name)


def _make_text(text: str) -> bytes:
    return b"ATLL" + bytes([WIRE_VERSION]) + text.encode("utf-8")


_PING = encode_message(p.Envelope(4, 1, 2, 3, 517, 902, 0, p.Ping(8)))

BAD_MESSAGES: tuple[BadMessage, ...] = (
    BadMessage("no bytes", "learner", b"", "truncated"),
    BadMessage("only the magic", "learner", _PING[:4], "truncated"),
    BadMessage("half of the magic and other bytes", "learner", b"AT{}", "magic"),
    BadMessage("a frame instead of a message", "learner", b"ATLF" + _PING[4:], "magic"),
    BadMessage("an earlier version", "learner", b"ATLL\x01" + _PING[5:], "version"),
    BadMessage("the previous version", "learner", b"ATLL\x03" + _PING[5:], "version"),
    BadMessage("a later version", "learner", b"ATLL\x05" + _PING[5:], "version"),
    BadMessage("no JSON", "learner", _PING[:5], "json"),
    BadMessage("half of the JSON", "learner", _PING[:-3], "json"),
    BadMessage("two JSON values", "learner", _PING + _PING[5:], "json"),
    BadMessage("not UTF-8", "learner", _PING[:5] + b"\xff" + _PING[5:], "json"),
    BadMessage("NaN as a literal", "learner", _make_text('["Envelope",4,1,2,3,517,902,0,["Report",1,1,NaN]]'), "json"),
    BadMessage(
        "a number of 65 bits", "learner", _make_text(f'["Envelope",4,1,2,3,517,902,0,["Ping",{2**63}]]'), "json"
    ),
    BadMessage(
        "half of a surrogate pair", "learner", _make_text('["Envelope",4,1,2,3,517,902,0,["Left","\\ud83c"]]'), "json"
    ),
    BadMessage("nested deeply", "learner", _make_text("[" * 3000 + "]" * 3000), "json"),
    BadMessage("a body without its envelope", "learner", _make_text('["Ping",8]'), "type"),
    BadMessage("an unknown body", "learner", _make_text('["Envelope",4,1,2,3,517,902,0,["Sing",8]]'), "type"),
    BadMessage("an extra field", "learner", _make_text('["Envelope",4,1,2,3,517,902,0,["Ping",8,9]]'), "type"),
    BadMessage("a field of another type", "learner", _make_text('["Envelope",4,1,2,3,517,902,0,["Ping","8"]]'), "type"),
    BadMessage(
        "true instead of a number", "learner", _make_text('["Envelope",4,1,2,3,517,902,0,["Ping",true]]'), "type"
    ),
    BadMessage(
        "a fraction instead of an integer", "learner", _make_text('["Envelope",4,1,2,3,517,902,0,["Ping",8.0]]'), "type"
    ),
    BadMessage("a learner does not pull", "learner", _encode_sample("syncer: Pull"), "type"),
    BadMessage("a syncer does not ping", "syncer", _PING, "type"),
)


class SampleFrame(NamedTuple):
    """A valid frame."""

    name: str
    kind: FrameKind
    codec: int
    header: bytes
    payload: bytes

    def data(self) -> bytes:
        return encode_frame_head(self.kind, self.codec, self.header, self.payload) + self.header + self.payload


_VALUES = struct.pack("<5f", 0.0, 1.0, -2.5, 3.0e-3, -1.0e6)
_PLAN = b'{"how":"balanced","tensors":[["head",[2,2],"float32","weight",""]],"fragments":[[[0,0,2]]]}'


def _fragment(base: int | None, begin: int, of: int) -> bytes:
    return FragmentHeader(2, 12, base, digest(_VALUES).hex(), begin, of).encode()


FRAMES: tuple[SampleFrame, ...] = (
    SampleFrame(
        "a delta as bf16", FrameKind.CONTRIBUTION, 1, _encode_sample("learner: Contribution"), bytes.fromhex("803f00c0")
    ),
    SampleFrame("the end of an update as bf16", FrameKind.FRAGMENT, 1, _fragment(11, 4, 14), b"\1\2" * 5),
    SampleFrame("a full value", FrameKind.FRAGMENT, 0, _fragment(None, 0, len(_VALUES)), _VALUES),
    SampleFrame(
        "a slice of a delta", FrameKind.SLICE, 0, SliceHeader(4, 2, 3, RoundId(2, 11, 1, 1), 4, 10).encode(), b"\1\2\3"
    ),
    SampleFrame(
        "optimizer state",
        FrameKind.OPTIMIZER_STATE,
        0,
        _encode_sample("learner: OptimizerState"),
        b"safetensors would be here",
    ),
    SampleFrame("the plan of a new model", FrameKind.MODEL, 0, b"{}", _PLAN),
    SampleFrame("values of a new model", FrameKind.MODEL, 0, encode_header({"fragment": 2}), _VALUES),
    SampleFrame("no header and no payload", FrameKind.MODEL, 0, b"", b""),
)


class BadFrame(NamedTuple):
    """An invalid frame. `room` is the payload size that the receiver expects and has allocated."""

    name: str
    kind: FrameKind
    room: int
    data: bytes
    code: WireErrorCode


def _forge(frame: SampleFrame, **fields: Any) -> bytes:
    """Encode the frame with other fields in its head, and a valid digest."""
    head: dict[str, Any] = {"magic": b"ATLF", "version": 4, "kind": int(frame.kind), "codec": frame.codec, "flags": 0}
    head |= {"header_bytes": len(frame.header), "payload_bytes": len(frame.payload)} | fields
    packed = struct.pack("<4sBBBBIQ", *head.values())
    return packed + digest(packed, frame.header, frame.payload) + frame.header + frame.payload


def _bad(name: str, frame: SampleFrame, data: bytes, code: WireErrorCode) -> BadFrame:
    return BadFrame(name, frame.kind, len(frame.payload), data, code)


_DELTA, _WHOLE, _SLICE = FRAMES[0], FRAMES[2], FRAMES[3]
_GOOD = _DELTA.data()
_HEADER_END = 36 + len(_DELTA.header)

BAD_FRAMES: tuple[BadFrame, ...] = (
    _bad("no bytes", _DELTA, b"", "truncated"),
    _bad("half a head", _DELTA, _GOOD[:20], "truncated"),
    _bad("half a header", _DELTA, _GOOD[: _HEADER_END - 1], "truncated"),
    _bad("no payload", _DELTA, _GOOD[:_HEADER_END], "truncated"),
    _bad("half a payload", _DELTA, _GOOD[:-1], "truncated"),
    _bad("another magic", _DELTA, _forge(_DELTA, magic=b"ATLL"), "magic"),
    _bad("some JSON", _DELTA, b'{"learner":4}', "magic"),
    _bad("a later version", _DELTA, _forge(_DELTA, version=5), "version"),
    _bad("an unknown flag", _DELTA, _forge(_DELTA, flags=1), "version"),
    _bad("an unknown kind", _DELTA, _forge(_DELTA, kind=9), "kind"),
    _bad("another kind than expected", _DELTA, _WHOLE.data(), "kind"),
    _bad("an unknown codec", _DELTA, _forge(_DELTA, codec=4), "codec"),
    _bad("a slice with a codec", _SLICE, _forge(_SLICE, codec=1), "codec"),
    _bad("a header of 1 MiB and 1 byte", _DELTA, _forge(_DELTA, header_bytes=2**20 + 1), "size"),
    _bad("a payload of 16 EiB", _DELTA, _forge(_DELTA, payload_bytes=2**64 - 1), "size"),
    _bad("a payload that is larger than expected", _DELTA, _forge(_DELTA, payload_bytes=6), "size"),
    _bad("a payload that is smaller than expected", _DELTA, _forge(_DELTA, payload_bytes=2), "size"),
    _bad("an extra byte", _DELTA, _GOOD + b"\0", "trailing"),
    _bad("a changed byte in the head", _DELTA, _GOOD[:6] + b"\2" + _GOOD[7:], "digest"),
    _bad("a changed byte in the header", _DELTA, _GOOD[:50] + b"?" + _GOOD[51:], "digest"),
    _bad("a changed byte in the payload", _DELTA, _GOOD[:-1] + b"\xc1", "digest"),
    _bad("a changed byte in the digest", _DELTA, _GOOD[:20] + bytes([_GOOD[20] ^ 1]) + _GOOD[21:], "digest"),
)


def to_readable_json(value: Any) -> Any:
    """Convert a message to JSON with named fields, and with types if the position does not imply them."""
    if isinstance(value, Value):
        fields = {name: to_readable_json(getattr(value, name)) for name in value.__struct_fields__}
        return {"type": type(value).__name__} | fields if isinstance(value, p.Body) else fields
    if isinstance(value, tuple):
        return [to_readable_json(each) for each in value]
    if isinstance(value, float) and value != value:
        return "nan"
    return value


def as_text(rows: list[dict[str, Any]]) -> str:
    """Write one row per line, so that diffs are easy to read."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return f"[\n{lines}\n]\n"
