"""Codecs: round trips, error bounds, refused data, and error feedback."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from atoll.tensors.codecs import CHUNK_NUMEL, CODECS, Codec, ErrorFeedback, get_codec
from tests.tensors.tensor_samples import has_same_bits, max_rounding_error, random_tensor

SIZES = (0, 1, 2, 63, 64, 65, 255, 256, 257, 1000, CHUNK_NUMEL - 1, CHUNK_NUMEL, CHUNK_NUMEL + 1, 2 * CHUNK_NUMEL + 300)
FLT_MAX = float(np.finfo(np.float32).max)
ROUNDING = [codec for codec in CODECS if codec.name != "f32"]

codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
rounding_codecs = pytest.mark.parametrize("codec", ROUNDING, ids=lambda codec: codec.name)
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 700)


def round_trip(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), x.numel())


def is_within_bound(codec: Codec, x: Tensor) -> bool:
    """Compare in f64, where the difference of two f32 values is exact."""
    return bool(((x.double() - round_trip(codec, x).double()).abs() <= max_rounding_error(codec, x).double()).all())


@given(seeds, sizes)
def test_f32_round_trip_is_exact(seed, numel):
    x = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**32, numel, dtype=np.uint32).view(np.float32))
    assert has_same_bits(round_trip(get_codec("f32"), x), x)  # NaN with its payload, denormals, both zeros


@given(seeds, sizes)
def test_bf16_round_trip_of_bf16_values_is_exact(seed, numel):
    halves = np.random.default_rng(seed).integers(0, 2**16, numel, dtype=np.uint32) << 16
    x = torch.from_numpy(halves.view(np.float32)).nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0)
    assert has_same_bits(round_trip(get_codec("bf16"), x), x)


@codecs
@pytest.mark.parametrize("numel", SIZES)
def test_round_trip_error_of_any_size_is_within_bound(codec, numel):
    x = random_tensor(numel, numel)
    data = codec.encode(x)
    assert data.dtype == torch.uint8
    assert data.numel() == codec.encoded_size(numel)
    assert codec.examine(data, numel)[0] is None
    assert is_within_bound(codec, x)


@codecs
@given(seeds, sizes, st.floats(0.0, 40.0))
def test_round_trip_error_of_any_values_is_within_bound(codec, seed, numel, spread):
    x = random_tensor(seed, numel, spread)  # includes denormals and values near the largest
    assert is_within_bound(codec, x)


@codecs
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70))
@example([FLT_MAX, -FLT_MAX, 1.0])
@example([2.0**-149, -(2.0**-149)])
@example([180 * 2.0**-149, 2.0**-126, 0.0, -0.0])
def test_round_trip_error_of_edge_values_is_within_bound(codec, values):
    x = torch.tensor(values)
    if codec.name == "bf16":
        x.clamp_(-3.38e38, 3.38e38)  # larger values overflow in bf16
    assert is_within_bound(codec, x)
    assert bool(round_trip(codec, x).isfinite().all())


@rounding_codecs
def test_error_bound_is_tight(codec):
    """A loose bound would make the tests above meaningless."""
    x = random_tensor(0, 10_000)
    errors = (x - round_trip(codec, x)).abs()
    assert float((errors / max_rounding_error(codec, x)).max()) > 0.9
    assert float(max_rounding_error(codec, x).max()) < {"bf16": 0.02, "int8": 0.02, "int4": 0.4}[codec.name]


@codecs
@pytest.mark.parametrize("numel", [1, 64, 300])
def test_zeros_round_trip_to_zeros(codec, numel):
    assert has_same_bits(round_trip(codec, torch.zeros(numel)), torch.zeros(numel))


@codecs
def test_decoded_values_are_a_fixed_point(codec):
    """Encoding decoded values again changes only last bits, never a level."""
    x = random_tensor(3, 5000)
    once = round_trip(codec, x)
    assert torch.allclose(round_trip(codec, once), once, rtol=0.01 if codec.name == "int4" else 2e-6, atol=0.0)


@codecs
@pytest.mark.parametrize("numel", [1, 77, 2 * CHUNK_NUMEL + 300])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_values_are_reported(codec, numel, bad):
    for index in {0, numel // 2, numel - 1}:
        x = random_tensor(0, numel)
        x[index] = bad
        problem = codec.examine(codec.encode(x), numel)[0]
        assert problem is not None
        assert "not finite" in problem


@codecs
def test_infinities_that_cancel_are_reported(codec):
    x = random_tensor(0, 3)
    x[0], x[1] = float("inf"), float("-inf")
    assert codec.examine(codec.encode(x), 3)[0] is not None


@codecs
def test_values_too_large_to_sum_are_reported(codec):
    assert codec.examine(codec.encode(torch.full((300,), 1e17)), 300)[0] is None
    assert codec.examine(codec.encode(torch.full((300,), 1e20)), 300)[0] is not None
    assert codec.examine(codec.encode(torch.full((300,), FLT_MAX)), 300)[0] is not None


@codecs
def test_invalid_size_is_reported_and_raises(codec):
    data = codec.encode(random_tensor(0, 100))
    assert "bytes" in str(codec.examine(data[:-1], 100)[0])
    assert codec.examine(data, 400)[0] is not None
    assert "flat bytes" in str(codec.examine(data.float(), 100)[0])
    with pytest.raises(ValueError, match="flat bytes"):
        codec.decode(data[:-1], 100)
    with pytest.raises(ValueError, match="do not fit"):
        codec.decode(data, 100, torch.empty(99))
    with pytest.raises(ValueError, match="flat bytes"):
        codec.encode(random_tensor(0, 100), torch.empty(5, dtype=torch.uint8))


@codecs
@pytest.mark.parametrize("x", [torch.zeros(4, 4), torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2]])
def test_tensors_that_are_not_flat_f32_are_refused(codec, x):
    with pytest.raises(ValueError, match="copy it into one"):
        codec.encode(x)


def test_unknown_codec_error_lists_the_codecs():
    with pytest.raises(ValueError, match="'fp8'; there are f32, bf16, int8, int4"):
        get_codec("fp8")
    assert [codec.wire_id for codec in CODECS] == [0, 1, 2, 3]
    assert all(get_codec(codec.name) is codec for codec in CODECS)


@codecs
@given(seeds, sizes, st.integers(0, 5))
def test_unaligned_and_reused_buffers_give_the_same_bytes(codec, seed, numel, offset):
    x = random_tensor(seed, numel)
    data = codec.encode(x)
    buffer = torch.full((codec.encoded_size(numel) + offset + 3,), 7, dtype=torch.uint8)
    window = buffer[offset : offset + codec.encoded_size(numel)]
    assert codec.encode(x, window) is window
    assert torch.equal(window, data)
    assert (buffer[:offset] == 7).all()
    assert (buffer[offset + codec.encoded_size(numel) :] == 7).all()
    out = torch.full((numel + 2,), 5.0)
    decoded = codec.decode(window, numel, out[1:-1])
    assert has_same_bits(decoded, codec.decode(data, numel))
    assert out[0] == out[-1] == 5.0
    assert (codec.examine(window, numel)[0] is None) == (codec.examine(data, numel)[0] is None)


def test_encoded_bytes_match_the_documentation():
    """Expected bytes are written by hand: learners in other languages are implemented from them."""
    x = torch.tensor([1.0, -2.0, 0.5])
    assert bytes(get_codec("f32").encode(x).tolist()) == struct.pack("<3f", 1.0, -2.0, 0.5)
    assert bytes(get_codec("bf16").encode(x).tolist()) == bytes([0x80, 0x3F, 0x00, 0xC0, 0x00, 0x3F])
    int8 = bytes(get_codec("int8").encode(x).tolist())
    (scale,) = struct.unpack("<f", int8[:4])
    assert abs(scale - 2.0 / 127) < 1e-8
    assert struct.unpack("<3b", int8[4:]) == (64, -127, 32)
    int4 = bytes(get_codec("int4").encode(x).tolist())
    (scale,) = struct.unpack("<f", b"\0\0" + int4[:2])
    assert abs(scale - 2.0 / 7) < 0.005 * 2.0 / 7
    q = [half - 8 for byte in int4[2:] for half in (byte & 15, byte >> 4)]
    assert q == [4, -7, 2] + [0] * 61


@pytest.mark.parametrize(("name", "bits"), [("f32", 32.0), ("bf16", 16.0), ("int8", 8.125), ("int4", 4.25)])
def test_bits_per_value(name, bits):
    assert get_codec(name).encoded_size(1 << 20) * 8 / (1 << 20) == bits


# --- error feedback ------------------------------------------------------------------------------------------------


def do_sums_agree(feedback: ErrorFeedback, seed: int, numel: int, sends: int, refused: frozenset[int]) -> bool:
    """Return whether decoded values sum up to the accepted inputs, within the error bound of the last send.

    Args:
        refused: Indices of the sends that the syncer refuses.
    """
    sent, decoded = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    last = torch.zeros(numel)
    for index in range(sends):
        x = random_tensor(seed + index, numel)
        data = feedback.encode(x)
        is_accepted = index not in refused
        feedback.settle(is_accepted)
        if is_accepted:
            received = feedback.codec.decode(data, numel)
            sent += x.double()
            decoded += received.double()
            last = max_rounding_error(feedback.codec, received)
    # 1.02: the bound is computed from the decoded values, whose scales may be slightly smaller. 1e-6: each f32 sum of x
    # and residual rounds the last bit.
    return bool(((sent - decoded).abs() <= 1.02 * last.double() + 1e-6 * sends).all())


@codecs
@given(seeds, sizes, st.integers(1, 40), st.frozensets(st.integers(0, 39), max_size=10))
def test_error_feedback_preserves_the_sum(codec, seed, numel, sends, refused):
    assert do_sums_agree(ErrorFeedback(codec, numel), seed, numel, sends, refused)


@given(seeds, sizes, st.lists(st.sampled_from(["bf16", "int8", "int4"]), min_size=1, max_size=20))
def test_error_feedback_preserves_the_sum_when_the_codec_changes(seed, numel, names):
    """The residual of int4 is added to the next send in any codec."""
    feedback = ErrorFeedback(get_codec("bf16"), numel)
    sent, decoded = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for index, name in enumerate(names):
        x = random_tensor(seed + index, numel)
        data = feedback.encode(x, codec=get_codec(name))
        feedback.settle(True)
        sent += x.double()
        decoded += get_codec(name).decode(data, numel).double()
    assert torch.allclose(sent - decoded, feedback.residual.double(), atol=1e-5 * len(names))
    last = get_codec(names[-1])
    assert bool((feedback.residual.abs() <= 1.02 * max_rounding_error(last, last.decode(data, numel)) + 1e-5).all())


def test_error_feedback_does_not_switch_between_lossless_and_lossy_codecs():
    for one, other in (("f32", "bf16"), ("int8", "f32")):
        with pytest.raises(ValueError, match=f"error feedback for {one} cannot encode in {other}"):
            ErrorFeedback(get_codec(one), 3).encode(torch.ones(3), codec=get_codec(other))


class NoFeedback(ErrorFeedback):
    """Bug: clears the residual after every send."""

    def settle(self, sent: bool) -> None:
        super().settle(sent)
        self.residual.zero_()


class SettlesRefused(ErrorFeedback):
    """Bug: settles a refused send as if it had been accepted."""

    def settle(self, sent: bool) -> None:
        super().settle(True)


class WrongSign(ErrorFeedback):
    """Bug: negates the residual."""

    def settle(self, sent: bool) -> None:
        super().settle(sent)
        if sent:
            self.residual.neg_()


@pytest.mark.parametrize("buggy_class", [NoFeedback, SettlesRefused, WrongSign])
@rounding_codecs
def test_sum_check_finds_injected_bugs(codec, buggy_class):
    refused = frozenset({3, 4, 7, 12, 20, 21})
    assert do_sums_agree(ErrorFeedback(codec, 300), 1, 300, 40, refused)
    assert not do_sums_agree(buggy_class(codec, 300), 1, 300, 40, refused)


@rounding_codecs
def test_refused_send_does_not_change_the_residual(codec):
    x, y = random_tensor(0, 500), random_tensor(1, 500)
    plain, interrupted = ErrorFeedback(codec, 500), ErrorFeedback(codec, 500)
    for feedback in (plain, interrupted):
        feedback.encode(x)
        feedback.settle(True)
    interrupted.encode(random_tensor(2, 500))
    interrupted.settle(False)
    interrupted.encode(random_tensor(3, 500))  # never settled
    assert torch.equal(plain.encode(y), interrupted.encode(y))


@rounding_codecs
def test_refused_nan_does_not_stay_in_the_residual(codec):
    feedback = ErrorFeedback(codec, 3)
    data = feedback.encode(torch.tensor([1.0, float("nan"), 2.0]))
    assert codec.examine(data, 3)[0] is not None
    feedback.settle(False)
    assert codec.examine(feedback.encode(torch.ones(3)), 3)[0] is None


@codecs
def test_first_send_with_feedback_equals_plain_encoding(codec):
    x = random_tensor(0, CHUNK_NUMEL + 999)
    feedback = ErrorFeedback(codec, x.numel())
    assert torch.equal(feedback.encode(x), codec.encode(x))
    out = torch.empty(codec.encoded_size(x.numel()), dtype=torch.uint8)
    assert feedback.encode(x, out) is out
    assert torch.equal(out, codec.encode(x))


def test_error_feedback_of_f32_allocates_nothing():
    assert ErrorFeedback(get_codec("f32"), 10**12).residual.numel() == 0


def test_error_feedback_refuses_invalid_calls():
    feedback = ErrorFeedback(get_codec("bf16"), 3)
    with pytest.raises(ValueError, match="call encode before"):
        feedback.settle(True)
    feedback.settle(False)
    with pytest.raises(ValueError, match="3 values"):
        feedback.encode(torch.zeros(4))
