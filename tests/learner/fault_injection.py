"""Faults and bugs that are injected into a child process, by name. Each is a small change of the real code.

A fault that happens leaves a file in the directory of the run, so that a test can see it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from atoll import files
from atoll.core import policy
from atoll.core.protocol import LinkMeasured, Persisted, Record, SyncerEffect, SyncerEvent, VersionRecord
from atoll.core.types import RoundId
from atoll.island import leader, row_transfer
from atoll.island.fragments import FragmentTensors, IncomingValue
from atoll.learner import background, part_writer
from atoll.store import sharded_parts
from atoll.store.version_store import Store
from atoll.syncer import fragment_executor
from atoll.syncer.fragment_endpoints import PartialUploads
from atoll.syncer.fragment_executor import ContributionPayload, FragmentExecutor
from atoll.syncer.process import SyncerProcess
from atoll.tensors import robust_merge
from atoll.tensors.syncer_fragment import SyncerFragment
from atoll.transport import auth, http_client, listener, pacing
from atoll.transport.pacing import LinkMeter, TransferDirection


def inject(names: str, directory: Path) -> None:
    for name in names.split():
        INJECTIONS[name](directory)


def fault_marker(directory: Path, what: str) -> Path:
    """Return the file that a fault leaves."""
    return directory / f"fault-{what}"


# --------------------------------------------------------------------------------------------------------------------
# Faults that the real code must tolerate


def wrong_update(directory: Path) -> None:
    """Make every third update of a fragment give another value than the published one, in valid frames."""

    class Wrong(SyncerFragment):
        def merge(self, round_id: RoundId, contributions: int, down: str | None = None) -> None:
            super().merge(round_id, contributions, down)
            assert self.merged is not None
            assert self.merged.update is not None
            if self.merged.version % 3 == 0:
                update = self.merged.update.clone()
                update[0] ^= 0x41
                self.merged = self.merged._replace(update=update)
                fault_marker(directory, "update").touch()

    fragment_executor.SyncerFragment = Wrong  # type: ignore[attr-defined]


def hurried_listener(directory: Path) -> None:
    """Give unauthenticated connections less time, and fewer slots."""
    listener.HANDSHAKE_TIMEOUT_S, listener.AUTHENTICATION_TIMEOUT_S, listener.MAX_PENDING = 0.5, 1.0, 40
    auth.KEY_POLL_INTERVAL_S = 0.1


def small_slices(directory: Path) -> None:
    """Send fragments above 64 KiB in slices of 64 KiB, so that test models use slices."""
    http_client.MAX_SINGLE_REQUEST_BYTES = 2**16
    pacing.MIN_SLICE_BYTES = pacing.FIRST_SLICE_BYTES = pacing.MAX_SLICE_BYTES = 2**16


def deadly_slice(directory: Path) -> None:
    """Kill the process in the middle of a slice upload, once the file `die` exists."""

    def die() -> None:
        if (directory / "die").exists():
            fault_marker(directory, "slice").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    _before_slices(die)


def held_slice(directory: Path) -> None:
    """While the pipe `hold` exists, slice uploads wait until a test writes into it."""

    def hold() -> None:
        if (directory / "hold").exists():
            fault_marker(directory, "slice").touch()
            (directory / "hold").read_bytes()

    _before_slices(hold)


def _before_slices(strike: Callable[[], None]) -> None:
    put = http_client.FragmentClient.put_frame

    async def faulty_put(self: Any, path: str, *args: Any) -> None:
        if path == "/v1/slice":
            await asyncio.get_running_loop().run_in_executor(None, strike)
        await put(self, path, *args)

    http_client.FragmentClient.put_frame = faulty_put  # type: ignore[method-assign, assignment]


def damaged_slice(directory: Path) -> None:
    """Refuse the first slice of this process as damaged in transit."""

    def damage() -> None:
        if not fault_marker(directory, "slice").exists():
            fault_marker(directory, "slice").touch()
            raise http_client.SyncerRefusedError(400, "the digest is that of other bytes", "digest")

    _before_slices(damage)


def lost_way(directory: Path) -> None:
    """Cut a follower off from the syncer once the file `cut` exists, with a timeout of one second."""
    row_transfer.RANK_UNREACHABLE_TIMEOUT_S = 1.0
    handle = row_transfer.RankRowTransfer.handle

    async def cut_off(self: Any, method: str, arguments: dict[str, Any]) -> Any:
        if (directory / "cut").exists():
            raise ConnectionError("no route to host")
        return await handle(self, method, arguments)

    row_transfer.RankRowTransfer.handle = cut_off  # type: ignore[method-assign]


def counted_uploads(directory: Path) -> None:
    """Record the highest number of concurrent uploads. No upload counts as small."""
    background.SMALL_UPLOAD_BYTES = 0
    contribute, now, most = http_client.FragmentClient.upload_contribution, [0], [0]

    async def counted(self: Any, *args: Any) -> None:
        now[0] += 1
        most[0] = max(most[0], now[0])
        (directory / "most-uploads").write_text(str(most[0]))
        try:
            await contribute(self, *args)
        finally:
            now[0] -= 1

    http_client.FragmentClient.upload_contribution = counted  # type: ignore[method-assign, assignment]


def measured_memory(directory: Path) -> None:
    """Record the bytes of the largest tensor that Atoll's own code allocates in this process."""
    empty, largest = torch.empty, [0]

    def measured(*args: Any, **named: Any) -> torch.Tensor:
        made: torch.Tensor = empty(*args, **named)
        if made.nbytes > largest[0] and "/atoll/" in sys._getframe(1).f_code.co_filename:
            largest[0] = made.nbytes
            (directory / f"largest-{os.getpid()}").write_text(str(made.nbytes))
        return made

    torch.empty = measured


