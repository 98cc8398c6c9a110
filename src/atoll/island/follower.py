"""A rank of an island other than the leader. It sends a request at every step boundary and executes the reply.

Its training thread copies and adopts its own rows at the same steps as all ranks. A background thread sends rows to the
leader and receives rows of new versions. If every rank transfers its own rows, another background thread does that on
requests of the leader. A follower takes no part in the protocol with the syncer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from atoll.core.types import NO_VERSION, AdoptMode, FragmentId, RoundId, Version
from atoll.errors import AtollError, IslandBrokenError, LearnerRefusedError
from atoll.island.boundary import DRAINED_REASONS, summarize_error
from atoll.island.fragments import Buffer, CopyUnavailableError, FragmentTensors, PulledCopy, RowFragment, plan_for_run
from atoll.island.optimizer_state_io import PART_COMMANDS, PartShardWorker, receive_tensors
from atoll.island.rank_connection import (
    RNG_ONLY,
    BoundaryStatus,
    RankCommand,
    RankConnection,
    RankReply,
    RankRequest,
    encode_failure,
)
from atoll.island.stats import LearnerStats, LearnerStatus
from atoll.island.topology import Ranks, fsdp_modules, reshard
from atoll.store.learner_parts import get_rng_states, set_rng_states
from atoll.store.run_settings import RunSettings
from atoll.tensors import optimizer_state
from atoll.tensors.codecs import get_codec
from atoll.tensors.model_view import ModelView
from atoll.tensors.optimizers import Optimizers
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.row_sharding import FragmentSharding, shard_fragment
from atoll.tensors.sharding import ShardWindow, assign_owners, shard_windows

MAX_STAGED_STATES = 4
"""Staged copies of state that the leader has not collected yet."""

MAX_ARRIVALS = 16
"""Versions of one fragment that have arrived at a rank and are not adopted yet."""

THREAD_JOIN_TIMEOUT_S = 5.0


class FollowerFragment:
    """Fragment at a follower. Versions arrive before the leader's command to adopt them."""

    def __init__(self, tensors: FragmentTensors) -> None:
        self.tensors = tensors
        self.copies_made = 0  # total number
        self._arrivals: dict[Version, Buffer] = {}

    def add_version(self, version: Version, value: Buffer) -> None:
        """Store a version. An earlier version stays: the leader may already have decided to adopt it."""
        self.tensors.release(self._arrivals.pop(version, None))
        self._arrivals[version] = value
        while len(self._arrivals) > MAX_ARRIVALS:
            self.tensors.release(self._arrivals.pop(min(self._arrivals)))

    def adopt(self, version: Version, mode: AdoptMode, merged_copy: bool, alpha: float) -> None:
        state, value = self.tensors, self._arrivals.pop(version, None)
        if value is None:
            raise IslandBrokenError(
                f"cannot adopt version {version} of fragment {state.p}: it has not arrived at this rank"
            )
        for older in [each for each in self._arrivals if each < version]:
            state.release(self._arrivals.pop(older))
        state.set_newest(version, value)
        new, reference = state.prepare_adoption(merged_copy)
        state.adopt(mode, new, reference, alpha)
        state.release(new, reference)
        if state.rows is not None:
            state.rows.settle(merged_copy)

    def retain_version(self, version: Version) -> Buffer | None:
        """Return a version that has arrived, adopted or not. The caller releases it."""
        found = self._arrivals.get(version)
        return self.tensors.buffers.retain(found) if found is not None else self.tensors.retain_newest(version)


class StagedState(NamedTuple):
    """State copied at one boundary for a peer or for a snapshot's part, until the leader collects it."""

    state: optimizer_state.OptimizerStateCopy | None
    rows: list[tuple[FragmentTensors, Buffer, Callable[[], None]]]
    rng: dict[str, Tensor]
    error: str


