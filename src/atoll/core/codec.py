"""Values of registered types to JSON and back, exactly: `decode(encode(x))` is `x` in type and in value.

| Python | JSON |
|---|---|
| named tuple | `["Name", field, ...]` |
| dataclass | `["Name", {"field": value, ...}]` |
| tuple | array |
| mapping | array of `[key, value]`: keys of JSON objects would turn into strings |
| number, string, truth value, None | itself |
| NaN and the infinities | `{"float": "nan"}`, `{"float": "inf"}`, `{"float": "-inf"}`: JSON has no word for them |

Encoders and decoders are built once from the annotations of the registered types. Reading trusts nothing: whatever does
not fit is a `MisfitError` that says where. Writing trusts the annotations of numbers and strings, which mypy has
checked, and looks only where a wrong value would be written down as something else.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

Turn: TypeAlias = Callable[[Any], Any]

_SCALARS: dict[Any, frozenset[type]] = {
    bool: frozenset({bool}),
    int: frozenset({int}),
    float: frozenset({float, int}),  # a whole number is welcome where a float is asked for, and stays one
    str: frozenset({str}),
    NoneType: frozenset({NoneType}),
    object: frozenset({bool, int, float, str, NoneType}),  # an argument of a reason
}
_SPELLED = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
_TO_TEXT = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


class MisfitError(ValueError):
    """A value that does not fit its annotation. `path` leads to it, outermost first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.path: list[str] = []

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {self.what}" if self.path else self.what


class Codec:
    """Encoders and decoders of a fixed list of named tuples and dataclasses.

    >>> codec = Codec([RoundId, Pull])
    >>> codec.encode(Pull(RoundId(7, 3, 1, 1)))
    ['Pull', ['RoundId', 7, 3, 1, 1]]
    >>> codec.decode(["Pull", ["RoundId", 7, 3, 1, 1]])
    Pull(round=RoundId(fragment=7, base=3, epoch=1, attempt=1))
    """

    def __init__(self, types: Iterable[type]) -> None:
        self.types: dict[str, type] = {}
        for cls in types:
            assert cls.__name__ not in self.types, f"two types are called {cls.__name__}"
            self.types[cls.__name__] = cls
        self._encoders: dict[type, Turn] = {}
        self._decoders: dict[str, Turn] = {}
        for cls in self.types.values():
            self._build(cls)

    def encode(self, value: object) -> Any:
        """A registered value as lists that `to_text` can write."""
        encoder = self._encoders.get(type(value))
        if encoder is None:
            raise MisfitError(f"type {type(value).__name__!r} is not registered")
        return encoder(value)

    def decode(self, raw: object) -> Any:
        """A registered value of whatever type the text names."""
        return self._named(raw, self._decoders, "is not registered")

    def shapes(self) -> dict[str, tuple[str, ...]]:
        """The fields of every registered type, in order. A tape carries them, so that it can be read without us."""
        return {name: _fields(cls) for name, cls in self.types.items()}

    # ---------------------------------------------------------------------------------------------------- building

    def _build(self, cls: type) -> None:
        if cls.__name__ in self._decoders:
            return
        hints = get_type_hints(cls)
        fields = _fields(cls)
        for field in fields:
            self._build_inner(hints[field])
        encoders = [self._encoder(hints[field]) for field in fields]
        decoders = [(field, hints[field], self.decoder(hints[field])) for field in fields]
        if dataclasses.is_dataclass(cls):
            self._encoders[cls] = _dataclass_encoder(cls, fields, encoders)
            self._decoders[cls.__name__] = _dataclass_decoder(cls, decoders)
        else:
            self._encoders[cls] = _tuple_encoder(cls, encoders)
            self._decoders[cls.__name__] = _tuple_decoder(cls, decoders)

    def _build_inner(self, hint: Any) -> None:
        if isinstance(hint, type) and hint.__name__ in self.types and get_origin(hint) is None:
            self._build(hint)
        for inner in get_args(hint):
            if not isinstance(inner, str | int):  # the values of a Literal
                self._build_inner(inner)

    def encoder(self, hint: Any) -> Turn:
        """How values with this annotation are prepared for `to_text`."""
        return self._encoder(hint) or (lambda value: value)

    def _encoder(self, hint: Any) -> Turn | None:
        """None where values are written as they are."""
        if hint is object:
            return _check_scalar
        if hint in _SCALARS or hint is Ellipsis or get_origin(hint) is Literal:
            return None
        if hint in self._encoders:
            return self._encoders[hint]
        origin, inner = get_origin(hint), [self._encoder(arg) for arg in get_args(hint)]
        if origin in (Union, UnionType):
            if not any(inner):
                return None
            table = {get_origin(arg) or arg: turn for arg, turn in zip(get_args(hint), inner, strict=True)}
            return _union_encoder(table)
        if origin is tuple:
            if not any(inner):
                return None
            if get_args(hint)[1:] == (...,):
                return _each(inner[0])
            return _by_place(inner)
        if _is_mapping(origin):
            return _pairs(inner[1])
        raise TypeError(f"no encoding for {hint!r}: a type of ours has to be registered")

    def decoder(self, hint: Any) -> Turn:
        """How values with this annotation are read."""
        if hint in _SCALARS:
            return _scalar_decoder(hint)
        origin, args = get_origin(hint), get_args(hint)
        if origin is Literal:
            return _literal_decoder(args)
        if origin is None:
            assert hint.__name__ in self._decoders, f"no decoding for {hint!r}: a type of ours has to be registered"
            return self._decoders[hint.__name__]
        if origin in (Union, UnionType):
            return self._union_decoder(args)
        if origin is tuple and args[1:] == (...,):
            return _each_decoder(self.decoder(args[0]))
        if origin is tuple:
            return _by_place_decoder([self.decoder(arg) for arg in args])
        assert _is_mapping(origin), f"no decoding for {hint!r}"
        return _pairs_decoder(self.decoder(args[0]), self.decoder(args[1]))

    def _union_decoder(self, args: tuple[Any, ...]) -> Turn:
        if len(args) == 2 and args[1] is NoneType:
            inner = self.decoder(args[0])
            return lambda raw: None if raw is None else inner(raw)
        scalars = frozenset[type]().union(*(_SCALARS.get(arg, ()) for arg in args))
        names = {arg.__name__: self._decoders[arg.__name__] for arg in args if arg not in _SCALARS}
        spelled = _scalar_decoder(object) if float in scalars else None

        def decode(raw: Any) -> Any:
            if type(raw) is list and names:
                return self._named(raw, names, "does not belong here")
            if type(raw) in scalars:
                return raw
            if type(raw) is dict and spelled is not None:
                return spelled(raw)
            expected = [*names, *sorted(t.__name__ for t in scalars)]
            raise MisfitError(f"expected {' or '.join(expected)}, found {_shown(raw)}")

        return decode

    def _named(self, raw: Any, decoders: Mapping[str, Turn], complaint: str) -> Any:
        if type(raw) is not list or not raw or type(raw[0]) is not str:
            raise MisfitError(f"expected a named value, found {_shown(raw)}")
        decoder = decoders.get(raw[0])
        if decoder is None:
            raise MisfitError(f"type {raw[0]!r} {complaint if raw[0] in self.types else 'is unknown'}")
        return decoder(raw)


