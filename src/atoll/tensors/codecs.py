"""How numbers travel: flat f32 tensors to bytes and back, and the error feedback of a sender.

All numbers are little endian. `n` is the number of values; a block is a run of values that share one scale, counted
from the first value, the last one may be short.

| name | number | bytes, in this order |
|---|---|---|
| f32  | 0 | n values of 4 bytes |
| bf16 | 1 | n values of 2 bytes: the upper half of the f32, rounded to nearest even |
| int8 | 2 | one f32 scale per block of 256, then n signed bytes q; value = q * scale, scale = absmax / 127 |
| int4 | 3 | one bf16 scale per block of 64, then 32 bytes per block; value = (q - 8) * scale, scale = absmax / 7 |

int4 packs two values per byte, the earlier one in the low half, and fills the last block up with zeros. Its scales are
bf16: they have the whole range of f32, save two bytes per block, and a scale that is off by 0.4 % only moves the
levels. Scales are made a little smaller than the quotient (by 2**-22 and 2**-8), so that no level overflows, and are at
least the smallest normal f32, so that zeros and denormals need no case of their own.

Everything works through chunks that stay in the cache. Codecs keep no memory between calls: one serves many threads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

CHUNK_NUMEL = 1 << 18
"""Values per chunk; a multiple of every block. 1 MiB of f32: it stays in the cache and hides what calls cost."""

_TINY = 2.0**-126  # the smallest normal f32


ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Hears from which value to which the bytes are written for good, chunk by chunk."""


