"""Contributions that arrive in slices: put together here, kept while a link is down, and handed over when all is there.

A contribution is put together in memory while the gate has room for it, and in a file without a name otherwise: a
learner on a thin link takes minutes for what others send in seconds, and neither waits for the other. A learner has at
most one of each fragment here: while it leaves, and at the end of a run, it is asked for all of them at once. What
nobody goes on with is forgotten after a while.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.types import Incarnation, LearnerId, RoundId
from atoll.transport.buffers import ByteBuffers, Span, Spans
from atoll.transport.wire import WireError, as_bytes

IDLE_S = 120.0


class ArrivalKey(NamedTuple):
    learner: LearnerId
    incarnation: Incarnation
    round: RoundId


class Claim:
    """One request that brings one slice. Whoever brings the same bytes later takes its place: the earlier one belongs
    to a connection that its sender has given up."""

    def __init__(self, arrival: Arrival, begin: int, end: int) -> None:
        self.arrival = arrival
        self.begin = begin
        self.end = end
        self.is_wanted = True

    @property
    def memory(self) -> memoryview:
        return as_bytes(self.arrival.data)[self.begin : self.end]


class Arrival:
    def __init__(self, key: ArrivalKey, data: Tensor, held_bytes: int) -> None:
        self.key = key
        self.data = data
        self.held_bytes = held_bytes  # of the gate; 0: it is in a file
        self.missing = Spans([(0, data.numel())])
        self.claims: set[Claim] = set()
        self.touched = time.monotonic()


class Arrivals:
    def __init__(self, folder: Path, buffers: ByteBuffers, gate: MemoryGate) -> None:
        self._folder = folder
        self._buffers = buffers
        self._gate = gate
        self._begun: dict[ArrivalKey, Arrival] = {}  # the one that was begun first, first
        self._sweep: asyncio.TimerHandle | None = None

    def missing(self, key: ArrivalKey, size: int) -> list[Span]:
        arrival = self._of_size(key, size)
        return list(arrival.missing) if arrival is not None else [(0, size)]

    def claim(self, key: ArrivalKey, begin: int, end: int, size: int) -> Claim | None:
        """Memory for one slice; None if it is here already. Raises `OSError` where there is no room at all."""
        arrival = self._of_size(key, size)
        if arrival is None:
            arrival = self._begin(key, size)
        if not arrival.missing.holds(begin, end):
            return None
        for other in list(arrival.claims):
            if other.begin < end and begin < other.end:
                self.give_up(other)
        claim = Claim(arrival, begin, end)
        arrival.claims.add(claim)
        return claim

    def arrived(self, claim: Claim) -> None:
        """All its bytes are in and right."""
        claim.arrival.missing.remove(claim.begin, claim.end)
        self.give_up(claim)

    def give_up(self, claim: Claim) -> None:
        claim.is_wanted = False
        claim.arrival.claims.discard(claim)
        claim.arrival.touched = time.monotonic()
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(IDLE_S, self._forget_idle)

    def _of_size(self, key: ArrivalKey, size: int) -> Arrival | None:
        """A learner may choose the codec of a contribution, once: its slices are of one size, and so is the whole."""
        arrival = self._begun.get(key)
        if arrival is not None and arrival.data.numel() != size:
            begun = arrival.data.numel()
            raise WireError(f"{size} bytes of a contribution that was begun with {begun}", "size")
        return arrival

    def take(self, key: ArrivalKey, size: int) -> Arrival | None:
        """It is complete and belongs to whoever asks now, who has to `give_back`. None: it is not complete."""
        arrival = self._of_size(key, size)
        if arrival is None or arrival.missing:
            return None
        return self._begun.pop(key)

    def give_back(self, arrival: Arrival) -> None:
        if arrival.held_bytes:
            self._buffers.give(arrival.data)
            self._gate.give(arrival.held_bytes)
            arrival.held_bytes = 0

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for key in list(self._begun):
            self._forget(key)

    def _begin(self, key: ArrivalKey, size: int) -> Arrival:
        """A learner has one copy of a fragment: an older round of it, or of an older incarnation, never comes."""
        for old in [k for k in self._begun if k.learner == key.learner]:
            if old.round.fragment == key.round.fragment or old.incarnation != key.incarnation:
                self._forget(old)
        if self._gate.take_now(size):
            arrival = Arrival(key, self._buffers.take(size), size)
        else:
            arrival = Arrival(key, self._in_file(size), 0)
        self._begun[key] = arrival
        return arrival

    def _in_file(self, size: int) -> Tensor:
        with tempfile.TemporaryFile(dir=self._folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk says so here, and not by a signal later
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)

    def _forget(self, key: ArrivalKey) -> None:
        arrival = self._begun.pop(key)
        for claim in list(arrival.claims):
            self.give_up(claim)
        self.give_back(arrival)

    def _forget_idle(self) -> None:
        self._sweep = None
        now = time.monotonic()
        for key, arrival in list(self._begun.items()):
            if not arrival.claims and now - arrival.touched >= IDLE_S:
                self._forget(key)
        if self._begun:
            self._sweep = asyncio.get_running_loop().call_later(IDLE_S, self._forget_idle)


# --------------------------------------------------------------------------------------------------------------------
# A bound on the bytes that are being received at once: what exceeds it waits in the network, not in memory


class MemoryGate:
    """First come, first served; a single piece larger than the bound passes when nothing else is held."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        if self.take_now(size):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(size)  # its turn came at the moment it was cancelled
            elif (size, turn) in self._waiting:
                self._waiting.remove((size, turn))
                self.give(0)  # whoever stood behind it may fit
            raise

    def take_now(self, size: int) -> bool:
        """Without waiting, where that can be."""
        free = not self._waiting and self._fits(size)
        if free:
            self.held_bytes += size
        return free

    def give(self, size: int) -> None:
        self.held_bytes -= size
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            if not turn.done():  # cancelled, and not yet gone from the queue
                self.held_bytes += size
                turn.set_result(None)

    def _fits(self, size: int) -> bool:
        return self.held_bytes == 0 or self.held_bytes + size <= self.most_bytes
