"""The syncer process and its parts: served versions, send queues, the memory gate, the optimizer state spool."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atoll.core.protocol import Envelope, Pong, PublishAck, Published, Resync
from atoll.core.types import AcceptedContribution, Limits, RoundId
from atoll.store.run_settings import RunSettings
from atoll.syncer import http_api
from atoll.syncer.fragment_endpoints import MemoryGate
from atoll.syncer.http_api import StateSpool
from atoll.syncer.main import serve_syncer
from atoll.syncer.process import SyncerLink
from atoll.tensors.codecs import get_codec
from atoll.tensors.plan import describe_tensors, make_plan
from atoll.tensors.settings import Numerics
from atoll.tensors.syncer_fragment import MAX_PINNED_VERSIONS, SyncerFragment
from atoll.transport.websocket import MAX_QUEUED_MESSAGES, WebSocketConnection
from atoll.transport.wire import FrameKind, decode_message, encode_frame_head
from tests.learner.runs import LIMIT_S, Run, config, endless
from tests.syncer.raw_learner import RawLearner

# --------------------------------------------------------------------------------------------------------------------
# The process


def test_status_before_model_is_waiting_for_a_model(tmp_path):
    with Run(tmp_path, extra={"lr": 0.5}) as run:
        status = run.status()
        assert (status["stage"], status["founded"], status["merges"]) == ("waiting for a model", False, 0)
        settings = json.loads(run.request("GET", "/v1/run")[1])
        assert (settings["founded"], settings["extra"], settings["protocol"]) == (False, {"lr": 0.5}, 3)
        assert run.request("GET", "/v1/link", Connection="Upgrade", Upgrade="websocket")[0] == 409
        assert run.request("GET", "/v1/fragment/0/0")[0] == 404
        assert run.request("POST", "/v1/finish")[0] == 204
        assert run.status()["stage"] == "waiting for a model"


def test_next_learner_creates_run_after_interrupted_upload(tmp_path):
    with Run(tmp_path, config(budget_merges=3)) as run:
        plan = json.dumps(RawLearner(run, 1).plan.to_json()).encode()
        head = encode_frame_head(FrameKind.MODEL, 0, b"{}", plan) + b"{}" + plan
        host, _, port = run.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT_S) as dying:
            dying.sendall(b"PUT /v1/model HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + head)
        learners = run.joined(1, 2)
        run.go(*learners)
        run.assert_same(run.finish(*learners), 1, 2)


def test_directory_is_locked_by_one_syncer(tmp_path):
    with Run(tmp_path) as run:
        with pytest.raises(ValueError, match=rf"in use by process {run.syncer.pid}"):
            serve_syncer(tmp_path, RunSettings(config()), port=0)
        assert run.status()["stage"] == "waiting for a model"


def test_stored_settings_override_all_but_the_budget(tmp_path):
    with Run(tmp_path, endless(every_steps=4), Numerics(outer_lr=0.25)) as run:
        (one,) = run.joined(1)
        run.go(one)
        run.until(run.merges(3), "the run is under way")
        run.syncer.kill()
        run.settings = RunSettings(config(every_steps=7, budget_merges=6), Numerics(outer_lr=0.75))
        run.start_syncer()
        settings = RunSettings.from_json(json.loads(run.request("GET", "/v1/run")[1]))
        assert (settings.config.every_steps, settings.numerics.outer_lr) == (4, 0.25)
        assert settings.config.budget_merges == 6
        run.assert_same(run.finish(one), 1)
        assert run.log_lines(run.syncer, "the budget is used up")


def test_damaged_store_is_reported_and_no_older_version_loaded(tmp_path):
    with Run(tmp_path, endless()) as run:
        (one,) = run.joined(1)
        run.go(one)
        run.until(run.merges(3), "the run is under way")
        run.syncer.kill()
        one.expected_to_end = True
    newest = max((tmp_path / "store" / "fragments" / "000").iterdir())
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    with pytest.raises(ValueError, match=rf"{newest.name}: the digest does not match"):
        serve_syncer(tmp_path, RunSettings(config()), port=0)


def test_learner_ids_are_assigned_once(tmp_path):
    with Run(tmp_path) as run:

        def join(learner: int | None) -> tuple[int, int]:
            reply = json.loads(run.request("POST", "/v1/join", json.dumps({"learner": learner}).encode())[1])
            return reply["learner"], reply["incarnation"]

        assert [join(None), join(None), join(7), join(7), join(None)] == [(1, 1), (2, 1), (7, 1), (7, 2), (3, 1)]


def test_resumed_finished_run_ends_again(tmp_path):
    """A syncer on a finished directory serves the end to learners that missed it, and exits."""
    with Run(tmp_path, config(budget_merges=3, limits=Limits(initial_wait_s=0.5))) as run:
        (one,) = run.joined(1)
        run.go(one)
        published = run.finish(one)
        (tmp_path / "published.safetensors").unlink()
        run.start_syncer()
        again = run.finish()
        assert published.keys() == again.keys()
        assert all(torch.equal(published[name], again[name]) for name in published)
        run.assert_clean()


# --------------------------------------------------------------------------------------------------------------------
# Served versions


def make_fragment() -> SyncerFragment:
    model = nn.Linear(4, 4)
    plan = make_plan(describe_tensors(model), 1, "balanced")
    return SyncerFragment(plan, 0, Numerics(up="f32", down="f32"), 0, torch.arange(20.0))


def merge_next_version(fragment: SyncerFragment) -> None:
    """Merge one more version, which is not durable yet."""
    round_id = RoundId(0, fragment.served.version, 1, 1)
    data = get_codec("f32").encode(torch.full((20,), 0.5))
    fragment.accumulate(round_id, AcceptedContribution(1, 1, 1, 1, 16, 16, 0, 256.0), data, "f32")
    fragment.merge(round_id, 1)


def test_served_version_changes_when_durable():
    fragment = make_fragment()
    before = fragment.served
    merge_next_version(fragment)
    assert fragment.served is before
    fragment.mark_durable()
    assert (fragment.served.version, fragment.served.base) == (1, 0)
    assert not torch.equal(fragment.served.value, before.value)


def test_version_in_download_stays_unchanged():
    """On a slow link two newer versions are published before the download of this one ends."""
    fragment = make_fragment()
    slow = fragment.pin(0)
    assert slow is fragment.served
    expected = slow.value.clone()
    for _ in range(4):
        fragment.pin(fragment.served.version)  # a faster learner
        merge_next_version(fragment)
        fragment.mark_durable()
        fragment.unpin(fragment.served.version - 1)
    assert torch.equal(slow.value, expected)
    assert fragment.served.version == 4
    assert fragment.pin(0) is slow
    fragment.unpin(0)
    fragment.unpin(0)
    assert fragment.pin(0) is None
    buffers = set()
    for _ in range(6):
        merge_next_version(fragment)
        fragment.mark_durable()
        buffers.add(fragment.served.value.data_ptr())
    assert len(buffers) == 2, "two buffers alternate if no learner is slow"


def test_number_of_pinned_old_versions_is_bounded():
    fragment = make_fragment()
    for version in range(MAX_PINNED_VERSIONS + 3):
        fragment.pin(version)
        merge_next_version(fragment)
        fragment.mark_durable()
    assert [version for version in range(MAX_PINNED_VERSIONS + 4) if fragment.pin(version) is not None] == [
        3,
        4,
        5,
        6,
        7,
    ]
    fragment.unpin(0)  # the slow learner abandons its download
    fragment.unpin(1)


def test_sum_that_differs_from_sealed_round_is_not_merged():
    fragment = make_fragment()
    round_id = RoundId(0, 0, 1, 1)
    with pytest.raises(AssertionError, match="nothing of"):
        fragment.merge(round_id, 1)
    merge_next_version(fragment)
    fragment.discard(round_id)
    with pytest.raises(AssertionError, match="durable before it was merged"):
        make_fragment().mark_durable()


# --------------------------------------------------------------------------------------------------------------------
# Send queue of a learner


class Reader:
    """Peer of a link that reads messages only after `reads` is set."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.received: list[Any] = []
        self.closed_with: tuple[int, bytes] | None = None
        self.aborted = False

    async def send_bytes(self, data: bytes) -> None:
        await self.reads.wait()
        self.received.append(decode_message(data, "syncer").body)

    async def close(self, *, code: int, message: bytes) -> None:
        self.closed_with = code, message

    def abort(self) -> None:
        self.aborted = True


