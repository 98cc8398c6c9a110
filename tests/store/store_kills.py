"""Kills a syncer's store in the middle of writes and looks at what the next one finds. Run as a process of its own.

    python -m tests.store.store_kills lines KIND STORE FOLDER
    python -m tests.store.store_kills anywhere COUNT STORE FOLDER
    python -m tests.store.store_kills race COUNT STORE FOLDER

`lines`: one write is repeated in forked processes; the first is killed at its first line of the store's code, the
second at its second, until one comes through. `anywhere`: processes write version after version and are killed from
outside, wherever they are. One line of JSON per kill says what was found. `race`: nobody is killed; processes take over
from each other at the same moment, and write.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from atoll import files
from atoll.store import tensor_file, version_store
from atoll.store.version_store import (
    FencedError,
    Store,
    StoreDamagedError,
    StoreInUseError,
    list_complete_snapshots,
    read_snapshot_record,
)
from tests.store.store_samples import (
    FRAGMENTS,
    InPlaceStore,
    create_store,
    has_sample_tensors,
    make_members,
    make_snapshot,
    make_tensors,
    make_version,
)

STORES: dict[str, type[Store]] = {"Store": Store, "InPlaceStore": InPlaceStore}
NUMEL = 2**15  # a file is written in several pieces, whatever its size
CODE = {files.__file__, tensor_file.__file__, version_store.__file__, str(Path(__file__).with_name("store_samples.py"))}


def write_version(kind: type[Store], folder: Path) -> None:
    with kind.open(folder) as opened:
        start_kill_countdown()
        opened.write(make_version(1, 3), make_tensors(3, NUMEL))


def write_members(kind: type[Store], folder: Path) -> None:
    with kind.open(folder) as opened:
        start_kill_countdown()
        opened.write(make_members(2))


def write_snapshot(kind: type[Store], folder: Path) -> None:
    with kind.open(folder) as opened:
        start_kill_countdown()
        opened.write(make_snapshot(1, 2, 2))


def open_store(kind: type[Store], folder: Path) -> None:
    start_kill_countdown()
    kind.open(folder).close()


KINDS: dict[str, Callable[[type[Store], Path], None]] = {
    "version": write_version,
    "members": write_members,
    "snapshot": write_snapshot,
    "open": open_store,
}

lines_until_kill = 0  # lines until this process dies


def start_kill_countdown() -> None:
    sys.settrace(trace_call)


def trace_call(frame: FrameType, event: str, arg: Any) -> Any:
    return trace_line if frame.f_code.co_filename in CODE else None


def trace_line(frame: FrameType, event: str, arg: Any) -> Any:
    global lines_until_kill
    if event == "line":
        lines_until_kill -= 1
        if lines_until_kill == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return trace_line


def fork_child(action: Callable[[], int | None]) -> int:
    """The process id of a copy of this process that does this and nothing else."""
    child = os.fork()
    if child == 0:
        run_and_exit(action)
    return child


def run_and_exit(action: Callable[[], int | None]) -> NoReturn:
    try:
        code = action() or 0
        sys.settrace(None)
    except BaseException as wrong:
        print(f"the child failed: {wrong!r}", file=sys.stderr, flush=True)
        os._exit(2)
    os._exit(code)


def reopen_and_report(folder: Path, any_epoch: bool = False) -> dict[str, Any]:
    """What the next syncer finds. The samples know only records of epoch 1."""
    try:
        with Store.open(folder) as opened:
            versions = {}
            for fragment in range(FRAGMENTS):
                number, record, values = opened.read_newest(fragment)
                epoch = record.round.epoch if any_epoch and record is not None else 1
                assert record == (make_version(fragment, number, epoch) if number else None)
                versions[fragment] = number if has_sample_tensors(values, number, NUMEL) else "other values"
            restored = opened.read_restored()
            assert restored.members is not None
            return {
                "versions": list(versions.values()),
                "members": restored.members.serial,
                "settings": opened.read_settings(),
                "snapshots": [
                    list(read_snapshot_record(folder, number).versions)  # type: ignore[union-attr]
                    for number in list_complete_snapshots(folder)
                ],
                "epoch": opened.epoch,
                "left over": sorted(str(path.relative_to(folder)) for path in folder.rglob(".*")),
            }
    except StoreDamagedError as wrong:
        return {"damaged": str(wrong.path.relative_to(folder)), "why": str(wrong)}


def kill_at_every_line(what: str, kind: type[Store], folder: Path) -> None:
    global lines_until_kill
    create_store(folder / "before", 2, NUMEL).close()
    here = folder / "run"
    for line in range(1, 10_000):
        lines_until_kill = line
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(folder / "before", here)
        _, status = os.waitpid(fork_child(lambda: KINDS[what](kind, here)), 0)
        assert status in (0, signal.SIGKILL), status
        print(json.dumps({"line": line, "killed": status == signal.SIGKILL} | reopen_and_report(here)), flush=True)
        if status == 0:
            return


def kill_anywhere(count: int, kind: type[Store], folder: Path) -> None:
    rng = random.Random(0)
    for number in range(count):
        here = folder / f"run{number}"
        create_store(here, 0, NUMEL).close()
        told, tell = os.pipe()

        def write_on(here: Path = here, tell: int = tell) -> None:
            with kind.open(here) as opened:
                for number in range(1, 1000):
                    opened.write(make_version(0, number), make_tensors(number, NUMEL))
                    os.write(tell, b".")

        child = fork_child(write_on)
        os.close(tell)
        durable_versions = 0
        for _ in range(rng.randrange(1, 6)):
            durable_versions += len(os.read(told, 1))
        for _ in range(rng.randrange(3000)):  # until the child is somewhere in its next write
            os.stat(here)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        durable_versions += len(os.read(told, 1000))
        os.close(told)
        row = {"killed": status == signal.SIGKILL, "told": durable_versions, "unfinished": len([*here.rglob(".*")])}
        print(json.dumps(row | reopen_and_report(here)), flush=True)
        shutil.rmtree(here)


RACERS = 6


def race(count: int, kind: type[Store], folder: Path) -> None:
    for number in range(count):
        here = folder / f"race{number}"
        create_store(here, 1, NUMEL).close()
        go, start = os.pipe()
        go_on, restart = os.pipe()
        told, tell = os.pipe()

        def take_and_write(here: Path = here, go: int = go, go_on: int = go_on, tell: int = tell) -> int:
            os.read(go, 1)
            try:
                store = kind.open(here, is_takeover=True)
            except (FencedError, StoreInUseError):
                return 1
            finally:
                os.write(tell, b".")
            os.read(go_on, 1)
            try:
                store.write(make_version(0, 2, store.epoch), make_tensors(2, NUMEL))
            except (FencedError, ValueError):
                return 1
            return 0

        children = [fork_child(take_and_write) for _ in range(RACERS)]
        os.write(start, b"." * RACERS)
        for _ in children:
            os.read(told, 1)
        os.write(restart, b"." * RACERS)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        for pipe in (go, start, go_on, restart, told, tell):
            os.close(pipe)
        row: dict[str, Any] = {"codes": codes}
        print(json.dumps(row | reopen_and_report(here, any_epoch=True)), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a forked process has none of the others
    mode, argument, store_name, folder_name = sys.argv[1:]
    if mode == "lines":
        kill_at_every_line(argument, STORES[store_name], Path(folder_name))
    elif mode == "race":
        race(int(argument), STORES[store_name], Path(folder_name))
    else:
        kill_anywhere(int(argument), STORES[store_name], Path(folder_name))
