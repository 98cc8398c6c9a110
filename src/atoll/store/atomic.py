"""Files that are whole or not there, and that say so when they were damaged.

A file is written beside its place, made durable, and then given its name: who is killed on the way, or finds the disk
full, leaves the old file as it was. Every byte of a file is covered by a digest (XXH3, 128 bits) in the file itself:

- a small one is `{"digest":"<32 hex digits>","value":<JSON>}` and a line end, the digest being that of the JSON;
- tensors are a safetensors file, which any tool can read. The digest is in its metadata, and is that of the whole file
  with zeros in the digest's place.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128, xxh3_128_hexdigest

UNFINISHED = ".unfinished"
"""Ends the name of a file that is being written. One that is found was left by a killed process."""

OURS = os.urandom(4).hex()
"""Part of the name of what this process has not finished: another one must never give our half a name, nor we its."""

_PIECE_BYTES = 2**20
_MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_DIGEST_DIGITS = 32
_NO_DIGEST = b"0" * _DIGEST_DIGITS
ALIGNMENT = 64

_SMALL = (b'{"digest":"', b'","value":', b"}\n")
_TENSORS_START = b'{"__metadata__":{"digest":"'
_DIGEST_AT = 8 + len(_TENSORS_START)

DTYPES: dict[torch.dtype, str] = {
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
}
_DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


class StoreDamaged(ValueError):  # noqa: N818 - the name of a fact, as the user reads it
    """A file that is not what was written. The sentence names the file and what can be done."""

    def __init__(self, path: Path, what: str, advice: str) -> None:
        super().__init__(f"{path}: {what}; {advice}")
        self.path = path
        self.what = what
        self.advice = advice


class DamageError(ValueError):
    """What is wrong inside of a file; who knows the file makes a `StoreDamaged` of it."""


# --------------------------------------------------------------------------------------------------------------------
# Writing


def put_file(
    path: Path, pieces: Sequence[memoryview | bytes | bytearray], last_word: Callable[[], None], replace: bool
) -> None:
    """Write a file and make it and its name durable.

    `last_word` is called when only the name is missing, and may still raise. Without `replace` a file that has the name
    already is not touched, and the error is `FileExistsError`.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid():x}-{OURS}{UNFINISHED}")
    try:
        # An old one is removed and not written over: it may be a second name of a file that was finished.
        unfinished.unlink(missing_ok=True)
        _write(unfinished, pieces)
        last_word()
        if replace:
            os.replace(unfinished, path)
        else:
            _name(unfinished, path)
    except OSError as wrong:
        _clear(unfinished)
        wrong.filename, wrong.filename2 = str(path), None  # a full disk does not say whose it is
        raise
    except BaseException:
        _clear(unfinished)
        raise
    sync_folder(path.parent)


def _write(path: Path, pieces: Sequence[memoryview | bytes | bytearray]) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for piece in pieces:
            view = memoryview(piece)
            while view.nbytes:
                written = os.write(file, view[:_PIECE_BYTES])
                view = view[written:]
        os.fsync(file)
    finally:
        os.close(file)


def _name(unfinished: Path, path: Path) -> None:
    """Give the file its name unless somebody has it. A rename would take it away from him without a word."""
    try:
        os.link(unfinished, path)
    except OSError as wrong:
        if wrong.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.rename(unfinished, path)  # a file system without links
        return
    os.unlink(unfinished)


def _clear(unfinished: Path) -> None:
    with contextlib.suppress(OSError):
        unfinished.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as wrong:
        wrong.filename = str(folder)
        raise


