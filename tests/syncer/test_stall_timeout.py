"""One timer for a whole transfer: it ends one that stands still, and no other."""

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


def test_a_transfer_that_stands_still_is_given_up():
    async def transfer():
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(TimeoutError):
            async with StallTimeout(LIMIT_S):
                await loop.create_future()
        return loop.time() - began

    assert asyncio.run(transfer()) >= LIMIT_S


def test_one_that_moves_goes_on_for_as_long_as_it_takes():
    async def transfer():
        loop = asyncio.get_running_loop()
        end = loop.time() + 5 * LIMIT_S
        async with StallTimeout(LIMIT_S) as still:
            while loop.time() < end:
                still.progress += 1
                await until(loop.time())

    asyncio.run(transfer())


def test_one_that_stops_after_it_has_moved_is_given_up_too():
    async def transfer():
        async with StallTimeout(LIMIT_S) as still:
            still.progress += 1
            await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        asyncio.run(transfer())


def test_a_pause_is_nobodys_silence():
    async def transfer():
        loop = asyncio.get_running_loop()
        async with StallTimeout(LIMIT_S) as still:
            still.pause()
            await until(loop.time() + 3 * LIMIT_S)
            still.resume()

    asyncio.run(transfer())


def test_after_a_pause_it_may_be_silent_no_longer_than_before():
    async def transfer():
        async with StallTimeout(LIMIT_S) as still:
            still.pause()
            still.resume()
            await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        asyncio.run(transfer())


def test_other_errors_and_cancellations_pass_through():
    async def fails():
        async with StallTimeout(LIMIT_S):
            raise KeyError("mine")

    async def is_cancelled(begun):
        async with StallTimeout(60.0):
            begun.set()
            await asyncio.get_running_loop().create_future()

    async def cancel():
        begun = asyncio.Event()
        task = asyncio.ensure_future(is_cancelled(begun))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(fails())
    asyncio.run(cancel())
