"""Contributions that are far larger than any before are refused; everything that training does is not."""

from __future__ import annotations

import torch

from atoll.ml.codecs import codec
from atoll.net.usual_sizes import KEPT, MOST_TIMES, SEEN_FIRST, UsualSizes


def told(sizes: UsualSizes, *norms: float, steps: int = 1, fragment: int = 0) -> list[str | None]:
    return [sizes.problem(fragment, norm, steps) for norm in norms]


def test_a_wild_one_is_refused_and_not_remembered():
    sizes = UsualSizes()
    assert told(sizes, *[1.0] * SEEN_FIRST) == [None] * SEEN_FIRST
    assert told(sizes, 1e6, 1e6) == ["wild: 1e+06 times as large as the largest of the last 8"] * 2
    assert told(sizes, MOST_TIMES) == [None]


def test_nobody_is_judged_by_the_first_few():
    sizes = UsualSizes()
    assert told(sizes, *[1e-6] * (SEEN_FIRST - 1), 1e6) == [None] * SEEN_FIRST


def test_the_work_of_many_steps_may_be_large():
    sizes = UsualSizes()
    told(sizes, *[1.0] * SEEN_FIRST)
    assert told(sizes, 5000.0) != [None]
    assert told(sizes, 5000.0, steps=50) == [None]


def test_fragments_have_sizes_of_their_own():
    sizes = UsualSizes()
    told(sizes, *[1e-3] * SEEN_FIRST, fragment=1)
    assert told(sizes, *[1e3] * SEEN_FIRST, fragment=2) == [None] * SEEN_FIRST


def test_a_schedule_that_warms_up_or_decays_is_no_reason():
    sizes = UsualSizes()
    assert set(told(sizes, *(1e-4 * 1.5**n for n in range(30)))) == {None}
    assert set(told(sizes, *(1e2 * 0.8**n for n in range(100)))) == {None}


def test_fragments_that_did_not_change_say_nothing_about_the_first_change():
    sizes = UsualSizes()
    assert set(told(sizes, *[0.0] * (2 * KEPT), 1.0)) == {None}


def test_the_codec_tells_the_norm_with_the_problem():
    values = torch.randn(1000)
    for name in ("f32", "bf16", "int8", "int4"):
        up = codec(name)
        problem, norm = up.examined(up.encode(values), 1000)
        assert problem is None
        assert float(values.norm()) * 0.9 < norm < float(values.norm()) * 20
        assert up.problem(up.encode(values), 1000) is None
    up = codec("bf16")
    values[5] = torch.nan
    assert up.examined(up.encode(values), 1000)[0] == up.problem(up.encode(values), 1000) is not None
