"""Initial values of a run from a checkpoint in its directory, in place of those of the first learner.

The first learner still sends the plan. Its own values are dropped, and like all later learners it downloads the run's.
No learner has to load the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from atoll.tensors.codecs import get_codec
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.robust_merge import find_nonfinite_in_fragment

INIT_FILE = "init.safetensors"


def load_initial_values(directory: Path, plan: FragmentPlan) -> list[Tensor] | None:
    """Return the fragments of the checkpoint in a run's directory, in f32, or None without one.

    Tensors that are frozen in the model are not checked: they are never sent.

    Raises:
        ValueError: The checkpoint is of another model, or damaged.
    """
    path = directory / INIT_FILE
    if not path.is_file():
        return None
    values = [torch.empty(plan.numel(p)) for p in range(len(plan.fragments))]
    try:
        with safe_open(path, framework="pt") as file:
            _check_names(path, plan, set(file.keys()))
            for p, value in enumerate(values):
                for piece, begin, end in plan.spans(p):
                    tensor = file.get_tensor(piece.tensor)
                    shape = plan.by_name[piece.tensor].shape
                    if tuple(tensor.shape) != shape:
                        raise ValueError(f"{path}: {piece.tensor} is {tuple(tensor.shape)}, the model has {shape}")
                    rows = (tensor if shape else tensor.unsqueeze(0))[piece.start : piece.stop]
                    value[begin:end].copy_(rows.reshape(-1))
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    for p, value in enumerate(values):
        if not torch.isfinite(value.sum()):
            location = find_nonfinite_in_fragment(plan, p, get_codec("f32"), value.view(torch.uint8))
            raise ValueError(f"{path} holds values that are not finite: {location}")
    return values


def _check_names(path: Path, plan: FragmentPlan, names: set[str]) -> None:
    required = {info.name for info in plan.tensors if info.is_synced}
    known = {info.name for info in plan.tensors}
    missing = sorted(required - names)
    unknown = sorted(name for name in names - known if not _is_in_frozen_module(name, plan))
    if missing or unknown:
        lacks = f"lacks {missing[0]!r}" if missing else ""
        has = f"has {unknown[0]!r}" if unknown else ""
        raise ValueError(
            f"{path} is of another model: it {' and '.join(filter(None, (lacks, has)))};"
            " make it again with atoll import --rename or --prefix"
        )


def _is_in_frozen_module(name: str, plan: FragmentPlan) -> bool:
    """Return whether all parameters of the tensor's module are frozen: buffers of such modules are not in the plan."""
    module = name.rpartition(".")[0]
    own = [info.kind for info in plan.tensors if info.name.rpartition(".")[0] == module]
    return bool(own) and set(own) == {"frozen"}
