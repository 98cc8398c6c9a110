"""Tape format: exact round trip, and errors with a location for invalid input."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import zlib
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from atoll.core import ledger, protocol, reasons, types
from atoll.core.codec import Value
from atoll.core.protocol import (
    Envelope,
    LogReason,
    MessageArrived,
    Ping,
    Pong,
    Published,
    Pull,
    Report,
    Send,
    StepTaken,
)
from atoll.core.reasons import Reason
from atoll.core.syncer.state import RestoredState
from atoll.core.types import Limits, MergedUpTo, RoundId, RunConfig
from atoll.tape.format import (
    FORMAT_VERSION,
    TAPE_TYPES,
    Actor,
    Entry,
    Header,
    TapeError,
    canonical,
    decode,
    decode_entry,
    decode_header,
    encode,
    encode_entry,
    encode_header,
)

ACTOR = Actor(3, 1)
HEADER = Header(FORMAT_VERSION, "0.1.0", ACTOR, RunConfig(), 7)

# --------------------------------------------------------------------------------------------------------------------
# Examples of every type, drawn from its annotations

SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(),
    float: st.floats() | st.integers(),
    str: st.text(st.characters(), max_size=8),
    NoneType: st.none(),
    object: st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
}
CONFIGS = st.builds(
    RunConfig,
    run_id=st.text(max_size=8),
    fragments=st.just(8),
    grace_margin=st.floats(0, 1, exclude_max=True),
    adopt=st.sampled_from(["carry", "overwrite", "blend"]),
    budget_tokens=st.none() | st.integers(1),
    owned_fragments=st.none() | st.sets(st.integers(0, 7), min_size=1).map(tuple),
    fingerprint=st.lists(st.text(max_size=8), max_size=3).map(tuple),
    limits=st.builds(Limits, max_wait_s=st.floats(30.0, allow_nan=False)),
)


@functools.cache
def values_of(hint: Any) -> st.SearchStrategy[Any]:
    if hint is RunConfig:
        return CONFIGS
    if hint is Limits:
        return st.builds(Limits, max_pull_attempts=st.integers(1))
    if hint in SCALARS:
        return SCALARS[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, UnionType):
        return st.one_of([values_of(arg) for arg in args])
    if origin is tuple and args[1:] == (...,):
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, args))
    if origin in (dict, Mapping):
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=3)
    hints = get_type_hints(hint)
    return st.builds(hint, **{name: values_of(each) for name, each in hints.items()})


def exact(value: Any) -> Any:
    """Return the value with all nested types, so that equality is exact."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), [exact(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Value):
        return type(value), exact(structs.astuple(value))
    if isinstance(value, tuple):
        return type(value), [exact(each) for each in value]
    if isinstance(value, Mapping):
        return type(value), [(exact(key), exact(each)) for key, each in value.items()]
    return type(value), repr(value)


@pytest.mark.parametrize("kind", TAPE_TYPES, ids=lambda kind: kind.__name__)
@settings(max_examples=40)
@given(data=st.data())
def test_every_type_round_trips(kind, data):
    value = data.draw(values_of(kind))
    assert exact(decode(encode(value))) == exact(value)


@given(
    entry=st.builds(
        Entry,
        st.floats(),
        st.just(ACTOR),
        st.integers(1),
        values_of(protocol.Event),
        values_of(tuple[protocol.Effect, ...]),
    )
)
def test_entry_round_trips(entry):
    line = encode_entry(entry)
    assert line.isascii()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert exact(decode_entry(line[:-1], ACTOR)) == exact(entry)


@given(
    header=st.builds(
        Header,
        st.just(FORMAT_VERSION),
        st.text(),
        st.just(ACTOR),
        CONFIGS,
        st.none() | st.integers(),
        values_of(RestoredState | None),
        st.text(),
    )
)
def test_header_round_trips(header):
    assert exact(decode_header(encode_header(header)[:-1])) == exact(header)


def is_value(cls: type) -> bool:
    return issubclass(cls, Value) or hasattr(cls, "_fields") or dataclasses.is_dataclass(cls)


def test_protocol_types_are_registered():
    ours = {
        cls
        for module in (protocol, types, reasons, ledger)
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if cls.__module__ == module.__name__ and is_value(cls)
    }
    # figures for display, samples of a step, and the ledgers of a syncer
    not_on_tapes = {ledger.LeaseTotals, ledger.StepSamples, ledger.TokenAccount, ledger.LeaseHolder}
    assert ours - set(TAPE_TYPES) == not_on_tapes
    assert len({cls.__name__ for cls in TAPE_TYPES}) == len(TAPE_TYPES)


# --------------------------------------------------------------------------------------------------------------------
# Encoding


def test_encoded_value_has_type_names():
    assert encode(Pull(RoundId(7, 3, 1, 2))) == '["Pull",["RoundId",7,3,1,2]]'
    assert (
        encode(Published(7, 4, None, MergedUpTo(1, 3, 40, 4000, 0), 0.25))
        == '["Published",7,4,null,["MergedUpTo",1,3,40,4000,0,0],0.25]'
    )