def run_with_link(
    test: Callable[[SyncerLink, Reader], Coroutine[Any, Any, None]], fragments: dict[int, SyncerFragment] | None = None
) -> None:
    async def run_test() -> None:
        reader = Reader()
        link = SyncerLink((1, 1, 1), WebSocketConnection(reader, reader), fragments or {})  # type: ignore[arg-type]
        try:
            await test(link, reader)
        finally:
            link.abandon()

    asyncio.run(asyncio.wait_for(run_test(), LIMIT_S))


def to_learner(body: Any) -> Envelope:
    return Envelope(1, 1, 1, 1, 1, 1, 0, body)


def test_newer_version_replaces_queued_notice():
    async def test(link: SyncerLink, reader: Reader) -> None:
        link.post(to_learner(Pong(0)))
        await run_other_tasks()  # the first message is being sent and cannot be replaced
        for version in range(1, 200):
            link.post(to_learner(Published(version % 2, version, None, None, 0.0)))
            link.post(to_learner(Pong(version)))
        reader.reads.set()
        link.connection.close("all sent")
        await link.connection.wait_closed()
        assert [body for body in reader.received if type(body) is Pong] == [Pong(serial) for serial in range(200)]
        notices = [(body.fragment, body.version) for body in reader.received if type(body) is Published]
        assert notices == [(0, 198), (1, 199)]
        assert reader.closed_with == (1001, b"all sent")

    run_with_link(test)


