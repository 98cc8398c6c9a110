"""What a run is founded with instead of the values that its first learner brings: a checkpoint in its directory.

The first learner still says what the model is. Its own values are put aside, and it takes the run's like everybody
else: nobody has to load anything, on no island.
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
    """The fragments of the checkpoint that lies in a run's directory, in f32; None where there is none.

    Raises ValueError where it is of another model. What is frozen in this model is not looked at: it never travels.
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
    except SafetensorError as wrong:
        raise ValueError(f"{path} is damaged: {wrong}") from None
    for p, value in enumerate(values):
        if not torch.isfinite(value.sum()):
            named = find_nonfinite_in_fragment(plan, p, get_codec("f32"), value.view(torch.uint8))
            raise ValueError(f"{path} holds values that are not finite: {named}")
    return values


def _check_names(path: Path, plan: FragmentPlan, given: set[str]) -> None:
    wanted = {info.name for info in plan.tensors if info.is_synced}
    known = {info.name for info in plan.tensors}
    lacking = sorted(wanted - given)
    unknown = sorted(name for name in given - known if not _is_in_frozen_module(name, plan))
    if lacking or unknown:
        lacks = f"lacks {lacking[0]!r}" if lacking else ""
        has = f"has {unknown[0]!r}" if unknown else ""
        raise ValueError(
            f"{path} is of another model: it {' and '.join(filter(None, (lacks, has)))};"
            " make it again with atoll import --rename or --prefix"
        )


def _is_in_frozen_module(name: str, plan: FragmentPlan) -> bool:
    """Whether it is in a module whose own parameters are all frozen: buffers of those are not in the plan."""
    module = name.rpartition(".")[0]
    own = [info.kind for info in plan.tensors if info.name.rpartition(".")[0] == module]
    return bool(own) and set(own) == {"frozen"}
