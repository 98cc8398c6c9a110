"""Bandwidth model: the published table, inverse functions, and predictions of benchmark runs."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.sim.bandwidth import (
    CODEC_BITS,
    UTILISATIONS,
    WIRE_BITS,
    ExchangePattern,
    Workload,
    all_reduce_factor,
    data_parallel,
    decoupled,
    diloco,
    effective_period_steps,
    min_rate_for_period,
    required_rate,
    step_time_s,
    streaming,
    utilisation,
)
from atoll.sim.published import PUBLISHED_RATE_PARAMS, PUBLISHED_RATE_STEP_S, PUBLISHED_RATES_GBIT_S
from atoll.tensors.codecs import CODECS
from benchmarks.predictions import predict_steps

PAGE = Path(__file__).resolve().parents[2] / "docs/plan.md"
CELLS = [
    (sites, name, share, rate) for (sites, name), row in PUBLISHED_RATES_GBIT_S.items() for share, rate in row.items()
]


def required_gbit_s(sites: int, name: str, share: float) -> float:
    load = Workload(PUBLISHED_RATE_PARAMS, sites, PUBLISHED_RATE_STEP_S)
    exchange = data_parallel(sites) if name == "data-parallel" else decoupled(name.removeprefix("decoupled-"))
    return required_rate(exchange, load, share) / 1e9


# --------------------------------------------------------------------------------------------------------------------
# The published table


@pytest.mark.parametrize(("sites", "name", "share", "published"), CELLS)
def test_model_matches_published_rates_within_three_percent(sites, name, share, published):
    assert len(CELLS) == 18
    assert required_gbit_s(sites, name, share) == pytest.approx(published, rel=0.03)  # required: 10 %


def test_model_matches_published_ratio_at_95_percent():
    """At 95 % and 8 sites: 198 Gbit/s and 0.84 Gbit/s, a factor of 236."""
    ratio = required_gbit_s(8, "data-parallel", 0.95) / required_gbit_s(8, "decoupled-int4", 0.95)
    assert ratio == pytest.approx(236, rel=0.04)


def test_docs_table_matches_model():
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (\d) \| ([\w-]+) \| (\d+) % \| ([\d.]+) \| ([\d.]+) \| ([+-][\d.]+) \|$", text, re.MULTILINE
    )
    shown = {(int(sites), name, int(share) / 100): tuple(map(float, rest)) for sites, name, share, *rest in rows}
    assert shown.keys() == {cell[:3] for cell in CELLS}
    for sites, name, share, published in CELLS:
        shown_published, shown_ours, shown_percent = shown[sites, name, share]
        ours = required_gbit_s(sites, name, share)
        assert shown_published == published
        assert shown_ours == float(f"{ours:.3g}")
        assert shown_percent == pytest.approx(100 * (ours / published - 1), abs=0.051)
    worst = max(abs(percent) for _, _, percent in shown.values())
    assert f"The worst of the 18 cells is off by {worst:.1f} %" in text


def test_published_decoupled_rates_are_below_rate_for_period():
    """At the published rate for 95 % a step sends less than one fragment."""
    fragment_gbit = PUBLISHED_RATE_PARAMS * 16 / 24 / 1e9
    assert PUBLISHED_RATES_GBIT_S[2, "decoupled-bf16"][0.95] * PUBLISHED_RATE_STEP_S / 0.95 < 0.62 * fragment_gbit
    load = Workload(PUBLISHED_RATE_PARAMS, 2, PUBLISHED_RATE_STEP_S)
    assert min_rate_for_period("bf16", load, 24) == pytest.approx(fragment_gbit * 1e9)
    assert 40 < effective_period_steps("bf16", load, 24, 1.9e9) < 44


# --------------------------------------------------------------------------------------------------------------------
# The model

EXCHANGES = st.builds(
    ExchangePattern,
    bits_per_number=st.sampled_from((4.0, 16.0, 32.0)),
    share=st.floats(0.01, 1.0),
    every_steps=st.floats(0.2, 500.0),
    hidden_steps=st.floats(0.0, 10.0),
    sequential_delays=st.floats(0.0, 20.0),
)
LOADS = st.builds(
    Workload,
    params=st.floats(1e5, 1e12),
    sites=st.integers(2, 64),
    step_s=st.floats(0.01, 100.0),
    delay_s=st.floats(0.0, 0.3),
    star=st.booleans(),
)
SHARES = st.floats(0.01, 0.999)


@given(EXCHANGES, LOADS, SHARES)
def test_required_rate_is_inverse_of_utilisation(exchange, load, share):
    rate = required_rate(exchange, load, share)
    if math.isinf(rate):  # no rate is enough because of the delays
        assert utilisation(exchange, load, 1e30) <= share * (1 + 1e-9)
    else:
        assert utilisation(exchange, load, rate) == pytest.approx(share, rel=1e-6)


@given(EXCHANGES, LOADS, st.floats(1e3, 1e13), st.floats(1.0, 100.0))
def test_utilisation_increases_with_rate(exchange, load, rate, more):
    assert utilisation(exchange, load, rate) <= utilisation(exchange, load, rate * more) * (1 + 1e-12)
    assert 0.0 < utilisation(exchange, load, rate) <= 1.0


@given(EXCHANGES, LOADS, SHARES, SHARES)
def test_required_rate_increases_with_target(exchange, load, one, other):
    low, high = sorted((one, other))
    assert required_rate(exchange, load, low) <= required_rate(exchange, load, high) * (1 + 1e-12)


@given(EXCHANGES, LOADS, st.floats(1e3, 1e13))
def test_traffic_never_exceeds_link_rate(exchange, load, rate):
    step_s = step_time_s(exchange, load, rate)
    assert load.params * exchange.bits_per_step * load.traffic_factor / step_s <= rate * (1 + 1e-9)


@pytest.mark.parametrize("method", [data_parallel(4), diloco(4), streaming(4), decoupled("int4")])
def test_required_rate_scales_with_params_and_step_rate(method):
    load = Workload(1e9, 4, 1.0)
    for share in UTILISATIONS:
        assert required_rate(method, replace(load, params=3e9), share) == pytest.approx(
            3 * required_rate(method, load, share)
        )
        assert required_rate(method, replace(load, step_s=2.0), share) == pytest.approx(
            required_rate(method, load, share) / 2
        )


def test_required_rate_increases_with_delay_to_infinity():
    low, medium, high = (Workload(1e9, 4, 1.0, delay_s=delay) for delay in (0.0, 0.1, 0.2))
    dp = data_parallel(4)
    assert required_rate(dp, low, 0.95) < required_rate(dp, medium, 0.95) < math.inf
    assert required_rate(dp, high, 0.95) == math.inf
    assert required_rate(decoupled("bf16"), high, 0.95) < math.inf


def test_required_rates_of_diloco_and_streaming():
    load = Workload(1e9, 2, 1.0)
    assert required_rate(diloco(2), load, 0.5) == pytest.approx(16e9 / 24)
    assert required_rate(streaming(2), load, 0.95) == pytest.approx(0.95 * 16e9 / 24)


def test_star_needs_one_model_per_period():
    load = Workload(1e9, 8, 1.0)
    ratio = min_rate_for_period("bf16", load, 24) / min_rate_for_period("bf16", replace(load, star=True), 24)
    assert ratio == pytest.approx(all_reduce_factor(8))


def test_wire_bits_match_codecs():
    numel = 1 << 20
    assert {codec.name: 8 * codec.encoded_size(numel) / numel for codec in CODECS} == WIRE_BITS
    assert list(CODEC_BITS) == list(WIRE_BITS)


# --------------------------------------------------------------------------------------------------------------------
# Predictions of runs

SLOW_LINKS = Workload(params=10e6, sites=4, step_s=0.5, delay_s=0.02)


def test_paced_ddp_step_overlaps_exchange():
    sending_s = 10e6 * 32 * 1.5 / 2e9 + 6 * 0.02
    assert predict_steps("ddp", SLOW_LINKS, 2e9, work_s=0.5 - sending_s).step_s == pytest.approx(0.5)
    assert predict_steps("ddp", SLOW_LINKS, 2e9, work_s=0.5).step_s == pytest.approx(0.5 + sending_s)


def test_slow_link_increases_period_not_step_time():
    fast, slow = (predict_steps("decoupled", SLOW_LINKS, rate, codec="int4", every_steps=24) for rate in (1e9, 1e6))
    assert (fast.step_s, slow.step_s, slow.utilisation) == (0.5, 0.5, 1.0)
    assert fast.period_steps == 24
    assert slow.period_steps == pytest.approx(10e6 * 4.25 * 1.5 / (1e6 * 0.5))
    assert slow.sent_bit_s == pytest.approx(1e6)
    assert predict_steps("decoupled", SLOW_LINKS, 0.0).period_steps == math.inf


def test_ddp_is_twenty_times_slower_if_gradients_take_twenty_steps():
    rate = 10e6 * 32 * 1.5 / (20 * 0.5)
    ratio = (
        predict_steps("ddp", SLOW_LINKS, rate, work_s=0.1).step_s / predict_steps("decoupled", SLOW_LINKS, rate).step_s
    )
    assert 19 < ratio < 21


def test_predicted_steps_of_diloco_and_streaming():
    rate = 48e6
    sending_s = 10e6 * 32 * 1.5 / rate
    assert predict_steps("diloco", SLOW_LINKS, rate).step_s == pytest.approx(0.5 + (sending_s + 6 * 0.02) / 24)
    assert predict_steps("streaming", SLOW_LINKS, rate).step_s == pytest.approx(0.5)
    assert predict_steps("streaming", SLOW_LINKS, rate / 10).step_s == pytest.approx(10 * sending_s / 24)
    assert predict_steps("streaming", SLOW_LINKS, rate / 10).sent_bit_s == pytest.approx(rate / 10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Workload(1e9, 1, 1.0), "sites is 1; a single site has nothing to exchange"),
        (lambda: Workload(1e9, 2, 0.0), "give seconds above 0"),
        (lambda: required_rate(data_parallel(2), SLOW_LINKS, 1.0), "give a share above 0 and below 1"),
        (lambda: step_time_s(data_parallel(2), SLOW_LINKS, -1.0), "the rate is -1 bit/s"),
        (lambda: effective_period_steps("bf16", SLOW_LINKS, 24, -1.0), "the rate is -1 bit/s"),
        (lambda: decoupled("int3"), "unknown codec 'int3'; give one of f32, bf16, int8, int4"),
        (lambda: streaming(2, tau_steps=0), "tau is 0"),
        (lambda: streaming(2, fragments=0), "at least 1 fragment"),
        (lambda: predict_steps("async", SLOW_LINKS, 1e9), "no method 'async'"),
    ],
)
def test_invalid_input_raises_with_remedy(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_plan_imports_without_torch():
    script = "import sys; sys.modules['torch'] = None; import atoll.sim.plan, atoll.sim.bandwidth"
    subprocess.run([sys.executable, "-c", script], timeout=300, check=True)


def test_last_gradient_message_never_overlaps():
    """At high utilisation the last of 56 messages alone determines the rate."""
    load = Workload(params=5e9, sites=2, step_s=1.0)
    dp = data_parallel(2)
    rate = required_rate(dp, load, 0.99)
    assert rate == pytest.approx(5e9 * 16 / 56 / (1 / 0.99 - 1))
    assert utilisation(dp, load, rate) == pytest.approx(0.99)
    as_one_flow = ExchangePattern(16.0, 1.0, 1.0, 2 / 3)
    assert rate > 1.15 * required_rate(as_one_flow, load, 0.99)
    assert required_rate(dp, load, 0.9) < 1.03 * required_rate(as_one_flow, load, 0.9)