def test_one_version_is_announced_at_a_time_and_pinned():
    fragment = make_fragment()

    def published() -> Envelope:
        return to_learner(Published(0, fragment.served.version, None, None, 0.0))

    async def test(link: SyncerLink, reader: Reader) -> None:
        reader.reads.set()
        link.post(published())
        for _ in range(3):
            merge_next_version(fragment)
            fragment.mark_durable()
            link.post(published())
            await run_other_tasks()
        assert [body.version for body in reader.received] == [0]
        assert fragment.pin(0) is not None
        fragment.unpin(0)
        link.acknowledge(PublishAck(0, -1))  # for an older version
        await run_other_tasks()
        assert [body.version for body in reader.received] == [0]
        link.acknowledge(PublishAck(0, 0))
        await run_other_tasks()
        assert [body.version for body in reader.received] == [0, 3]
        assert fragment.pin(0) is None
        link.post(published())  # repeated, because the acknowledgement is late
        link.acknowledge(PublishAck(0, 3))
        await run_other_tasks()
        assert [body.version for body in reader.received] == [0, 3], "an acknowledged version is not announced again"
        link.post(published())
        await run_other_tasks()
        link.post(published())
        link.acknowledge(Resync(0, 2))
        await run_other_tasks()
        assert [body.version for body in reader.received] == [0, 3, 3, 3]
        link.abandon()
        merge_next_version(fragment)
        fragment.mark_durable()
        assert fragment.pin(3) is None, "a closed link pins no version"

    run_with_link(test, {0: fragment})


def test_learner_that_never_reads_is_disconnected(monkeypatch):
    monkeypatch.setattr("atoll.transport.websocket.CLOSE_TIMEOUT_S", 0.05)

    async def test(link: SyncerLink, reader: Reader) -> None:
        for serial in range(MAX_QUEUED_MESSAGES + 2):
            link.post(to_learner(Pong(serial)))
        await link.connection.wait_closed()
        assert reader.aborted
        assert reader.received == []
        assert len(link.connection) <= MAX_QUEUED_MESSAGES + 1

    run_with_link(test)


# --------------------------------------------------------------------------------------------------------------------
# Memory


async def run_other_tasks() -> None:
    """Let all other tasks run, and the tasks that they wake."""
    loop = asyncio.get_running_loop()
    for _ in range(3):
        future = loop.create_future()
        loop.call_soon(future.set_result, None)
        await future


async def start_acquire(gate: MemoryGate, size: int) -> asyncio.Task[None]:
    """Start a task that acquires this much. It has acquired it, or waits."""
    task = asyncio.ensure_future(gate.acquire(size))
    await run_other_tasks()
    return task


def test_gate_admits_in_order():
    async def test() -> None:
        gate = MemoryGate(100)
        first, second, third, fourth = [await start_acquire(gate, size) for size in (60, 50, 30, 10)]
        assert [task.done() for task in (first, second, third, fourth)] == [True, False, False, False]
        gate.release(60)  # 30 would have fitted before, but 50 is first in the queue
        await run_other_tasks()
        assert [task.done() for task in (second, third, fourth)] == [True, True, True]
        assert gate.used_bytes == 90

    asyncio.run(test())


