"""The numeric settings of a run: refused values and the JSON round trip."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.tensors.settings import Numerics

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


def test_json_round_trip_restores_every_field():
    numerics = Numerics("rows", "average", "sgd", 1, 0.0, 20, False, "int4", "f32", ("wte*", "*.embed"))
    assert Numerics.from_json(json.loads(json.dumps(numerics.to_json()))) == numerics


def test_named_codec_is_the_only_one_and_auto_starts_with_bf16():
    assert Numerics().upload_codecs == Numerics().download_codecs == ("bf16", "int8", "int4")
    for name in ("f32", "bf16", "int8", "int4"):
        assert Numerics(up=name).upload_codecs == Numerics(down=name).download_codecs == (name,)
    assert Numerics(up="int8").download_codecs[0] == "bf16"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("plan", "even"),
        ("merge", None),
        ("outer", "not a class"),
        ("outer", ""),
        ("outer_lr", 0.0),
        ("outer_lr", math.nan),
        ("outer_lr", math.inf),
        ("outer_lr", "0.4"),
        ("outer_ramp", -1),
        ("outer_ramp", 2.5),
        ("outer_ramp", True),
        ("outer_momentum", 1.0),
        ("outer_momentum", -0.1),
        ("outer_momentum", math.nan),
        ("outer_momentum", True),
        ("up", "fp8"),
        ("down", ["f32"]),
        ("embeddings", ["wte"]),
        ("embeddings", ("",)),
        ("embeddings", (1,)),
        ("embeddings", ("x",) * 101),
    ],
)
def test_invalid_value_error_names_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        Numerics(**{field: value})


def test_missing_and_unknown_fields_are_refused():
    complete = Numerics().to_json()
    for name in complete:
        with pytest.raises(ValueError, match=f"lack '{name}'"):
            Numerics.from_json({key: value for key, value in complete.items() if key != name})
    with pytest.raises(ValueError, match="unknown 'nesterov'"):
        Numerics.from_json({**complete, "nesterov": True})


@given(JSON, st.sampled_from([*Numerics().to_json()]))
def test_arbitrary_json_raises_only_value_error(value, field):
    for raw in (value, {**Numerics().to_json(), field: value}):
        try:
            numerics = Numerics.from_json(raw)
        except ValueError:
            continue
        assert Numerics.from_json(numerics.to_json()) == numerics
