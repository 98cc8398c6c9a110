"""Search for bytes that break the parsers of `atoll.transport.wire`, guided by coverage.

It needs atheris, which is not among the requirements (docs/wire.md says how to run it):

    python tests/transport/fuzz_wire.py [folder for findings] [options of libFuzzer, -max_total_time=60 ...]

The first byte of an input chooses the reader, the rest is read by it. A finding is any exception but `WireError`, a
frame that is accepted without a valid digest, or more memory than the limits allow.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import atheris  # type: ignore[import-untyped]

with atheris.instrument_imports(include=["atoll", "json"]):
    from atoll.core import codec, protocol  # noqa: F401 - instrumented here, imported below
    from atoll.transport.wire import (
        FragmentHeader,
        FrameHead,
        FrameKind,
        FrameParser,
        WireError,
        decode_message,
        encode_message,
    )

MAX_PAYLOAD_BYTES = 2**16


def accept(head: FrameHead, header: bytes) -> bytearray:
    if head.payload_bytes > MAX_PAYLOAD_BYTES:
        raise WireError(f"{head.payload_bytes} bytes, the limit is {MAX_PAYLOAD_BYTES}", "size")
    return bytearray(head.payload_bytes)


def read_one(data: bytes) -> None:
    choice, data = (data[0] if data else 0), data[1:]
    with suppress(WireError):
        match choice % 4:
            case 0:
                envelope = decode_message(data, "learner")
                decode_message(
                    encode_message(envelope), "learner"
                )  # a decoded message can be encoded and decoded again
            case 1:
                envelope = decode_message(data, "syncer")
                decode_message(encode_message(envelope), "syncer")
            case 2:
                FragmentHeader.decode(data)
            case _:
                read_frame(FrameKind(1 + choice // 4 % 4), data, cut=choice // 16 + 1)


def read_frame(kind: FrameKind, data: bytes, cut: int) -> None:
    parser = FrameParser(kind, accept)
    for at in range(0, len(data), cut):
        parser.feed(data[at : at + cut])
    parser.finish()


def seeds(folder: Path) -> None:
    """Write the golden vectors as the first inputs."""
    from tests.transport.samples import BAD_FRAMES, BAD_MESSAGES, FRAMES, MESSAGES

    inputs = [bytes([message.sender == "syncer"]) + encode_message(message.envelope) for message in MESSAGES]
    inputs += [bytes([message.sender == "syncer"]) + message.data for message in BAD_MESSAGES]
    inputs += [bytes([3 + 4 * (frame.kind - 1)]) + frame.data() for frame in FRAMES]
    inputs += [bytes([3 + 4 * (frame.kind - 1)]) + frame.data for frame in BAD_FRAMES]
    inputs += [b"\2" + frame.header for frame in FRAMES]
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(inputs):
        (folder / f"seed-{number:03d}").write_bytes(data)


if __name__ == "__main__":
    if sys.argv[1:] and not sys.argv[1].startswith("-"):
        seeds(Path(sys.argv[1]))
    atheris.Setup(sys.argv, read_one)
    atheris.Fuzz()