class Scratch:
    """Room for one chunk in work, and for the blocks that it cuts at either end. Not shared between threads."""

    def __init__(self, numel: int = CHUNK_NUMEL) -> None:
        numel = min(CHUNK_NUMEL, -(-numel // 256) * 256) + 2 * 256
        self.values = torch.empty(numel)  # of the user of a codec: a chunk before encoding or after decoding
        self.work = torch.empty(numel)  # of the codec itself
        self.bytes = torch.empty(numel, dtype=torch.uint8)
        self.shorts = torch.empty(numel // 2, dtype=torch.int16)


def chunk_ranges(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Cuts [begin, end) at the multiples of CHUNK, counted from `begin`."""
    for at in range(begin, end, CHUNK_NUMEL):
        yield at, min(at + CHUNK_NUMEL, end)


def square_sum(x: Tensor) -> float:
    """Sum of the squares of a flat f32 tensor: f32 within a chunk, f64 over chunks. NaN and inf show in it."""
    return sum(float(torch.dot(x[begin:end], x[begin:end])) for begin, end in chunk_ranges(0, x.numel()))


class Codec(ABC):
    """Bytes for flat contiguous f32 tensors on the CPU.

    `write` and `read` work on a part that begins at a multiple of `block`, ends at one or at the last value, and is not
    longer than the scratch. `encode` and `decode` are those in a loop.
    """

    name: str
    wire_id: int  # on the wire
    block_size: int = 1  # values that share a scale
    is_lossless = False  # nothing is rounded: the values themselves travel
    has_exact_norm = False  # `examine` finds the norm itself, not a bound of it

    @abstractmethod
    def encoded_size(self, numel: int) -> int:
        """Bytes of `numel` values."""

    @abstractmethod
    def encode_chunk(self, x: Tensor, data: Tensor, numel: int, begin: int, scratch: Scratch) -> None:
        """Encodes `x` as the values from `begin` on of the `numel` values in `data`. `x` stays as it is."""

    @abstractmethod
    def decode_chunk(self, data: Tensor, numel: int, begin: int, out: Tensor, scratch: Scratch) -> None:
        """Decodes into `out` the values from `begin` on, as many as `out` holds."""

    @abstractmethod
    def byte_ranges(self, numel: int, begin: int, end: int) -> list[tuple[int, int]]:
        """Which bytes hold these values; they begin and end as those of `write`."""

    @abstractmethod
    def decodable_values(self, numel: int, first_bytes: int) -> int:
        """How many values can be read of the first so many bytes: whole blocks, or all."""

    @abstractmethod
    def _square_sum(self, data: Tensor, numel: int) -> float:
        """At least the sum of the squares of the decoded values, or not finite where one of them is not."""

    def encode(self, x: Tensor, out: Tensor | None = None, on_progress: ProgressCallback | None = None) -> Tensor:
        """Bytes of `x`, in `out` if it is given."""
        numel = _flat(x)
        out = self.allocate(numel, out)
        scratch = Scratch(numel)
        target = ensure_aligned(out)
        for begin, end in chunk_ranges(0, numel):
            self.encode_chunk(x[begin:end], target, numel, begin, scratch)
            if on_progress is not None and target is out:
                on_progress(begin, end)
        return copy_back(out, target, numel, on_progress)

    def decode(self, data: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """The values, in `out` if it is given. `data` must be without a problem."""
        self.check_size(data, numel)
        out = torch.empty(numel) if out is None else out
        if _flat(out) != numel:
            raise ValueError(f"{numel} values do not fit into a tensor of {out.numel()}")
        data = ensure_aligned(data)
        scratch = Scratch(numel)
        for begin, end in chunk_ranges(0, numel):
            self.decode_chunk(data, numel, begin, out[begin:end], scratch)
        return out

    def examine(self, data: Tensor, numel: int) -> tuple[str | None, float]:
        """Return why these bytes must not be merged, or None, and a bound of their norm, a few times it at most.

        Found are a wrong size, and values whose squares do not add up to a finite f32: NaN, inf, and numbers from about
        1e19 on. The latter are finite, but neither a norm nor a weighted sum of them would be.
        """
        if data.dtype != torch.uint8 or data.dim() != 1:
            return f"flat bytes are needed, this is {data.dtype} of shape {tuple(data.shape)}", 0.0
        if data.numel() != self.encoded_size(numel):
            return f"{numel} values are {self.encoded_size(numel)} bytes in {self.name}, these are {data.numel()}", 0.0
        squares = self._square_sum(ensure_aligned(data), numel)
        if not squares <= _MOST_SQUARE_SUM:
            found = f"not finite: {numel} values in {self.name} hold NaN, inf or numbers too large to sum their squares"
            return found, 0.0
        return None, math.sqrt(squares)

    def check_size(self, data: Tensor, numel: int) -> None:
        if data.dtype != torch.uint8 or data.dim() != 1 or data.numel() != self.encoded_size(numel):
            raise ValueError(
                f"{numel} values are {self.encoded_size(numel)} flat bytes in {self.name}, "
                f"this is {data.dtype} of shape {tuple(data.shape)}"
            )

    def allocate(self, numel: int, out: Tensor | None) -> Tensor:
        if out is None:
            return torch.empty(self.encoded_size(numel), dtype=torch.uint8)
        self.check_size(out, numel)
        return out


_MOST_SQUARE_SUM = 3.4e38


def _flat(x: Tensor) -> int:
    if x.dtype != torch.float32 or x.dim() != 1 or not x.is_contiguous() or x.is_cuda:
        raise ValueError(
            f"a flat contiguous f32 tensor on the CPU is needed, this is {x.dtype} of shape {tuple(x.shape)} "
            f"on {x.device}; copy it into one"
        )
    return x.numel()


def ensure_aligned(data: Tensor) -> Tensor:
    """Bytes that can be viewed as numbers: the same, or a copy where they begin at an odd place of their storage."""
    return data.clone() if data.storage_offset() % 4 or not data.is_contiguous() else data


def copy_back(out: Tensor, target: Tensor, numel: int, on_progress: ProgressCallback | None) -> Tensor:
    """`out`, which has the bytes that were written into `target`: itself, or what stood in for it."""
    if target is not out:
        out.copy_(target)
        if on_progress is not None:
            on_progress(0, numel)
    return out


class FloatCodec(Codec):
    """The values in a floating-point dtype. In bf16 values beyond 3.39e38 become inf, which `examine` finds."""

    has_exact_norm = True

    def __init__(self, name: str, number: int, dtype: torch.dtype) -> None:
        self.name = name
        self.wire_id = number
        self.dtype = dtype
        self.is_lossless = dtype == torch.float32

    def encoded_size(self, numel: int) -> int:
        return self.dtype.itemsize * numel

    def encode_chunk(self, x: Tensor, data: Tensor, numel: int, begin: int, scratch: Scratch) -> None:
        data.view(self.dtype)[begin : begin + x.numel()].copy_(x)

    def decode_chunk(self, data: Tensor, numel: int, begin: int, out: Tensor, scratch: Scratch) -> None:
        out.copy_(data.view(self.dtype)[begin : begin + out.numel()])

    def byte_ranges(self, numel: int, begin: int, end: int) -> list[tuple[int, int]]:
        return [(self.encoded_size(begin), self.encoded_size(end))]

    def decodable_values(self, numel: int, first_bytes: int) -> int:
        return first_bytes // self.dtype.itemsize

    def _square_sum(self, data: Tensor, numel: int) -> float:
        held = data.view(self.dtype)
        if self.is_lossless:
            return square_sum(held)
        values, total = torch.empty(min(CHUNK_NUMEL, numel)), 0.0
        for begin, end in chunk_ranges(0, numel):
            part = values[: end - begin].copy_(held[begin:end])
            total += float(torch.dot(part, part))
        return total


class IntegerPacking(Protocol):
    """How the levels of whole blocks are laid out in bytes."""

    def size(self, count: int) -> int:
        """Bytes of so many values."""
        ...

    def store(self, q: Tensor, integers: Tensor, begin: int, scratch: Scratch) -> None:
        """Write rounded levels, f32, a whole number of blocks, as the integers from value `begin` on; may change q."""

    def load(self, integers: Tensor, begin: int, out: Tensor, scratch: Scratch) -> None:
        """Read whole blocks of levels as f32."""


class Int8Packing:
    """One byte per value."""

    def size(self, count: int) -> int:
        return count

    def store(self, q: Tensor, integers: Tensor, begin: int, scratch: Scratch) -> None:
        target = integers.view(torch.int8)[begin : begin + q.numel()]
        target.copy_(q[: target.numel()])  # fewer in a short last block

    def load(self, integers: Tensor, begin: int, out: Tensor, scratch: Scratch) -> None:
        source = integers.view(torch.int8)[begin : begin + out.numel()]
        out[: source.numel()].copy_(source)


class Int4Packing:
    """Two values per byte."""

    def size(self, count: int) -> int:
        return count // 2

    def store(self, q: Tensor, integers: Tensor, begin: int, scratch: Scratch) -> None:
        count = q.numel()
        low_and_high = scratch.bytes[:count].view(torch.int8).copy_(q).add_(8).view(torch.int16)
        shifted = torch.bitwise_right_shift(low_and_high, 4, out=scratch.shorts[: count // 2])
        integers[begin // 2 : (begin + count) // 2].copy_(shifted.bitwise_or_(low_and_high))  # keeps the low byte

    def load(self, integers: Tensor, begin: int, out: Tensor, scratch: Scratch) -> None:
        count = out.numel()
        packed = scratch.shorts[: count // 2].copy_(integers[begin // 2 : (begin + count) // 2])
        halves = scratch.bytes[:count]
        spread = torch.bitwise_left_shift(packed, 4, out=halves.view(torch.int16))
        spread.bitwise_or_(packed).bitwise_and_(0x0F0F)
        out.copy_(halves.view(torch.int8).sub_(8))


class BlockCodec(Codec):
    """Integers with one scale per block: all scales come first, then all integers."""

    def __init__(
        self,
        name: str,
        number: int,
        block: int,
        scale_dtype: torch.dtype,
        levels: int,
        margin: float,
        integers: IntegerPacking,
        block_may_be_short: bool,
    ) -> None:
        """`levels`: the integers are -levels .. levels. `margin`: by which a scale is smaller than absmax / levels, so
        that levels * scale is finite. `block_may_be_short`: the last one is not padded."""
        self.name = name
        self.wire_id = number
        self.block_size = block
        self.scale_dtype = scale_dtype
        self.levels = levels
        self.margin = margin
        self.packing = integers
        self.block_may_be_short = block_may_be_short

    def scale_bytes(self, numel: int) -> int:
        return -(-numel // self.block_size) * self.scale_dtype.itemsize

    def scales(self, data: Tensor, numel: int) -> Tensor:
        return data[: self.scale_bytes(numel)].view(self.scale_dtype)

    def encoded_size(self, numel: int) -> int:
        padded = numel if self.block_may_be_short else -(-numel // self.block_size) * self.block_size
        return self.scale_bytes(numel) + self.packing.size(padded)

    def encode_chunk(self, x: Tensor, data: Tensor, numel: int, begin: int, scratch: Scratch) -> None:
        whole = x.numel() // self.block_size * self.block_size
        if whole:
            self._write_blocks(x[:whole], data, numel, begin, scratch)
        if whole < x.numel():
            rest = torch.zeros(self.block_size)
            rest[: x.numel() - whole] = x[whole:]
            self._write_blocks(rest, data, numel, begin + whole, scratch)

    def decode_chunk(self, data: Tensor, numel: int, begin: int, out: Tensor, scratch: Scratch) -> None:
        whole = out.numel() // self.block_size * self.block_size
        if whole:
            self._read_blocks(data, numel, begin, out[:whole], scratch)
        if whole < out.numel():
            rest = torch.empty(self.block_size)
            self._read_blocks(data, numel, begin + whole, rest, scratch)
            out[whole:] = rest[: out.numel() - whole]

    def _write_blocks(self, x: Tensor, data: Tensor, numel: int, begin: int, scratch: Scratch) -> None:
        rows = x.view(-1, self.block_size)
        work = scratch.work[: x.numel()]
        q = work.view(-1, self.block_size)
        first = begin // self.block_size
        scales = self.scales(data, numel)[first : first + rows.shape[0]]
        scales.copy_(self._scales_of(torch.abs(rows, out=q).amax(1)))
        torch.mul(rows, scales.float().reciprocal().unsqueeze_(1), out=q)
        self.packing.store(work.round_(), data[self.scale_bytes(numel) :], begin, scratch)

    def _read_blocks(self, data: Tensor, numel: int, begin: int, out: Tensor, scratch: Scratch) -> None:
        rows = out.view(-1, self.block_size)
        first = begin // self.block_size
        scales = self.scales(data, numel)[first : first + rows.shape[0]].float()
        self.packing.load(data[self.scale_bytes(numel) :], begin, out, scratch)
        rows.mul_(scales.unsqueeze(1))

    def _scales_of(self, absmax: Tensor) -> Tensor:
        # A NaN stays a NaN and an inf an inf: the scale is where the receiver looks for them.
        return absmax.mul_((1.0 - self.margin) / self.levels).clamp_(min=_TINY)

    def byte_ranges(self, numel: int, begin: int, end: int) -> list[tuple[int, int]]:
        first, last, each = begin // self.block_size, -(-end // self.block_size), self.scale_dtype.itemsize
        scales, integers = self.scale_bytes(numel), self.packing.size
        to = self.encoded_size(numel) if end == numel else scales + integers(end)
        return [(first * each, last * each), (scales + integers(begin), to)]

    def decodable_values(self, numel: int, first_bytes: int) -> int:
        if first_bytes >= self.encoded_size(numel):
            return numel
        of_integers = max(0, first_bytes - self.scale_bytes(numel))
        return of_integers // self.packing.size(self.block_size) * self.block_size

    def _square_sum(self, data: Tensor, numel: int) -> float:
        return square_sum(self.scales(data, numel).float()) * float(self.levels + 1) ** 2 * self.block_size


CODECS: tuple[Codec, ...] = (
    FloatCodec("f32", 0, torch.float32),
    FloatCodec("bf16", 1, torch.bfloat16),
    BlockCodec("int8", 2, 256, torch.float32, 127, 2.0**-22, Int8Packing(), block_may_be_short=True),  # 8.125 bits each
    BlockCodec("int4", 3, 64, torch.bfloat16, 7, 2.0**-8, Int4Packing(), block_may_be_short=False),  # 4.25 bits each
)
"""Each at the place of its number."""


def get_codec(name: str) -> Codec:
    """The codec of this name."""
    for candidate in CODECS:
        if candidate.name == name:
            return candidate
    raise ValueError(f"no codec is called {name!r}; there are {', '.join(c.name for c in CODECS)}")


class ErrorFeedback:
    """Error feedback of one fragment at a sender: what rounding leaves out goes along with the next send.

    What is encoded is x + residual; what of that the receiver will not see is the pending residual. It counts only when
    the receiver has taken the bytes: `settle(True)`. Over any number of settled sends the sum of what was decoded is
    the sum of what was given, up to the last residual, which is at most one quantum.

    Two f32 per value for a codec that rounds, nothing for f32. A residual is a plain value, so the next send may be in
    another codec that rounds.
    """

    def __init__(self, codec: Codec, numel: int) -> None:
        self.codec = codec
        self.numel = numel
        self.is_lossy = not codec.is_lossless
        self.residual = torch.zeros(numel if self.is_lossy else 0)
        self._next = torch.zeros_like(self.residual)
        self._pending = False

    def encode(
        self,
        x: Tensor,
        out: Tensor | None = None,
        codec: Codec | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> Tensor:
        """Bytes of x + residual, in `out` if it is given, and by another codec if one is given. Replaces a pending
        residual that was never settled."""
        if _flat(x) != self.numel:
            raise ValueError(f"the fragment has {self.numel} values, {x.numel()} were given")
        codec = self.codec if codec is None else codec
        if self.is_lossy is codec.is_lossless:
            raise ValueError(
                f"a feedback of {self.codec.name} cannot send in {codec.name}: one of them leaves nothing out"
            )
        self._pending = True
        if not self.is_lossy:
            return codec.encode(x, out, on_progress)
        out = codec.allocate(self.numel, out)
        target = ensure_aligned(out)
        scratch = Scratch(self.numel)
        for begin, end in chunk_ranges(0, self.numel):
            wanted = torch.add(x[begin:end], self.residual[begin:end], out=self._next[begin:end])
            codec.encode_chunk(wanted, target, self.numel, begin, scratch)
            got = scratch.values[: end - begin]
            codec.decode_chunk(target, self.numel, begin, got, scratch)
            wanted.sub_(got)
            if on_progress is not None and target is out:
                on_progress(begin, end)
        return copy_back(out, target, self.numel, on_progress)

    def settle(self, sent: bool) -> None:
        """The receiver has taken the last encoded bytes, or never will: then the residual stays what it was."""
        if sent and not self._pending:
            raise ValueError("nothing was encoded since the last settle; call encode before settle(True)")
        if sent and self.is_lossy:
            self.residual, self._next = self._next, self.residual
        self._pending = False
