"""A rank of an island that does not lead it: it asks its leader at every step boundary, and does what it is told.

Its training thread copies and adopts its own rows, at the same steps as all ranks. One background thread gives rows to
the leader and takes those of new versions; where every rank sends and fetches its own, another one does that when the
leader says so. It does not know the protocol.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from atoll.core.types import NOTHING, AdoptHow, FragmentId, RoundId, Version
from atoll.errors import AtollError, IslandBroken, LearnerRefused
from atoll.island.boundary import LEFT, cause_of
from atoll.island.fragments import Buffer, Copied, CopyGone, FragmentTensors, RowFragment, plan_of
from atoll.island.optimizer_state_io import ORDERS as PART_ORDERS
from atoll.island.optimizer_state_io import FollowerParts, receive_tensors
from atoll.island.rank_connection import (
    ONLY_BESIDE,
    BoundaryStatus,
    Order,
    RankConnection,
    RankReply,
    RankRequest,
    failure_text,
)
from atoll.island.stats import LearnerStats, LearnerStatus
from atoll.island.topology import Ranks, fsdp_modules, reshard
from atoll.store.learner_parts import set_rng, take_rng
from atoll.store.run_settings import RunSettings
from atoll.tensors import optimizer_state
from atoll.tensors.codecs import codec
from atoll.tensors.model_view import ModelView
from atoll.tensors.optimizers import Optimizers
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.row_sharding import RowShare, share_out
from atoll.tensors.sharding import Window, owned, windows

MAX_STAGED_STATES = 4
"""Of inner state that was taken and that nobody has asked for yet."""

MAX_ARRIVALS = 16
"""Versions of one fragment that have arrived at a rank and are not adopted."""

JOIN_S = 5.0


class FollowerFragment:
    """One fragment at a rank that does not lead. Versions arrive before the leader says to adopt them."""

    def __init__(self, state: FragmentTensors) -> None:
        self.state = state
        self.copies = 0  # made so far
        self._arrivals: dict[Version, Buffer] = {}

    def arrived(self, version: Version, value: Buffer) -> None:
        """Keep a version. The leader may have decided to adopt an earlier one that is still to be adopted here."""
        self.state.release(self._arrivals.pop(version, None))
        self._arrivals[version] = value
        while len(self._arrivals) > MAX_ARRIVALS:
            self.state.release(self._arrivals.pop(min(self._arrivals)))

    def adopt(self, version: Version, how: AdoptHow, merged_copy: bool, alpha: float) -> None:
        state, value = self.state, self._arrivals.pop(version, None)
        if value is None:
            raise IslandBroken(f"version {version} of fragment {state.p} is adopted, and has not arrived at this rank")
        for older in [each for each in self._arrivals if each < version]:
            state.release(self._arrivals.pop(older))
        state.arrived(version, value)
        new, reference = state.will_adopt(merged_copy)
        state.adopt(how, new, reference, alpha)
        state.release(new, reference)
        if state.rows is not None:
            state.rows.settle(merged_copy)

    def hold_version(self, version: Version) -> Buffer | None:
        """Return a version that is here, adopted or not. The caller releases it."""
        found = self._arrivals.get(version)
        return self.state.buffers.hold(found) if found is not None else self.state.hold_newest(version)


class StagedState(NamedTuple):
    """What was taken at one boundary for a peer or for a snapshot's part, until the leader asks for it."""

    inner: optimizer_state.Taken | None
    rows: list[tuple[FragmentTensors, Buffer, Callable[[], None]]]
    rng: dict[str, Tensor]
    wrong: str


class FollowerBackground(Protocol):
    """What a follower needs of the background thread of its process, with which it sends and fetches its own rows."""

    @property
    def has_token(self) -> bool: ...

    def start(self) -> None: ...

    def check(self) -> None: ...

    def try_reach(self, address: str) -> None: ...

    def obey(
        self,
        line: RankConnection,
        rows: Callable[[int], Sequence[RowFragment]],
        hold: Callable[[FragmentId, Version], Buffer | None],
        ranks: int,
    ) -> None: ...

    def stop(self, last_words_s: float | None) -> None: ...


