"""The three walks of the design page: every function, message, event and effect in them exists, and they are short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from atoll.core import protocol

PAGE = Path(__file__).parent.parent / "docs/design.md"
MAX_MODULES = 20


def walks() -> dict[str, str]:
    section = PAGE.read_text(encoding="utf-8").split("\n## Three walks\n")[1].split("\n## ")[0]
    return {each.partition("\n")[0]: each.partition("\n")[2] for each in section.split("\n### ")[1:]}


def module_of(name: str) -> str:
    """Return the module of `package.module.function` or `package.module.Class.function`."""
    parts = name.split(".")
    return ".".join(part for part in parts[:-1] if part.islower())


def problems(walk: str) -> Iterator[str]:
    for name in re.findall(r"`([a-z_.]+\.[\w.]+)`", walk):
        found: object = import_module(f"atoll.{module_of(name)}")
        for part in name.removeprefix(f"{module_of(name)}.").split("."):
            found = getattr(found, part, None)
        if not callable(found):
            yield f"there is no function {name}"
    for name in re.findall(r"\*\*(\w+)\*\*", walk):
        if not hasattr(protocol, name):
            yield f"there is no message, event or effect {name}"
    modules = {module_of(name) for name in re.findall(r"`([a-z_.]+\.[\w.]+)`", walk)}
    if not 0 < len(modules) <= MAX_MODULES:
        yield f"it passes {len(modules)} modules, the limit is {MAX_MODULES}"


def test_there_are_three_walks():
    assert len(walks()) == 3


@pytest.mark.parametrize("walk", walks())
def test_walk_names_what_exists_and_is_short(walk):
    assert list(problems(walks()[walk])) == []


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("`learner.api.Learner.step`", "`learner.api.Learner.stride`", "no function learner.api.Learner.stride"),
        ("**StepTaken**", "**StepMade**", "no message, event or effect StepMade"),
    ],
)
def test_planted_mistake_in_a_walk_is_found(right, wrong, problem):
    walk = next(iter(walks().values()))
    assert right in walk
    assert any(problem in each for each in problems(walk.replace(right, wrong)))
