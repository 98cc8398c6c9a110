"""Scripts of other people go on working: what they rely on is written down, and changes only where it is meant."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import atoll
from tests.public_api import KEPT, described, of_class, untyped

ADVICE = "if it is meant: python -m tests.public_api --write, and a line in CHANGELOG.md"


def test_the_public_api_is_what_is_written_down():
    assert described() == KEPT.read_text(encoding="utf-8"), ADVICE


def another_learner(change: str) -> type[Any]:
    """A copy of the class with one change, as text."""
    source = inspect.getsource(atoll.Learner)
    right, _, wrong = change.partition(" => ")
    assert right in source, "the planted change has no place any more"
    planted: dict[str, Any] = {}
    exec(
        "from __future__ import annotations\n" + source.replace(right, wrong, 1),
        vars(inspect.getmodule(atoll.Learner)) | {},
        planted,
    )
    kind: type[Any] = planted["Learner"]
    return kind


@pytest.mark.parametrize(
    "change",
    [
        "def step(self, tokens: int, => def step(self, samples: int,",
        "loss: float | Tensor | None = None => loss: float | None = None",
        "token: str | None = None, => token: str = '',",
        "def progress(self) -> float => def progress(self) -> int",
        "def take( => def draw(",
        "keys: str | PathLike[str] | None = None, => ",
    ],
)
def test_a_planted_change_is_noticed(change):
    before = list(of_class("atoll.Learner", atoll.Learner))
    assert list(of_class("atoll.Learner", another_learner(change))) != before


def test_a_change_that_nobody_sees_is_none():
    before = list(of_class("atoll.Learner", atoll.Learner))
    assert list(of_class("atoll.Learner", another_learner("def _join(self) => def _join_it(self)"))) == before


def test_everything_public_has_types():
    kinds = [getattr(atoll, name) for name in atoll.__all__]
    assert [found for kind in kinds if inspect.isclass(kind) for found in untyped(kind)] == []


def test_a_parameter_without_a_type_is_noticed():
    assert untyped(another_learner("def step(self, tokens: int, => def step(self, tokens,")) == ["step(tokens)"]
