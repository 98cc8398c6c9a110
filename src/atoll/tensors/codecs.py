"""Quantization: encode flat f32 tensors as bytes, decode them, and carry rounding errors over (error feedback).

All numbers are little endian. `n` is the number of values. A block is a run of values that share one scale. Blocks are
counted from the first value, and the last one may be short.

| name | number | bytes, in this order |
|---|---|---|
| f32  | 0 | n values of 4 bytes |
| bf16 | 1 | n values of 2 bytes: the upper half of the f32, rounded to nearest even |
| int8 | 2 | one f32 scale per block of 256, then n signed bytes q; value = q * scale, scale = absmax / 127 |
| int4 | 3 | one bf16 scale per block of 64, then 32 bytes per block; value = (q - 8) * scale, scale = absmax / 7 |

int4 packs two values per byte, the earlier one in the low half, and pads the last block with zeros. Its scales are
bf16: they have the range of f32, save two bytes per block, and an error of 0.4 % in a scale only moves the levels.
Scales are slightly smaller than the quotient (by 2**-22 and 2**-8), so that no level overflows. They are at least the
smallest normal f32, so that zeros and denormals need no special case.

All functions work in chunks that fit into the cache. Codecs are stateless, so threads may share one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

CHUNK_NUMEL = 1 << 18
"""Values per chunk, a multiple of every block size. 1 MiB of f32 fits into the cache and hides the cost of calls."""

_TINY = 2.0**-126  # the smallest normal f32


ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Called after each chunk with the range [begin, end) of values whose bytes are final."""


