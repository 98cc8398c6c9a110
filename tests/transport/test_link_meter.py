"""Link meter: concurrent transfers are measured together, and transfers of broken links are not."""

from __future__ import annotations

import asyncio

import pytest

from atoll.core.policy import MIN_MEASURED_BYTES
from atoll.core.protocol import LinkMeasured
from atoll.transport.pacing import MIN_CANCELLED_SAMPLE_BYTES, LinkMeter, TransferDirection

LARGE = MIN_MEASURED_BYTES // 2  # values


class MeteredLink:
    """Simulated link and its meter."""

    def __init__(self, values: int = LARGE) -> None:
        self.now = 100.0
        self.direction = TransferDirection(None, "up")
        self.measured: list[LinkMeasured] = []
        self.meter = LinkMeter(self.direction, values, self.measured.append, lambda: self.now)

    def fail(self, error: BaseException, size: int, moved: int, seconds: float) -> None:
        with self.meter.transfer(lambda: size):
            self.move(moved, seconds)
            raise error

    def move(self, size: int, seconds: float) -> None:
        self.direction.moved_bytes += size
        self.now += seconds


def test_complete_transfer_is_measured():
    link = MeteredLink()
    link.move(10**9, 50.0)  # of an earlier transfer
    with link.meter.transfer(lambda: 4 * 2**20):
        link.move(4 * 2**20, 2.0)
    assert link.measured == [LinkMeasured("up", 4 * 2**20, 2.0, LARGE)]


def test_concurrent_transfers_are_measured_together():
    link = MeteredLink()
    one, other = link.meter.transfer(lambda: 1000), link.meter.transfer(lambda: 1000)
    one.__enter__()
    link.move(500, 1.0)
    other.__enter__()
    link.move(1000, 2.0)
    one.__exit__(None, None, None)
    link.move(500, 1.0)
    other.__exit__(None, None, None)
    assert link.measured == [LinkMeasured("up", 1500, 3.0, LARGE)], "the rest of the second transfer is too small"
    with link.meter.transfer(lambda: 1000):
        link.move(1000, 1.0)
    assert link.measured[1:] == [LinkMeasured("up", 1000, 1.0, LARGE)]


def test_broken_link_is_not_measured():
    link = MeteredLink()
    with pytest.raises(ConnectionError):
        link.fail(ConnectionError(), 1000, 900, 60.0)
    assert link.measured == []


@pytest.mark.parametrize("moved", [MIN_CANCELLED_SAMPLE_BYTES, MIN_CANCELLED_SAMPLE_BYTES - 1])
def test_long_cancelled_transfer_is_measured(moved):
    link = MeteredLink()
    with pytest.raises(asyncio.CancelledError):
        link.fail(asyncio.CancelledError(), 2**30, moved, 100.0)
    assert link.measured == ([LinkMeasured("up", moved, 100.0, LARGE)] if moved == MIN_CANCELLED_SAMPLE_BYTES else [])


def test_small_fragments_are_not_measured():
    link = MeteredLink(LARGE - 1)
    with link.meter.transfer(lambda: 1000):
        link.move(1000, 1.0)
    assert link.measured == []
