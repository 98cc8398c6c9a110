"""Numbers on the wire: what comes back, how far off it is, what is refused, and that error feedback loses nothing."""

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
ROUNDING = [each for each in CODECS if each.name != "f32"]

codecs = pytest.mark.parametrize("coder", CODECS, ids=lambda each: each.name)
rounding_codecs = pytest.mark.parametrize("coder", ROUNDING, ids=lambda each: each.name)
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 700)


def round_trip(coder: Codec, x: Tensor) -> Tensor:
    return coder.decode(coder.encode(x), x.numel())


def within_quantum(coder: Codec, x: Tensor) -> bool:
    """Compared in f64, where the difference of two f32 is exact."""
    return bool(((x.double() - round_trip(coder, x).double()).abs() <= max_rounding_error(coder, x).double()).all())


@given(seeds, sizes)
def test_f32_comes_back_bit_for_bit(seed, numel):
    x = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**32, numel, dtype=np.uint32).view(np.float32))
    assert has_same_bits(round_trip(get_codec("f32"), x), x)  # NaN with its payload, denormals, both zeros


@given(seeds, sizes)
def test_bf16_values_come_back_bit_for_bit_through_bf16(seed, numel):
    halves = np.random.default_rng(seed).integers(0, 2**16, numel, dtype=np.uint32) << 16
    x = torch.from_numpy(halves.view(np.float32)).nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0)
    assert has_same_bits(round_trip(get_codec("bf16"), x), x)


@codecs
@pytest.mark.parametrize("numel", SIZES)
def test_any_size_comes_back_within_a_quantum(coder, numel):
    x = random_tensor(numel, numel)
    data = coder.encode(x)
    assert data.dtype == torch.uint8
    assert data.numel() == coder.encoded_size(numel)
    assert coder.examine(data, numel)[0] is None
    assert within_quantum(coder, x)


@codecs
@given(seeds, sizes, st.floats(0.0, 40.0))
def test_any_values_come_back_within_a_quantum(coder, seed, numel, spread):
    x = random_tensor(seed, numel, spread)  # includes denormals and values near the largest
    assert within_quantum(coder, x)


@codecs
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70))
@example([FLT_MAX, -FLT_MAX, 1.0])
@example([2.0**-149, -(2.0**-149)])
@example([180 * 2.0**-149, 2.0**-126, 0.0, -0.0])
def test_chosen_values_come_back_within_a_quantum(coder, values):
    x = torch.tensor(values)
    if coder.name == "bf16":
        x.clamp_(-3.38e38, 3.38e38)  # beyond it bf16 has no numbers, see below
    assert within_quantum(coder, x)
    assert bool(round_trip(coder, x).isfinite().all())


@rounding_codecs
def test_the_quantum_is_not_a_generous_one(coder):
    """Otherwise the bounds above would hold for anything."""
    x = random_tensor(0, 10_000)
    errors = (x - round_trip(coder, x)).abs()
    assert float((errors / max_rounding_error(coder, x)).max()) > 0.9
    assert float(max_rounding_error(coder, x).max()) < {"bf16": 0.02, "int8": 0.02, "int4": 0.4}[coder.name]


@codecs
@pytest.mark.parametrize("numel", [1, 64, 300])
def test_zeros_stay_zeros(coder, numel):
    assert has_same_bits(round_trip(coder, torch.zeros(numel)), torch.zeros(numel))


@codecs
def test_a_decoded_value_encodes_to_itself(coder):
    """Levels are a fixed point up to their last bit: sending a decoded value again moves nothing by a level."""
    x = random_tensor(3, 5000)
    once = round_trip(coder, x)
    assert torch.allclose(round_trip(coder, once), once, rtol=0.01 if coder.name == "int4" else 2e-6, atol=0.0)


