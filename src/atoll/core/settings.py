"""Declare a setting once, with its default, bounds, help text and unit.

A setting is a field of a dataclass, or a parameter of a command. Command-line options (`atoll.cli.options`), TOML keys
and checks are derived from the declaration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

_KEY = "atoll.setting"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """Properties of a setting, in addition to its type and its default."""

    help: str = ""  # empty: no command-line option is derived
    metavar: str = ""  # symbol or unit, as help shows it
    flag: str | None = None  # option name without dashes; None: the name of the field
    min: float | None = None
    max: float | None = None
    above: float | None = None  # exclusive bound
    below: float | None = None  # exclusive bound
    parse: Callable[[str], Any] | None = None  # parses the option value; None: a plain number or text
    repeated: bool = False  # the option may be given several times; each value is parsed
    show: Callable[[Any], str] | None = None  # formats the default for help; the inverse of `parse`
    default_text: str | None = None  # in help, in place of the default; empty: show none
    advice: str = ""  # end of the error message for a value that is out of bounds
    check: Callable[[Any], None] | None = None  # raises `ValueError` for an invalid value
    envvar: str | None = None  # environment variable that is read if the option is not given
    short: str | None = None  # second spelling of the option, with its dash
    hidden: bool = False  # not shown in help


def setting(default: Any, help: str | Setting = "", metavar: str = "", **declared: Any) -> Any:
    """Declare a field of a dataclass as a setting. `declared` are the other fields of `Setting`."""
    made = help if isinstance(help, Setting) else Setting(help, metavar, **declared)
    return field(default=default, metadata={_KEY: made})


def same_setting(owner: type, name: str, default: Any = MISSING, **changes: Any) -> Any:
    """Declare a setting of another dataclass again, with another default or other changes."""
    source = next(each for each in fields(owner) if each.name == name)
    declared = replace(source.metadata[_KEY], **changes)
    return field(default=source.default if default is MISSING else default, metadata={_KEY: declared})


def get_setting(declared: Field[Any]) -> Setting | None:
    return declared.metadata.get(_KEY)


class Declared(NamedTuple):
    """Setting of a dataclass, or of a dataclass nested in it."""

    name: str
    setting: Setting
    type: Any
    default: Any

    @property
    def flag(self) -> str:
        """Return the name of the option, with dashes.

        >>> Declared("every_steps", Setting(flag="every"), int, 24).flag
        '--every'
        """
        return "--" + (self.setting.flag or self.name).replace("_", "-")

    def shown_default(self, value: Any) -> str:
        if self.setting.show is not None:
            return self.setting.show(value)
        return f"{value:g}" if isinstance(value, float) else str(value)


_hints: dict[type, dict[str, Any]] = {}


def type_hints(owner: type) -> dict[str, Any]:
    """Return the types of the fields, resolved once per class: resolving takes longer than a check."""
    if owner not in _hints:
        _hints[owner] = get_type_hints(owner)
    return _hints[owner]


def declared_settings(owner: Any) -> Iterator[Declared]:
    """Yield the settings of a dataclass (a class or an instance) and of dataclasses nested in it, in order.

    >>> @dataclass(frozen=True)
    ... class Pace:
    ...     every: int = setting(3, "Steps of one round.", min=1)
    >>> [(each.flag, each.default) for each in declared_settings(Pace)]
    [('--every', 3)]
    """
    hints = type_hints(owner if isinstance(owner, type) else type(owner))
    for each in fields(owner):
        value, declared = _value(owner, each), get_setting(each)
        if declared is not None:
            yield Declared(each.name, declared, hints[each.name], value)
        elif is_dataclass(value):
            yield from declared_settings(value)


def _value(owner: Any, each: Field[Any]) -> Any:
    """Return the value of a field: for a class its default, or MISSING if it has none."""
    if not isinstance(owner, type):
        return getattr(owner, each.name)
    return each.default if each.default_factory is MISSING else each.default_factory()


def make_settings(owner: type[T], values: Mapping[str, Any]) -> T:
    """Return an instance with these values of its settings, and of settings of dataclasses nested in it."""
    rest = dict(values)
    instance = owner(**_take_changes(owner, rest))
    if rest:
        raise TypeError(f"{owner.__name__} has no setting {next(iter(rest))!r}")
    return instance


def _take_changes(owner: Any, rest: dict[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for each in fields(owner):
        if each.name in rest:
            changes[each.name] = rest.pop(each.name)
        elif get_setting(each) is None and is_dataclass(nested := _value(owner, each)):
            changes[each.name] = replace(nested, **_take_changes(nested, rest))  # type: ignore[type-var]
    return changes


def check_settings(instance: Any) -> None:
    """Raise `ValueError` if the value of a setting has the wrong type or is out of bounds."""
    hints = type_hints(type(instance))
    for each in fields(instance):
        declared = get_setting(each)
        if declared is not None:
            _check(each.name, getattr(instance, each.name), hints[each.name], declared)


def _check(name: str, value: Any, hint: Any, declared: Setting) -> None:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if NoneType in get_args(hint) else [hint]
    if value is None and NoneType in get_args(hint):
        return
    kind = kinds[0]
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{name} is {value!r}; give one of {', '.join(choices[:-1])} or {choices[-1]}")
    elif kind is int:
        if type(value) is not int or not _is_within(value, declared):
            raise ValueError(f"{name} must be a whole number {_range(declared)}, got {value!r}")
    elif kind is float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not _is_within(value, declared):
            advice = f": {declared.advice}" if declared.advice else ""
            raise ValueError(f"{name} is {value!r}; give a number {_range(declared)}{advice}")
    elif kind in (str, bool) and type(value) is not kind:
        raise ValueError(f"{name} is {value!r}; give {'a text' if kind is str else 'true or false'}")


def _is_within(value: float, declared: Setting) -> bool:
    return (
        math.isfinite(value)
        and (declared.min is None or value >= declared.min)
        and (declared.max is None or value <= declared.max)
        and (declared.above is None or value > declared.above)
        and (declared.below is None or value < declared.below)
    )


def _range(declared: Setting) -> str:
    """Describe the bounds of a setting for an error message.

    >>> (
    ...     _range(Setting(min=1)),
    ...     _range(Setting(min=0, below=1)),
    ...     _range(Setting(min=1, max=16)),
    ...     _range(Setting(above=0)),
    ... )
    ('of at least 1', 'from 0 up to, not with, 1', 'from 1 to 16', 'above 0')
    """
    if declared.above is not None:
        return f"above {declared.above:g}"
    if declared.below is not None:
        return f"from {declared.min or 0:g} up to, not with, {declared.below:g}"
    if declared.max is not None:
        return f"from {declared.min or 0:g} to {declared.max:g}"
    return "" if declared.min is None else f"of at least {declared.min:g}"
