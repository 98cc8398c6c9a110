"""docs/architecture.md: every module, function, message, event and effect on it exists, and its walks are short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from atoll.core import protocol

PAGE = (Path(__file__).parent.parent / "docs/architecture.md").read_text(encoding="utf-8")
MAX_MODULES = 20
MAX_WORDS = 1_500
DOTTED_NAME = re.compile(r"`([a-z_]+\.[a-z_][\w.]*)`")
"""A module, class or function below `atoll`, as in `core.policy.compute_grace_window`."""


def read_walks() -> dict[str, str]:
    section = PAGE.split("\n## Three walks\n")[1].split("\n## ")[0]
    return {each.partition("\n")[0]: each.partition("\n")[2] for each in section.split("\n### ")[1:]}


def find_module(name: str) -> str:
    """Return the module part of `package.module.function` or `package.module.Class.function`."""
    return ".".join(part for part in name.split(".")[:-1] if part.islower())


def exists(name: str) -> bool:
    parts = name.split(".")
    found: object = import_module("atoll")
    for depth, part in enumerate(parts, start=1):
        if isinstance(found, ModuleType) and not hasattr(found, part):
            try:
                import_module(".".join(("atoll", *parts[:depth])))
            except ModuleNotFoundError:
                return False
        found = getattr(found, part, None)
    return found is not None


def find_missing_names(text: str) -> Iterator[str]:
    for name in DOTTED_NAME.findall(text):
        if not name.endswith((".md", ".toml", ".py")) and not exists(name):
            yield f"atoll has no {name}"
    for name in re.findall(r"\*\*([A-Z]\w+)\*\*", text):
        if not hasattr(protocol, name):
            yield f"there is no message, event or effect {name}"


def test_page_names_only_what_exists():
    assert len(DOTTED_NAME.findall(PAGE)) > 80
    assert list(find_missing_names(PAGE)) == []


def test_page_stays_a_map():
    assert len(PAGE.split()) <= MAX_WORDS


def test_there_are_three_walks():
    assert len(read_walks()) == 3


@pytest.mark.parametrize("walk", read_walks())
def test_walk_passes_few_modules(walk):
    modules = {find_module(name) for name in DOTTED_NAME.findall(read_walks()[walk])}
    assert 10 < len(modules) <= MAX_MODULES


@pytest.mark.parametrize(
    ("correct", "mistaken", "problem"),
    [
        ("`learner.api.Learner.step`", "`learner.api.Learner.stride`", "atoll has no learner.api.Learner.stride"),
        ("`tensors.codecs`", "`tensors.encodings`", "atoll has no tensors.encodings"),
        ("**StepTaken**", "**StepMade**", "there is no message, event or effect StepMade"),
    ],
)
def test_planted_mistake_is_found(correct, mistaken, problem):
    assert correct in PAGE
    assert problem in list(find_missing_names(PAGE.replace(correct, mistaken)))
