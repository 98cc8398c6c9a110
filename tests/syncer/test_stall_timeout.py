"""`StallTimeout` ends a transfer that stalls, and no other."""

import asyncio

import pytest

from atoll.syncer.fragment_endpoints import StallTimeout

LIMIT_S = 0.02


async def until(moment):
    """Wait in the loop, as a transfer waits for its peer."""
    loop = asyncio.get_running_loop()
    reached = loop.create_future()
    loop.call_at(moment, reached.set_result, None)
    await reached


def test_stalled_transfer_times_out():
    async def transfer():
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(TimeoutError):
            async with StallTimeout(LIMIT_S):
                await loop.create_future()
        return loop.time() - began

    assert asyncio.run(transfer()) >= LIMIT_S


def test_moving_transfer_does_not_time_out():
    async def transfer():
        loop = asyncio.get_running_loop()
        end = loop.time() + 5 * LIMIT_S
        async with StallTimeout(LIMIT_S) as timeout:
            while loop.time() < end:
                timeout.progress += 1
                await until(loop.time())

    asyncio.run(transfer())


def test_transfer_that_stalls_later_times_out():
    async def transfer():
        async with StallTimeout(LIMIT_S) as timeout:
            timeout.progress += 1
            await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        asyncio.run(transfer())


def test_paused_time_does_not_count_as_stall():
    async def transfer():
        loop = asyncio.get_running_loop()
        async with StallTimeout(LIMIT_S) as timeout:
            timeout.pause()
            await until(loop.time() + 3 * LIMIT_S)
            timeout.resume()

    asyncio.run(transfer())


def test_full_timeout_applies_after_pause():
    async def transfer():
        async with StallTimeout(LIMIT_S) as timeout:
            timeout.pause()
            timeout.resume()
            await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        asyncio.run(transfer())


def test_other_errors_and_cancellations_pass_through():
    async def fails():
        async with StallTimeout(LIMIT_S):
            raise KeyError("mine")

    async def is_cancelled(started):
        async with StallTimeout(60.0):
            started.set()
            await asyncio.get_running_loop().create_future()

    async def cancel():
        started = asyncio.Event()
        task = asyncio.ensure_future(is_cancelled(started))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(fails())
    asyncio.run(cancel())
