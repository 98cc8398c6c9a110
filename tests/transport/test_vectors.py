"""Golden bytes: encoding gives the bytes of the vectors, and decoding them gives the stored meaning."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from atoll.core.protocol import LearnerBody, SyncerBody
from atoll.tensors.codecs import CODECS
from atoll.tensors.plan import FragmentPlan
from atoll.transport.wire import (
    Frame,
    FrameHead,
    FrameKind,
    FrameParser,
    WireError,
    WireErrorCode,
    decode_message,
    digest,
    encode_message,
)
from tests.transport.samples import BAD_FRAMES, BAD_MESSAGES, FRAMES, MESSAGES, as_text, to_readable_json

FOLDER = Path(__file__).parent / "vectors"

Row = dict[str, Any]

# The last block of int8 and of int4 is short, and the values of the first block differ by orders of magnitude.
VALUES = [0.0, -0.0, 1.0, -1.0, 0.1, 1e-3, -3.0e-5, 1.0e-40, 127.0, -128.5, 1.00390625, 65504.0] + [
    (i - 150) / 64 for i in range(300)
]


def rows_of_messages() -> list[Row]:
    return [
        {
            "name": m.name,
            "sender": m.sender,
            "hex": encode_message(m.envelope).hex(),
            "means": to_readable_json(m.envelope),
        }
        for m in MESSAGES
    ]


def rows_of_bad_messages() -> list[Row]:
    return [{"name": m.name, "sender": m.sender, "hex": m.data.hex(), "error": m.code} for m in BAD_MESSAGES]


def rows_of_frames() -> list[Row]:
    return [
        {
            "name": frame.name,
            "hex": frame.data().hex(),
            "means": {
                "kind": int(frame.kind),
                "codec": frame.codec,
                "header": frame.header.decode("latin-1"),
                "payload_hex": frame.payload.hex(),
            },
        }
        for frame in FRAMES
    ]


def rows_of_bad_frames() -> list[Row]:
    return [
        {"name": f.name, "expected_kind": int(f.kind), "room_bytes": f.room, "hex": f.data.hex(), "error": f.code}
        for f in BAD_FRAMES
    ]


def rows_of_codecs() -> list[Row]:
    rows = []
    for codec in CODECS:
        values = torch.tensor(VALUES)
        data = codec.encode(values)
        rows.append(
            {
                "name": codec.name,
                "number": codec.wire_id,
                "f32_hex": as_hex(values),
                "hex": as_hex(data),
                "decoded_f32_hex": as_hex(codec.decode(data, len(VALUES))),
            }
        )
    return rows


def rows_of_digests() -> list[Row]:
    samples = [b"", b"a", b"ATOLL", bytes(range(256)), struct.pack("<3f", 1.0, -2.0, 0.5)]
    return [{"hex": sample.hex(), "digest": digest(sample).hex()} for sample in samples]


FILES: dict[str, Callable[[], list[Row]]] = {
    "messages.json": rows_of_messages,
    "bad_messages.json": rows_of_bad_messages,
    "frames.json": rows_of_frames,
    "bad_frames.json": rows_of_bad_frames,
    "codecs.json": rows_of_codecs,
    "digests.json": rows_of_digests,
}


def as_hex(tensor: torch.Tensor) -> str:
    return tensor.numpy().tobytes().hex()


def read(name: str) -> list[Row]:
    rows: list[Row] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return rows


@pytest.mark.parametrize("name", FILES)
def test_encoding_matches_vectors(name: str, pytestconfig: pytest.Config) -> None:
    text = as_text(FILES[name]())
    path = FOLDER / name
    if pytestconfig.getoption("--rewrite-vectors"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, (
        f"the encoding differs from {name}, which other programs rely on. If this is intended, raise"
        " WIRE_VERSION and run `pytest tests/transport/test_vectors.py --rewrite-vectors`"
    )


def test_vector_folder_has_no_other_files():
    assert {path.name for path in FOLDER.iterdir()} == set(FILES)


# --------------------------------------------------------------------------------------------------------------------
# The tests below use only the vector files, like a program in another language


def parse_frame(data: bytes, kind: int, room: int) -> Frame:
    memory = bytearray(room)

    def accept(head: FrameHead, header: bytes) -> bytearray:
        return memory

    parser = FrameParser(FrameKind(kind), accept)
    parser.feed(data)
    return parser.finish()


def test_decoded_messages_match_vectors():
    for row in read("messages.json"):
        assert to_readable_json(decode_message(bytes.fromhex(row["hex"]), row["sender"])) == row["means"], row["name"]


def test_bad_message_vectors_are_refused_with_their_code():
    for row in read("bad_messages.json"):
        with pytest.raises(WireError) as caught:
            decode_message(bytes.fromhex(row["hex"]), row["sender"])
        assert caught.value.code == row["error"], row["name"]


def test_decoded_frames_match_vectors():
    for row in read("frames.json"):
        means = row["means"]
        payload = bytes.fromhex(means["payload_hex"])
        frame = parse_frame(bytes.fromhex(row["hex"]), means["kind"], len(payload))
        assert (int(frame.head.kind), frame.head.codec) == (means["kind"], means["codec"])
        assert (frame.header.decode("latin-1"), bytes(frame.payload)) == (means["header"], payload)


def test_bad_frame_vectors_are_refused_with_their_code():
    for row in read("bad_frames.json"):
        with pytest.raises(WireError) as caught:
            parse_frame(bytes.fromhex(row["hex"]), row["expected_kind"], row["room_bytes"])
        assert caught.value.code == row["error"], row["name"]


def test_plan_in_model_vector_is_valid():
    plans = [row["means"] for row in read("frames.json") if row["name"] == "the plan of a new model"]
    raw = json.loads(bytes.fromhex(plans[0]["payload_hex"]))
    assert FragmentPlan.from_json(raw).to_json() == raw


def test_decoded_codecs_match_vectors():
    for row, codec in zip(read("codecs.json"), CODECS, strict=True):
        data = torch.frombuffer(bytearray.fromhex(row["hex"]), dtype=torch.uint8)
        numel = len(row["f32_hex"]) // 8
        assert (row["name"], row["number"]) == (codec.name, codec.wire_id)
        assert as_hex(codec.decode(data, numel)) == row["decoded_f32_hex"]


# A second implementation, written only from the tables in docs/wire.md.


def decode_bf16(data: bytes) -> Any:
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")


def encode_bf16(values: Any) -> bytes:
    bits = values.astype("<f4").view("<u4").astype(np.uint64)
    return bytes(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").view("u1"))


def apply_scales(integers: Any, scales: Any, block: int) -> Any:
    return integers.astype("<f4") * np.repeat(scales, block)[: integers.size]


def reference_decode(name: str, data: bytes, n: int) -> Any:
    if name == "f32":
        return np.frombuffer(data, "<f4")
    if name == "bf16":
        return decode_bf16(data)
    if name == "int8":
        first = 4 * math.ceil(n / 256)
        return apply_scales(np.frombuffer(data, "i1", offset=first), np.frombuffer(data, "<f4", first // 4), 256)
    first = 2 * math.ceil(n / 64)
    pairs = np.frombuffer(data, "u1", offset=first)
    halves = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[:n]
    return apply_scales(halves.astype("i1") - 8, decode_bf16(data[:first]), 64)


def reference_encode(name: str, values: Any) -> bytes:
    if name == "f32":
        return bytes(values.view("u1"))
    if name == "bf16":
        return encode_bf16(values)
    block, levels, m = {"int8": (256, 127, 2.0**-22), "int4": (64, 7, 2.0**-8)}[name]
    padded = np.pad(values, (0, -values.size % block)).reshape(-1, block)
    scales = np.maximum(np.abs(padded).max(axis=1) * np.float32((1 - m) / levels), np.float32(2.0**-126))
    scale_bytes = bytes(scales.view("u1")) if name == "int8" else encode_bf16(scales)
    scales = scales if name == "int8" else decode_bf16(scale_bytes)
    q = np.rint(padded * (np.float32(1) / scales)[:, None]).astype("i1").reshape(-1)
    if name == "int8":
        return scale_bytes + bytes(q[: values.size].view("u1"))
    halves = (q + 8).astype("u1").reshape(-1, 2)
    return scale_bytes + bytes(halves[:, 0] | halves[:, 1] << 4)


def test_codecs_match_docs():
    for row in read("codecs.json"):
        values = np.frombuffer(bytes.fromhex(row["f32_hex"]), "<f4")
        data = bytes.fromhex(row["hex"])
        sizes = {"f32": 4 * values.size, "bf16": 2 * values.size}
        sizes |= {"int8": 4 * math.ceil(values.size / 256) + values.size, "int4": 34 * math.ceil(values.size / 64)}
        assert len(data) == sizes[row["name"]]
        decoded = reference_decode(row["name"], data, values.size)
        assert decoded.astype("<f4").tobytes().hex() == row["decoded_f32_hex"], row["name"]
        assert reference_encode(row["name"], values).hex() == row["hex"], row["name"]


# --------------------------------------------------------------------------------------------------------------------
# Completeness


@pytest.mark.parametrize(("sender", "bodies"), [("learner", LearnerBody), ("syncer", SyncerBody)])
def test_every_body_has_a_vector(sender: str, bodies: Any) -> None:
    covered = {row["means"]["body"]["type"] for row in read("messages.json") if row["sender"] == sender}
    assert covered == {body.__name__ for body in get_args(bodies)}


def test_every_kind_of_frame_has_a_vector():
    assert {row["means"]["kind"] for row in read("frames.json")} == set(FrameKind)


def test_every_error_code_has_a_vector():
    assert {row["error"] for name in ("bad_messages.json", "bad_frames.json") for row in read(name)} == set(
        get_args(WireErrorCode)
    )


def test_vector_names_are_unique():
    for name in ("messages.json", "bad_messages.json", "frames.json", "bad_frames.json"):
        names = [row["name"] for row in read(name)]
        assert len(names) == len(set(names)), name
