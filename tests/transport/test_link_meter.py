"""What a link carries: all transfers together, whole ones, and nothing of a link that broke."""

from __future__ import annotations

import asyncio

import pytest

from atoll.core.policy import MIN_MEASURED_BYTES
from atoll.core.protocol import LinkMeasured
from atoll.transport.pacing import MIN_CANCELLED_SAMPLE_BYTES, LinkMeter, TransferDirection

LARGE = MIN_MEASURED_BYTES // 2  # values


class Line:
    """A link that carries what a test says, and its meter."""

    def __init__(self, values: int = LARGE) -> None:
        self.now = 100.0
        self.direction = TransferDirection(None, "up")
        self.told: list[LinkMeasured] = []
        self.meter = LinkMeter(self.direction, values, self.told.append, lambda: self.now)

    def breaks(self, wrong: BaseException, size: int, moved: int, seconds: float) -> None:
        with self.meter.transfer(lambda: size):
            self.carries(moved, seconds)
            raise wrong

    def carries(self, size: int, seconds: float) -> None:
        self.direction.moved_bytes += size
        self.now += seconds


def test_a_whole_transfer_is_measured():
    line = Line()
    line.carries(10**9, 50.0)  # of something else, before
    with line.meter.transfer(lambda: 4 * 2**20):
        line.carries(4 * 2**20, 2.0)
    assert line.told == [LinkMeasured("up", 4 * 2**20, 2.0, LARGE)]


def test_two_that_share_a_link_measure_it_once():
    line = Line()
    one, other = line.meter.transfer(lambda: 1000), line.meter.transfer(lambda: 1000)
    one.__enter__()
    line.carries(500, 1.0)
    other.__enter__()
    line.carries(1000, 2.0)
    one.__exit__(None, None, None)
    line.carries(500, 1.0)
    other.__exit__(None, None, None)
    assert line.told == [LinkMeasured("up", 1500, 3.0, LARGE)], "the rest of the second is less than a transfer"
    with line.meter.transfer(lambda: 1000):
        line.carries(1000, 1.0)
    assert line.told[1:] == [LinkMeasured("up", 1000, 1.0, LARGE)]


def test_broken_link_is_not_measured():
    line = Line()
    with pytest.raises(ConnectionError):
        line.breaks(ConnectionError(), 1000, 900, 60.0)
    assert line.told == []


@pytest.mark.parametrize("moved", [MIN_CANCELLED_SAMPLE_BYTES, MIN_CANCELLED_SAMPLE_BYTES - 1])
def test_long_cancelled_transfer_is_measured(moved):
    line = Line()
    with pytest.raises(asyncio.CancelledError):
        line.breaks(asyncio.CancelledError(), 2**30, moved, 100.0)
    assert line.told == ([LinkMeasured("up", moved, 100.0, LARGE)] if moved == MIN_CANCELLED_SAMPLE_BYTES else [])


def test_small_fragments_are_not_measured():
    line = Line(LARGE - 1)
    with line.meter.transfer(lambda: 1000):
        line.carries(1000, 1.0)
    assert line.told == []
