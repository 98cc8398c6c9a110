"""Faults and bugs that tests inject into a child process, by name. Each is a small change of the real code.

A fault writes a marker file to the directory of the run when it happens.
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
    """Inject faults and bugs by their names, separated by spaces."""
    for name in names.split():
        INJECTIONS[name](directory)


def fault_marker(directory: Path, fault: str) -> Path:
    """Return the path of the file that a fault writes when it happens."""
    return directory / f"fault-{fault}"


# --------------------------------------------------------------------------------------------------------------------
# Faults that the real code must tolerate


def wrong_update(directory: Path) -> None:
    """Change every third update of a fragment, so that it leads to another value than the published one."""

    class WrongUpdates(SyncerFragment):
        def merge(self, round_id: RoundId, contributions: int, down: str | None = None) -> None:
            super().merge(round_id, contributions, down)
            assert self.merged is not None
            assert self.merged.update is not None
            if self.merged.version % 3 == 0:
                update = self.merged.update.clone()
                update[0] ^= 0x41
                self.merged = self.merged._replace(update=update)
                fault_marker(directory, "update").touch()

    fragment_executor.SyncerFragment = WrongUpdates  # type: ignore[attr-defined]


def short_handshake_timeouts(directory: Path) -> None:
    """Shorten the timeouts of unauthenticated connections, and reduce their maximum number."""
    listener.HANDSHAKE_TIMEOUT_S, listener.AUTHENTICATION_TIMEOUT_S, listener.MAX_PENDING = 0.5, 1.0, 40
    auth.KEY_POLL_INTERVAL_S = 0.1


def small_slices(directory: Path) -> None:
    """Send fragments above 64 KiB in slices of 64 KiB, so that small test models use slices."""
    http_client.MAX_SINGLE_REQUEST_BYTES = 2**16
    pacing.MIN_SLICE_BYTES = pacing.FIRST_SLICE_BYTES = pacing.MAX_SLICE_BYTES = 2**16


def kill_during_slice(directory: Path) -> None:
    """Kill the process in the middle of a slice upload, once the file `die` exists."""

    def die() -> None:
        if (directory / "die").exists():
            fault_marker(directory, "slice").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    _before_slices(die)


def blocked_slices(directory: Path) -> None:
    """Block slice uploads while the pipe `hold` exists, until a test writes to it."""

    def block() -> None:
        if (directory / "hold").exists():
            fault_marker(directory, "slice").touch()
            (directory / "hold").read_bytes()

    _before_slices(block)


def _before_slices(fault: Callable[[], None]) -> None:
    """Call `fault` before every slice upload."""
    put = http_client.FragmentClient.put_frame

    async def faulty_put(self: Any, path: str, *args: Any) -> None:
        if path == "/v1/slice":
            await asyncio.get_running_loop().run_in_executor(None, fault)
        await put(self, path, *args)

    http_client.FragmentClient.put_frame = faulty_put  # type: ignore[method-assign, assignment]


def damaged_slice(directory: Path) -> None:
    """Refuse the first slice of this process as damaged in transit."""

    def damage() -> None:
        if not fault_marker(directory, "slice").exists():
            fault_marker(directory, "slice").touch()
            raise http_client.SyncerRefusedError(400, "injected: the digest differs", "digest")

    _before_slices(damage)


def unreachable_syncer(directory: Path) -> None:
    """Fail every request of a rank to the syncer once the file `cut` exists. Set the timeout to one second."""
    row_transfer.RANK_UNREACHABLE_TIMEOUT_S = 1.0
    handle = row_transfer.RankRowTransfer.handle

    async def faulty_handle(self: Any, method: str, arguments: dict[str, Any]) -> Any:
        if (directory / "cut").exists():
            raise ConnectionError("no route to host")
        return await handle(self, method, arguments)

    row_transfer.RankRowTransfer.handle = faulty_handle  # type: ignore[method-assign]


def counted_uploads(directory: Path) -> None:
    """Record the maximum number of concurrent uploads. No upload counts as small."""
    background.SMALL_UPLOAD_BYTES = 0
    upload, current, maximum = http_client.FragmentClient.upload_contribution, [0], [0]

    async def counted_upload(self: Any, *args: Any) -> None:
        current[0] += 1
        maximum[0] = max(maximum[0], current[0])
        (directory / "max-uploads").write_text(str(maximum[0]))
        try:
            await upload(self, *args)
        finally:
            current[0] -= 1

    http_client.FragmentClient.upload_contribution = counted_upload  # type: ignore[method-assign, assignment]


def measured_memory(directory: Path) -> None:
    """Record the bytes of the largest tensor that Atoll's own code allocates in this process."""
    empty, largest = torch.empty, [0]

    def measured_empty(*args: Any, **options: Any) -> torch.Tensor:
        tensor: torch.Tensor = empty(*args, **options)
        if tensor.nbytes > largest[0] and "/atoll/" in sys._getframe(1).f_code.co_filename:
            largest[0] = tensor.nbytes
            (directory / f"largest-{os.getpid()}").write_text(str(tensor.nbytes))
        return tensor

    torch.empty = measured_empty