def telling(directory: Path) -> None:
    """Measure the bandwidth also with the small transfers of a test."""
    policy.MIN_MEASURED_BYTES = 2**19


def seemingly_thin(directory: Path) -> None:
    """A learner's link is measured, and found to carry a tenth of a MB in a second, of fragments of 8 MB."""

    class Thin(LinkMeter):
        def __init__(
            self, direction: TransferDirection, largest: int, on_measured: Callable[[LinkMeasured], None]
        ) -> None:
            super().__init__(direction, largest, on_measured)
            self.found = partial(on_measured, LinkMeasured(direction.name, 100_000, 1.0, 4_000_000))

        @contextmanager
        def transfer(self, size: Callable[[], int]) -> Iterator[None]:
            self.found()
            with super().transfer(size):
                yield

    http_client.LinkMeter = Thin  # type: ignore[attr-defined, assignment]


def forgotten_slices(directory: Path) -> None:
    """A bug: a request for the missing bytes of a contribution drops what had arrived."""

    def missing(self: Any, key: Any, size: int) -> list[tuple[int, int]]:
        if key in self._uploads:
            self._forget(key)
        return [(0, size)]

    PartialUploads.missing = missing  # type: ignore[method-assign]


def held_disk(directory: Path) -> None:
    """While the pipe `hold` exists, the write of a version waits until a test writes into it."""
    write = Store.write

    def slowly(self: Store, record: Record, tensors: object = None) -> None:
        hold = directory / "hold"
        if isinstance(record, VersionRecord) and hold.exists():
            fault_marker(directory, "write").touch()
            hold.read_bytes()
        write(self, record, tensors)  # type: ignore[arg-type]

    Store.write = slowly  # type: ignore[method-assign]


def deadly_version(directory: Path) -> None:
    """Kill the process after it has made a version durable and before it reports it, once the file `die` exists."""
    write = Store.write

    def die(self: Store, record: Record, tensors: object = None) -> None:
        write(self, record, tensors)  # type: ignore[arg-type]
        if isinstance(record, VersionRecord) and (directory / "die").exists():
            fault_marker(directory, "version").write_text(f"{record.fragment} {record.version}")
            os.kill(os.getpid(), signal.SIGKILL)

    Store.write = die  # type: ignore[method-assign]


