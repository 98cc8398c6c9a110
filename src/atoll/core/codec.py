"""Encode the protocol's values as JSON and read them strictly: `read` returns the value that `to_text` wrote.

| Python | JSON |
|---|---|
| `Value`, named tuple | `["Name", field, ...]` |
| dataclass (settings) | `["Name", {"field": value, ...}]` |
| tuple | array |
| mapping | array of `[key, value]`: keys of JSON objects are always strings |
| number, string, truth value, None | itself |
| NaN and the infinities | `{"float": "nan"}`, `{"float": "inf"}`, `{"float": "-inf"}`: JSON cannot express them |

msgspec converts between values and plain lists and checks every type in both directions. `json` writes and parses the
text, because `msgspec.json` writes NaN as null. Both directions raise `ValidationError`, and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

import msgspec
from msgspec import ValidationError

Number: TypeAlias = int | float
"""A float of a `Value`. With `float`, msgspec reads 0 as 0.0, so the text of a replay would differ from the tape."""

Scalar: TypeAlias = bool | Number | str | None

_SPELLED = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
_TO_TEXT = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


class Value(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True, gc=False):
    """Base class of messages and records: an immutable value that compares by type and fields.

    The garbage collector does not track it. That is safe because its fields are immutable, so no cycle can contain it.
    """


def to_text(value: object) -> str:
    """Return a value as JSON on one line, in ASCII. Raise ValidationError if `read` would refuse the text."""
    prepared = _to_builtins(value)
    try:
        return _TO_TEXT(prepared)
    except ValueError:  # NaN and the infinities are rare: search for them only when the encoder has found one
        return _TO_TEXT(_encode_nonfinite(prepared))


def parse_float(parsed: dict[str, Any]) -> Any:
    """Return NaN for `{"float": "nan"}`, and the infinities likewise. `json.loads` uses this as its `object_hook`."""
    spelled = parsed.get("float")
    return _SPELLED[spelled] if len(parsed) == 1 and type(spelled) is str and spelled in _SPELLED else parsed


def read(parsed: Any, hint: Any) -> Any:
    """Return parsed JSON as a value of this type. Raise ValidationError if it does not match.

    Pass a single class where speed matters: msgspec caches the layout of a class, but analyzes a union every time.
    """
    if type(hint) is not msgspec.StructMeta:
        if dataclasses.is_dataclass(hint):
            return _read_dataclass(parsed, hint)
        if hasattr(hint, "_fields"):
            return _read_named_tuple(parsed, hint)
        if get_origin(hint) in (dict, Mapping):
            pairs = read(parsed, tuple[tuple[get_args(hint)], ...])  # type: ignore[misc]
            if len(dict(pairs)) != len(pairs):
                raise ValidationError("a key occurs twice")
            return dict(pairs)
        optional = [arg for arg in get_args(hint) if dataclasses.is_dataclass(arg)]
        if optional:  # None or a dataclass
            return None if parsed is None else read(parsed, optional[0])
    try:
        value = msgspec.convert(parsed, Number if hint is float else hint)
    except ValidationError as error:
        raise ValidationError(_abbreviate(str(error))) from None  # the message may quote the input
    _check_fields(parsed, value)
    return value


def _to_builtins(value: Any) -> Any:
    kind = type(value)
    if type(kind) is not msgspec.StructMeta:
        if dataclasses.is_dataclass(value):
            fields = [field.name for field in dataclasses.fields(value)]
            return [kind.__name__, {field: _to_builtins(getattr(value, field)) for field in fields}]
        if hasattr(value, "_fields"):
            return [kind.__name__, *map(_to_builtins, value)]
        if isinstance(value, Mapping):
            return [[key, _to_builtins(each)] for key, each in value.items()]
    try:
        prepared = msgspec.to_builtins(value)
    except TypeError as error:
        raise ValidationError(f"{kind.__name__}: {error}") from None
    msgspec.convert(prepared, kind)
    return prepared


def _encode_nonfinite(prepared: Any) -> Any:
    if isinstance(prepared, float) and not float("-inf") < prepared < float("inf"):
        return {"float": str(prepared)}
    if isinstance(prepared, list | tuple):
        return [_encode_nonfinite(value) for value in prepared]
    if isinstance(prepared, dict):
        return {key: _encode_nonfinite(value) for key, value in prepared.items()}
    return prepared


def _read_dataclass(parsed: Any, kind: Any) -> Any:
    name, hints = kind.__name__, get_type_hints(kind)
    if type(parsed) is not list or len(parsed) != 2 or parsed[0] != name or type(parsed[1]) is not dict:
        raise ValidationError(f"expected {name} and an object with its fields")
    given = parsed[1]
    for field in given:
        if field not in hints:
            raise ValidationError(f"{name} has no field {_abbreviate(field)!r}")
    for field in hints:
        if field not in given:
            raise ValidationError(f"{name} lacks the field {field!r}")
    values = {field: _read_field(name, field, given[field], hint) for field, hint in hints.items()}
    try:
        return kind(**values)
    except ValueError as error:  # settings validate themselves
        raise ValidationError(f"{name}: {error}") from None


def _read_named_tuple(parsed: Any, kind: Any) -> Any:
    name, hints = kind.__name__, get_type_hints(kind)
    if type(parsed) is not list or len(parsed) != 1 + len(hints) or parsed[0] != name:
        raise ValidationError(f"expected {name} and its {len(hints)} fields")
    return kind(*[_read_field(name, *each) for each in zip(hints, parsed[1:], hints.values(), strict=True)])


def _read_field(name: str, field: str, parsed: Any, hint: Any) -> Any:
    try:
        return read(parsed, hint)
    except ValidationError as error:
        raise ValidationError(f"{name}.{field}: {error}") from None


def _check_fields(parsed: Any, value: object) -> None:
    """Reject a struct that lacks its last fields, which msgspec would fill with defaults."""
    if isinstance(value, msgspec.Struct):
        fields = value.__struct_fields__
        given = parsed[1:] if isinstance(value, Value) else parsed
        if len(given) != len(fields):
            raise ValidationError(f"{type(value).__name__} has {len(fields)} fields, found {len(given)}")
        for inner, field in zip(given, fields, strict=True):
            if type(inner) is list:
                _check_fields(inner, getattr(value, field))
    elif type(value) is tuple:
        for inner, each in zip(parsed, value, strict=True):
            if type(inner) is list:
                _check_fields(inner, each)


def _abbreviate(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:120]}...{text[-60:]}"
