"""The store: restoring in the same and the next process, damaged files, and fencing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from atoll.checkpoint.published_model import read_run_settings
from atoll.core.protocol import VersionRecord
from atoll.core.syncer.core import SyncerCore
from atoll.core.syncer.state import RestoredState
from atoll.core.types import RunConfig
from atoll.files import write_file
from atoll.store.run_settings import RUN_FORMAT, RunFormatError, RunSettings
from atoll.store.snapshots import list_snapshots
from atoll.store.tensor_file import (
    decode_small_file,
    decode_tensor_file,
    encode_small_file,
    encode_tensor_file,
    read_tensors,
)
from atoll.store.version_store import (
    LOST_EPOCH_MARGIN,
    FencedError,
    Store,
    StoreDamagedError,
    list_complete_snapshots,
    read_snapshot_record,
)
from tests.store.store_samples import (
    FRAGMENTS,
    MANIFEST,
    create_store,
    has_sample_tensors,
    make_leases,
    make_members,
    make_snapshot,
    make_tensors,
    make_version,
)

ROOT = Path(__file__).resolve().parent.parent.parent


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


# --------------------------------------------------------------------------------------------------------------------
# Writing and restoring


def test_new_directory_is_empty_and_has_epoch_1(tmp_path):
    with Store.open(tmp_path / "deep" / "store") as store:
        assert store.epoch == 1
        assert store.read_settings() is None
        assert store.read_restored() == RestoredState()
        assert store.fragments() == ()
        with pytest.raises(ValueError, match="not created"):
            store.read_newest(0)


def test_next_process_restores_all_records(tmp_path):
    with create_store(tmp_path) as store:
        store.write(make_version(0, 1), make_tensors(1))
        store.write(make_version(0, 2), make_tensors(2))
        store.write(make_version(1, 1), make_tensors(1))
        store.write(make_members(2))
        store.write(make_leases(1))
        store.write(make_leases(2))
        store.write(MANIFEST)
    with Store.open(tmp_path) as store:
        assert store.epoch == 2
        assert store.read_settings() == {"run": "sample", "lr": 0.4}
        assert store.read_restored() == RestoredState(
            {0: make_version(0, 2), 1: make_version(1, 1)}, make_members(2), MANIFEST, make_leases(2)
        )
        assert store.fragments() == (0, 1)
        number, record, values = store.read_newest(0)
        assert (number, record) == (2, make_version(0, 2))
        assert isinstance(record, VersionRecord)
        assert has_sample_tensors(values, 2)


def test_same_process_reads_written_versions(tmp_path):
    with create_store(tmp_path) as store:
        assert store.read_newest(1)[:2] == (0, None)
        store.write(make_version(1, 1), make_tensors(1))
        assert store.read_newest(1)[:2] == (1, make_version(1, 1))
        assert has_sample_tensors(store.read_newest(1)[2], 1)


def test_syncer_core_starts_from_restored_state(tmp_path):
    with create_store(tmp_path, 3) as store:
        core = SyncerCore(RunConfig(fragments=FRAGMENTS), store.epoch, store.read_restored())
        assert [fragment.version for fragment in core.state.fragments.values()] == [3, 3]


def test_newest_versions_are_retained(tmp_path):
    with create_store(tmp_path, 7, keep=3):
        retained = {f"fragments/001/{number:09d}.safetensors" for number in (5, 6, 7)}
        assert {name for name in files(tmp_path) if name.startswith("fragments/001")} == retained
    with Store.open(tmp_path, keep_versions=1) as store:
        assert {name for name in files(tmp_path) if name.startswith("fragments/001")} == {max(retained)}
        assert store.read_newest(1)[0] == 7
    with pytest.raises(ValueError, match="at least 1"):
        Store.open(tmp_path, keep_versions=0)


def test_initial_values_may_be_replaced_until_the_first_merge(tmp_path):
    with create_store(tmp_path) as store:
        store.write_initial(0, make_tensors(0, 99))
        assert has_sample_tensors(store.read_newest(0)[2], 0, 99)
        store.write(make_version(0, 1), make_tensors(1))
        with pytest.raises(ValueError, match="cannot follow it"):
            store.write_initial(0, make_tensors(0))


@pytest.mark.parametrize("number", [1, 2, 4])
def test_version_numbers_increase_by_one(tmp_path, number):
    with create_store(tmp_path, 2) as store, pytest.raises(AssertionError, match=f"{number} written after 2"):
        store.write(make_version(0, number), make_tensors(number))


def test_snapshot_keeps_values_of_deleted_versions(tmp_path):
    with create_store(tmp_path, 2) as store:
        store.write(make_snapshot(1, 2, 1))
        for number in (3, 4, 5, 6):
            store.write(make_version(0, number), make_tensors(number))
        _, values = read_tensors(tmp_path / "snapshots/000000001/000.safetensors")
        assert has_sample_tensors(values, 2)
        assert list_complete_snapshots(store.directory) == (1,)
        assert read_snapshot_record(store.directory, 1) == make_snapshot(1, 2, 1)
        with pytest.raises(FileNotFoundError, match="already deleted"):
            store.write(make_snapshot(2, 2, 2))
        for number in (3, 4, 5):
            store.write(make_snapshot(number, 6, 2))
        assert list_complete_snapshots(store.directory) == (3, 4, 5)
    (tmp_path / "snapshots/000000005/record.json").unlink()  # as if killed before the record was written
    with Store.open(tmp_path) as store:
        assert list_complete_snapshots(store.directory) == (3, 4)
        assert not (tmp_path / "snapshots/000000005").exists()
        assert not (tmp_path / "snapshots/000000002").exists()


def test_files_are_plain_safetensors_and_json(tmp_path):
    with create_store(tmp_path, 1):
        path = tmp_path / "fragments/000/000000001.safetensors"
        assert has_sample_tensors(load_file(path), 1)
        with safe_open(path, "pt") as file:
            assert json.loads(file.metadata()["record"])[0] == "VersionRecord"
        assert json.loads((tmp_path / "run.json").read_text())["value"] == {"run": "sample", "lr": 0.4}
        assert json.loads((tmp_path / "epoch").read_text())["value"] == 1


def test_store_has_only_documented_files(tmp_path):
    with create_store(tmp_path, 1) as store:
        store.write(MANIFEST)
        store.write(make_snapshot(1, 1, 1))
    assert {name for name in files(tmp_path) if not name.startswith("fragments/")} == {
        *("lock", "epoch", "claims/000000001", "run.json", "members.json", "manifest.json"),
        *(
            "snapshots/000000001/record.json",
            "snapshots/000000001/000.safetensors",
            "snapshots/000000001/001.safetensors",
        ),
    }


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool]


@given(
    note=st.text(max_size=30),
    parts=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=9).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
        max_size=5,
    ),
)
def test_tensor_file_round_trip(note, parts):
    written = {
        name: torch.arange(2 * torch.Size(shape).numel())[::2].reshape(shape).to(dtype)
        for name, (dtype, shape) in parts.items()
    }
    decoded_note, decoded = decode_tensor_file(bytearray(b"".join(encode_tensor_file(note, written))))
    assert decoded_note == note
    assert decoded.keys() == written.keys()
    for name, tensor in written.items():
        assert decoded[name].dtype == tensor.dtype
        assert torch.equal(decoded[name], tensor)
        decoded[name].zero_()  # must be writable


def test_tensors_of_unsupported_dtype_are_refused():
    with pytest.raises(ValueError, match="complex64"):
        encode_tensor_file("", {"value": torch.zeros(2, dtype=torch.complex64)})


# --------------------------------------------------------------------------------------------------------------------
# Damage


def make_damaged_copies(path: Path) -> list[bytes]:
    """Return copies of a file, each with one changed byte, truncated, zeroed or doubled."""
    data = path.read_bytes()
    changed = []
    for index in range(len(data)):
        copy = bytearray(data)
        copy[index] ^= 1 << index % 8
        changed.append(bytes(copy))
    cut = [data[:size] for size in {0, 1, 7, 8, 40, 80, len(data) // 2, len(data) - 1} if size < len(data)]
    return [*changed, *cut, data + b"\n", data + data, bytes(len(data))]


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("epoch", lambda store: store.check_epoch()),
        ("run.json", lambda store: store.read_settings()),
        ("members.json", lambda store: store.read_restored()),
        ("manifest.json", lambda store: store.read_manifest()),
        ("snapshots/000000001/record.json", lambda store: read_snapshot_record(store.directory, 1)),
        ("fragments/001/000000003.safetensors", lambda store: store.read_newest(1)),
        ("fragments/001/000000003.safetensors", lambda store: store.read_restored()),
    ],
)
def test_damaged_file_error_names_the_file(tmp_path, name, read):
    with create_store(tmp_path, 3) as store:
        store.write(MANIFEST)
        store.write(make_snapshot(1, 3, 3))
        path = tmp_path / name
        whole = path.read_bytes()
        cases = make_damaged_copies(path)
        assert len(cases) > 60
        for data in cases:
            path.unlink()  # a snapshot shares its values with the fragments
            path.write_bytes(data)
            with pytest.raises(StoreDamagedError, match=name) as caught:
                read(store)
            assert caught.value.path == path
            assert caught.value.advice
        path.write_bytes(whole)
        read(store)


def test_unreadable_file_is_damaged(tmp_path):
    with create_store(tmp_path, 2) as store:
        for path in (tmp_path / "fragments/000/000000002.safetensors", tmp_path / "members.json"):
            whole = path.read_bytes()
            path.unlink()
            path.mkdir()
            with pytest.raises(StoreDamagedError, match=f"{path.name}.*directory"):
                store.read_restored()
            path.rmdir()
            shutil.copyfile(tmp_path / "fragments/001/000000002.safetensors", path)
            with pytest.raises(StoreDamagedError, match=path.name):  # valid, but of another fragment
                store.read_restored()
            path.unlink()
            path.write_bytes(whole)


def test_advice_explains_the_effect_of_going_back(tmp_path):
    with create_store(tmp_path, 2) as store:
        path = tmp_path / "fragments/000/000000002.safetensors"
        path.write_bytes(b"")
        with pytest.raises(
            StoreDamagedError, match="move it away to go back to version 1, although learners may have a later one"
        ):
            store.read_newest(0)
    path.rename(tmp_path / "away")
    with Store.open(tmp_path) as store:
        assert store.read_newest(0)[0] == 1


def test_damaged_epoch_refuses_to_open_and_lost_epoch_is_skipped(tmp_path):
    create_store(tmp_path, 1).close()
    epoch = tmp_path / "epoch"
    epoch.write_bytes(epoch.read_bytes().replace(b'"value":1', b'"value":7'))
    with pytest.raises(StoreDamagedError, match="remove it while no syncer runs here"):
        Store.open(tmp_path)
    epoch.unlink()
    with Store.open(tmp_path) as store:  # the failed attempt has released the lock
        assert store.epoch == 1 + LOST_EPOCH_MARGIN + 1
        assert store.read_restored().versions == {0: make_version(0, 1), 1: make_version(1, 1)}


@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_as_a_file(data):
    for start in (b"", b'{"digest":"' + b"0" * 32 + b'","value":', (60).to_bytes(8, "little") + b'{"__metadata__":'):
        for read in (lambda raw: decode_small_file(bytes(raw)), decode_tensor_file):
            with pytest.raises(ValueError, match=r"."):
                read(bytearray(start + data))


# --------------------------------------------------------------------------------------------------------------------
# Two syncers, fencing


LOCK_PROGRAM = """
import sys
from pathlib import Path
from atoll.store.version_store import Store
store = Store.open(Path(sys.argv[1]))
print(store.epoch, flush=True)
sys.stdin.read()
"""


def test_second_process_is_refused_until_the_first_is_killed(tmp_path):
    command = [sys.executable, "-c", LOCK_PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "1\n"
            with pytest.raises(ValueError, match=f"in use by process {other.pid}:"):
                Store.open(tmp_path)
        finally:
            other.kill()
            other.wait(timeout=300)
    with Store.open(tmp_path) as store:
        assert store.epoch == 2  # the refused attempt has not increased it


def test_process_cannot_open_a_store_twice(tmp_path):
    with Store.open(tmp_path), pytest.raises(ValueError, match="in use"):
        Store.open(tmp_path)
    Store.open(tmp_path).close()


def raise_epoch(directory: Path, epoch: int = 9) -> None:
    """Raise the epoch like a syncer on another machine, where locks have no effect."""
    write_file(directory / "epoch", encode_small_file(str(epoch)))


@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.write(make_version(0, 2), make_tensors(2)),
        lambda store: store.write(make_members(2)),
        lambda store: store.write(MANIFEST),
        lambda store: store.write(make_snapshot(1, 1, 1)),
        lambda store: store.write_settings({}),
        lambda store: store.check_epoch(),
    ],
    ids=["version", "members", "manifest", "snapshot", "settings", "check_epoch"],
)
def test_fenced_syncer_writes_nothing(tmp_path, write):
    with create_store(tmp_path, 1) as store:
        raise_epoch(tmp_path)
        before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
        with pytest.raises(FencedError, match="epoch 9; this one, epoch 1, has to stop") as caught:
            write(store)
        assert caught.value.epoch == 9
        assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


def test_decreased_epoch_is_damage(tmp_path):
    with Store.open(tmp_path):
        pass
    with Store.open(tmp_path) as store:
        raise_epoch(tmp_path, 1)
        with pytest.raises(StoreDamagedError, match="contains epoch 1, but this syncer has epoch 2"):
            store.write(make_members(1))


@pytest.mark.parametrize("run_format", [RUN_FORMAT - 1, RUN_FORMAT + 1, "x"])
def test_run_directory_of_another_version_is_refused_with_advice(tmp_path: Path, run_format: object) -> None:
    """Records of other versions have other class names. Without the check, reading them is a decoding error."""
    with Store.open(tmp_path / "store") as store:
        store.write_settings(RunSettings().to_json() | {"protocol": run_format})
        epoch = store.epoch
    expected = (
        f"{tmp_path} holds a run of format {run_format!r}, this Atoll reads format {RUN_FORMAT}: finish the run with"
        " the version of Atoll that made it, or export its model with that version (atoll export) and start a new run"
        " from it (--init)"
    )
    opened: list[Callable[[], object]] = [
        lambda: Store.open(tmp_path / "store"),
        lambda: Store.open(tmp_path / "store", is_takeover=True),
        lambda: read_run_settings(tmp_path),
        lambda: list_snapshots(tmp_path),
    ]
    for read in opened:
        with pytest.raises(RunFormatError, match=f"^{re.escape(expected)}$"):
            read()
    assert f'"value":{epoch}}}' in (tmp_path / "store" / "epoch").read_text(), "a running syncer is not fenced"
