"""A tiny GPT-2 of transformers and batches of numbers for it, created in milliseconds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

WORDS, LENGTH = 32, 12


def gpt2(seed: int = 1, **changes: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**(sizes | quiet | changes)))


def texts(count: int, seed: int = 0, shown: int = LENGTH) -> list[dict[str, Tensor]]:
    """Return sequences in which each number is the previous one plus one. Only the last `shown` are in the loss."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        ids = (torch.randint(WORDS, (1,), generator=generator) + torch.arange(LENGTH)) % WORDS
        labels = ids.clone()
        labels[: LENGTH - shown] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    known: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_steps": 100_000,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**(known | changes))


def trainer(
    folder: Path, *callbacks: Any, model: Any = None, data: Any = None, evaluated: Any = None, **changes: Any
) -> Any:
    return Trainer(
        model if model is not None else gpt2(),
        arguments(folder, **changes),
        train_dataset=data if data is not None else texts(64),
        eval_dataset=evaluated,
        callbacks=list(callbacks),
    )
