"""The examples for transformers, accelerate and peft, executed as commands."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.test_examples import EXAMPLES, SYNCER, Processes, differing, finished, processes

__all__ = ["processes"]


def syncer_of(processes: Processes, directory: Path, quorum: int, merges: int) -> tuple[subprocess.Popen[str], str]:
    """Start the syncer of a run with this budget of merges. Return the process and its address."""
    changed = f"fragments=4, every_steps=4, quorum={quorum}, budget_merges={merges}"
    script = SYNCER.replace("quorum=2, budget_merges=60", changed)
    assert script != SYNCER
    child = processes.start("-c", script, directory / "run", cwd=directory)
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


def final_counts(child: subprocess.Popen[str]) -> tuple[int, int]:
    """Return the steps and tokens that the example logs at its end."""
    lines = finished(child)
    assert any("eval_loss" in line or "of the published model" in line for line in lines), lines
    found = re.search(r"(\d+) steps here, (\d+) tokens; held-out loss \d", "\n".join(lines))
    assert found is not None, lines
    return int(found[1]), int(found[2])


@pytest.mark.long
def test_a_trainer_alone_and_one_with_ddp_train_one_model(processes: Processes, tmp_path: Path) -> None:
    """The quorum needs both learners. Both ranks of the second one count: two micro-batches of 8 x 64 tokens each."""
    syncer, address = syncer_of(processes, tmp_path, quorum=2, merges=16)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", 2)
    script = (EXAMPLES / "with_transformers.py", "--syncer", address)
    both = processes.start(*torchrun, *script, "--learner", 2, "--out", "two", cwd=tmp_path)
    alone = processes.start(*script, "--learner", 1, "--out", "one", cwd=tmp_path)
    for child, tokens_of_a_step in ((alone, 1024), (both, 2048)):
        steps, tokens = final_counts(child)
        assert tokens == steps * tokens_of_a_step
    finished(syncer)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert differing(one, two) == []


@pytest.mark.long
def test_the_loop_of_accelerate_trains_to_the_end(processes: Processes, tmp_path: Path) -> None:
    syncer, address = syncer_of(processes, tmp_path, quorum=1, merges=16)
    script = (EXAMPLES / "with_accelerate.py", "--syncer", address, "--learner", 1, "--out", "model")
    steps, tokens = final_counts(processes.start(*script, cwd=tmp_path))
    assert tokens == steps * 1024
    finished(syncer)
    assert (tmp_path / "model/config.json").is_file()


@pytest.mark.long
def test_only_the_lora_adapter_is_merged(processes: Processes, tmp_path: Path) -> None:
    syncer, address = syncer_of(processes, tmp_path, quorum=1, merges=16)
    script = (EXAMPLES / "with_lora.py", "--syncer", address, "--learner", 1, "--out", "adapter")
    lines = finished(processes.start(*script, cwd=tmp_path))
    assert any("8192 of 128768 parameters were synchronized" in line for line in lines), lines
    finished(syncer)
    adapter = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert sum(each.numel() for each in adapter.values()) == 8192
    assert any(each.count_nonzero() for name, each in adapter.items() if "lora_B" in name), "nothing was learned"
    assert all(torch.isfinite(each).all() for each in adapter.values())
