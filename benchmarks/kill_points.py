"""Kill the writer at every file operation of the syncer's and the learners' write path, and look at what is left.

    python benchmarks/kill_points.py                 every point; about a minute
    python benchmarks/kill_points.py --every 10      each tenth, for a quick look
    python benchmarks/kill_points.py --power         what was not fsynced is lost too, as when the power goes

One script of writes is repeated in forked processes: founding, versions, members, snapshots, a restart, a take-over, a
learner's parts, the manifest. The first process is killed before its first operation on a file, the second before its
second, and so on; every write is also killed half-way. After each the directory is opened as the next syncer would, and
all that the killed syncer had reported as durable must be there, complete and with its own values. Then the next syncer
writes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll import files
from atoll.core.protocol import ManifestRecord, MembersRecord, SnapshotPart, SnapshotRecord, VersionRecord
from atoll.core.types import AcceptedContribution, MergedUpTo, RoundId, RunConfig
from atoll.store.learner_parts import PartCopy, list_parts, part_path, read_part, write_part
from atoll.store.tensor_file import read_tensors
from atoll.store.version_store import Store, StoreDamagedError, list_complete_snapshots, read_snapshot_record
from atoll.tensors.optimizer_state import OptimizerStateCopy

FRAGMENTS = 2
NUMEL = 1024
OPERATIONS = ("open", "write", "pwrite", "fsync", "link", "replace", "rename", "unlink", "mkdir", "rmdir")
CONFIG = RunConfig(run_id="points", fragments=FRAGMENTS)


# --------------------------------------------------------------------------------------------------------------------
# What is written


def values(fragment: int, version: int) -> dict[str, Tensor]:
    """They can be computed from the version alone."""
    base = torch.arange(NUMEL, dtype=torch.float32) + 1000 * fragment + version / 16
    return {"published": base, "precise": base * 2, "outer.momentum": -base}


def version_record(fragment: int, version: int) -> VersionRecord:
    accepted = AcceptedContribution(3, 1, 24 * version, 24, 1000, 1000 * version, 0, 1000 * 1000 / 24)
    mark = MergedUpTo(1, version - 1, 24 * version, 1000 * version, 0)
    return VersionRecord(fragment, version, RoundId(fragment, version - 1, 1, 1), (accepted,), ((3, mark),), 7)


def make_part(snapshot: int) -> tuple[SnapshotPart, PartCopy]:
    tensors = {"0": torch.full((64,), float(snapshot))}
    about = {"format": 1, "optimizer": "AdamW", "parameters": {}, "state": {}}
    part = SnapshotPart(snapshot, 10 * snapshot, 160 * snapshot, (1,) * FRAGMENTS, (), None)
    return part, PartCopy(
        [], OptimizerStateCopy(about, tensors, []), {"rng.cpu": torch.zeros(16, dtype=torch.uint8)}, "null"
    )


def write_everything(kind: type[Store], run: Path, on_durable: Callable[[str, int, int], None]) -> None:
    """`tell` says what is durable: the kind of record, its number, its version."""
    store = kind.open(run / "store")
    for fragment in range(FRAGMENTS):
        store.write_initial(fragment, values(fragment, 0))
    store.write_settings({"run": "points"})
    on_durable("founded", 0, 0)

    def members(serial: int) -> None:
        store.write(MembersRecord(serial, ((1, serial), (3, 1)), (), 0))
        on_durable("members", 0, serial)

    def versions(number: int) -> None:
        for fragment in range(FRAGMENTS):
            store.write(version_record(fragment, number), values(fragment, number))
            on_durable("version", fragment, number)

    def snapshot(number: int, version: int) -> None:
        store.pin_snapshot(number, (version,) * FRAGMENTS)
        part, taken = make_part(number)
        write_part(run, CONFIG, 3, 1, part, taken)
        on_durable("part", 3, number)
        versions(version + 1)  # while the part was on its way
        store.write(SnapshotRecord(number, (version,) * FRAGMENTS, ((3, part),), (), ()))
        on_durable("snapshot", 0, number)

    members(1)
    versions(1)
    snapshot(1, 1)
    members(2)
    snapshot(2, 2)
    store.pin_snapshot(3, (3,) * FRAGMENTS)
    store.discard_snapshot(3)
    versions(4)
    store.close()
    store = kind.open(run / "store")
    store.send_heartbeat()
    snapshot(4, 4)
    store = kind.open(run / "store", is_takeover=True)
    members(3)
    snapshot(5, 5)
    snapshot(6, 6)
    versions(8)
    store.write(ManifestRecord((8,) * FRAGMENTS, 8 * FRAGMENTS, 1000))
    on_durable("manifest", 0, 0)
    store.close()


# --------------------------------------------------------------------------------------------------------------------
# How it is killed


class CrashInjector:
    """Counts operations on files and ends the process at one of them. A write has two points: before, and half-way."""

    def __init__(self, at: int, power: bool) -> None:
        self._left = at
        self._power = power
        self._unsynced: set[int] = set()  # numbers of open files
        self.seen: list[str] = []

    def install(self) -> None:
        """For the rest of the life of this process."""
        for name in OPERATIONS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._point(name)
            if name in ("write", "pwrite"):
                file, data, *rest = args
                self._unsynced.add(file)
                if self._left == 1:
                    call(file, memoryview(data)[: memoryview(data).nbytes // 2], *rest)
                self._point(f"half a {name}")
            elif name == "fsync":
                self._unsynced.discard(args[0])
            return call(*args, **kwargs)

        return counted

    def _point(self, name: str) -> None:
        self.seen.append(name)
        self._left -= 1
        if self._left == 0:
            if self._power:
                for file in self._unsynced:
                    with suppress(OSError):  # it was closed: a file that no reader could rely on
                        os.ftruncate(file, os.fstat(file).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)


class Outcome(NamedTuple):
    point: int
    operation: str
    problem: str  # empty: nothing is lost or damaged


def run_until_kill(kind: type[Store], run: Path, point: int, power: bool) -> tuple[dict[tuple[str, int], int], bool]:
    """Return the newest durable item of each kind before the end, and whether the process ended without a kill."""
    hear, say = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            knife = CrashInjector(point, power)
            write_pipe = os.write

            def tell(what: str, number: int, version: int) -> None:
                write_pipe(say, json.dumps([what, number, version]).encode() + b"\n")

            knife.install()
            write_everything(kind, run, tell)
            write_pipe(say, json.dumps(["points", len(knife.seen), 0, knife.seen]).encode() + b"\n")
            os._exit(0)
        except BaseException as error:
            print(f"the writer failed at point {point}: {error!r}", file=sys.stderr)
            os._exit(1)
    os.close(say)
    with open(hear, "rb") as pipe:
        lines = [json.loads(line) for line in pipe.read().splitlines()]
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), f"point {point}: the writer ended with {status}"
    durable = {(what, number): version for what, number, version, *_ in lines}
    if status == 0:
        durable["points", 0] = lines[-1][1]
        SEEN_OPERATIONS[:] = lines[-1][3]
    return durable, status == 0


SEEN_OPERATIONS: list[str] = []
"""Of a writer that was not killed, in their order."""


# --------------------------------------------------------------------------------------------------------------------
# What is left


def matches(found: dict[str, Tensor], fragment: int, version: int) -> bool:
    wanted = values(fragment, version)
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def find_problems(run: Path, durable: dict[tuple[str, int], int]) -> Iterator[str]:
    """Sentences about what is lost or damaged. The next syncer starts here, reads everything and writes on."""
    with Store.open(run / "store") as store:
        founded = ("founded", 0) in durable
        for fragment in range(FRAGMENTS):
            durable_version = durable.get(("version", fragment), 0 if founded else -1)
            if fragment not in store.fragments():
                if founded:
                    yield f"fragment {fragment} is lost"
                continue
            version, record, tensors = store.read_newest(fragment)
            if version not in (durable_version, durable_version + 1) and founded:
                yield f"fragment {fragment}: version {durable_version} was reported durable, {version} is found"
            if not matches(tensors, fragment, version) or (
                record is not None and record != version_record(fragment, version)
            ):
                yield f"fragment {fragment}: version {version} has other values"
        restored = store.read_restored()
        serial = restored.members.serial if restored.members is not None else 0
        if serial < durable.get(("members", 0), 0):
            yield f"members record {durable['members', 0]} is lost, {serial} is found"
        if ("manifest", 0) in durable and store.read_manifest() is None:
            yield "the manifest is lost"
        newest = durable.get(("snapshot", 0), 0)
        if newest and newest not in list_complete_snapshots(store.directory):
            yield f"snapshot {newest} is lost"
        for number in list_complete_snapshots(store.directory):
            kept = read_snapshot_record(store.directory, number)
            assert kept is not None
            for fragment, version in enumerate(kept.versions):
                path = run / "store" / "snapshots" / f"{number:09d}" / f"{fragment:03d}.safetensors"
                if not matches(read_tensors(path)[1], fragment, version):
                    yield f"snapshot {number} has other values"
        yield from _problems_of_parts(run, durable)
        left = sorted(path.name for path in (run / "store").rglob(f".*{files.TEMPORARY_SUFFIX}"))
        if left:
            yield f"left over: {left}"
        if founded and store.read_manifest() is None:
            for fragment in store.fragments():
                version = store.read_newest(fragment)[0] + 1
                store.write(version_record(fragment, version), values(fragment, version))


def _problems_of_parts(run: Path, durable: dict[tuple[str, int], int]) -> Iterator[str]:
    newest = durable.get(("part", 3), 0)
    if newest and newest not in list_parts(run).get(3, []):
        yield f"part {newest} is lost"
    for number in list_parts(run).get(3, []):
        if float(read_part(part_path(run, 3, number)).tensors["inner.0"][0]) != float(number):
            yield f"part {number} has other values"


def check_point(kind: type[Store], folder: Path, point: int, power: bool) -> tuple[str, bool]:
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    durable, whole = run_until_kill(kind, run, point, power)
    try:
        return "; ".join(find_problems(run, durable)), whole
    except (StoreDamagedError, OSError, ValueError) as error:
        return f"damaged: {error}", whole


@contextmanager
def tmpfs_directory() -> Iterator[Path]:
    """What a process has written survives its death on any disk, and hundreds of deaths are quicker in memory."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


