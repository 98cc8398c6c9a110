"""Describe the public API as text: names, signatures and types of `atoll` and its errors.

    python -m tests.public_api            print it
    python -m tests.public_api --write    write it to tests/public_api.txt, for an intended change

Annotations are printed as they are written in the source, so a change of a type is a change of the text.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import atoll
from atoll import errors

API_FILE = Path(__file__).with_name("public_api.txt")
PUBLIC_DUNDER_METHODS = ("__init__", "__enter__", "__exit__")  # methods with underscores that scripts use


def describe_api() -> str:
    lines = [f"atoll.{name}" for name in atoll.__all__ if not inspect.isclass(getattr(atoll, name))]
    lines += [line for name in atoll.__all__ for line in describe_class(f"atoll.{name}", getattr(atoll, name))]
    lines += list(describe_module(errors))
    return "\n".join(lines) + "\n"


def describe_module(module: ModuleType) -> Iterator[str]:
    """Yield the classes that the module defines, in alphabetical order."""
    for name, kind in sorted(vars(module).items()):
        if inspect.isclass(kind) and kind.__module__ == module.__name__ and not name.startswith("_"):
            yield from describe_class(f"{module.__name__}.{name}", kind)


def describe_class(name: str, kind: Any) -> Iterator[str]:
    """Yield the class with its bases and public members; nothing if it is not a class."""
    if not inspect.isclass(kind):
        return
    bases = ", ".join(base.__name__ for base in kind.__bases__ if base is not object)
    yield f"{name}({bases})"
    for field, hint in sorted(vars(kind).get("__annotations__", {}).items()):
        if not field.startswith("_"):
            yield f"    {field}: {getattr(hint, '__forward_arg__', hint)}"
    for member, value in sorted(vars(kind).items()):
        if member.startswith("_") and member not in PUBLIC_DUNDER_METHODS:
            continue
        if isinstance(value, property):
            yield f"    {member} -> {_return_type(value.fget)}"
        elif isinstance(value, staticmethod | classmethod):
            yield f"    {type(value).__name__} {member}{_signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"    {member}{_signature(value)}"


def find_untyped(kind: Any) -> list[str]:
    """Return public parameters and results without annotation."""
    found = []
    for member, value in sorted(vars(kind).items()):
        function = value.fget if isinstance(value, property) else value
        if not inspect.isfunction(function) or (member.startswith("_") and member not in PUBLIC_DUNDER_METHODS):
            continue
        signature = inspect.signature(function)
        untyped = [p.name for p in signature.parameters.values() if p.name != "self" and p.annotation is p.empty]
        found += [f"{member}({name})" for name in untyped]
        if signature.return_annotation is signature.empty:
            found.append(f"{member} -> ?")
    return found


def _signature(function: Any) -> str:
    """Return the signature without the quotes of postponed annotations."""
    return str(inspect.signature(function)).replace("'", "")


def _return_type(function: Any) -> str:
    return str(inspect.signature(function).return_annotation)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        API_FILE.write_text(describe_api(), encoding="utf-8")
    else:
        print(describe_api(), end="")
