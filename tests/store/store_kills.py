"""Kill a process in the middle of writes to its store, and report what the next process restores. Run as a program:

    python -m tests.store.store_kills lines KIND STORE FOLDER
    python -m tests.store.store_kills anywhere COUNT STORE FOLDER
    python -m tests.store.store_kills race COUNT STORE FOLDER

- `lines` repeats one write in forked processes. Process n is killed at line n of the store's code, until one process
  completes the write.
- `anywhere` lets processes write version after version, and kills them at random moments.
- `race` kills no process. Several processes take over the store at the same moment, and write.

Each kill, or race, prints one line of JSON with the restored state.
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
NUMEL = 2**15  # files are written in several pieces, whatever their size
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

lines_until_kill = 0  # lines of traced code until this process kills itself


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
    """Fork a process that runs `action` and exits. Return its process id."""
    child = os.fork()
    if child == 0:
        run_and_exit(action)
    return child


def run_and_exit(action: Callable[[], int | None]) -> NoReturn:
    try:
        code = action() or 0
        sys.settrace(None)
    except BaseException as error:
        print(f"the child failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(2)
    os._exit(code)


def reopen_and_report(folder: Path, any_epoch: bool = False) -> dict[str, Any]:
    """Return what the next syncer restores. Sample records have epoch 1, unless `any_epoch` is set."""
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
                "leftovers": sorted(str(path.relative_to(folder)) for path in folder.rglob(".*")),
            }
    except StoreDamagedError as error:
        return {"damaged": str(error.path.relative_to(folder)), "cause": str(error)}


def kill_at_every_line(action: str, kind: type[Store], folder: Path) -> None:
    global lines_until_kill
    create_store(folder / "before", 2, NUMEL).close()
    here = folder / "run"
    for line in range(1, 10_000):
        lines_until_kill = line
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(folder / "before", here)
        _, status = os.waitpid(fork_child(lambda: KINDS[action](kind, here)), 0)
        assert status in (0, signal.SIGKILL), status
        print(json.dumps({"line": line, "killed": status == signal.SIGKILL} | reopen_and_report(here)), flush=True)
        if status == 0:
            return


def kill_anywhere(count: int, kind: type[Store], folder: Path) -> None:
    rng = random.Random(0)
    for number in range(count):
        here = folder / f"run{number}"
        create_store(here, 0, NUMEL).close()
        progress, report = os.pipe()

        def write_versions(here: Path = here, report: int = report) -> None:
            with kind.open(here) as opened:
                for number in range(1, 1000):
                    opened.write(make_version(0, number), make_tensors(number, NUMEL))
                    os.write(report, b".")

        child = fork_child(write_versions)
        os.close(report)
        durable_versions = 0
        for _ in range(rng.randrange(1, 6)):
            durable_versions += len(os.read(progress, 1))
        for _ in range(rng.randrange(3000)):  # let the child continue into its next write
            os.stat(here)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        durable_versions += len(os.read(progress, 1000))
        os.close(progress)
        row = {"killed": status == signal.SIGKILL, "durable": durable_versions, "unfinished": len([*here.rglob(".*")])}
        print(json.dumps(row | reopen_and_report(here)), flush=True)
        shutil.rmtree(here)


RACERS = 6


def race(count: int, kind: type[Store], folder: Path) -> None:
    for number in range(count):
        here = folder / f"race{number}"
        create_store(here, 1, NUMEL).close()
        started, start = os.pipe()
        write_allowed, allow_write = os.pipe()
        progress, report = os.pipe()

        def take_over_and_write(
            here: Path = here, started: int = started, write_allowed: int = write_allowed, report: int = report
        ) -> int:
            os.read(started, 1)
            try:
                store = kind.open(here, is_takeover=True)
            except (FencedError, StoreInUseError):
                return 1
            finally:
                os.write(report, b".")
            os.read(write_allowed, 1)
            try:
                store.write(make_version(0, 2, store.epoch), make_tensors(2, NUMEL))
            except (FencedError, ValueError):
                return 1
            return 0

        children = [fork_child(take_over_and_write) for _ in range(RACERS)]
        os.write(start, b"." * RACERS)
        for _ in children:
            os.read(progress, 1)
        os.write(allow_write, b"." * RACERS)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        for pipe in (started, start, write_allowed, allow_write, progress, report):
            os.close(pipe)
        row: dict[str, Any] = {"codes": codes}
        print(json.dumps(row | reopen_and_report(here, any_epoch=True)), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a forked process lacks the other threads
    mode, argument, store_name, folder_name = sys.argv[1:]
    if mode == "lines":
        kill_at_every_line(argument, STORES[store_name], Path(folder_name))
    elif mode == "race":
        race(int(argument), STORES[store_name], Path(folder_name))
    else:
        kill_anywhere(int(argument), STORES[store_name], Path(folder_name))