class Follower:
    is_open = True  # steps can be reported; `Learner.__enter__` makes it

    def __init__(
        self,
        ranks: Ranks,
        model: nn.Module,
        optimizers: Optimizers,
        status: LearnerStatus,
        background: FollowerBackground,
        notice_level: Callable[[], int],
        log: logging.Logger,
    ) -> None:
        self._status = status
        self._background = background
        self._notice_level = notice_level
        self._ranks = ranks
        self._model = model
        self._optimizers = optimizers
        self._log = log
        self._fsdp = fsdp_modules(model)
        self._leader = ranks.control[0]
        self._orders = ranks.bulk[0]
        self._orders.wait_for_ever()
        self._news = threading.Condition()
        self._view: ModelView | None = None
        self._plan: FragmentPlan | None = None
        self._owned: list[list[Window]] = []
        self._rows: list[FollowerFragment] = []
        self._shares: list[RowShare] = []  # by fragment, where ranks send and fetch their own
        self._reaches = 0  # the syncer
        self._generation = 0
        self._parcels: dict[int, StagedState] = {}
        self._parcel = 0
        self._parts = FollowerParts(self, ranks, model, optimizers)
        self._error: BaseException | None = None
        self._closing = False
        self._alpha = 0.0
        self._told = BoundaryStatus()
        self._paused = False
        self._is_joined = False
        self.steps = 0
        self._began = 0.0
        self._boundary_s = 0.0
        self._adopted = 0
        self._copied = 0
        self._thread = threading.Thread(target=self._obey_orders, name="atoll-rank", daemon=True)

    # ------------------------------------------------------------------------------------------ in the training thread

    def join(self) -> None:
        self._thread.start()
        while not self._is_joined:
            self._meet(RankRequest.JOIN, self._reaches)
        self._began = time.monotonic()
        self._rest()

    def step(self, tokens: int, loss: float | Tensor | None) -> None:
        """Report one step. Only rank 0 sends the loss."""
        begin = time.monotonic()
        if self._error is not None:
            raise IslandBroken(f"the background of this rank has failed: {self._error}") from self._error
        self._background.check()
        self.steps += 1
        self._meet(RankRequest.STEP, tokens)
        self._boundary_s += time.monotonic() - begin
        self._rest()

    @property
    def fragments(self) -> Sequence[FragmentTensors]:
        return [rows.state for rows in self._rows]

    def take(self, count: int) -> tuple[int, ...]:
        self._leader.ask(RankRequest.TAKE, count)
        _, words = self._leader.answered()
        return tuple(words[0][1])

    def _rest(self) -> None:
        while self._paused and not self._status.finished:
            began = time.monotonic()
            self._meet(RankRequest.REST)
            self._status.paused_s += time.monotonic() - began

    def _meet(self, kind: RankRequest, value: int = 0) -> None:
        """Ask, and do what is answered."""
        self._leader.ask(kind, value, noticed=self._notice_level())
        told, words = self._leader.answered()
        self._paused = told.paused
        if kind not in (RankRequest.JOIN, RankRequest.CLOSE):
            self._told = told
            self._status.progress = told.progress
        if words and self._is_joined:
            reshard(self._fsdp)
        for word, *rest in words:
            getattr(self, f"_on_{word}")(*rest)

    def stats(self) -> LearnerStats:
        """What the leader counted by the last boundary; times and memory are this rank's own."""
        told = self._told
        return LearnerStats(
            steps=max(told.steps, self.steps),
            tokens=told.tokens,
            bytes_up=told.bytes_up,
            bytes_down=told.bytes_down,
            boundary_s=self._boundary_s,
            lock_wait_s=0.0,
            training_s=time.monotonic() - self._began if self._began else 0.0,
            adopted=self._adopted,
            contributed=self._copied,
            link="up" if self._is_joined else "down",
            samples=told.samples,
            repeated=0,
            paused_s=self._status.paused_s,
            host_bytes=sum(rows.state.host_bytes for rows in self._rows),
            parameters=self._view.local_numel if self._view is not None else 0,
            way="rows" if self._shares else "leader",
        )

    def close(self, wrong: BaseException | type[BaseException] | None) -> None:
        """All ranks leave together; one that leaves alone says why."""
        try:
            if wrong is None:
                self._meet(RankRequest.CLOSE)
                if self._paused:  # there is a notice, and something to push
                    self._rest()
                    self._meet(RankRequest.CLOSE)
                if self._status.finished and not self._status.drained:
                    reshard(self._fsdp)
                    self._write_anchors()
            else:
                self._leader.ask(RankRequest.FAILED, 0, failure_text(wrong, self._ranks.rank))
                self._leader.shut_after_last_words()
        except AtollError:
            if wrong is None and not self._status.finished:
                raise
        finally:
            with self._news:
                self._closing = True
                self._news.notify_all()
            self._ranks.shut()
            self._background.stop(None)
            self._thread.join(JOIN_S)
            self._parts.close()

    # ------------------------------------------------------------------------------------------------------------ words

    def _on_settings(self, settings: Any) -> None:
        self._status.settings = RunSettings.from_json(settings)
        plan = plan_of(self._model, self._status.settings)
        view = ModelView(self._model, plan, packed=True)
        optimizer_state.named(self._optimizers, self._model)  # raises for an optimizer of another model
        mine = owned(self._ranks.boxes, plan.tensors)[self._ranks.rank]
        with self._news:
            self._owned = [windows(plan, p, view.boxes, mine) for p in range(len(plan.fragments))]
            self._plan, self._view = plan, view
            self._news.notify_all()

    def _on_reach(self, address: str, with_token: bool) -> None:
        """May this rank speak to the syncer? It has its own token and keys, if any."""
        try:
            if with_token and not self._background.has_token:
                raise ValueError("it was given no token")  # to ask without one would look like a stranger
            self._background.start()
            self._background.try_reach(address)
            self._reaches = 1
        except (ValueError, OSError, AtollError) as wrong:  # OSError: keys that this rank may not read
            self._log.info("rank %d cannot speak to the syncer: %s", self._ranks.rank, wrong)

    def _on_way(self, way: str) -> None:
        if not way:
            self._background.stop(None)
            return
        assert self._plan is not None
        self._shares = [share_out(self._plan, p, self._ranks.boxes) for p in range(len(self._plan.fragments))]
        self._background.obey(self._ranks.rows[0], self._own_rows, self._hold_version, self._ranks.size)

    def _own_rows(self, generation: int) -> list[RowFragment]:
        """The leader may ask before the training thread has heard of its new incarnation."""
        with self._news:
            self._wait_until(lambda: self._generation >= generation)
            if self._generation != generation:
                raise CopyGone("this is of an earlier incarnation")
            return [rows.state.rows for rows in self._rows if rows.state.rows is not None]

    def _hold_version(self, p: FragmentId, version: Version) -> Buffer | None:
        with self._news:
            return self._rows[p].hold_version(version)

    def _on_attach(self, learner: int, incarnation: int, generation: int, alpha: float) -> None:
        """One incarnation begins."""
        assert self._view is not None and self._plan is not None
        self._status.number = (learner, incarnation)
        self._alpha = alpha
        up = codec(self._status.settings.numerics.ups[0])
        shares: Sequence[RowShare | None] = self._shares or [None] * len(self._plan.fragments)
        made = [FragmentTensors(self._view, p, up, None, share, self._ranks.rank) for p, share in enumerate(shares)]
        with self._news:
            self._rows = [FollowerFragment(each) for each in made]
            self._generation = generation
            self._parcels.clear()
            self._parcel = 0
            self._news.notify_all()

    def _on_copy(self, p: FragmentId, serial: int) -> None:
        rows = self._rows[p]
        with self._news:
            copied = rows.state.will_copy(RoundId(p, NOTHING, 0, 0))
        assert copied.serial == serial, f"copy {copied.serial} of fragment {p} is {serial} at the leader"
        rows.state.copy(copied)
        self._copied += 1
        with self._news:
            rows.copies = serial
            self._news.notify_all()

    def _on_adopt(self, p: FragmentId, version: Version, how: AdoptHow, merged_copy: bool) -> None:
        with self._news:
            self._rows[p].adopt(version, how, merged_copy, self._alpha)
        self._adopted += 1

    def _on_give(self) -> None:
        self._put(lambda: StagedState(optimizer_state.take(self._optimizers, self._model), [], {}, ""))

    def _on_save(self) -> None:
        with self._news:
            # One part is written at a time: of an earlier one nobody has come for this, because saving it had failed.
            for key in [key for key, parcel in self._parcels.items() if parcel.rows]:
                self._drop(key)

        def take() -> StagedState:
            inner = optimizer_state.take(self._optimizers, self._model)
            return StagedState(inner, [(rows, *rows.copy_for_part()) for rows in self.fragments], take_rng(), "")

        self._put(take)

    def _put(self, take: Callable[[], StagedState]) -> None:
        try:
            parcel = take()
        except Exception as error:  # the leader gets the cause when it asks
            parcel = StagedState(None, [], {}, f"rank {self._ranks.rank}: {cause_of(error)}")
        with self._news:
            self._parcel += 1
            self._parcels[self._parcel] = parcel
            if len(self._parcels) > MAX_STAGED_STATES:
                self._drop(min(self._parcels))
            self._news.notify_all()

    def _on_start(self, warmup_steps: int, about: Any, restored: Any, is_loaded: bool) -> None:
        tensors = receive_tensors(self._leader)
        if is_loaded:
            self._parts.take_loaded().install()
        elif about is not None:
            optimizer_state.prepare(about, tensors, self._optimizers, self._model, cut=True).install()
        set_rng({name: tensor for name, tensor in tensors.items() if name.startswith("rng.")})
        self._parts.forget()
        self._status.warmup_steps = warmup_steps
        self._status.restored_state = restored
        self._is_joined = True

    def _on_end(self, code: str, text: str) -> None:
        if code == "learner-finished":
            self._write_anchors()
            self._status.finished = self._is_joined = True
        elif code in LEFT:
            self._status.finished = self._status.drained = self._is_joined = True
        elif self._is_joined:
            raise LearnerRefused(text)

    def _on_final(self, versions: list[Version]) -> None:
        """The run was over before this island came."""
        for rows, version in zip(self._rows, versions, strict=True):
            with self._news:
                rows.adopt(version, "overwrite", False, 0.0)
        self._status.finished = self._is_joined = True

    def _write_anchors(self) -> None:
        for rows in self.fragments:
            if rows.anchor is not None:
                rows.adopt("overwrite", rows.anchor, None, 0.0)

    # ---------------------------------------------------------------------------------------- in the background thread

    def _obey_orders(self) -> None:
        try:
            while True:
                order, p, key, generation = self._orders.ordered()
                if order is Order.READ:
                    self._give_read(p)
                elif order is Order.SHARE:
                    self._take_share(p, key, generation)
                elif order is Order.INNER:
                    self._give_inner(key, generation, only_beside=p == ONLY_BESIDE)
                elif order in PART_ORDERS:
                    self._parts.obey(order, key, generation)
                elif order is Order.EDGES:
                    self._encode(p, key, generation)
                elif order is Order.PASS:
                    self._pass(p, key, generation)
                else:
                    self._give_rows(order, p, key, generation)
        except BaseException as wrong:
            if not self._closing:
                self._error = wrong  # the training thread raises it at its next step
                with self._news:
                    self._news.notify_all()
                self._orders.shut()  # the leader must not wait for what will not come

    def _wait_until(self, is_here: Callable[[], bool]) -> None:
        """With the lock held: for what the training thread does at a boundary that it has not come to yet."""
        while not is_here():
            if self._closing:
                raise IslandBroken("this rank leaves")
            self._news.wait(1.0)

    def _give_read(self, p: FragmentId) -> None:
        """While the training thread waits for the leader to join."""
        with self._news:
            self._wait_until(lambda: self._view is not None)
        assert self._view is not None
        flat = self._view.buffer(p)
        self._view.read(p, flat)
        self._send_rows(p, flat)

    def _give_rows(self, order: Order, p: FragmentId, key: int, generation: int) -> None:
        held: list[tuple[FragmentTensors, Buffer]] = []
        wait: Callable[[], None] | None = None
        with self._news:
            if order is Order.COPY:
                state, copied = self._hold_copy(p, key, generation)
                if copied is not None:
                    held = [(state, copied.buffer), (state, copied.anchor)]
                    wait = copied.taken.result()
            else:
                parcel = self._parcel_of(key, generation)
                if parcel is not None and p < len(parcel.rows):
                    wait = parcel.rows[p][2]
                    held = [(parcel.rows[p][0], parcel.rows[p][0].buffers.hold(parcel.rows[p][1]))]
        try:
            if wait is None:
                self._orders.say(RankReply.GONE)
            else:
                wait()
                self._send_rows(p, held[0][1].tensor)
        finally:
            for rows, buffer in held:
                rows.release(buffer)

    def _hold_copy(self, p: FragmentId, serial: int, generation: int) -> tuple[FragmentTensors, Copied | None]:
        """With the lock held: wait for the copy with this serial. The caller releases it; None: it is gone."""
        self._wait_until(
            lambda: generation < self._generation or (generation == self._generation and self._rows[p].copies >= serial)
        )
        state = self._rows[p].state
        copied = state.copied if generation == self._generation else None
        return state, state.hold_copy() if copied is not None and copied.serial == serial else None

    def _send_rows(self, p: FragmentId, packed: Tensor) -> None:
        self._orders.say(RankReply.HERE)
        for window in self._owned[p]:
            self._orders.send_tensor(window.of_packed(packed))

    def _encode(self, p: FragmentId, key: int, generation: int) -> None:
        """This rank's strips of the copy with this serial."""
        with self._news:
            state, copied = self._hold_copy(p, key, generation)
        rows = state.rows
        assert rows is not None
        if copied is None:
            self._orders.say(RankReply.GONE)
            return
        try:
            prepared = rows.prepare(copied)
        finally:
            state.release(copied.buffer, copied.anchor)
        self._orders.say(RankReply.HERE)
        self._orders.send_tensor(prepared.given)
        status, by = self._orders.said()
        if status is not RankReply.HERE:
            rows.give_up(key, CopyGone("another rank does not have this copy any more"))
            return
        taken = torch.empty(sum(move.size for move in rows.dealt.taken(rows.rank)))
        self._orders.receive_tensor(taken)
        rows.encode_strips(prepared, taken, codec(by))

    def _pass(self, p: FragmentId, version: Version, generation: int) -> None:
        """What was fetched here goes by the leader, and what others have fetched of the same rows comes."""
        with self._news:
            self._wait_until(lambda: self._generation >= generation)
            fragment, is_mine = self._rows[p], self._generation == generation
        rows = fragment.state.rows
        assert rows is not None
        value = rows.take_fetched(version) if is_mine else None
        self._orders.say(RankReply.HERE if value is not None else RankReply.GONE)
        if self._orders.said()[0] is not RankReply.HERE or value is None:
            rows.buffers.release(value)
            return
        for stretch in rows.dealt.stretches:
            mine = stretch.first if stretch.rank == rows.rank else dict(stretch.others).get(rows.rank)
            if mine is None:
                continue
            part = value.tensor[mine : mine + stretch.end - stretch.begin]
            if stretch.rank == rows.rank:
                self._orders.send_tensor(part)
            else:
                self._orders.receive_tensor(part)
        if self._orders.said()[0] is RankReply.HERE:
            with self._news:
                fragment.arrived(version, value)
        else:
            rows.buffers.release(value)
        self._orders.say(RankReply.HERE)

    def _take_share(self, p: FragmentId, version: Version, generation: int) -> None:
        with self._news:
            self._wait_until(lambda: self._generation >= generation)
            fragment, is_mine = self._rows[p], self._generation == generation
        value = fragment.state.buffers.take()
        self._orders.receive_tensor(value.tensor)
        with self._news:
            if is_mine:
                fragment.arrived(version, value)
            else:
                fragment.state.release(value)
        self._orders.say(RankReply.HERE)

    def _parcel_of(self, key: int, generation: int) -> StagedState | None:
        self._wait_until(lambda: generation < self._generation or self._parcel >= key)
        return self._parcels.get(key) if generation == self._generation else None

    def _drop(self, key: int) -> None:
        for rows, buffer, _ in self._parcels.pop(key).rows:
            rows.release(buffer)

    def parcel_inner(self, key: int, generation: int) -> tuple[optimizer_state.Taken | None, str]:
        """Inner state that was taken, which stays here, or what went wrong when it was."""
        with self._news:
            parcel = self._parcel_of(key, generation)
            return (parcel.inner, parcel.wrong) if parcel is not None else (None, "")

    def is_of(self, generation: int) -> bool:
        """Once the training thread has come to it."""
        with self._news:
            self._wait_until(lambda: self._generation >= generation)
            return self._generation == generation

    def _give_inner(self, key: int, generation: int, only_beside: bool) -> None:
        """What this rank owns of it, and nothing that the leader has itself. Nobody asks a second time."""
        with self._news:
            parcel = self._parcel_of(key, generation)
            if parcel is not None:
                self._drop(key)
        if parcel is None or parcel.inner is None:
            self._orders.say(RankReply.WRONG, parcel.wrong if parcel is not None else "")
            return
        inner, sent = parcel.inner, []
        try:
            inner.wait()
        except RuntimeError as error:
            self._orders.say(RankReply.WRONG, f"rank {self._ranks.rank}: {cause_of(error)}")
            return
        names = optimizer_state.named_numbers(inner.about)
        mine = owned(self._ranks.boxes, self._plan.tensors)[self._ranks.rank] if self._plan is not None else frozenset()
        listed: list[Any] = []
        for number, part in inner.parts.items():
            if names[number].parameter in mine and not only_beside:
                listed.append([number, part.box.offset, part.box.shape, _dtype_name(inner.tensors[number])])
                sent.append(inner.tensors[number])
        for name, tensor in parcel.rng.items():
            listed.append([f"rank{self._ranks.rank}.{name}", None, list(tensor.shape), _dtype_name(tensor)])
            sent.append(tensor)
        self._orders.say(RankReply.HERE)
        self._orders.send_json(listed)
        for tensor in sent:
            self._orders.send_tensor(tensor)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