class Scratch:
    """Temporary memory for one chunk and the partial blocks at its ends. Not thread-safe."""

    def __init__(self, numel: int = CHUNK_NUMEL) -> None:
        numel = min(CHUNK_NUMEL, -(-numel // 256) * 256) + 2 * 256
        self.values = torch.empty(numel)  # memory of the caller: a chunk before encoding or after decoding
        self.work = torch.empty(numel)  # memory of the codec
        self.bytes = torch.empty(numel, dtype=torch.uint8)
        self.shorts = torch.empty(numel // 2, dtype=torch.int16)


def chunk_ranges(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut [begin, end) into ranges of CHUNK_NUMEL values; the last one may be shorter."""
    for at in range(begin, end, CHUNK_NUMEL):
        yield at, min(at + CHUNK_NUMEL, end)


def square_sum(x: Tensor) -> float:
    """Return the sum of squares of a flat f32 tensor: f32 within a chunk, f64 over chunks. NaN and inf propagate."""
    return sum(float(torch.dot(x[begin:end], x[begin:end])) for begin, end in chunk_ranges(0, x.numel()))


class Codec(ABC):
    """Encoding of flat contiguous f32 tensors on the CPU as bytes.

    `encode_chunk` and `decode_chunk` take a range that begins at a multiple of `block_size` and ends at one or at the
    last value. It must fit into the scratch memory. `encode` and `decode` call them in a loop.
    """

    name: str
    wire_id: int  # number of the codec in frames
    block_size: int = 1  # values that share a scale
    is_lossless = False  # values are not rounded
    has_exact_norm = False  # `examine` returns the exact norm, not an upper bound

    @abstractmethod
    def encoded_size(self, numel: int) -> int:
        """Return the number of bytes of `numel` encoded values."""

    @abstractmethod
    def encode_chunk(self, x: Tensor, data: Tensor, numel: int, begin: int, scratch: Scratch) -> None:
        """Encode `x` into `data`, which holds `numel` values, from value `begin` on. `x` is not changed."""

    @abstractmethod
    def decode_chunk(self, data: Tensor, numel: int, begin: int, out: Tensor, scratch: Scratch) -> None:
        """Decode the `out.numel()` values from `begin` on into `out`."""

    @abstractmethod
    def byte_ranges(self, numel: int, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the byte ranges that encode values [begin, end), a range that `encode_chunk` would accept."""

    @abstractmethod
    def decodable_values(self, numel: int, first_bytes: int) -> int:
        """Return how many values can be decoded from the first `first_bytes` bytes: full blocks, or all values."""

    @abstractmethod
    def _square_sum(self, data: Tensor, numel: int) -> float:
        """Return an upper bound of the sum of squares of the decoded values; not finite if a value is not finite."""

    def encode(self, x: Tensor, out: Tensor | None = None, on_progress: ProgressCallback | None = None) -> Tensor:
        """Encode `x`, into `out` if it is given, and return the bytes."""
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
        """Decode `numel` values, into `out` if it is given. Does not check values: call `examine` first."""
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
        """Return the reason why these bytes must not be merged, or None, and an upper bound of their norm.

        The bound is at most a few times the norm. Problems are a bad size, and values whose sum of squares is not a
        finite f32: NaN, inf, and numbers from about 1e19 on. Such numbers are finite, but their norm and weighted sums
        are not.
        """
        if data.dtype != torch.uint8 or data.dim() != 1:
            return f"flat bytes are needed, this is {data.dtype} of shape {tuple(data.shape)}", 0.0
        if data.numel() != self.encoded_size(numel):
            return f"{numel} values are {self.encoded_size(numel)} bytes in {self.name}, these are {data.numel()}", 0.0
        squares = self._square_sum(ensure_aligned(data), numel)
        if not squares <= _MAX_SQUARE_SUM:
            problem = (
                f"not finite: {numel} values in {self.name} hold NaN, inf or numbers too large to sum their squares"
            )
            return problem, 0.0
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


_MAX_SQUARE_SUM = 3.4e38


def _flat(x: Tensor) -> int:
    if x.dtype != torch.float32 or x.dim() != 1 or not x.is_contiguous() or x.is_cuda:
        raise ValueError(
            f"a flat contiguous f32 tensor on the CPU is needed, this is {x.dtype} of shape {tuple(x.shape)} "
            f"on {x.device}; copy it into one"
        )
    return x.numel()


def ensure_aligned(data: Tensor) -> Tensor:
    """Return bytes that can be viewed as numbers: `data` itself, or a copy if it is not aligned or not contiguous."""
    return data.clone() if data.storage_offset() % 4 or not data.is_contiguous() else data


def copy_back(out: Tensor, target: Tensor, numel: int, on_progress: ProgressCallback | None) -> Tensor:
    """Copy `target` into `out` if they are different tensors; return `out`."""
    if target is not out:
        out.copy_(target)
        if on_progress is not None:
            on_progress(0, numel)
    return out


class FloatCodec(Codec):
    """Cast to a floating-point dtype. In bf16, values beyond 3.39e38 become inf, which `examine` reports."""

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
        typed = data.view(self.dtype)
        if self.is_lossless:
            return square_sum(typed)
        values, total = torch.empty(min(CHUNK_NUMEL, numel)), 0.0
        for begin, end in chunk_ranges(0, numel):
            part = values[: end - begin].copy_(typed[begin:end])
            total += float(torch.dot(part, part))
        return total


class IntegerPacking(Protocol):
    """Byte layout of the quantized integers of full blocks."""

    def size(self, count: int) -> int:
        """Return the number of bytes of `count` values."""
        ...

    def store(self, q: Tensor, integers: Tensor, begin: int, scratch: Scratch) -> None:
        """Write full blocks of rounded f32 levels `q` as integers, from value `begin` on. May change `q`."""

    def load(self, integers: Tensor, begin: int, out: Tensor, scratch: Scratch) -> None:
        """Read full blocks of levels as f32."""


class Int8Packing:
    """Packing of one value in one byte."""

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
    """Integers with one scale per block: first all scales, then all integers."""

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
        """Initialize the codec.

        Args:
            levels: Integers are in -levels .. levels.
            margin: Relative amount by which a scale is smaller than absmax / levels, so that levels * scale is finite.
            block_may_be_short: The last block is not padded.
        """
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
        full = x.numel() // self.block_size * self.block_size
        if full:
            self._encode_blocks(x[:full], data, numel, begin, scratch)
        if full < x.numel():
            tail = torch.zeros(self.block_size)
            tail[: x.numel() - full] = x[full:]
            self._encode_blocks(tail, data, numel, begin + full, scratch)

    def decode_chunk(self, data: Tensor, numel: int, begin: int, out: Tensor, scratch: Scratch) -> None:
        full = out.numel() // self.block_size * self.block_size
        if full:
            self._decode_blocks(data, numel, begin, out[:full], scratch)
        if full < out.numel():
            tail = torch.empty(self.block_size)
            self._decode_blocks(data, numel, begin + full, tail, scratch)
            out[full:] = tail[: out.numel() - full]

    def _encode_blocks(self, x: Tensor, data: Tensor, numel: int, begin: int, scratch: Scratch) -> None:
        rows = x.view(-1, self.block_size)
        work = scratch.work[: x.numel()]
        q = work.view(-1, self.block_size)
        first = begin // self.block_size
        scales = self.scales(data, numel)[first : first + rows.shape[0]]
        scales.copy_(self._compute_scales(torch.abs(rows, out=q).amax(1)))
        torch.mul(rows, scales.float().reciprocal().unsqueeze_(1), out=q)
        self.packing.store(work.round_(), data[self.scale_bytes(numel) :], begin, scratch)

    def _decode_blocks(self, data: Tensor, numel: int, begin: int, out: Tensor, scratch: Scratch) -> None:
        rows = out.view(-1, self.block_size)
        first = begin // self.block_size
        scales = self.scales(data, numel)[first : first + rows.shape[0]].float()
        self.packing.load(data[self.scale_bytes(numel) :], begin, out, scratch)
        rows.mul_(scales.unsqueeze(1))

    def _compute_scales(self, absmax: Tensor) -> Tensor:
        # NaN and inf must survive: the receiver detects them in the scales.
        return absmax.mul_((1.0 - self.margin) / self.levels).clamp_(min=_TINY)

    def byte_ranges(self, numel: int, begin: int, end: int) -> list[tuple[int, int]]:
        first, last, each = begin // self.block_size, -(-end // self.block_size), self.scale_dtype.itemsize
        scales, integers = self.scale_bytes(numel), self.packing.size
        to = self.encoded_size(numel) if end == numel else scales + integers(end)
        return [(first * each, last * each), (scales + integers(begin), to)]

    def decodable_values(self, numel: int, first_bytes: int) -> int:
        if first_bytes >= self.encoded_size(numel):
            return numel
        integer_bytes = max(0, first_bytes - self.scale_bytes(numel))
        return integer_bytes // self.packing.size(self.block_size) * self.block_size

    def _square_sum(self, data: Tensor, numel: int) -> float:
        return square_sum(self.scales(data, numel).float()) * float(self.levels + 1) ** 2 * self.block_size


CODECS: tuple[Codec, ...] = (
    FloatCodec("f32", 0, torch.float32),
    FloatCodec("bf16", 1, torch.bfloat16),
    BlockCodec("int8", 2, 256, torch.float32, 127, 2.0**-22, Int8Packing(), block_may_be_short=True),  # 8.125 bits each
    BlockCodec("int4", 3, 64, torch.bfloat16, 7, 2.0**-8, Int4Packing(), block_may_be_short=False),  # 4.25 bits each
)
"""All codecs; the index is `wire_id`."""


def get_codec(name: str) -> Codec:
    """Return the codec with this name. Raise ValueError if the name is unknown."""
    for candidate in CODECS:
        if candidate.name == name:
            return candidate
    raise ValueError(f"unknown codec {name!r}; give one of {', '.join(c.name for c in CODECS)}")


class ErrorFeedback:
    """Error feedback of one fragment at a sender: the rounding error of one send is added to the next one.

    `encode` encodes x + residual. The rounding error of that is the pending residual. It becomes the residual when the
    receiver has accepted the bytes: `settle(True)`. Over any number of settled sends, the sum of the decoded values
    equals the sum of the inputs, up to the last residual, which is at most one quantization step.

    A lossy codec needs two f32 per value, f32 needs none. A residual does not depend on the codec, so the next send may
    use another lossy codec.
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
        """Encode x + residual and return the bytes. Replace a pending residual that was not settled.

        Args:
            out: Memory for the bytes.
            codec: Codec for this send; None for the codec of this object.
            on_progress: Called after each chunk.
        """
        if _flat(x) != self.numel:
            raise ValueError(f"the fragment has {self.numel} values, got {x.numel()}")
        codec = self.codec if codec is None else codec
        if self.is_lossy is codec.is_lossless:
            raise ValueError(
                f"error feedback for {self.codec.name} cannot encode in {codec.name}: one of the two is lossless"
            )
        self._pending = True
        if not self.is_lossy:
            return codec.encode(x, out, on_progress)
        out = codec.allocate(self.numel, out)
        target = ensure_aligned(out)
        scratch = Scratch(self.numel)
        for begin, end in chunk_ranges(0, self.numel):
            compensated = torch.add(x[begin:end], self.residual[begin:end], out=self._next[begin:end])
            codec.encode_chunk(compensated, target, self.numel, begin, scratch)
            decoded = scratch.values[: end - begin]
            codec.decode_chunk(target, self.numel, begin, decoded, scratch)
            compensated.sub_(decoded)
            if on_progress is not None and target is out:
                on_progress(begin, end)
        return copy_back(out, target, self.numel, on_progress)

    def settle(self, sent: bool) -> None:
        """Record whether the receiver accepted the last encoded bytes. If not, keep the old residual."""
        if sent and not self._pending:
            raise ValueError("nothing was encoded since the last settle; call encode before settle(True)")
        if sent and self.is_lossy:
            self.residual, self._next = self._next, self.residual
        self._pending = False