@codecs
@pytest.mark.parametrize("numel", [1, 77, 2 * CHUNK_NUMEL + 300])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_a_problem(coder, numel, bad):
    for place in {0, numel // 2, numel - 1}:
        x = random_tensor(0, numel)
        x[place] = bad
        problem = coder.examine(coder.encode(x), numel)[0]
        assert problem is not None
        assert "not finite" in problem


@codecs
def test_infinities_that_cancel_are_a_problem(coder):
    x = random_tensor(0, 3)
    x[0], x[1] = float("inf"), float("-inf")
    assert coder.examine(coder.encode(x), 3)[0] is not None


@codecs
def test_values_too_large_to_add_up_are_a_problem(coder):
    assert coder.examine(coder.encode(torch.full((300,), 1e17)), 300)[0] is None
    assert coder.examine(coder.encode(torch.full((300,), 1e20)), 300)[0] is not None
    assert coder.examine(coder.encode(torch.full((300,), FLT_MAX)), 300)[0] is not None


@codecs
def test_a_wrong_size_is_a_problem_and_an_error(coder):
    data = coder.encode(random_tensor(0, 100))
    assert "bytes" in str(coder.examine(data[:-1], 100)[0])
    assert coder.examine(data, 400)[0] is not None
    assert "flat bytes" in str(coder.examine(data.float(), 100)[0])
    with pytest.raises(ValueError, match="flat bytes"):
        coder.decode(data[:-1], 100)
    with pytest.raises(ValueError, match="do not fit"):
        coder.decode(data, 100, torch.empty(99))
    with pytest.raises(ValueError, match="flat bytes"):
        coder.encode(random_tensor(0, 100), torch.empty(5, dtype=torch.uint8))


@codecs
@pytest.mark.parametrize("x", [torch.zeros(4, 4), torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2]])
def test_other_tensors_are_refused(coder, x):
    with pytest.raises(ValueError, match="copy it into one"):
        coder.encode(x)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="'fp8'; there are f32, bf16, int8, int4"):
        get_codec("fp8")
    assert [each.wire_id for each in CODECS] == [0, 1, 2, 3]
    assert all(get_codec(each.name) is each for each in CODECS)


@codecs
@given(seeds, sizes, st.integers(0, 5))
def test_bytes_may_begin_anywhere_and_buffers_be_used_again(coder, seed, numel, offset):
    x = random_tensor(seed, numel)
    data = coder.encode(x)
    room = torch.full((coder.encoded_size(numel) + offset + 3,), 7, dtype=torch.uint8)
    place = room[offset : offset + coder.encoded_size(numel)]
    assert coder.encode(x, place) is place
    assert torch.equal(place, data)
    assert (room[:offset] == 7).all()
    assert (room[offset + coder.encoded_size(numel) :] == 7).all()
    out = torch.full((numel + 2,), 5.0)
    decoded = coder.decode(place, numel, out[1:-1])
    assert has_same_bits(decoded, coder.decode(data, numel))
    assert out[0] == out[-1] == 5.0
    assert (coder.examine(place, numel)[0] is None) == (coder.examine(data, numel)[0] is None)


def test_the_bytes_are_those_of_the_documentation():
    """Written out by hand: who writes a learner in another language works from this."""
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


def sums_agree(feedback: ErrorFeedback, seed: int, numel: int, sends: int, refused: frozenset[int]) -> bool:
    """Sends; the sum of what was decoded is the sum of what was taken, up to one quantum of the last send."""
    given, decoded = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    last = torch.zeros(numel)
    for turn in range(sends):
        x = random_tensor(seed + turn, numel)
        data = feedback.encode(x)
        taken = turn not in refused
        feedback.settle(taken)
        if taken:
            got = feedback.codec.decode(data, numel)
            given += x.double()
            decoded += got.double()
            last = max_rounding_error(feedback.codec, got)
    # Half a level lies between what was encoded and what came out, whose own quantum may be a little smaller; f32 sums
    # of x and residual are off by a last bit in each turn.
    return bool(((given - decoded).abs() <= 1.02 * last.double() + 1e-6 * sends).all())


@codecs
@given(seeds, sizes, st.integers(1, 40), st.frozensets(st.integers(0, 39), max_size=10))
def test_feedback_loses_nothing_in_the_long_run(coder, seed, numel, sends, refused):
    assert sums_agree(ErrorFeedback(coder, numel), seed, numel, sends, refused)