def test_entry_line_is_json_with_checksum():
    line = encode_entry(
        Entry(12.5, ACTOR, 17, StepTaken(1, 100, 0.5), (LogReason(("learner", 3), Reason("connection-up")),))
    )
    checksum, payload = json.loads(line)
    assert payload == [
        12.5,
        17,
        ["StepTaken", 1, 100, 0.5, 0],
        [["LogReason", ["learner", 3], ["Reason", "connection-up", []]]],
    ]
    assert checksum == f"{zlib.crc32(json.dumps(payload, separators=(',', ':')).encode()):08x}"


def test_header_has_fields_of_every_type():
    _, (_, fields, shapes) = json.loads(encode_header(HEADER))
    assert fields["actor"] == ["Actor", 3, 1]
    assert fields["config"][1]["every_steps"] == 24
    assert shapes["RoundId"] == ["fragment", "base", "epoch", "attempt"]
    assert set(shapes) == {cls.__name__ for cls in TAPE_TYPES}


def test_non_finite_numbers_are_encoded():
    assert encode(Report(1, 2, float("nan"))) == '["Report",1,2,{"float":"nan"},0]'
    assert encode(Report(1, 2, float("-inf"))) == '["Report",1,2,{"float":"-inf"},0]'
    assert encode(Reason("grace-no-slack", (1, float("inf")))) == '["Reason","grace-no-slack",[1,{"float":"inf"}]]'


def test_canonical_text_distinguishes_types():
    ping, pong = (Ping(4), Pong(4))
    assert ping != pong  # type: ignore[comparison-overlap]
    assert canonical(ping) != canonical(pong)
    assert canonical((Ping(4), Ping(5))) == '[["Ping",4],["Ping",5]]'
    assert canonical(Report(1, 2, float("nan"))) == canonical(Report(1, 2, float("nan")))


# --------------------------------------------------------------------------------------------------------------------
# Invalid input


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('["Sail",1]', 'expected an array that begins with the name of a type, found ["Sail",1]'),
        ("[7]", "expected an array that begins with the name of a type, found [7]"),
        ("{}", "expected an array that begins with the name of a type, found {}"),
        ('["Pull"]', "Pull: Expected `array` of at least length 2, got 1"),
        ('["Pull",["RoundId",7,3,1,2],5]', "Pull: Expected `array` of at most length 1, got 2"),
        ('["StepTaken",1,2,0.5]', "StepTaken has 4 fields, found 3"),
        ('["Published",7,4,null,["MergedUpTo",1,3,40,4000,0],0.25]', "MergedUpTo has 6 fields, found 5"),
        ('["MergeRound",["RoundId",0,0,1,1],[["AcceptedContribution",1,1,1,1,1,1,0,1.0]],["Reason","x",[]],null]',
         "AcceptedContribution has"),
        ('["Pull",["MergedUpTo",1,1,1,1,1]]', "Pull: Invalid value 'MergedUpTo' - at `$[1][0]`"),
        ('["Pull",["RoundId",7,3,1,"2"]]', "Pull: Expected `int`, got `str` - at `$[1][4]`"),
        ('["Pull",["RoundId",7,3,1,true]]', "Pull: Expected `int`, got `bool` - at `$[1][4]`"),
        ('["Pull",["RoundId",7,3,1,2.0]]', "Pull: Expected `int`, got `float` - at `$[1][4]`"),
        ('["StepTaken",1,2,true,0]', "StepTaken: Expected `int | float`, got `bool` - at `$[3]`"),
        ('["StepTaken",1,2,{"float":"fast"},0]', "StepTaken: Expected `int | float`, got `object` - at `$[3]`"),
        ('["StepTaken",{"float":"nan"},2,1.0,0]', "StepTaken: Expected `int`, got `float` - at `$[1]`"),
        ('["Reason","connection-up",[[]]]',
         "Reason: Expected `bool | int | float | str | null`, got `array` - at `$[2][0]`"),
        ('["LogReason",["learner"],["Reason","connection-up",[]]]',
         "LogReason: Expected `array` of length 2, got 1 - at `$[1]`"),
        ('["Send",["Envelope",1,1,1,1,1,1,1,["Dial",0,1]]]', "Send: Invalid value 'Dial' - at `$[1][8][0]`"),
        ('["AdoptFragment",1,1,"seize",true,1,1,1]', "AdoptFragment: Invalid enum value 'seize' - at `$[3]`"),
        ('["Published",1,1,[],null,0.5]', "Published: Expected `int | null`, got `array` - at `$[3]`"),
        (
            '["RestoredState",{"versions":[[1]],"members":null,"manifest":null,"leases":null}]',
            "RestoredState.versions: Expected `array` of length 2, got 1 - at `$[0]`",
        ),
        ('["Limits",{"speed":1}]', "Limits has no field 'speed'"),
        ('["Limits",{}]', "Limits lacks the field 'initial_wait_s'"),
        ('["LedgerLine",1,1,0,[["a",1],["a",2]]]', "LedgerLine.dropped: a key occurs twice"),
        ("{", "invalid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[" * 100_000, "invalid JSON"),
    ],
)  # fmt: skip
def test_decode_rejects_invalid_value_with_location(text, message):
    with pytest.raises(TapeError) as caught:
        decode(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "type 'int' is not registered"),
        (Entry(0.0, ACTOR, 1, StepTaken(1, 1, 1.0), ()), "type 'Entry' is not registered"),
        (Pull(MergedUpTo(1, 1, 1, 1, 1)), "Pull: Invalid value 'MergedUpTo'"),  # type: ignore[arg-type]
        (Send(Envelope(1, 1, 1, 1, 1, 1, 0, StepTaken(1, 1, 1.0))), "Send: Invalid value 'StepTaken'"),  # type: ignore[arg-type]
        (Reason("connection-up", ((1, 2),)), "Reason: Expected .*, got `array`"),  # type: ignore[arg-type]
        (Ping(object()), "Ping: .*objects of type object"),  # type: ignore[arg-type]
    ],
)
def test_encode_rejects_invalid_value(value, message):
    with pytest.raises(TapeError, match=message):
        encode(value)


