"""Formats of the store's files. Damage is detected when a file is read.

A digest (XXH3, 128 bits) in the file covers every byte of it:

- A small file is `{"digest":"<32 hex digits>","value":<JSON>}` and a line end, with the digest of the JSON.
- Tensors are in a safetensors file, which any tool can read. The digest is in its metadata. It is computed over the
  whole file with zeros in place of the digest.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_128, xxh3_128_hexdigest

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_DIGEST_DIGITS = 32
_ZERO_DIGEST = b"0" * _DIGEST_DIGITS
_ALIGNMENT = 64

_SMALL_FILE_PARTS = (b'{"digest":"', b'","value":', b"}\n")
_TENSORS_START = b'{"__metadata__":{"digest":"'
_DIGEST_OFFSET = 8 + len(_TENSORS_START)

_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}
_DTYPES_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


class StoreDamagedError(ValueError):
    """A file was damaged or changed. The message names the file, the problem and what to do."""

    def __init__(self, path: Path, problem: str, advice: str) -> None:
        super().__init__(f"{path}: {problem}; {advice}")
        self.path = path
        self.problem = problem
        self.advice = advice


class DamageError(ValueError):
    """Damage in the content of a file. The caller, which knows the path, raises a `StoreDamagedError` from it."""


def error_reason(error: OSError | ValueError) -> str:
    """Return the problem with a file, without its path."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


# --------------------------------------------------------------------------------------------------------------------
# Small files


def encode_small_file(value: str) -> list[bytes]:
    """Return the content of a small file with this JSON and its digest."""
    text = value.encode("utf-8")
    first, middle, last = _SMALL_FILE_PARTS
    return [first + xxh3_128_hexdigest(text).encode() + middle + text + last]


def decode_small_file(data: bytes) -> str:
    """Return the JSON in a small file. Raise DamageError."""
    first, middle, last = _SMALL_FILE_PARTS
    head = len(first) + _DIGEST_DIGITS
    if not data:
        raise DamageError("the file is empty")
    if data[: len(first)] != first or data[head : head + len(middle)] != middle or data[-len(last) :] != last:
        raise DamageError("not a file written by Atoll, or truncated")
    text = data[head + len(middle) : -len(last)]
    if data[len(first) : head] != xxh3_128_hexdigest(text).encode():
        raise DamageError("the digest does not match: the file was damaged or changed after it was written")
    return text.decode("utf-8")


# --------------------------------------------------------------------------------------------------------------------
# Tensors


class TensorLayout(NamedTuple):
    """Layout of a safetensors file."""

    header: bytes
    """Bytes before the tensors."""
    offsets: dict[str, int]
    """Offset of each tensor in the file, in the order of the file."""
    size: int


def make_tensor_layout(
    metadata: Mapping[str, str], kinds: Mapping[str, tuple[torch.dtype, Sequence[int]]]
) -> TensorLayout:
    """Lay out a safetensors file for tensors of these types and shapes."""
    fields: dict[str, Any] = {"__metadata__": metadata}
    begins, end = {}, 0
    # The widest numbers first, so that every tensor begins at a multiple of its element.
    for name, (dtype, shape) in sorted(kinds.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        if dtype not in _DTYPES:
            raise ValueError(f"tensor {name!r} is {dtype}; a tensor file supports {', '.join(map(str, _DTYPES))}")
        begins[name], end = end, end + math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begins[name], end]}
    header = json.dumps(fields, separators=(",", ":")).encode("ascii")
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    head = len(header).to_bytes(8, "little") + header
    return TensorLayout(head, {name: len(head) + begin for name, begin in begins.items()}, len(head) + end)


def encode_tensor_file(record: str, tensors: Mapping[str, Tensor]) -> list[memoryview | bytes]:
    """Return the content of a tensor file, in pieces, without copying the tensors. `record` is any text."""
    metadata = {"digest": _ZERO_DIGEST.decode(), "record": record}
    layout = make_tensor_layout(metadata, {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    head = bytearray(layout.header)
    assert head.startswith(_TENSORS_START, 8)
    views = [_tensor_bytes(tensors[name]) for name in layout.offsets]
    state = xxh3_128(head)
    for view in views:
        state.update(view)
    head[_DIGEST_OFFSET : _DIGEST_OFFSET + _DIGEST_DIGITS] = state.hexdigest().encode()
    return [bytes(head), *views]


def _tensor_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.stride() != (1,):  # 0 or 1 values count as contiguous with any stride
        flat = torch.empty(flat.numel(), dtype=flat.dtype).copy_(flat)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array) if flat.numel() else memoryview(b"")


def decode_tensor_file(data: bytearray) -> tuple[str, dict[str, Tensor]]:
    """Return the record text and the tensors of a file, which share the memory of `data`. Raise DamageError."""
    start = 8 + _header_bytes(data)
    view = memoryview(data)
    state = xxh3_128(view[:_DIGEST_OFFSET])
    state.update(_ZERO_DIGEST)
    state.update(view[_DIGEST_OFFSET + _DIGEST_DIGITS :])
    if data[_DIGEST_OFFSET : _DIGEST_OFFSET + _DIGEST_DIGITS] != state.hexdigest().encode():
        raise DamageError("the digest does not match: the file was damaged, changed or truncated after it was written")
    fields = json.loads(bytes(view[8:start]))
    record: str = fields.pop("__metadata__")["record"]
    return record, dict(_tensors(data, start, fields))


def _header_bytes(data: bytearray) -> int:
    if len(data) < _DIGEST_OFFSET + _DIGEST_DIGITS:
        raise DamageError(f"the file is truncated to {len(data)} bytes")
    size = int.from_bytes(data[:8], "little")
    if data[8:_DIGEST_OFFSET] != _TENSORS_START or size > min(_MAX_HEADER_BYTES, len(data) - 8):
        raise DamageError("not a tensor file written by Atoll, or truncated")
    return size


def _tensors(data: bytearray, start: int, fields: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, field in fields.items():
        begin, end = field["data_offsets"]
        dtype = _DTYPES_BY_NAME[field["dtype"]]
        if begin == end:
            yield name, torch.empty(field["shape"], dtype=dtype)
            continue
        flat = torch.frombuffer(data, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=start + begin)
        yield name, flat.reshape(field["shape"])


def read_tensors(path: Path) -> tuple[str, dict[str, Tensor]]:
    """Return the record text and the tensors of a file, in writable memory. Raise OSError or DamageError."""
    with open(path, "rb", buffering=0) as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        view, filled = memoryview(data), 0
        while filled < len(data):
            count = file.readinto(view[filled:])
            if not count:
                raise DamageError(f"the file ends after {filled} of {len(data)} bytes")
            filled += count
    return decode_tensor_file(data)