def test_gate_admits_larger_piece_alone():
    async def test() -> None:
        gate = MemoryGate(100)
        small, huge, later = [await start_acquire(gate, size) for size in (10, 500, 10)]
        assert [task.done() for task in (small, huge, later)] == [True, False, False]
        gate.release(10)
        await run_other_tasks()
        assert (huge.done(), later.done(), gate.used_bytes) == (True, False, 500)
        gate.release(500)
        await run_other_tasks()
        assert later.done()

    asyncio.run(test())


@pytest.mark.parametrize("when", ["while it waits", "when it is admitted"])
def test_cancelled_waiter_reserves_nothing(when):
    async def test() -> None:
        gate = MemoryGate(100)
        first, impatient, small = [await start_acquire(gate, size) for size in (60, 90, 30)]
        assert not small.done()
        if when == "when it is admitted":
            gate.release(60)
            impatient.cancel()
            await run_other_tasks()
            assert gate.used_bytes == 30
        else:
            impatient.cancel()
            await run_other_tasks()
            assert gate.used_bytes == 90
        assert first.done()
        assert impatient.cancelled()
        assert small.done()

    asyncio.run(test())


@pytest.mark.parametrize("seed", range(5))
def test_gate_never_exceeds_limit_nor_loses_waiter(seed):
    async def test() -> None:
        rng = random.Random(seed)
        gate = MemoryGate(100)
        waiting: list[tuple[int, asyncio.Task[None]]] = []
        acquired: list[int] = []
        for _ in range(500):
            choice = rng.random()
            if choice < 0.5:
                size = rng.choice([1, 10, 50, 99, 300])
                waiting.append((size, await start_acquire(gate, size)))
            elif choice < 0.6 and waiting:
                waiting.pop(rng.randrange(len(waiting)))[1].cancel()
            elif acquired:
                gate.release(acquired.pop(rng.randrange(len(acquired))))
            await run_other_tasks()
            acquired += [size for size, task in waiting if task.done()]
            waiting = [(size, task) for size, task in waiting if not task.done()]
            assert gate.used_bytes == sum(acquired)
            assert sum(acquired) <= 100 or len(acquired) == 1
        while acquired or waiting:
            gate.release(acquired.pop())
            await run_other_tasks()
            acquired += [size for size, task in waiting if task.done()]
            waiting = [(size, task) for size, task in waiting if not task.done()]
        assert gate.used_bytes == 0

    asyncio.run(test())


# --------------------------------------------------------------------------------------------------------------------
# Spooled optimizer state


def spool_state(spool: StateSpool, key: tuple[int, int], payload: bytes) -> Path:
    file = spool.create_file(key, b"header", len(payload))
    file.payload[:] = payload
    file.write_head()
    file.publish()
    file.close()
    found = spool.path(key)
    assert found is not None
    return found


def test_spool_stores_newest_optimizer_state_as_frame(tmp_path):
    spool = StateSpool(tmp_path)
    first = spool_state(spool, (3, 1), b"first")
    second = spool_state(spool, (3, 1), b"the second one")
    assert not first.exists()
    assert (
        second.read_bytes()
        == encode_frame_head(FrameKind.OPTIMIZER_STATE, 0, b"header", b"the second one") + b"headerthe second one"
    )
    assert spool.path((3, 2)) is None
    spool.clear()
    assert list(tmp_path.iterdir()) == []


def test_spool_files_of_one_learner_share_no_memory(tmp_path):
    spool = StateSpool(tmp_path)
    large, small = spool.create_file((3, 1), b"header", 2**20), spool.create_file((3, 1), b"header", 10)
    large.payload[:] = b"x" * 2**20  # writing to the mapping of a truncated file would end the process
    small.close()
    large.write_head()
    large.publish()
    large.close()
    assert [path.suffix for path in tmp_path.iterdir()] == [".state"]


def test_spool_deletes_oldest_and_leftover_files(tmp_path):
    (tmp_path / "learner-1-i1-1.part").write_bytes(b"of a syncer that was killed")
    spool = StateSpool(tmp_path)
    assert list(tmp_path.iterdir()) == []
    for learner in range(1, http_api.MAX_STATE_FILES + 3):
        spool_state(spool, (learner, 1), b"state")
    assert len(list(tmp_path.iterdir())) == http_api.MAX_STATE_FILES
    assert spool.path((1, 1)) is None
    assert spool.path((3, 1)) is not None