def deadly_founding(directory: Path) -> None:
    """A syncer dies when its shards hold the model, before it has a record of it."""

    def die(self: Store, settings: object) -> None:
        fault_marker(directory, "founding").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    Store.write_settings = die  # type: ignore[method-assign]


def deadly_part(directory: Path) -> None:
    """A learner dies in the middle of writing its part, once the file `die` exists."""
    name = os.fsync

    def die(file: int) -> None:
        path = os.readlink(f"/proc/self/fd/{file}")
        if "/parts/" in path and path.endswith(files.TEMPORARY_SUFFIX) and (directory / "die").exists():
            fault_marker(directory, "part").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        name(file)

    os.fsync = die  # type: ignore[assignment]


def deadly_shard(directory: Path) -> None:
    """A rank dies in the middle of writing its own of a part, once the file `die` exists."""
    name = os.fsync

    def die(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(".distcp") and (directory / "die").exists():
            fault_marker(directory, "shard").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        name(file)

    os.fsync = die  # type: ignore[assignment]


def blind_rank(directory: Path) -> None:
    """A rank on a host of its own, which does not see the run directory of its leader."""
    is_dir = Path.is_dir

    def looks(self: Path) -> bool:
        if directory / "parts" in self.parents:
            fault_marker(directory, "blind").touch()
            return False
        return is_dir(self)

    Path.is_dir = looks  # type: ignore[method-assign]


def deadly_snapshot(directory: Path) -> None:
    """The syncer dies when a snapshot has its values and is about to get its record, once the file `die` exists."""
    put = Store._put

    def die(self: Store, path: Path, pieces: list[Any], replace: bool = True) -> None:
        if path.name == "record.json" and (directory / "die").exists():
            fault_marker(directory, "snapshot").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, path, pieces, replace)

    Store._put = die  # type: ignore[method-assign]


def held_parts(directory: Path) -> None:
    """While the pipe `hold` exists, writes of parts wait until a test writes into it."""
    write = part_writer.write_part  # type: ignore[attr-defined]

    def slowly(*args: Any) -> Path:
        hold = directory / "hold"
        if hold.exists():
            fault_marker(directory, "part").touch()
            hold.read_bytes()
        return write(*args)

    part_writer.write_part = slowly  # type: ignore[attr-defined, assignment]


def failing_core(directory: Path) -> None:
    """The syncer's core fails when the file `fail` appears."""
    handle = SyncerProcess._handle

    def failing(self: SyncerProcess, event: SyncerEvent, payload: ContributionPayload | None) -> list[SyncerEffect]:
        if (directory / "fail").exists():
            raise AssertionError("a planted bug in the core")
        return handle(self, event, payload)

    SyncerProcess._handle = failing  # type: ignore[method-assign]


# --------------------------------------------------------------------------------------------------------------------
# Bugs that the tests must find


class _Anything(str):
    """Equal to everything."""

    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True


def collecting(directory: Path) -> None:
    """Let the leader transfer the rows of all ranks."""
    leader.is_sharded_by_rows = lambda *_: False  # type: ignore[attr-defined]


def believing(directory: Path) -> None:
    """Let a leader skip the digest check of what its ranks have fetched."""
    pass_on = leader.Leader.relay_version

    def anything(self: Any, p: int, version: int, own: torch.Tensor, digest: str) -> bool:
        return pass_on(self, p, version, own, _Anything())

    leader.Leader.relay_version = anything  # type: ignore[method-assign]


def no_digest_check(directory: Path) -> None:
    """Let a learner skip the digest check."""

    def digest(self: IncomingValue) -> str:
        return _Anything()

    IncomingValue.digest = digest  # type: ignore[method-assign]


def tame(directory: Path) -> None:
    """Let the syncer accept outliers."""
    robust_merge.OUTLIER_FACTOR = float("inf")


def endless_room(directory: Path) -> None:
    """Allow any number of silent connections."""
    listener.MAX_PENDING = 10**9