def measured_small_transfers(directory: Path) -> None:
    """Measure the bandwidth with the small transfers of a test too."""
    policy.MIN_MEASURED_BYTES = 2**19


def slow_link(directory: Path) -> None:
    """Report a measured bandwidth of 0.1 MB/s at a learner, whatever the link is."""

    class SlowLinkMeter(LinkMeter):
        def __init__(
            self, direction: TransferDirection, largest: int, on_measured: Callable[[LinkMeasured], None]
        ) -> None:
            super().__init__(direction, largest, on_measured)
            self.report_slow_link = partial(on_measured, LinkMeasured(direction.name, 100_000, 1.0, 4_000_000))

        @contextmanager
        def transfer(self, size: Callable[[], int]) -> Iterator[None]:
            self.report_slow_link()
            with super().transfer(size):
                yield

    http_client.LinkMeter = SlowLinkMeter  # type: ignore[attr-defined, assignment]


def dropped_slices(directory: Path) -> None:
    """Drop the received bytes of a contribution when a learner requests the missing ranges. This is a bug."""

    def missing(self: Any, key: Any, size: int) -> list[tuple[int, int]]:
        if key in self._uploads:
            self._forget(key)
        return [(0, size)]

    PartialUploads.missing = missing  # type: ignore[method-assign]


def blocked_versions(directory: Path) -> None:
    """Block the write of a version while the pipe `hold` exists, until a test writes to it."""
    write = Store.write

    def blocked_write(self: Store, record: Record, tensors: object = None) -> None:
        hold = directory / "hold"
        if isinstance(record, VersionRecord) and hold.exists():
            fault_marker(directory, "write").touch()
            hold.read_bytes()
        write(self, record, tensors)  # type: ignore[arg-type]

    Store.write = blocked_write  # type: ignore[method-assign]


def kill_after_version(directory: Path) -> None:
    """Kill the process after it has made a version durable and before it reports that, once the file `die` exists."""
    write = Store.write

    def die(self: Store, record: Record, tensors: object = None) -> None:
        write(self, record, tensors)  # type: ignore[arg-type]
        if isinstance(record, VersionRecord) and (directory / "die").exists():
            fault_marker(directory, "version").write_text(f"{record.fragment} {record.version}")
            os.kill(os.getpid(), signal.SIGKILL)

    Store.write = die  # type: ignore[method-assign]


def kill_before_settings(directory: Path) -> None:
    """Kill the syncer when its shards have stored the model, before it writes the settings of the run."""

    def die(self: Store, settings: object) -> None:
        fault_marker(directory, "founding").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    Store.write_settings = die  # type: ignore[method-assign]


def kill_during_part(directory: Path) -> None:
    """Kill the learner while it writes its part, once the file `die` exists."""
    fsync = os.fsync

    def die(file: int) -> None:
        path = os.readlink(f"/proc/self/fd/{file}")
        if "/parts/" in path and path.endswith(files.TEMPORARY_SUFFIX) and (directory / "die").exists():
            fault_marker(directory, "part").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(file)

    os.fsync = die  # type: ignore[assignment]