def to_text(prepared: Any) -> str:
    """JSON on one line, in ASCII. Numbers that JSON cannot write are rare, so they are looked for only when met."""
    try:
        return _TO_TEXT(prepared)
    except ValueError:
        return _TO_TEXT(_spell_out(prepared))
    except TypeError as wrong:
        raise MisfitError(str(wrong)) from None


def _spell_out(prepared: Any) -> Any:
    if isinstance(prepared, float) and not float("-inf") < prepared < float("inf"):
        return {"float": str(float(prepared))}
    if isinstance(prepared, list | tuple):
        return [_spell_out(value) for value in prepared]
    if isinstance(prepared, dict):
        return {key: _spell_out(value) for key, value in prepared.items()}
    return prepared


def _fields(cls: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    fields: tuple[str, ...] = cls._fields
    return fields


def _is_mapping(origin: Any) -> bool:
    return origin is dict or origin is Mapping


def _shown(raw: Any) -> str:
    text = repr(raw)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --------------------------------------------------------------------------------------------------------------------
# Writing


def _check_scalar(value: Any) -> Any:
    """Where anything may stand, a tuple or an enum would be read back as something else."""
    if type(value) not in _SCALARS[object]:
        raise MisfitError(f"expected a number, a string, a truth value or None, got {type(value).__name__}")
    return value


def _tuple_encoder(cls: Any, encoders: list[Turn | None]) -> Turn:
    name = cls.__name__
    inner = [(place, encoder) for place, encoder in enumerate(encoders, 1) if encoder is not None]

    def encode(value: Any) -> Any:
        # A named tuple of another type would be written under this name: equal fields look alike.
        if type(value) is not cls:
            raise MisfitError(f"expected {name}, got {type(value).__name__}")
        prepared = [name, *value]
        for place, encoder in inner:
            prepared[place] = encoder(prepared[place])
        return prepared

    return encode


def _dataclass_encoder(cls: Any, fields: tuple[str, ...], encoders: list[Turn | None]) -> Turn:
    def encode(value: Any) -> Any:
        if type(value) is not cls:
            raise MisfitError(f"expected {cls.__name__}, got {type(value).__name__}")
        prepared = {}
        for field, encoder in zip(fields, encoders, strict=True):
            inner = getattr(value, field)
            prepared[field] = inner if encoder is None else encoder(inner)
        return [cls.__name__, prepared]

    return encode


def _union_encoder(table: Mapping[Any, Turn | None]) -> Turn:
    def encode(value: Any) -> Any:
        try:
            encoder = table[type(value)]
        except KeyError:
            names = " or ".join(t.__name__ for t in table)
            raise MisfitError(f"expected {names}, got {type(value).__name__}") from None
        return value if encoder is None else encoder(value)

    return encode


def _each(encoder: Turn | None) -> Turn:
    assert encoder is not None
    return lambda values: [encoder(value) for value in values]


def _by_place(encoders: list[Turn | None]) -> Turn:
    def encode(values: Any) -> Any:
        return [v if encoder is None else encoder(v) for v, encoder in zip(values, encoders, strict=True)]

    return encode


def _pairs(encoder: Turn | None) -> Turn:
    return lambda mapping: [[key, value if encoder is None else encoder(value)] for key, value in mapping.items()]


# --------------------------------------------------------------------------------------------------------------------
# Reading


def _scalar_decoder(hint: Any) -> Turn:
    accepted = _SCALARS[hint]

    def decode(raw: Any) -> Any:
        if type(raw) in accepted:
            return raw
        if type(raw) is dict and float in accepted and raw.keys() == {"float"} and str(raw["float"]) in _SPELLED:
            return _SPELLED[raw["float"]]
        expected = "a number, a string, a truth value or None" if hint is object else hint.__name__
        raise MisfitError(f"expected {expected}, found {_shown(raw)}")

    return decode


def _literal_decoder(accepted: tuple[Any, ...]) -> Turn:
    def decode(raw: Any) -> Any:
        if raw not in accepted:
            raise MisfitError(f"expected {' or '.join(map(repr, accepted))}, found {_shown(raw)}")
        return raw

    return decode


def _tuple_decoder(cls: Any, fields: list[tuple[str, Any, Turn]]) -> Turn:
    """Fields that are plain numbers and strings are checked by their types all at once: what was accepted before is
    known by its signature."""
    name, count, make = cls.__name__, len(fields), cls._make
    plain = [(place, field, turn) for place, (field, hint, turn) in enumerate(fields) if hint in _SCALARS]
    inner = [(place, field, turn) for place, (field, hint, turn) in enumerate(fields) if hint not in _SCALARS]
    accepted: set[tuple[type, ...]] = set()

    def check(values: list[Any]) -> None:
        signature = tuple(map(type, values))
        for place, field, turn in plain:
            values[place] = _within(f"{name}.{field}", turn, values[place])
        if dict not in signature:  # a spelled-out number has to be turned each time
            accepted.add(signature)

    def decode(raw: Any) -> Any:
        if type(raw) is not list or not raw or raw[0] != name:
            raise MisfitError(f"expected {name}, found {_shown(raw)}")
        values = raw[1:]
        if len(values) != count:
            raise MisfitError(f"{name} has {count} fields, found {len(values)}")
        if tuple(map(type, values)) not in accepted:
            check(values)
        for place, field, turn in inner:
            try:
                values[place] = turn(values[place])
            except MisfitError as misfit:
                misfit.path.insert(0, f"{name}.{field}")
                raise
        return make(values)

    return decode


def _within(place: str, turn: Turn, raw: Any) -> Any:
    try:
        return turn(raw)
    except MisfitError as misfit:
        misfit.path.insert(0, place)
        raise


def _dataclass_decoder(cls: Any, fields: list[tuple[str, Any, Turn]]) -> Turn:
    name, known = cls.__name__, [field for field, _, _ in fields]

    def decode(raw: Any) -> Any:
        if type(raw) is not list or len(raw) != 2 or raw[0] != name or type(raw[1]) is not dict:
            raise MisfitError(f"expected {name}, found {_shown(raw)}")
        given = raw[1]
        for field in given:
            if field not in known:
                raise MisfitError(f"{name} has no field {field!r}")
        for field in known:
            if field not in given:
                raise MisfitError(f"{name} lacks its field {field!r}")
        values = {field: _within(f"{name}.{field}", turn, given[field]) for field, _, turn in fields}
        try:
            return cls(**values)
        except ValueError as wrong:  # settings refuse nonsense by themselves
            raise MisfitError(f"{name}: {wrong}") from None

    return decode


def _each_decoder(turn: Turn) -> Turn:
    def decode(raw: Any) -> Any:
        if type(raw) is not list:
            raise MisfitError(f"expected an array, found {_shown(raw)}")
        try:
            return tuple([turn(value) for value in raw])
        except MisfitError:
            return tuple([_within(f"[{place}]", turn, value) for place, value in enumerate(raw)])

    return decode


def _by_place_decoder(turns: list[Turn]) -> Turn:
    def decode(raw: Any) -> Any:
        if type(raw) is not list or len(raw) != len(turns):
            raise MisfitError(f"expected an array of {len(turns)}, found {_shown(raw)}")
        return tuple([_within(f"[{place}]", turn, raw[place]) for place, turn in enumerate(turns)])

    return decode


def _pairs_decoder(of_key: Turn, of_value: Turn) -> Turn:
    turn = _by_place_decoder([of_key, of_value])

    def decode(raw: Any) -> Any:
        if type(raw) is not list:
            raise MisfitError(f"expected an array of pairs, found {_shown(raw)}")
        pairs = [_within(f"[{place}]", turn, pair) for place, pair in enumerate(raw)]
        if len(dict(pairs)) != len(pairs):
            raise MisfitError("a key stands twice")
        return dict(pairs)

    return decode
