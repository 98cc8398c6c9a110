"""Large payloads in slices: missing ranges, bandwidth limits, parallel streams, and resumed transfers."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.protocol import Pull
from atoll.core.types import RoundId
from atoll.learner.api import Learner
from atoll.syncer.fragment_endpoints import MemoryGate, PartialUploads, UploadKey
from atoll.tensors.settings import Numerics
from atoll.transport.buffers import ByteBufferPool, Spans, StreamingBuffer
from atoll.transport.pacing import (
    FIRST_SLICE_BYTES,
    MAX_BURST_S,
    MAX_SLICE_BYTES,
    RateLimiter,
    TransferDirection,
    check_streams,
    parse_rate,
)
from atoll.transport.wire import FrameKind, SliceHeader, WireError, encode_frame_head
from tests.chaos.relays import relay_to
from tests.learner.runs import LearnerSpec, Run, endless
from tests.learner.small_models import work
from tests.syncer.raw_learner import RawLearner

# --------------------------------------------------------------------------------------------------------------------
# Missing ranges


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(0, 40)), max_size=30), st.integers(1, 9))
def test_spans_are_a_set_of_bytes(steps, most):
    spans, known = Spans(), set()
    for adds, begin, end in steps:
        if adds:
            spans.add(begin, end)
            known |= set(range(begin, end))
        else:
            spans.remove(begin, end)
            known -= set(range(begin, end))
        listed = list(spans)
        assert {byte for b, e in listed for byte in range(b, e)} == known
        assert all(b < e for b, e in listed)
        assert all(one[1] < other[0] for one, other in itertools.pairwise(listed)), "neighbours are joined"
        assert spans.bytes == len(known)
        assert spans.contains(begin, end) is (begin < end and set(range(begin, end)) <= known) or begin >= end
    bytes_taken: list[int] = []
    while (span := spans.take(most)) is not None:
        assert span[1] - span[0] <= most
        bytes_taken += range(*span)
    assert bytes_taken == sorted(known)


# --------------------------------------------------------------------------------------------------------------------
# Rates


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("2gbit", 2.5e8), ("500 Mbit", 6.25e7), ("10MB/s", 1e7), ("1e3kbit/s", 1.25e5), ("8bit", 1.0), (".5GB/s", 5e8)],
)
def test_rates_are_parsed(text, bytes_per_s):
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize("text", ["", "2", "fast", "-1gbit", "0gbit", "1e999bit", "2 gbits", "nan bit"])
def test_invalid_rate_is_refused_with_example(text):
    with pytest.raises(ValueError, match="as 2gbit, 500mbit or 10MB/s"):
        parse_rate(text)


def test_rate_limit_allows_one_burst_after_idle_time():
    now = [100.0]
    pace = RateLimiter(1000.0, clock=lambda: now[0])
    for _ in range(50):
        now[0] += pace.reserve(100)
    assert now[0] - 100.0 == pytest.approx(5.0, abs=2 * MAX_BURST_S)
    now[0] += 3600.0
    assert pace.reserve(1000) == pytest.approx(1.0 - MAX_BURST_S)
    assert RateLimiter(None).reserve(10**12) == 0.0


# --------------------------------------------------------------------------------------------------------------------
# Number of streams, size of slices


@pytest.mark.parametrize("wanted", [0, 17, -1, 2.0, True, "4"])
def test_invalid_number_of_streams_is_refused(wanted):
    with pytest.raises(ValueError, match="give a number of connections from 1 to 16"):
        check_streams(wanted)


def test_learner_passes_streams_to_its_transfers():
    job = work()
    bulk = Learner(job.model, job.optimizer, "127.0.0.1:7400", streams=3)._background.bulk
    assert (bulk.up.streams, bulk.down.streams) == (3, 3)
    with pytest.raises(ValueError, match="streams is 17"):
        Learner(job.model, job.optimizer, "127.0.0.1:7400", streams=17)


def test_slice_size_is_one_second_of_throughput():
    async def scene(size: int) -> int:
        direction = TransferDirection(None, "up", streams=2)

        async def move(begin: int, end: int) -> None:
            direction.moved_bytes += end - begin

        await direction.transfer(Spans([(0, size)]), move)
        return direction.slice_bytes()

    assert asyncio.run(scene(2**20)) == FIRST_SLICE_BYTES, "a small transfer is not measured"
    assert asyncio.run(scene(64 * 2**20)) == MAX_SLICE_BYTES


def test_only_failed_slice_is_missing_again():
    moved: list[tuple[int, int]] = []

    async def move(begin: int, end: int) -> None:
        await asyncio.to_thread(int)  # let the other streams run
        if begin <= 10 * 2**20 < end:
            raise ConnectionError("broken")
        moved.append((begin, end))

    direction, missing = TransferDirection(None, "up", streams=3), Spans([(0, 40 * 2**20)])
    with pytest.raises(ConnectionError, match="broken"):
        asyncio.run(direction.transfer(missing, move))
    for begin, end in moved:
        assert not any(b < end and begin < e for b, e in missing)
    assert missing.bytes + sum(end - begin for begin, end in moved) == 40 * 2**20
    assert missing.contains(10 * 2**20, 10 * 2**20 + 1)


# --------------------------------------------------------------------------------------------------------------------
# Transfer of a buffer that is still written


def test_streaming_buffer_wait_does_not_count_as_link_time():
    size, first = 3 * FIRST_SLICE_BYTES + 5, FIRST_SLICE_BYTES + 1000
    moved: list[tuple[int, int]] = []
    sent = threading.Event()

    def write(stream: StreamingBuffer) -> None:
        stream.set_buffer(torch.zeros(size, dtype=torch.uint8))
        stream.mark_written([(0, 10), (500, first)])  # with a gap, as between scales and integers
        if sent.wait(300):
            stream.mark_written([(10, 500), (first, size)])
            stream.finish(None)
        else:
            stream.finish(AssertionError("written slices wait for unwritten ones"))

    async def move(begin: int, end: int) -> None:
        moved.append((begin, end))
        sent.set()

    async def scene() -> TransferDirection:
        direction = TransferDirection(None, "up")
        stream = StreamingBuffer(size)
        writing = asyncio.create_task(asyncio.to_thread(write, stream))
        await direction.transfer(stream.missing, move, stream)
        await writing
        return direction

    direction = asyncio.run(scene())
    assert moved[0] == (500, 500 + FIRST_SLICE_BYTES), "a full slice; smaller ones wait until all bytes are written"
    assert Spans(moved).contains(0, size)
    assert sum(end - begin for begin, end in moved) == size
    assert direction.idle_s > 0


def test_error_of_writer_is_raised_by_transfer():
    async def move(begin: int, end: int) -> None:
        raise AssertionError("nothing was written")

    async def scene() -> None:
        stream = StreamingBuffer(2 * FIRST_SLICE_BYTES)
        direction = TransferDirection(None, "up", streams=3)
        asyncio.get_running_loop().call_later(0.01, stream.finish, MemoryError("no room"))
        await direction.transfer(stream.missing, move, stream)

    with pytest.raises(MemoryError, match="no room"):
        asyncio.run(scene())


def test_direction_is_not_idle_while_any_transfer_moves():
    """While one of two transfers waits for its encoder, the time of the other counts as link time."""

    async def scene() -> float:
        direction = TransferDirection(None, "up")
        stream, other = StreamingBuffer(2 * FIRST_SLICE_BYTES), Spans([(0, 10)])
        may_finish = asyncio.Event()

        async def slowly(begin: int, end: int) -> None:
            stream.finish(None)
            await may_finish.wait()

        async def nothing(begin: int, end: int) -> None: ...

        moving = asyncio.create_task(direction.transfer(other, slowly))
        waiting = asyncio.create_task(direction.transfer(stream.missing, nothing, stream))
        await waiting
        idle_s = direction.idle_s
        may_finish.set()
        await moving
        return idle_s

    assert asyncio.run(scene()) == 0


# --------------------------------------------------------------------------------------------------------------------
# Assembly at the syncer


def key(learner: int = 1, fragment: int = 0, attempt: int = 1, incarnation: int = 1) -> UploadKey:
    return UploadKey(learner, incarnation, RoundId(fragment, 3, 1, attempt))


@pytest.fixture
def uploads(tmp_path):
    return PartialUploads(tmp_path, ByteBufferPool(), MemoryGate(100))


def upload_slice(uploads: PartialUploads, of: UploadKey, begin: int, end: int, size: int) -> None:
    write = uploads.begin_slice(of, begin, end, size)
    assert write is not None
    write.memory[:] = bytes(range(begin, end))
    uploads.finish_slice(write)


def run_in_loop(scene: Any) -> Any:
    async def run() -> Any:
        return scene()

    return asyncio.run(run())


def test_slices_of_different_total_size_are_refused(uploads):
    """A slice of a larger encoding would be written beyond the allocated memory."""

    def scene() -> None:
        upload_slice(uploads, key(), 0, 10, 20)
        for size in (10, 40):
            for call in (
                lambda size=size: uploads.begin_slice(key(), 5, size, size),
                lambda size=size: uploads.missing(key(), size),
                lambda size=size: uploads.take_complete(key(), size),
            ):
                with pytest.raises(WireError, match=f"contribution of {size} bytes, but its first slice announced 20"):
                    call()
        assert uploads.missing(key(), 20) == [(10, 20)]
        uploads.close()

    run_in_loop(scene)


@pytest.mark.parametrize("size", [80, 200], ids=["in memory", "in a file"])
def test_slices_in_any_order_complete_the_upload(uploads, size):
    def scene() -> None:
        other = uploads.begin_slice(key(learner=2), 0, 1, 60)  # leaves no room for the large one
        assert other is not None
        upload_slice(uploads, key(), 50, size, size)
        assert uploads.missing(key(), size) == [(0, 50)]
        assert uploads.take_complete(key(), size) is None
        upload_slice(uploads, key(), 0, 50, size)
        upload = uploads.take_complete(key(), size)
        assert bytes(upload.data.numpy()) == bytes(range(size))
        assert (upload.reserved_bytes > 0) is (size <= 100 - 60)
        uploads.release(upload)
        uploads.close()

    run_in_loop(scene)


def test_repeated_slice_replaces_pending_write_but_no_received_bytes(uploads):
    def scene() -> None:
        first = uploads.begin_slice(key(), 0, 10, 30)
        second = uploads.begin_slice(key(), 5, 15, 30)
        assert (first.is_wanted, second.is_wanted) == (False, True)
        uploads.finish_slice(second)
        assert uploads.begin_slice(key(), 5, 15, 30) is None
        assert uploads.begin_slice(key(), 14, 16, 30) is None, "received bytes are never overwritten"
        uploads.close()

    run_in_loop(scene)


def test_idle_upload_is_dropped(uploads):
    def scene() -> None:
        uploads.begin_slice(key(attempt=1), 0, 10, 30)
        newer = uploads.begin_slice(key(attempt=2), 0, 10, 30)
        assert uploads.missing(key(attempt=1), 30) == [(0, 30)]
        for fragment in range(1, 100):
            uploads.begin_slice(key(fragment=fragment), 0, 10, 30)
        assert newer.is_wanted, "a draining learner uploads all fragments at the same time"
        uploads.begin_slice(key(incarnation=2), 0, 10, 30)
        assert len(uploads._uploads) == 1, "uploads of an older incarnation never continue"
        uploads.close()
        assert uploads._gate.used_bytes == 0

    run_in_loop(scene)


# --------------------------------------------------------------------------------------------------------------------
# Real processes


def wide(
    run: Run, number: int, address: str | None = None, planted: str = "small-slices", streams: int | None = None
) -> Any:
    spec = LearnerSpec(number, "wide", pace_s=0.01, planted=planted, streams=streams)
    return run.start(spec, *([address] if address else []))


def test_sliced_uploads_do_not_change_the_run(tmp_path):
    with Run(tmp_path, endless(fragments=2, every_steps=8), Numerics(plan="rows")) as run:
        learners = [wide(run, 1), run.start(LearnerSpec(2, "wide", pace_s=0.01))]
        for learner in learners:
            learner.expect("joined")
        run.go(*learners)
        run.until(run.merges(6), "merges")
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        run.assert_clean()


CONTRIBUTION = 988_008  # of the wide model, as bf16


def count_merges_with_broken_connections(directory: Any, bug: str = "") -> int:
    """Break every connection after 0.6 of a contribution. Return the merges after the first one or four breaks."""
    with (
        Run(directory, endless(fragments=1, every_steps=4), Numerics(plan="rows"), planted=bug) as run,
        relay_to(run.address) as relay,
    ):
        far = wide(run, 1, relay.address, streams=1)
        far.expect("joined")
        relay.break_after(0.6 * CONTRIBUTION)
        far.command("go")
        run.until(lambda status: relay.broken >= 4 or status["merges"], "connections break")
        merges: int = run.status()["merges"]
        assert relay.broken >= 1
        assert run.log_lines(far, "connection closed: ") == [], "the link must stay open"
        far.command("break")
        return merges


def test_contribution_upload_resumes_after_lost_connection(tmp_path):
    assert count_merges_with_broken_connections(tmp_path / "resumed") >= 1
    assert count_merges_with_broken_connections(tmp_path / "bug", "dropped-slices") == 0


def test_fragment_download_resumes_after_lost_connection(tmp_path):
    """A learner joins over a link that breaks every connection before a fragment of 2 MB is complete."""
    with (
        Run(tmp_path, endless(fragments=1, every_steps=8), Numerics(plan="rows")) as run,
        relay_to(run.address) as relay,
    ):
        near = wide(run, 1)
        near.expect("joined")
        relay.break_after(0.8 * CONTRIBUTION)
        far = wide(run, 2, relay.address, streams=1)
        far.expect("joined")
        assert relay.broken >= 2
        relay.break_after(None)
        run.go(near, far)
        run.until(run.merges(2), "merges")
        run.end()
        run.assert_same(run.finish(near, far), 1, 2)
        run.assert_clean()


@pytest.mark.long
def test_codec_adapts_to_link_bandwidth(tmp_path):
    with (
        Run(tmp_path, endless(fragments=1, every_steps=4), Numerics(plan="rows")) as run,
        relay_to(run.address) as relay,
    ):
        far = wide(run, 1, relay.address, "measured-small-transfers")
        far.expect("joined")
        relay.throttle(1e6)
        far.command("go")
        up, down = "contributions are now sent in int", "updates are now sent in int"
        run.until(lambda _: run.log_lines(far, up), "contributions are coarser")
        run.until(lambda _: run.log_lines(run.syncer, down), "updates are coarser")
        relay.throttle(None)
        up, down = "contributions are now sent in bf16", "updates are now sent in bf16"
        run.until(lambda _: run.log_lines(far, up), "contributions are finer again")
        run.until(lambda _: run.log_lines(run.syncer, down), "updates are finer again")
        run.end()
        run.assert_same(run.finish(far), 1)


@pytest.mark.long
def test_rate_limit_of_learner_is_respected(tmp_path):
    with (
        Run(tmp_path, endless(fragments=1, every_steps=1), Numerics(plan="rows")) as run,
        relay_to(run.address) as relay,
    ):
        far = run.start(LearnerSpec(1, "wide", pace_s=0.001, max_rate="16mbit"), relay.address)
        far.expect("joined")
        began, before = time.monotonic(), relay.counts()
        far.command("go")
        run.until(run.merges(3), "merges")
        took_s, after = time.monotonic() - began, relay.counts()
        assert after.up_bytes - before.up_bytes > 2 * CONTRIBUTION
        assert after.up_bytes - before.up_bytes < 2e6 * took_s + 200_000
        assert after.down_bytes - before.down_bytes < 2e6 * took_s + 1_500_000  # buffered in sockets, not read
        far.command("break")


# --------------------------------------------------------------------------------------------------------------------
# Hostile slices


def slice_frame(client: RawLearner, fields: SliceHeader, payload: bytes) -> bytes:
    header = fields.encode()
    return encode_frame_head(FrameKind.SLICE, 0, header, payload) + header + payload


def test_invalid_slices_are_refused_and_missing_ranges_reported(tmp_path):
    with Run(tmp_path, endless()) as run:
        run.joined(1)

        async def scene() -> None:
            async with RawLearner(run, 9) as client:
                await client.join()
                size = len(client.values(0).numpy())
                good = SliceHeader(9, 1, 1, RoundId(0, 0, client.epoch, 1), 0, size)
                invalid = {
                    "another size": (good._replace(total_bytes=size + 1), b"x"),
                    "beyond the end": (good._replace(begin=size - 1), b"xx"),
                    "nothing": (good, b""),
                    "no such fragment": (good._replace(round=RoundId(99, 0, 1, 1)), b"x"),
                }
                for name, (fields, payload) in invalid.items():
                    status, reply = await client.put("/v1/slice", slice_frame(client, fields, payload))
                    assert status == 400, (name, reply)
                for other in (good._replace(learner=5), good._replace(session=7), good._replace(incarnation=2)):
                    status, _ = await client.put("/v1/slice", slice_frame(client, other, b"x"))
                    assert status == 409, "there is no such link"
                frame = bytearray(slice_frame(client, good, b"abc"))
                frame[-1] ^= 1
                status, reply = await client.put("/v1/slice", bytes(frame))
                assert (status, reply["code"]) == (400, "digest")
                assert (await client.put("/v1/slice", slice_frame(client, good, b"abc")))[0] == 204
                assert (await client.put("/v1/slice", slice_frame(client, good, b"abc")))[0] == 204
                pull = Pull(good.round)
                status, reply = await client.put("/v1/contribution", client.frame(client.contribution(pull, 1), b""))
                assert (status, reply["missing"]) == (202, [[3, size]])

        asyncio.run(scene())
