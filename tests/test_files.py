"""Atomic and durable writes of files."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.checkpoint.model_file import write_tensors
from atoll.files import atomic_write, write_file, write_text
from atoll.reference.job_settings import JobSettings


def count_fsyncs(write: Any) -> int:
    """Return the number of calls of os.fsync while `write` runs."""
    calls: list[str] = []

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and arg.__module__ == "posix" and arg.__name__ == "fsync":
            calls.append(arg.__name__)

    sys.setprofile(profile)
    try:
        write()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_durable_write_syncs_file_and_folder_and_other_writes_sync_nothing(tmp_path):
    path = tmp_path / "x"
    assert count_fsyncs(lambda: write_text(path, "durable")) == 2
    assert count_fsyncs(lambda: write_text(path, "fast", durable=False)) == 0
    assert path.read_text() == "fast"


def test_config_and_model_of_a_run_are_durable(tmp_path):
    assert count_fsyncs(lambda: JobSettings().save(tmp_path / "config.json")) == 2
    assert count_fsyncs(lambda: write_tensors({"w": torch.ones(3)}, tmp_path / "model.safetensors")) == 2
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], torch.ones(3))


def test_block_that_raises_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as file:
        raise KeyboardInterrupt(file.write(b"new"))
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


def test_library_may_write_under_the_name_of_the_open_file(tmp_path):
    with atomic_write(tmp_path / "x") as file:
        Path(file.name).write_bytes(b"by a library")
    assert (tmp_path / "x").read_bytes() == b"by a library"


def test_existing_file_is_replaced_only_on_request(tmp_path):
    path = tmp_path / "x"
    write_file(path, [b"fi", b"rst"], replace=False)
    with pytest.raises(FileExistsError):
        write_file(path, [b"second"], replace=False)
    assert path.read_bytes() == b"first"
    write_file(path, [b"third"])
    assert path.read_bytes() == b"third"
    assert [*tmp_path.iterdir()] == [path]


def test_mode_holds_before_the_first_byte(tmp_path):
    with atomic_write(tmp_path / "secret", mode=0o600) as file:
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_error_names_the_file_that_could_not_be_written(tmp_path):
    with pytest.raises(FileNotFoundError) as missing:
        write_text(tmp_path / "nowhere/x", "")
    assert missing.value.filename == str(tmp_path / "nowhere/x")
    with pytest.raises(OSError, match="No space left") as full, atomic_write(tmp_path / "x"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert full.value.filename == str(tmp_path / "x")
    with pytest.raises(FileNotFoundError) as other, atomic_write(tmp_path / "x"):
        (tmp_path / "input").read_bytes()
    assert other.value.filename == str(tmp_path / "input")