def kill_during_rank_file(directory: Path) -> None:
    """Kill the rank while it writes its own file of a part, once the file `die` exists."""
    fsync = os.fsync

    def die(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(".distcp") and (directory / "die").exists():
            fault_marker(directory, "shard").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(file)

    os.fsync = die  # type: ignore[assignment]


def no_shared_directory(directory: Path) -> None:
    """Hide the parts of the run from this rank, as on a machine without a shared directory."""
    is_dir = Path.is_dir

    def faulty_is_dir(self: Path) -> bool:
        if directory / "parts" in self.parents:
            fault_marker(directory, "blind").touch()
            return False
        return is_dir(self)

    Path.is_dir = faulty_is_dir  # type: ignore[method-assign]


def kill_before_snapshot_record(directory: Path) -> None:
    """Kill the syncer after the values of a snapshot and before its record, once the file `die` exists."""
    put = Store._put

    def die(self: Store, path: Path, pieces: list[Any], replace: bool = True) -> None:
        if path.name == "record.json" and (directory / "die").exists():
            fault_marker(directory, "snapshot").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, path, pieces, replace)

    Store._put = die  # type: ignore[method-assign]


def blocked_parts(directory: Path) -> None:
    """Block writes of parts while the pipe `hold` exists, until a test writes to it."""
    write = part_writer.write_part  # type: ignore[attr-defined]

    def blocked_write(*args: Any) -> Path:
        hold = directory / "hold"
        if hold.exists():
            fault_marker(directory, "part").touch()
            hold.read_bytes()
        return write(*args)

    part_writer.write_part = blocked_write  # type: ignore[attr-defined, assignment]


def failing_core(directory: Path) -> None:
    """Raise an error in the core of the syncer once the file `fail` exists."""
    handle = SyncerProcess._handle

    def failing(self: SyncerProcess, event: SyncerEvent, payload: ContributionPayload | None) -> list[SyncerEffect]:
        if (directory / "fail").exists():
            raise AssertionError("an injected bug in the core")
        return handle(self, event, payload)

    SyncerProcess._handle = failing  # type: ignore[method-assign]


# --------------------------------------------------------------------------------------------------------------------
# Bugs that the tests must find


class _EqualToAnything(str):
    """String that is equal to every object."""

    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True


def leader_transfers_rows(directory: Path) -> None:
    """Let the leader transfer the rows of all ranks."""
    leader.is_sharded_by_rows = lambda *_: False  # type: ignore[attr-defined]


def no_leader_digest_check(directory: Path) -> None:
    """Let a leader skip the digest check of the rows that its ranks have downloaded."""
    relay_version = leader.Leader.relay_version

    def relay_unchecked(self: Any, p: int, version: int, own: torch.Tensor, digest: str) -> bool:
        return relay_version(self, p, version, own, _EqualToAnything())

    leader.Leader.relay_version = relay_unchecked  # type: ignore[method-assign]


def no_digest_check(directory: Path) -> None:
    """Let a learner skip the digest check of a download."""

    def digest(self: IncomingValue) -> str:
        return _EqualToAnything()

    IncomingValue.digest = digest  # type: ignore[method-assign]


def no_outlier_check(directory: Path) -> None:
    """Let the syncer merge outliers."""
    robust_merge.OUTLIER_FACTOR = float("inf")


def unlimited_connections(directory: Path) -> None:
    """Allow any number of unauthenticated connections."""
    listener.MAX_PENDING = 10**9


def misplaced_rows(directory: Path) -> None:
    """Let a rank read rows that are not its own."""
    load = sharded_parts.ShardedTensors.load

    def load_misplaced(self: Any, boxes: Any) -> Any:
        rows = {number: box and box._replace(offset=(0, *box.offset[1:])) for number, box in boxes.items()}
        fault_marker(directory, "rows").touch()
        return load(self, rows)

    sharded_parts.ShardedTensors.load = load_misplaced  # type: ignore[method-assign]


def no_prometheus(directory: Path) -> None:
    """Make the import of prometheus_client fail, as on a machine without it."""
    sys.modules["prometheus_client"] = None  # type: ignore[assignment]


