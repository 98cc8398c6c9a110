"""Checks of the arguments of `atoll.Learner`. Each raises a ValueError that says what to pass instead."""

from __future__ import annotations

import math
import operator
import sys
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.learner.environment import env


def check_model(model: object, optimizer: object) -> None:
    """Raise ValueError unless these are a model and its optimizer, or a list of optimizers."""
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    if isinstance(model, Optimizer) and any(isinstance(each, nn.Module) for each in optimizers):
        raise ValueError("model and optimizer are swapped: write atoll.Learner(model, optimizer, ...)")
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be a torch.nn.Module, got {_describe(model)}; pass the module whose parameters the optimizer"
            " updates"
        )
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise ValueError(
                f"optimizer must be a torch.optim.Optimizer, got {_describe(each)}; pass the one that updates the"
                " model, such as torch.optim.AdamW(model.parameters())"
            )


def _describe(value: object) -> str:
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def to_int(value: Any) -> int | None:
    """Return an integer of any kind as an int, also one of numpy or a 0-dimensional tensor, or None for other values.

    >>> import numpy
    >>> to_int(numpy.int64(64)), to_int(torch.tensor(64)), to_int(True), to_int(64.0)
    (64, 64, None, None)
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or (isinstance(value, Tensor) and (value.dim() > 0 or value.dtype is torch.bool)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_learner_number(value: Any) -> int:
    number = to_int(value)
    if number is None or number < 1:
        raise ValueError(f"learners are numbered from 1: learner must be a whole number of at least 1, got {value!r}")
    return number


def check_seconds(name: str, meaning: str, value: Any) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and 0 < float(value) < math.inf):
        raise ValueError(f"{name} is {meaning}, in seconds above 0; got {value!r}")
    return float(value)


def resolve_seconds(name: str, meaning: str, value: Any, may_be_infinite: bool = False) -> float | None:
    """Return `value`, or else the seconds in the environment, such as ATOLL_NOTICE_S for `notice_s`."""
    if value is not None:
        return value if may_be_infinite and value == math.inf else check_seconds(name, meaning, value)
    variable = f"ATOLL_{name.upper()}"
    if (text := env(variable)) is None:
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found <= (math.inf if may_be_infinite else sys.float_info.max):
        raise ValueError(f"{variable} is {meaning}, a number of seconds; got {text!r}")
    return found


def check_path(name: str, value: Any) -> Path:
    if not isinstance(value, str | PathLike):
        raise ValueError(f"{name} is a path, got {_describe(value)}")
    return Path(value)


def check_directory(name: str, value: Any) -> Path:
    """Return the path. Raise ValueError if no directory can be made there."""
    path = check_path(name, value)
    for each in (path, *path.parents):
        if each.exists():
            if not each.is_dir():
                raise ValueError(f"{name} is {path}, but {each} is a file: pass a directory, or a path to make one at")
            break
    return path