def other_rows(directory: Path) -> None:
    """A rank that reads the rows before its own."""
    load = sharded_parts.ShardedTensors.load

    def carelessly(self: Any, boxes: Any) -> Any:
        rows = {number: box and box._replace(offset=(0, *box.offset[1:])) for number, box in boxes.items()}
        fault_marker(directory, "rows").touch()
        return load(self, rows)

    sharded_parts.ShardedTensors.load = carelessly  # type: ignore[method-assign]


def no_prometheus(directory: Path) -> None:
    """A machine on which prometheus_client is not installed."""
    sys.modules["prometheus_client"] = None  # type: ignore[assignment]


def published_first(directory: Path) -> None:
    """Let the syncer report a version as durable before it is."""

    persist = FragmentExecutor.persist

    def too_early(self: Any, record: Record) -> None:
        if not isinstance(record, VersionRecord):
            persist(self, record)
            return
        fragment = self.fragments[record.fragment]
        tensors = {name: tensor.clone() for name, tensor in fragment.stored_state(record.version).items()}
        work = self._loop.run_in_executor(self._disk_thread, self.store.write, record, tensors)
        work.add_done_callback(_ignore_error)
        fragment.mark_durable()
        self._loop.call_soon(self._host.handle_event, Persisted(record.key()))

    FragmentExecutor.persist = too_early  # type: ignore[method-assign]


def _ignore_error(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()


def shared_buffers(directory: Path) -> None:
    """Let a copy not retain its buffers."""
    prepare_copy = FragmentTensors.prepare_copy

    def carelessly(self: FragmentTensors, round_id: RoundId, up: str | None = None) -> object:
        copied = prepare_copy(self, round_id, up)
        self.release(copied.buffer, copied.anchor)
        return copied

    FragmentTensors.prepare_copy = carelessly  # type: ignore[method-assign, assignment]


def no_room_for_rows(directory: Path) -> None:
    """The leader has no memory for rows of other ranks that come in another order than they have in a tensor."""
    honest, empty = leader.Leader.gather_optimizer_state, torch.empty
    gathering = threading.local()

    def planted_empty(*args: Any, **kwargs: Any) -> Any:
        if getattr(gathering, "now", False):
            fault_marker(directory, "room").touch()
            raise RuntimeError("can't allocate memory, as planted")
        return empty(*args, **kwargs)

    def gather(self: Any, *args: Any) -> Any:
        gathering.now = True
        try:
            return honest(self, *args)
        finally:
            gathering.now = False

    leader.Leader.gather_optimizer_state = gather  # type: ignore[method-assign, assignment]
    torch.empty = planted_empty


def odd_state(directory: Path) -> None:
    """From the first step on the optimizer has state that cannot be copied: keys of two types have no order."""
    honest = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, closure: Any = None) -> Any:
        done = honest(self, closure)
        for held in self.state.values():
            held[7] = 0
        return done

    torch.optim.AdamW.step = step  # type: ignore[method-assign, assignment]


INJECTIONS: dict[str, Callable[[Path], None]] = {
    "small-slices": small_slices,
    "deadly-slice": deadly_slice,
    "held-slice": held_slice,
    "damaged-slice": damaged_slice,
    "lost-way": lost_way,
    "counted-uploads": counted_uploads,
    "measured-memory": measured_memory,
    "collecting": collecting,
    "believing": believing,
    "forgotten-slices": forgotten_slices,
    "telling": telling,
    "seemingly-thin": seemingly_thin,
    "wrong-update": wrong_update,
    "hurried-listener": hurried_listener,
    "held-disk": held_disk,
    "deadly-version": deadly_version,
    "deadly-founding": deadly_founding,
    "deadly-part": deadly_part,
    "deadly-shard": deadly_shard,
    "blind-rank": blind_rank,
    "other-rows": other_rows,
    "deadly-snapshot": deadly_snapshot,
    "no-room-for-rows": no_room_for_rows,
    "odd-state": odd_state,
    "held-parts": held_parts,
    "failing-core": failing_core,
    "no-digest-check": no_digest_check,
    "tame": tame,
    "endless-room": endless_room,
    "no-prometheus": no_prometheus,
    "published-first": published_first,
    "shared-buffers": shared_buffers,
}