class FollowerBackground(Protocol):
    """Interface of the background thread of a follower's process, which transfers its own rows."""

    @property
    def has_token(self) -> bool: ...

    def start(self) -> None: ...

    def check(self) -> None: ...

    def check_reachable(self, address: str) -> None: ...

    def serve_rows(
        self,
        connection: RankConnection,
        rows: Callable[[int], Sequence[RowFragment]],
        retain: Callable[[FragmentId, Version], Buffer | None],
        ranks: int,
    ) -> None: ...

    def stop(self, goodbye_timeout_s: float | None) -> None: ...


class Follower:
    is_open = True  # `Learner.__enter__` creates a follower, so steps can be reported

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
        self._commands = ranks.bulk[0]
        self._commands.disable_timeout()
        self._changed = threading.Condition()
        self._view: ModelView | None = None
        self._plan: FragmentPlan | None = None
        self._owned: list[list[ShardWindow]] = []
        self._rows: list[FollowerFragment] = []
        self._shares: list[FragmentSharding] = []  # by fragment, if ranks transfer their own rows
        self._reaches_syncer = 0  # 1 if this rank can reach the syncer
        self._generation = 0
        self._staged: dict[int, StagedState] = {}
        self._staged_count = 0
        self._parts = PartShardWorker(self, ranks, model, optimizers)
        self._error: BaseException | None = None
        self._is_closing = False
        self._blend_alpha = 0.0
        self._leader_status = BoundaryStatus()
        self._is_paused = False
        self._is_joined = False
        self.steps = 0
        self._started_at = 0.0
        self._boundary_s = 0.0
        self._adopted = 0
        self._copies = 0
        self._thread = threading.Thread(target=self._serve_commands, name="atoll-rank", daemon=True)

    # ------------------------------------------------------------------------------------------ in the training thread

    def join(self) -> None:
        self._thread.start()
        while not self._is_joined:
            self._sync_with_leader(RankRequest.JOIN, self._reaches_syncer)
        self._started_at = time.monotonic()
        self._wait_while_paused()

    def step(self, tokens: int, loss: float | Tensor | None) -> None:
        """Report one step. Only rank 0 sends the loss."""
        begin = time.monotonic()
        if self._error is not None:
            raise IslandBrokenError(f"the background thread of this rank failed: {self._error}") from self._error
        self._background.check()
        self.steps += 1
        self._sync_with_leader(RankRequest.STEP, tokens)
        self._boundary_s += time.monotonic() - begin
        self._wait_while_paused()

    @property
    def fragments(self) -> Sequence[FragmentTensors]:
        return [rows.tensors for rows in self._rows]

    def take(self, count: int) -> tuple[int, ...]:
        self._leader.send_request(RankRequest.TAKE, count)
        _, commands = self._leader.receive_reply()
        return tuple(commands[0][1])

    def _wait_while_paused(self) -> None:
        while self._is_paused and not self._status.finished:
            paused_at = time.monotonic()
            self._sync_with_leader(RankRequest.PAUSE)
            self._status.paused_s += time.monotonic() - paused_at

    def _sync_with_leader(self, kind: RankRequest, value: int = 0) -> None:
        """Send a request and execute the commands of the reply."""
        self._leader.send_request(kind, value, preemption_level=self._notice_level())
        status, commands = self._leader.receive_reply()
        self._is_paused = status.is_paused
        if kind not in (RankRequest.JOIN, RankRequest.CLOSE):
            self._leader_status = status
            self._status.progress = status.progress
        if commands and self._is_joined:
            reshard(self._fsdp)
        for command, *arguments in commands:
            getattr(self, f"_on_{command}")(*arguments)

    def stats(self) -> LearnerStats:
        """Return the counters of the leader as of the last boundary, with times and memory of this rank."""
        status = self._leader_status
        return LearnerStats(
            steps=max(status.steps, self.steps),
            tokens=status.tokens,
            bytes_up=status.bytes_up,
            bytes_down=status.bytes_down,
            boundary_s=self._boundary_s,
            lock_wait_s=0.0,
            training_s=time.monotonic() - self._started_at if self._started_at else 0.0,
            adopted=self._adopted,
            contributed=self._copies,
            link="up" if self._is_joined else "down",
            samples=status.samples,
            repeated_steps=0,
            paused_s=self._status.paused_s,
            host_bytes=sum(rows.tensors.host_bytes for rows in self._rows),
            parameters=self._view.local_numel if self._view is not None else 0,
            transfer_mode="rows" if self._shares else "leader",
        )

    def close(self, error: BaseException | type[BaseException] | None) -> None:
        """Leave together with all ranks, or send the error with which this rank leaves alone."""
        try:
            if error is None:
                self._sync_with_leader(RankRequest.CLOSE)
                if self._is_paused:  # the learner is drained and has unmerged work
                    self._wait_while_paused()
                    self._sync_with_leader(RankRequest.CLOSE)
                if self._status.finished and not self._status.drained:
                    reshard(self._fsdp)
                    self._write_anchors()
            else:
                self._leader.send_request(RankRequest.FAILED, 0, encode_failure(error, self._ranks.rank))
                self._leader.shut_down_writes()
        except AtollError:
            if error is None and not self._status.finished:
                raise
        finally:
            with self._changed:
                self._is_closing = True
                self._changed.notify_all()
            self._ranks.shut_down()
            self._background.stop(None)
            self._thread.join(THREAD_JOIN_TIMEOUT_S)
            self._parts.close()

    # --------------------------------------------------------------------------------------------------------- commands

    def _on_settings(self, settings: Any) -> None:
        self._status.settings = RunSettings.from_json(settings)
        plan = plan_for_run(self._model, self._status.settings)
        view = ModelView(self._model, plan, packed=True)
        optimizer_state.named_optimized_parameters(
            self._optimizers, self._model
        )  # raises for another model's optimizer
        own_requests = assign_owners(self._ranks.boxes, plan.tensors)[self._ranks.rank]
        with self._changed:
            self._owned = [shard_windows(plan, p, view.boxes, own_requests) for p in range(len(plan.fragments))]
            self._plan, self._view = plan, view
            self._changed.notify_all()

    def _on_reach(self, address: str, with_token: bool) -> None:
        """Check whether this rank can reach the syncer, with its own token and keys."""
        try:
            if with_token and not self._background.has_token:
                raise ValueError("it was given no token")  # the syncer would log a request without a token
            self._background.start()
            self._background.check_reachable(address)
            self._reaches_syncer = 1
        except (ValueError, OSError, AtollError) as error:  # OSError: unreadable key files
            self._log.info("rank %d cannot reach the syncer: %s", self._ranks.rank, error)

    def _on_transfer_mode(self, mode: str) -> None:
        if not mode:
            self._background.stop(None)
            return
        assert self._plan is not None
        self._shares = [shard_fragment(self._plan, p, self._ranks.boxes) for p in range(len(self._plan.fragments))]
        self._background.serve_rows(self._ranks.rows[0], self._own_rows, self._retain_version, self._ranks.size)

    def _own_rows(self, generation: int) -> list[RowFragment]:
        """Return the row fragments. Wait if the training thread has not begun this incarnation yet."""
        with self._changed:
            self._wait_until(lambda: self._generation >= generation)
            if self._generation != generation:
                raise CopyUnavailableError("it belongs to an earlier incarnation")
            return [rows.tensors.rows for rows in self._rows if rows.tensors.rows is not None]

    def _retain_version(self, p: FragmentId, version: Version) -> Buffer | None:
        with self._changed:
            return self._rows[p].retain_version(version)

    def _on_attach(self, learner: int, incarnation: int, generation: int, alpha: float) -> None:
        """Begin one incarnation."""
        assert self._view is not None and self._plan is not None
        self._status.identity = (learner, incarnation)
        self._blend_alpha = alpha
        codec = get_codec(self._status.settings.numerics.upload_codecs[0])
        shares: Sequence[FragmentSharding | None] = self._shares or [None] * len(self._plan.fragments)
        made = [FragmentTensors(self._view, p, codec, None, share, self._ranks.rank) for p, share in enumerate(shares)]
        with self._changed:
            self._rows = [FollowerFragment(each) for each in made]
            self._generation = generation
            self._staged.clear()
            self._staged_count = 0
            self._changed.notify_all()

    def _on_copy(self, p: FragmentId, serial: int) -> None:
        rows = self._rows[p]
        with self._changed:
            copied = rows.tensors.prepare_copy(RoundId(p, NO_VERSION, 0, 0))
        assert copied.serial == serial, f"copy {copied.serial} of fragment {p} has serial {serial} at the leader"
        rows.tensors.copy(copied)
        self._copies += 1
        with self._changed:
            rows.copies_made = serial
            self._changed.notify_all()

    def _on_adopt(self, p: FragmentId, version: Version, mode: AdoptMode, merged_copy: bool) -> None:
        with self._changed:
            self._rows[p].adopt(version, mode, merged_copy, self._blend_alpha)
        self._adopted += 1

    def _on_copy_state(self) -> None:
        self._stage(lambda: StagedState(optimizer_state.copy_state(self._optimizers, self._model), [], {}, ""))

    def _on_save_part(self) -> None:
        with self._changed:
            # Parts are written one at a time. One that is left was not collected, because saving it failed.
            for key in [key for key, staged in self._staged.items() if staged.rows]:
                self._drop_staged(key)

        def take() -> StagedState:
            inner = optimizer_state.copy_state(self._optimizers, self._model)
            return StagedState(inner, [(rows, *rows.copy_for_part()) for rows in self.fragments], get_rng_states(), "")

        self._stage(take)

    def _stage(self, take: Callable[[], StagedState]) -> None:
        try:
            staged = take()
        except Exception as error:  # the leader receives it when it requests the copy
            staged = StagedState(None, [], {}, f"rank {self._ranks.rank}: {summarize_error(error)}")
        with self._changed:
            self._staged_count += 1
            self._staged[self._staged_count] = staged
            if len(self._staged) > MAX_STAGED_STATES:
                self._drop_staged(min(self._staged))
            self._changed.notify_all()

    def _on_start(self, warmup_steps: int, metadata: Any, restored: Any, is_loaded: bool) -> None:
        tensors = receive_tensors(self._leader)
        if is_loaded:
            self._parts.take_loaded().install()
        elif metadata is not None:
            optimizer_state.prepare(metadata, tensors, self._optimizers, self._model, is_local_part=True).install()
        set_rng_states({name: tensor for name, tensor in tensors.items() if name.startswith("rng.")})
        self._parts.forget()
        self._status.warmup_steps = warmup_steps
        self._status.restored_state = restored
        self._is_joined = True

    def _on_end(self, code: str, text: str) -> None:
        if code == "learner-finished":
            self._write_anchors()
            self._status.finished = self._is_joined = True
        elif code in DRAINED_REASONS:
            self._status.finished = self._status.drained = self._is_joined = True
        elif self._is_joined:
            raise LearnerRefusedError(text)

    def _on_final(self, versions: list[Version]) -> None:
        """Adopt the final versions of a run that was over before this learner joined."""
        for rows, version in zip(self._rows, versions, strict=True):
            with self._changed:
                rows.adopt(version, "overwrite", False, 0.0)
        self._status.finished = self._is_joined = True

    def _write_anchors(self) -> None:
        for rows in self.fragments:
            if rows.anchor is not None:
                rows.adopt("overwrite", rows.anchor, None, 0.0)

    # ---------------------------------------------------------------------------------------- in the background thread

    def _serve_commands(self) -> None:
        try:
            while True:
                command, p, key, generation = self._commands.receive_command()
                if command is RankCommand.READ:
                    self._send_initial_rows(p)
                elif command is RankCommand.VERSION:
                    self._receive_version(p, key, generation)
                elif command is RankCommand.STATE:
                    self._send_state(key, generation, only_rng=p == RNG_ONLY)
                elif command in PART_COMMANDS:
                    self._parts.handle(command, key, generation)
                elif command is RankCommand.EDGES:
                    self._encode(p, key, generation)
                elif command is RankCommand.RELAY:
                    self._relay(p, key, generation)
                else:
                    self._send_stored_rows(command, p, key, generation)
        except BaseException as error:
            if not self._is_closing:
                self._error = error  # the training thread raises it at its next step
                with self._changed:
                    self._changed.notify_all()
                self._commands.shut_down()  # the leader must not wait for a reply

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait until the training thread has reached a boundary. The caller has the lock."""
        while not is_done():
            if self._is_closing:
                raise IslandBrokenError("this rank leaves")
            self._changed.wait(1.0)

    def _send_initial_rows(self, p: FragmentId) -> None:
        """Send the initial weights, while the training thread waits for the leader to join."""
        with self._changed:
            self._wait_until(lambda: self._view is not None)
        assert self._view is not None
        flat = self._view.buffer(p)
        self._view.read(p, flat)
        self._send_rows(p, flat)

    def _send_stored_rows(self, command: RankCommand, p: FragmentId, key: int, generation: int) -> None:
        held: list[tuple[FragmentTensors, Buffer]] = []
        wait: Callable[[], None] | None = None
        with self._changed:
            if command is RankCommand.COPY:
                state, copied = self._retain_copy(p, key, generation)
                if copied is not None:
                    held = [(state, copied.buffer), (state, copied.anchor)]
                    wait = copied.ready.result()
            else:
                staged = self._find_staged(key, generation)
                if staged is not None and p < len(staged.rows):
                    wait = staged.rows[p][2]
                    held = [(staged.rows[p][0], staged.rows[p][0].buffers.retain(staged.rows[p][1]))]
        try:
            if wait is None:
                self._commands.send_result(RankReply.MISSING)
            else:
                wait()
                self._send_rows(p, held[0][1].tensor)
        finally:
            for rows, buffer in held:
                rows.release(buffer)

    def _retain_copy(self, p: FragmentId, serial: int, generation: int) -> tuple[FragmentTensors, PulledCopy | None]:
        """Wait for the copy with this serial. Return None if it is dropped. The caller has the lock and releases it."""
        self._wait_until(
            lambda: (
                generation < self._generation
                or (generation == self._generation and self._rows[p].copies_made >= serial)
            )
        )
        state = self._rows[p].tensors
        copied = state.pulled_copy if generation == self._generation else None
        return state, state.retain_copy() if copied is not None and copied.serial == serial else None

    def _send_rows(self, p: FragmentId, packed: Tensor) -> None:
        self._commands.send_result(RankReply.OK)
        for window in self._owned[p]:
            self._commands.send_tensor(window.view_packed(packed))

    def _encode(self, p: FragmentId, key: int, generation: int) -> None:
        """Encode this rank's strips of the copy with this serial."""
        with self._changed:
            state, copied = self._retain_copy(p, key, generation)
        rows = state.rows
        assert rows is not None
        if copied is None:
            self._commands.send_result(RankReply.MISSING)
            return
        try:
            prepared = rows.prepare_copy(copied)
        finally:
            state.release(copied.buffer, copied.anchor)
        self._commands.send_result(RankReply.OK)
        self._commands.send_tensor(prepared.outgoing)
        status, codec = self._commands.receive_result()
        if status is not RankReply.OK:
            rows.abort_encoding(key, CopyUnavailableError("another rank has dropped this copy"))
            return
        taken = torch.empty(sum(move.numel for move in rows.share.receives_at(rows.rank)))
        self._commands.receive_tensor(taken)
        rows.encode_strips(prepared, taken, get_codec(codec))

    def _relay(self, p: FragmentId, version: Version, generation: int) -> None:
        """Exchange the rows of a version by way of the leader: send fetched rows, and receive replicated rows."""
        with self._changed:
            self._wait_until(lambda: self._generation >= generation)
            fragment, is_mine = self._rows[p], self._generation == generation
        rows = fragment.tensors.rows
        assert rows is not None
        value = rows.pop_fetched(version) if is_mine else None
        self._commands.send_result(RankReply.OK if value is not None else RankReply.MISSING)
        if self._commands.receive_result()[0] is not RankReply.OK or value is None:
            rows.buffers.release(value)
            return
        for row_range in rows.share.row_ranges:
            offset = row_range.packed_begin if row_range.rank == rows.rank else dict(row_range.replicas).get(rows.rank)
            if offset is None:
                continue
            part = value.tensor[offset : offset + row_range.end - row_range.begin]
            if row_range.rank == rows.rank:
                self._commands.send_tensor(part)
            else:
                self._commands.receive_tensor(part)
        if self._commands.receive_result()[0] is RankReply.OK:
            with self._changed:
                fragment.add_version(version, value)
        else:
            rows.buffers.release(value)
        self._commands.send_result(RankReply.OK)

    def _receive_version(self, p: FragmentId, version: Version, generation: int) -> None:
        with self._changed:
            self._wait_until(lambda: self._generation >= generation)
            fragment, is_mine = self._rows[p], self._generation == generation
        value = fragment.tensors.buffers.acquire()
        self._commands.receive_tensor(value.tensor)
        with self._changed:
            if is_mine:
                fragment.add_version(version, value)
            else:
                fragment.tensors.release(value)
        self._commands.send_result(RankReply.OK)

    def _find_staged(self, key: int, generation: int) -> StagedState | None:
        self._wait_until(lambda: generation < self._generation or self._staged_count >= key)
        return self._staged.get(key) if generation == self._generation else None

    def _drop_staged(self, key: int) -> None:
        for rows, buffer, _ in self._staged.pop(key).rows:
            rows.release(buffer)

    def staged_state(self, key: int, generation: int) -> tuple[optimizer_state.OptimizerStateCopy | None, str]:
        """Return a staged copy without removing it, or the error that occurred when it was made."""
        with self._changed:
            staged = self._find_staged(key, generation)
            return (staged.state, staged.error) if staged is not None else (None, "")

    def is_current(self, generation: int) -> bool:
        """Wait for this incarnation to begin. Return False if a newer one has begun."""
        with self._changed:
            self._wait_until(lambda: self._generation >= generation)
            return self._generation == generation

    def _send_state(self, key: int, generation: int, only_rng: bool) -> None:
        """Send the part of the state that this rank owns and the leader lacks, and drop it: it is requested once."""
        with self._changed:
            staged = self._find_staged(key, generation)
            if staged is not None:
                self._drop_staged(key)
        if staged is None or staged.state is None:
            self._commands.send_result(RankReply.ERROR, staged.error if staged is not None else "")
            return
        inner, sent = staged.state, []
        try:
            inner.wait()
        except RuntimeError as error:
            self._commands.send_result(RankReply.ERROR, f"rank {self._ranks.rank}: {summarize_error(error)}")
            return
        names = optimizer_state.tensor_owners(inner.metadata)
        own_parts = (
            assign_owners(self._ranks.boxes, self._plan.tensors)[self._ranks.rank]
            if self._plan is not None
            else frozenset()
        )
        listed: list[Any] = []
        for number, part in inner.parts.items():
            if names[number].parameter in own_parts and not only_rng:
                listed.append([number, part.box.offset, part.box.shape, _dtype_name(inner.tensors[number])])
                sent.append(inner.tensors[number])
        for name, tensor in staged.rng.items():
            listed.append([f"rank{self._ranks.rank}.{name}", None, list(tensor.shape), _dtype_name(tensor)])
            sent.append(tensor)
        self._commands.send_result(RankReply.OK)
        self._commands.send_json(listed)
        for tensor in sent:
            self._commands.send_tensor(tensor)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
