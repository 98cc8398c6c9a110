"""The public API equals tests/public_api.txt, so that it changes only on purpose."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch

import atoll
from atoll import errors as error_module
from atoll.island.stats import LearnerStats
from tests.public_api import API_FILE, describe_api, describe_class, find_untyped

ADVICE = "if the change is intended: python -m tests.public_api --write, and a line in CHANGELOG.md"


def test_public_api_equals_its_file():
    assert describe_api() == API_FILE.read_text(encoding="utf-8"), ADVICE


def changed_learner(change: str) -> type[Any]:
    """Return a copy of the class with one change of its source."""
    source = inspect.getsource(atoll.Learner)
    old, _, new = change.partition(" => ")
    assert old in source, "the source of the planted change is gone"
    planted: dict[str, Any] = {}
    exec(
        "from __future__ import annotations\n" + source.replace(old, new, 1),
        vars(inspect.getmodule(atoll.Learner)) | {},
        planted,
    )
    kind: type[Any] = planted["Learner"]
    return kind


@pytest.mark.parametrize(
    "change",
    [
        "def step(self, tokens: SupportsIndex, => def step(self, samples: SupportsIndex,",
        "loss: float | Tensor | None = None => loss: float | None = None",
        "token: str | None = None, => token: str = '',",
        "def progress(self) -> float => def progress(self) -> int",
        "def take( => def draw(",
        "keys: str | PathLike[str] | None = None, => ",
    ],
)
def test_planted_change_is_detected(change):
    before = list(describe_class("atoll.Learner", atoll.Learner))
    assert list(describe_class("atoll.Learner", changed_learner(change))) != before


def test_private_change_is_not_reported():
    before = list(describe_class("atoll.Learner", atoll.Learner))
    assert list(describe_class("atoll.Learner", changed_learner("def _close( => def _close_it("))) == before


def test_everything_public_has_types():
    kinds = [getattr(atoll, name) for name in atoll.__all__]
    assert [found for kind in kinds if inspect.isclass(kind) for found in find_untyped(kind)] == []


def test_parameter_without_annotation_is_detected():
    assert find_untyped(changed_learner("def step(self, tokens: SupportsIndex, => def step(self, tokens,")) == [
        "step(tokens)"
    ]


def test_every_error_and_the_stats_are_exported():
    errors = {name for name, kind in vars(error_module).items() if inspect.isclass(kind)}
    assert errors <= set(atoll.__all__)
    assert all(getattr(atoll, name) is getattr(error_module, name) for name in errors)
    assert atoll.LearnerStats is LearnerStats
    with pytest.raises(AttributeError, match="module 'atoll' has no attribute 'Lerner'"):
        _ = atoll.Lerner


def test_dir_shows_what_is_exported_and_no_typing_helpers():
    assert dir(atoll) == sorted(atoll.__all__)


def test_errors_are_caught_and_names_are_listed_without_torch():
    code = (
        "import sys, atoll; atoll.JoinTimeoutError, atoll.IslandBrokenError, dir(atoll); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("name", ["id", "incarnation"])
def test_id_and_incarnation_before_entering_are_an_error_with_a_sentence(name):
    model = torch.nn.Linear(2, 2)
    learner = atoll.Learner(model, torch.optim.SGD(model.parameters()), "127.0.0.1:1")
    with pytest.raises(ValueError, match=rf"^{name} is known once the learner has joined: enter `with atoll.Learner"):
        getattr(learner, name)