def make_folder(folder: Path) -> None:
    """The folder and those above it, durably."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


# --------------------------------------------------------------------------------------------------------------------
# Small files


def small_file(value: str) -> list[bytes]:
    """A small file that holds this JSON."""
    text = value.encode("utf-8")
    first, middle, last = _SMALL
    return [first + xxh3_128_hexdigest(text).encode() + middle + text + last]


def read_small_file(data: bytes) -> Any:
    """The value of a small file."""
    return json.loads(small_file_text(data))


def small_file_text(data: bytes) -> str:
    """The JSON of a small file, as it was written."""
    first, middle, last = _SMALL
    head = len(first) + _DIGEST_DIGITS
    if not data:
        raise DamageError("the file is empty")
    if data[: len(first)] != first or data[head : head + len(middle)] != middle or data[-len(last) :] != last:
        raise DamageError("not a file of Atoll, or cut short")
    text = data[head + len(middle) : -len(last)]
    if data[len(first) : head] != xxh3_128_hexdigest(text).encode():
        raise DamageError("the digest is wrong: the file was damaged or changed after it was written")
    return text.decode("utf-8")


# --------------------------------------------------------------------------------------------------------------------
# Tensors


def tensor_file(note: str, tensors: Mapping[str, Tensor]) -> list[memoryview | bytes]:
    """A file of tensors, in pieces: the tensors themselves are not copied. `note` is any text."""
    # The widest numbers first, so that every tensor begins at a multiple of its element.
    named = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    views, fields, end = [], {}, 0
    for name, tensor in named:
        if tensor.dtype not in DTYPES:
            raise ValueError(f"tensor {name!r} is {tensor.dtype}: a store keeps {', '.join(map(str, DTYPES))}")
        flat = _flat_bytes(tensor)
        fields[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + flat.numel()],
        }
        end += flat.numel()
        array: Any = flat.numpy()
        views.append(memoryview(array) if flat.numel() else memoryview(b""))
    metadata = {"digest": _NO_DIGEST.decode(), "record": note}
    header = json.dumps({"__metadata__": metadata} | fields, separators=(",", ":")).encode("ascii")
    assert header.startswith(_TENSORS_START)
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    head = bytearray(len(header).to_bytes(8, "little") + header)
    state = xxh3_128(head)
    for view in views:
        state.update(view)
    head[_DIGEST_AT : _DIGEST_AT + _DIGEST_DIGITS] = state.hexdigest().encode()
    return [bytes(head), *views]


def _flat_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.stride() != (1,):  # one value or none counts as contiguous whatever its stride
        flat = torch.empty(flat.numel(), dtype=flat.dtype).copy_(flat)
    return flat.view(torch.uint8)


def read_tensor_file(data: bytearray) -> tuple[str, dict[str, Tensor]]:
    """The note and the tensors of a file; they share its memory."""
    start = 8 + _header_bytes(data)
    view = memoryview(data)
    state = xxh3_128(view[:_DIGEST_AT])
    state.update(_NO_DIGEST)
    state.update(view[_DIGEST_AT + _DIGEST_DIGITS :])
    if data[_DIGEST_AT : _DIGEST_AT + _DIGEST_DIGITS] != state.hexdigest().encode():
        raise DamageError("the digest is wrong: the file was damaged, changed or cut short after it was written")
    fields = json.loads(bytes(view[8:start]))
    note: str = fields.pop("__metadata__")["record"]
    return note, dict(_tensors(data, start, fields))


def _header_bytes(data: bytearray) -> int:
    if len(data) < _DIGEST_AT + _DIGEST_DIGITS:
        raise DamageError(f"the file has {len(data)} bytes and is cut short")
    size = int.from_bytes(data[:8], "little")
    if data[8:_DIGEST_AT] != _TENSORS_START or size > min(_MOST_HEADER_BYTES, len(data) - 8):
        raise DamageError("not a file of tensors that Atoll wrote, or cut short")
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


def read_file(path: Path) -> bytearray:
    """A whole file in memory that may be written."""
    with open(path, "rb", buffering=0) as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        view, filled = memoryview(data), 0
        while filled < len(data):
            count = file.readinto(view[filled:])
            if not count:
                raise DamageError(f"the file ends after {filled} of {len(data)} bytes")
            filled += count
        return data