def test_encode_error_names_actor_and_tick():
    with pytest.raises(TapeError, match=r"learner 3 incarnation 1, tick 5: Invalid value 'Ping'"):
        encode_entry(Entry(0.0, ACTOR, 5, Ping(1), ()))  # type: ignore[arg-type]


def with_checksum(payload: object) -> bytes:
    text = json.dumps(payload, separators=(",", ":")).encode()
    return b'["%08x",%b]' % (zlib.crc32(text), text)


def header_with(**changes: object) -> bytes:
    _, (name, fields, shapes) = json.loads(encode_header(HEADER))
    return with_checksum([name, fields | changes, shapes])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "not a line of a tape"),
        (b"hello", "not a line of a tape: b'hello'"),
        (encode_entry(Entry(0.0, ACTOR, 1, StepTaken(1, 1, 1.0), ()))[:-1], "no header"),
        (with_checksum(["Header", 1]), "the header is malformed"),
        (header_with(format_version=FORMAT_VERSION + 1, atoll_version="9.0"),
         f"a newer Atoll: format {FORMAT_VERSION + 1} of Atoll 9.0"),
        (header_with(format_version=1, atoll_version="0.1.0"), "an older Atoll: format 1 of Atoll 0.1.0"),
        (header_with(format_version=0), "format version 0 does not exist"),
        (header_with(format_version="1"), "the header has no format version"),
        (header_with(mood="good"), "Header has no field 'mood'"),
        (header_with(seed="7"), "Header.seed: Expected `int | null`, got `str`"),
        (header_with(config=["RunConfig", {}]), "Header.config: RunConfig lacks the field 'run_id'"),
    ],
)  # fmt: skip
def test_decode_header_rejects_invalid_line(line, message):
    with pytest.raises(TapeError) as caught:
        decode_header(line)
    assert message in str(caught.value)


def test_header_rejects_invalid_config():
    _, (name, fields, shapes) = json.loads(encode_header(HEADER))
    fields["config"][1]["quorum"] = 0
    with pytest.raises(TapeError, match=r"Header\.config: RunConfig: quorum must be a whole number of at least 1"):
        decode_header(with_checksum([name, fields, shapes]))


def test_header_with_unknown_type_raises():
    _, (name, fields, shapes) = json.loads(encode_header(HEADER))
    with pytest.raises(TapeError, match=r"written by another Atoll, 0\.1\.0: unknown type 'Sail'"):
        decode_header(with_checksum([name, fields, shapes | {"Sail": []}]))
    with pytest.raises(TapeError, match=r"Ping has the fields .* here"):
        decode_header(with_checksum([name, fields, shapes | {"Ping": ["serial", "mood"]}]))


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ([1.0, 1, ["TimerFired"]], "an entry must have four parts"),
        ("hello", "an entry must have four parts"),
        (["Header", {}, {}], "a second header"),
        (["now", 1, ["TimerFired"], []], "tick 1: Expected `int | float`, got `str` - at `$[0]`"),
        ([1.0, 0, ["TimerFired"], []], "a tick must be an integer of at least 1"),
        ([1.0, 1, ["Dial", 0.0, 1], []], "tick 1: Invalid value 'Dial' - at `$[2][0]`"),
        ([1.0, 1, ["TimerFired"], [["TimerFired"]]], "tick 1: Invalid value 'TimerFired' - at `$[3][0][0]`"),
        ([1.0, 1, ["TimerFired"], {}], "tick 1: Expected `array`, got `object` - at `$[3]`"),
    ],
)
def test_decode_entry_rejects_invalid_payload(payload, message):
    with pytest.raises(TapeError) as caught:
        decode_entry(with_checksum(payload), ACTOR)
    assert message in str(caught.value)


def test_integer_time_round_trips():
    entry = Entry(5, ACTOR, 1, MessageArrived(Envelope(3, 1, 1, 1, 1, 1, 0, Pull(RoundId(1, 2, 3, 4)))), ())
    assert exact(decode_entry(encode_entry(entry)[:-1], ACTOR)) == exact(entry)
