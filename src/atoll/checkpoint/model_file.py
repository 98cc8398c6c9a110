"""`model.safetensors` of a run: the model as it was last published, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from atoll.files import atomic_write
from atoll.tensors.plan import named_tensors

MODEL_FILE = "model.safetensors"


def model_digest(model: nn.Module) -> str:
    """Return the xxh3 over names, shapes, dtypes and bytes of a model's tensors."""
    return tensors_digest(named_tensors(model))


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of `model_digest` for these tensors."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {tuple(plain.shape)} {plain.dtype}\n".encode())
        if plain.numel():
            digest.update(plain.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_tensors(model: Mapping[str, Tensor], path: Path) -> Path:
    """Write the tensors of a model atomically, as a safetensors file with their digest."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.items()}
    with atomic_write(path) as file:
        save_file(tensors, file.name, metadata={"format": "pt", "digest": tensors_digest(tensors)})
    return path


def read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in sorted(file.keys())}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or is damaged: {error}") from None


@torch.no_grad()
def load_into_model(model: nn.Module, values: Mapping[str, Tensor], source: str) -> None:
    """Set every tensor of the model. Names and shapes must match exactly."""
    tensors = named_tensors(model)
    if set(tensors) != set(values):
        odd = min(set(tensors) ^ set(values))
        raise ValueError(
            f"{source} {'lacks' if odd in tensors else 'has an unknown'} tensor {odd!r}: it is a file of another model"
        )
    for name, tensor in tensors.items():
        if tensor.shape != values[name].shape:
            raise ValueError(f"{source}: {name} is {tuple(values[name].shape)}, the model has {tuple(tensor.shape)}")
        tensor.copy_(values[name])