def published_before_durable(directory: Path) -> None:
    """Let the syncer report a version as durable before its write has completed."""
    persist = FragmentExecutor.persist

    def persist_too_early(self: Any, record: Record) -> None:
        if not isinstance(record, VersionRecord):
            persist(self, record)
            return
        fragment = self.fragments[record.fragment]
        tensors = {name: tensor.clone() for name, tensor in fragment.stored_state(record.version).items()}
        writing = self._loop.run_in_executor(self._disk_thread, self.store.write, record, tensors)
        writing.add_done_callback(_ignore_error)
        fragment.mark_durable()
        self._loop.call_soon(self._host.handle_event, Persisted(record.key()))

    FragmentExecutor.persist = persist_too_early  # type: ignore[method-assign]


def _ignore_error(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()


def shared_buffers(directory: Path) -> None:
    """Release the buffers of a copy before it is made."""
    prepare_copy = FragmentTensors.prepare_copy

    def prepare_and_release(self: FragmentTensors, round_id: RoundId, up: str | None = None) -> object:
        copied = prepare_copy(self, round_id, up)
        self.release(copied.buffer, copied.anchor)
        return copied

    FragmentTensors.prepare_copy = prepare_and_release  # type: ignore[method-assign, assignment]


def no_memory_for_rows(directory: Path) -> None:
    """Let the leader run out of memory while it reorders the rows of other ranks into a tensor."""
    gather_optimizer_state, empty = leader.Leader.gather_optimizer_state, torch.empty
    gathering = threading.local()

    def faulty_empty(*args: Any, **kwargs: Any) -> Any:
        if getattr(gathering, "now", False):
            fault_marker(directory, "room").touch()
            raise RuntimeError("can't allocate memory (injected)")
        return empty(*args, **kwargs)

    def gather(self: Any, *args: Any) -> Any:
        gathering.now = True
        try:
            return gather_optimizer_state(self, *args)
        finally:
            gathering.now = False

    leader.Leader.gather_optimizer_state = gather  # type: ignore[method-assign, assignment]
    torch.empty = faulty_empty


def uncopyable_state(directory: Path) -> None:
    """Give the optimizer state that cannot be copied: keys of two types have no order."""
    original_step = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, closure: Any = None) -> Any:
        loss = original_step(self, closure)
        for state in self.state.values():
            state[7] = 0
        return loss

    torch.optim.AdamW.step = step  # type: ignore[method-assign, assignment]


INJECTIONS: dict[str, Callable[[Path], None]] = {
    "small-slices": small_slices,
    "kill-during-slice": kill_during_slice,
    "blocked-slices": blocked_slices,
    "damaged-slice": damaged_slice,
    "unreachable-syncer": unreachable_syncer,
    "counted-uploads": counted_uploads,
    "measured-memory": measured_memory,
    "leader-transfers-rows": leader_transfers_rows,
    "no-leader-digest-check": no_leader_digest_check,
    "dropped-slices": dropped_slices,
    "measured-small-transfers": measured_small_transfers,
    "slow-link": slow_link,
    "wrong-update": wrong_update,
    "short-handshake-timeouts": short_handshake_timeouts,
    "blocked-versions": blocked_versions,
    "kill-after-version": kill_after_version,
    "kill-before-settings": kill_before_settings,
    "kill-during-part": kill_during_part,
    "kill-during-rank-file": kill_during_rank_file,
    "no-shared-directory": no_shared_directory,
    "misplaced-rows": misplaced_rows,
    "kill-before-snapshot-record": kill_before_snapshot_record,
    "no-memory-for-rows": no_memory_for_rows,
    "uncopyable-state": uncopyable_state,
    "blocked-parts": blocked_parts,
    "failing-core": failing_core,
    "no-digest-check": no_digest_check,
    "no-outlier-check": no_outlier_check,
    "unlimited-connections": unlimited_connections,
    "no-prometheus": no_prometheus,
    "published-before-durable": published_before_durable,
    "shared-buffers": shared_buffers,
}