def kill_everywhere(kind: type[Store], every: int, power: bool) -> list[Outcome]:
    with tmpfs_directory() as folder:
        problem, whole = check_point(kind, folder, 0, power)
        assert whole, "a point of 0 kills no process"
        operations = list(SEEN_OPERATIONS)
        found = [Outcome(0, "nothing", problem)] if problem else []
        for point in range(1, len(operations) + 1, every):
            problem, whole = check_point(kind, folder, point, power)
            assert not whole, f"point {point} of {len(operations)} did not kill"
            found.append(Outcome(point, operations[point - 1], problem))
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th point")
    options.add_argument("--power", action="store_true", help="what was not fsynced is lost")
    options.add_argument("--json", action="store_true", help="one JSON object instead of text")
    given = options.parse_args()
    torch.set_num_threads(1)  # a forked process has none of the others
    began = time.monotonic()
    found = kill_everywhere(Store, max(1, given.every), given.power)
    bad = [outcome for outcome in found if outcome.problem]
    by_operation = Counter(outcome.operation for outcome in found)
    if given.json:
        print(json.dumps({"points": len(found), "bad": [o._asdict() for o in bad], "operations": dict(by_operation)}))
        return 1 if bad else 0
    print(f"killed at {len(found)} points in {time.monotonic() - began:.0f} s: ", end="")
    print(", ".join(f"{count} x {name}" for name, count in by_operation.most_common()))
    print(f"damaged or lost: {len(bad)}")
    for outcome in bad:
        print(f"  point {outcome.point}, {outcome.operation}: {outcome.problem}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
