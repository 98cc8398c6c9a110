"""Export and import of models as transformers directories, which `from_pretrained` loads. Nothing is downloaded.

A run stores a tied tensor under the first of its names, and no frozen tensors. The class of the model knows which
tensors are tied and what its file contains, so it writes and reads the files.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from atoll.tensors.plan import TensorInfo, named_tensors, tensor_digest

CONFIG, ADAPTER_CONFIG, ADAPTER = "config.json", "adapter_config.json", "adapter_model.safetensors"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")

_ADAPTER_TENSOR = re.compile(r"(lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.[^.]+")
"""Part of a tensor's name after which PEFT inserts the name of the adapter. Its files omit that name."""


def export_pretrained(tensors: Mapping[str, Tensor], frozen: Mapping[str, TensorInfo], config: Path, out: Path) -> None:
    """Write the model of a run, or the adapter that it has trained, into the new directory `out`.

    `config` is a config.json or its directory. Weights in that directory are used for frozen tensors, whose digests
    must be those of the run.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not overwritten: pass another --out")
    adapted = [name for name in tensors if _ADAPTER_TENSOR.search(name)]
    if adapted:
        _export_adapter(tensors, adapted, config, out)
        return
    model, has_weights = _base_model(config)
    if frozen and not has_weights:
        raise ValueError(
            f"the run has no {min(frozen)!r}, because it was frozen. Pass as --config the directory of the model that "
            "the learners have loaded, with its weights"
        )
    load_run_tensors(model, tensors, frozen)
    model.save_pretrained(out)


@torch.no_grad()
def load_run_tensors(model: nn.Module, tensors: Mapping[str, Tensor], frozen: Mapping[str, TensorInfo]) -> None:
    """Load the tensors of a run into a model, each with its dtype in the run. Tied tensors stay tied."""
    model_tensors = named_tensors(model)
    if missing := sorted(set(model_tensors) - {*tensors, *frozen} - _local_buffers(model, model_tensors, frozen)):
        raise ValueError(f"this model has {missing[0]!r}, which the run lacks: pass the --config of the run's model")
    for name, info in frozen.items():
        if name in model_tensors:
            # Learners may have loaded another dtype.
            model_tensors[name].data = model_tensors[name].to(getattr(torch, info.dtype))
        if name not in model_tensors or tensor_digest(model_tensors[name]) != info.digest:
            raise ValueError(
                f"{name} was frozen, and differs from the run, where it was {info.dtype}: pass the directory that was"
                " loaded"
            )
    for name, value in tensors.items():
        if name not in model_tensors:
            raise ValueError(f"the run has {name!r}, which this model lacks: pass the --config of the run's model")
        if model_tensors[name].shape != value.shape:
            shapes = f"{tuple(value.shape)} in the run and {tuple(model_tensors[name].shape)} in this model"
            raise ValueError(f"{name} is {shapes}: pass the --config of the run's model")
        model_tensors[name].data = value.clone()


def _local_buffers(model: nn.Module, model_tensors: Mapping[str, Tensor], frozen: Mapping[str, TensorInfo]) -> set[str]:
    """Return the buffers of modules whose own parameters were all frozen. A run does not merge them."""
    still = {id(model_tensors[name]) for name in frozen if name in model_tensors}
    local: set[int] = set()
    for module in model.modules():
        own = [id(parameter) for parameter in module.parameters(recurse=False)]
        if own and still.issuperset(own):
            local.update(id(buffer) for buffer in module.buffers(recurse=False))
    return {name for name, tensor in model_tensors.items() if id(tensor) in local}


def _base_model(config: Path) -> tuple[Any, bool]:
    """Return the model of a configuration, and whether it has loaded weights from the same directory."""
    model_class = _find_class(config)
    folder = config if config.is_dir() else config.parent
    if any((folder / name).is_file() for name in WEIGHTS):
        return model_class.from_pretrained(folder, local_files_only=True, dtype="auto"), True
    return model_class(_load_config(config)), False


def _load_config(config: Path) -> Any:
    from transformers import AutoConfig

    path = config / CONFIG if config.is_dir() else config
    if not path.is_file():
        raise ValueError(f"{path} does not exist: pass the config.json of the model, or its directory")
    return AutoConfig.from_pretrained(path, local_files_only=True)


def _find_class(config: Path) -> Any:
    """Return the class that the configuration names. No class is guessed, and no remote code is loaded."""
    import transformers

    named = _load_config(config).architectures or []
    model_class = getattr(transformers, named[0], None) if named else None
    if model_class is None:
        found = f"names {named[0]!r}, which transformers does not have" if named else "names no class"
        raise ValueError(f'{config} {found}: write it there, as in "architectures": ["GPT2LMHeadModel"]')
    return model_class


def _export_adapter(tensors: Mapping[str, Tensor], adapted: list[str], config: Path, out: Path) -> None:
    if others := sorted(set(tensors) - set(adapted)):
        raise ValueError(
            f"{others[0]!r} was trained next to the adapter, but only LoRA adapters can be exported: export with "
            "--to safetensors, load that in your script and call save_pretrained"
        )
    path = config / ADAPTER_CONFIG if config.is_dir() else config
    if not path.is_file() or path.name != ADAPTER_CONFIG:
        raise ValueError(f"the run has trained an adapter: pass as --config its {ADAPTER_CONFIG} or the directory")
    kind = json.loads(path.read_text(encoding="utf-8")).get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{path} is of {kind}, but only LoRA adapters can be exported")
    out.mkdir(parents=True, exist_ok=True)
    named = {_ADAPTER_TENSOR.sub(r"\1", name): value.contiguous() for name, value in tensors.items()}
    if len(named) < len(tensors):
        raise ValueError("the run has trained several adapters: export with --to safetensors")
    save_file(named, out / ADAPTER, metadata={"format": "pt"})
    shutil.copyfile(path, out / ADAPTER_CONFIG)


def read_pretrained(folder: Path) -> dict[str, Tensor]:
    """Return the model in a transformers directory, with the tensor names of a run."""
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise ValueError(f"{folder} contains none of {', '.join(WEIGHTS)}: pass a directory of save_pretrained")
    model, _ = _base_model(folder)
    return {name: tensor.detach().clone().contiguous() for name, tensor in named_tensors(model).items()}


__all__ = ["export_pretrained", "load_run_tensors", "read_pretrained"]