@given(seeds, sizes, st.lists(st.sampled_from(["bf16", "int8", "int4"]), min_size=1, max_size=20))
def test_feedback_loses_nothing_where_the_codec_changes_under_way(seed, numel, names):
    """What int4 has left out goes along with the next send, whatever that one is in."""
    feedback = ErrorFeedback(get_codec("bf16"), numel)
    given, decoded = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for turn, name in enumerate(names):
        x = random_tensor(seed + turn, numel)
        data = feedback.encode(x, codec=get_codec(name))
        feedback.settle(True)
        given += x.double()
        decoded += get_codec(name).decode(data, numel).double()
    assert torch.allclose(given - decoded, feedback.residual.double(), atol=1e-5 * len(names))
    last = get_codec(names[-1])
    assert bool((feedback.residual.abs() <= 1.02 * max_rounding_error(last, last.decode(data, numel)) + 1e-5).all())


def test_error_feedback_does_not_switch_between_lossless_and_lossy_codecs():
    for one, other in (("f32", "bf16"), ("int8", "f32")):
        with pytest.raises(ValueError, match=f"error feedback for {one} cannot encode in {other}"):
            ErrorFeedback(get_codec(one), 3).encode(torch.ones(3), codec=get_codec(other))


class NoFeedback(ErrorFeedback):
    """A planted bug: every send starts without a residual."""

    def settle(self, sent: bool) -> None:
        super().settle(sent)
        self.residual.zero_()


class NeverForgets(ErrorFeedback):
    """A bug: what was refused is settled as if it had been taken."""

    def settle(self, sent: bool) -> None:
        super().settle(True)


class WrongSign(ErrorFeedback):
    """A bug: what was left out is taken away once more."""

    def settle(self, sent: bool) -> None:
        super().settle(sent)
        if sent:
            self.residual.neg_()


@pytest.mark.parametrize("planted", [NoFeedback, NeverForgets, WrongSign])
@rounding_codecs
def test_the_sums_tell_a_planted_bug(coder, planted):
    refused = frozenset({3, 4, 7, 12, 20, 21})
    assert sums_agree(ErrorFeedback(coder, 300), 1, 300, 40, refused)
    assert not sums_agree(planted(coder, 300), 1, 300, 40, refused)


@rounding_codecs
def test_a_refused_send_leaves_no_trace(coder):
    x, y = random_tensor(0, 500), random_tensor(1, 500)
    plain, interrupted = ErrorFeedback(coder, 500), ErrorFeedback(coder, 500)
    for each in (plain, interrupted):
        each.encode(x)
        each.settle(True)
    interrupted.encode(random_tensor(2, 500))
    interrupted.settle(False)
    interrupted.encode(random_tensor(3, 500))  # never settled at all
    assert torch.equal(plain.encode(y), interrupted.encode(y))


@rounding_codecs
def test_a_refused_nan_does_not_stay(coder):
    feedback = ErrorFeedback(coder, 3)
    data = feedback.encode(torch.tensor([1.0, float("nan"), 2.0]))
    assert coder.examine(data, 3)[0] is not None
    feedback.settle(False)
    assert coder.examine(feedback.encode(torch.ones(3)), 3)[0] is None


@codecs
def test_feedback_and_plain_encoding_agree_on_the_first_send(coder):
    x = random_tensor(0, CHUNK_NUMEL + 999)
    feedback = ErrorFeedback(coder, x.numel())
    assert torch.equal(feedback.encode(x), coder.encode(x))
    out = torch.empty(coder.encoded_size(x.numel()), dtype=torch.uint8)
    assert feedback.encode(x, out) is out
    assert torch.equal(out, coder.encode(x))


def test_feedback_of_f32_takes_no_memory():
    assert ErrorFeedback(get_codec("f32"), 10**12).residual.numel() == 0


def test_feedback_refuses_what_makes_no_sense():
    feedback = ErrorFeedback(get_codec("bf16"), 3)
    with pytest.raises(ValueError, match="call encode before"):
        feedback.settle(True)
    feedback.settle(False)
    with pytest.raises(ValueError, match="3 values"):
        feedback.encode(torch.zeros(4))
