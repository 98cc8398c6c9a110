"""`atoll.Learner`: one learner of a run, around a training loop.

Two threads share one `LearnerCore` under a lock that is held for microseconds. The training thread reports steps to it,
copies and adopts. The background thread does all that may take long: sockets, encoding, decoding, the tape. The work of
the training thread at a step boundary is a list of actions, so that all ranks of an island execute the same actions at
the same step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from types import TracebackType
from typing import Any, SupportsIndex

from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.core.types import MAX_TOKENS_PER_STEP
from atoll.island.follower import Follower
from atoll.island.leader import Leader
from atoll.island.stats import LearnerStats, LearnerStatus
from atoll.island.topology import rendezvous
from atoll.learner.arguments import (
    check_directory,
    check_learner_number,
    check_model,
    check_path,
    resolve_seconds,
    to_int,
)
from atoll.learner.background import BackgroundThread
from atoll.learner.environment import KEYS, RUN_DIRECTORY, TOKEN, env, learner_from_env, syncer_from_env
from atoll.learner.leading_rank import LeadingRank
from atoll.learner.loop_check import LoopCheck, ParameterCheck
from atoll.learner.preemption import DeferredSignals, Preemption
from atoll.learner.published import PublishedValues
from atoll.logs import ContextLogger
from atoll.tensors import optimizer_state
from atoll.tensors.optimizers import check_not_accumulating, unwrap_optimizers
from atoll.transport.endpoint import parse_endpoint
from atoll.transport.pacing import check_streams, parse_rate

DEFAULT_DISCONNECT_TIMEOUT_S = 86_400.0


class Learner:
    """Learner of a run, around a training loop that already works.

        batches = epochs(loader)  # from atoll.integrations.data
        with atoll.Learner(model, optimizer, syncer="head:7400", keys="keys/far") as learner:
            while not learner.finished:
                batch = next(batches)
                loss = train_step(batch)
                learner.step(tokens=batch.numel(), loss=loss)

    `optimizer` is one optimizer or a list of them, such as `[muon, adamw]`. For a wrapper around several optimizers
    that has no state, pass the list of them: their optimizer state would not be found in the wrapper.

    Entering the block joins the run. The model takes the published values, and the optimizer takes a peer's state if
    there is one. The first learner to join provides the initial weights. `step` never waits for the network; while an
    operator has paused the run, it blocks. When the run is over, `finished` is True and the model holds the final
    published values. A learner that joins after the end gets them on entering. So check `finished` before each step,
    and let the run end the training: `epochs` repeats the data. Leaving the block early, by an exception or Ctrl-C,
    leaves the run, and the other learners continue. When an operator drains this learner, `finished` and `drained` are
    True.

    In a run with leases (`RunConfig.lease_samples`) the samples of the run are numbered, and each number is leased to
    one learner: `samples = learner.take(batch)` before a step returns the numbers to train on. You decide what a number
    means; with N samples on disk, `number // N` is the epoch and `number % N` the position in that epoch's permutation.
    When a learner is killed, the samples that it has taken and that are not merged are leased to other learners.

    `syncer` may list several addresses, as in "head:7400,other:7400", for standby syncers. The learner tries them in
    turn. Connections to another machine use TLS: with `keys`, the directory of this learner's key (`atoll keys add`),
    or with `ca`, a file with the certificate authority of the syncer, and a token. "https://head:7400" alone trusts the
    certificate authorities of this system. Renewed keys are used from the next connection on.

    `learner` is the number of this learner, from 1. With it, a restarted process continues as the same learner; without
    it the syncer assigns the next free number. `run_directory` stores this learner's tape and its parts of snapshots;
    without it neither is stored. A part holds parameters, optimizer state and the states of torch's generators, and
    what `extra_state` returns: any JSON value, such as a position in the data. When no peer is left that could send
    optimizer state, a learner starts from its own part, and `restored_state` is what `extra_state` returned for it.

    In a torchrun job, all ranks together are one learner. Atoll recognizes DDP, FSDP2 and tensor parallelism from the
    parameters. Every rank enters, steps and leaves. Rank 0 runs the protocol. Ranks that own whole rows of the
    parameters upload and download them directly, with the same token or keys; if one rank has none, rank 0 transfers
    the rows of all ranks.

    With `notice_s`, SIGTERM is a preemption notice: the machine is taken away after this many seconds. At the next step
    boundary the unmerged work is merged, then `finished` and `drained` are True. A second SIGTERM leaves at once.

    A learner that cannot reach the syncer trains on, logs a warning, and retries. After `disconnect_timeout_s` (a day
    by default; `math.inf` for no limit) `step` raises `SyncerUnreachableError`, because the run may be over. The model
    holds the weights of the last step.

    Arguments that are not given are read from ATOLL_SYNCER, ATOLL_TOKEN, ATOLL_KEYS, ATOLL_LEARNER,
    ATOLL_RUN_DIRECTORY, ATOLL_NOTICE_S, ATOLL_JOIN_TIMEOUT_S and ATOLL_DISCONNECT_TIMEOUT_S, which a launcher sets:
    `atoll.Learner(model, optimizer)` is enough then.

    `max_rate`, such as "500mbit" or "2gbit", limits the bandwidth for tensors in each direction; messages are not
    counted. A large tensor is sent over four connections at once; `streams` sets another number.
    """

    # long: every argument is checked and every attribute is set, once
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        syncer: str | None = None,
        token: str | None = None,
        *,
        keys: str | PathLike[str] | None = None,
        ca: str | PathLike[str] | None = None,
        learner: int | None = None,
        run_directory: str | PathLike[str] | None = None,
        join_timeout_s: float | None = None,
        disconnect_timeout_s: float | None = None,
        extra_state: Callable[[], Any] | None = None,
        max_rate: str | None = None,
        streams: int | None = None,
        notice_s: float | None = None,
        log: logging.Logger | None = None,
    ) -> None:
        check_model(model, optimizer)
        syncer = syncer if syncer is not None else syncer_from_env()
        token = token if token is not None else env(TOKEN)
        keys = keys if keys is not None or ca is not None else env(KEYS)
        run_directory = run_directory if run_directory is not None else env(RUN_DIRECTORY)
        learner = check_learner_number(learner) if learner is not None else learner_from_env()
        join_timeout_s = resolve_seconds("join_timeout_s", "how long to wait for the run", join_timeout_s)
        if extra_state is not None and not callable(extra_state):
            raise ValueError(f"extra_state is a function that returns a JSON value to store, got {extra_state!r}")
        self.log = ContextLogger(log if log is not None else logging.getLogger("atoll.learner"), learner=learner)
        self._model = model
        self._optimizers = unwrap_optimizers(optimizer)
        optimizer_state.track_counters(self._optimizers)
        self._wrapped_optimizer = optimizer  # as a framework has wrapped it
        run = check_directory("run_directory", run_directory) if run_directory is not None else None
        own_keys = check_path("keys", keys) if keys is not None else None
        endpoint = parse_endpoint(syncer, own_keys, check_path("ca", ca) if ca is not None else None)
        rate = parse_rate(max_rate) if max_rate is not None else None
        limits = rate, check_streams(streams)
        disconnect_s = resolve_seconds(
            "disconnect_timeout_s", "how long to train without a syncer (inf: no limit)", disconnect_timeout_s, True
        )
        self._background = BackgroundThread(
            endpoint, token, self.log, *limits, disconnect_s or DEFAULT_DISCONNECT_TIMEOUT_S
        )
        self._entered = False
        self._pid = 0  # id of the process that entered the block
        self._signals = DeferredSignals()
        self._preemption = Preemption(
            resolve_seconds("notice_s", "the time from SIGTERM to the end", notice_s), self.log
        )
        self.published_values = PublishedValues(model, self._signals)
        self._trained: ParameterCheck | None = None  # set at the join
        self._loop_check: LoopCheck | None = None  # set at the join
        self._status = LearnerStatus()
        self._rank: LeadingRank | Follower = LeadingRank(
            model,
            self._optimizers,
            self._background,
            self._status,
            self._signals,
            self._preemption,
            self.log,
            learner=learner,
            run_directory=run,
            join_timeout_s=join_timeout_s,
            extra_state=extra_state,
        )

    # ---------------------------------------------------------------------------------------------------- joining

    def __enter__(self) -> Learner:
        if self._entered:
            raise ValueError("a Learner is entered once; make another one to join again")
        self._entered = True
        self._pid = os.getpid()
        ranks = rendezvous(self._model)
        if ranks is not None and ranks.is_leader:
            assert isinstance(self._rank, LeadingRank)
            self._rank.island = Leader(ranks, self._model, self._background, self.log)
        elif ranks is not None:
            trained, notice = (self._model, self._optimizers), self._preemption
            self._rank = Follower(ranks, *trained, self._status, self._background, lambda: notice.level, self.log)
        self._signals.install()
        try:
            self._rank.join()
        except BaseException as error:
            self._close(error)
            raise
        self._trained = ParameterCheck(self._model, self._optimizers, self.log)
        self._loop_check = LoopCheck(self._model, list(self._optimizers), lambda: self._status.finished, self.log)
        self._preemption.listen(self._signals)
        return self

    # ---------------------------------------------------------------------------------------------------- training

    def take(self, count: SupportsIndex) -> tuple[int, ...]:
        """Return the numbers of the samples for the next step, without waiting; `step` reports how many were taken.

        If no lease is left because the syncer was unreachable for very long, numbers of the last lease are repeated.
        In an island of several ranks all of them call it, each for its own part of the step. Ranks that train on the
        same data (tensor parallelism) get the same numbers.
        """
        if not self._rank.is_open:
            raise ValueError("take() outside of `with atoll.Learner(...)`: enter it first")
        if not self._status.settings.config.lease_samples:
            raise ValueError("this run has no leases: use your own data, or join a run that has leases")
        requested = to_int(count)
        if requested is None or requested < 1:
            raise ValueError(f"count must be a whole number of at least 1, got {count!r}")
        return self._rank.take(requested) if not self._status.finished else ()

    def step(self, tokens: SupportsIndex, loss: float | Tensor | None = None) -> None:
        """Report one optimizer step. Copy and adopt the fragments that are due at this boundary.

        This never waits for the network. In an island of several ranks all of them call it after every step, each with
        the tokens of its own batch. Their tokens are added up; ranks that train on the same data count once. The loss
        that is shown is that of rank 0.

        Args:
            tokens: an integer of any kind; reading a tensor on an accelerator waits for the device.
            loss: one number or a tensor with one value, to be shown.
        """
        if not self._rank.is_open:
            raise ValueError("step() outside of `with atoll.Learner(...)`: enter it first")
        count = to_int(tokens)
        if count is None or not 0 < count <= MAX_TOKENS_PER_STEP:
            raise ValueError(f"tokens must be a whole number from 1 to {MAX_TOKENS_PER_STEP}, got {tokens!r}")
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise ValueError(f"loss is one number, got a tensor of shape {tuple(loss.shape)}: pass its mean")
            loss = loss.detach()
        elif loss is not None:
            loss = float(loss)
        self.published_values.check_step()
        check_not_accumulating(self._wrapped_optimizer)
        if self._status.finished:
            return
        if self._trained is not None:
            self._trained.check()
        if self._loop_check is not None:
            self._loop_check.begin_call()
        self._rank.step(count, loss)
        if self._loop_check is not None:
            self._loop_check.end_call()

    def published(self) -> AbstractContextManager[None]:
        """Return a context in which the model holds the newest published values that this learner has adopted.

        Afterwards the model holds its own values again, bit for bit. Use it for evaluation and for checkpoints.

            with learner.published():
                print(evaluate(model))

        No step may be taken in it, and nothing is sent. Only the ranks that evaluate enter it; if the model is sharded,
        these are all ranks. It takes host memory for one more copy of the model.
        """
        return self.published_values.swap_in(self._rank.fragments)

    # ---------------------------------------------------------------------------------------------------- showing

    @property
    def id(self) -> int:
        """Number of this learner, from 1."""
        return self._require_identity("id")[0]

    @property
    def incarnation(self) -> int:
        """Number of times that this learner has joined."""
        return self._require_identity("incarnation")[1]

    def _require_identity(self, name: str) -> tuple[int, int]:
        if self._status.identity is None:
            raise ValueError(f"{name} is known once the learner has joined: enter `with atoll.Learner(...)` first")
        return self._status.identity

    @property
    def progress(self) -> float:
        """Consumed share of the run's budget, 0..1, as of the last step boundary, for learning-rate schedules.

        It does not change between boundaries: a step may depend only on recorded values, so that a replay repeats it.
        """
        return 1.0 if self._status.finished and not self._status.drained else self._status.progress

    @property
    def finished(self) -> bool:
        """True when the run is over, or when this learner was drained."""
        return self._status.finished

    @property
    def drained(self) -> bool:
        """True when an operator or a preemption notice has drained this learner.

        The other learners continue. The model holds the weights of its last step and what it adopted since.
        """
        return self._status.drained

    @property
    def paused_s(self) -> float:
        """Total seconds for which this learner was paused with the run."""
        return self._status.paused_s

    @property
    def lr_scale(self) -> float:
        """Learning-rate factor: below 1 in the first steps of a learner that started without optimizer state."""
        step, warmup_steps = self._rank.steps, self._status.warmup_steps
        return (step + 1) / (warmup_steps + 1) if step < warmup_steps else 1.0

    @property
    def restored_state(self) -> Any:
        """Return value of `extra_state` in the part that this learner has started from, or None."""
        return self._status.restored_state

    @property
    def extra(self) -> dict[str, Any]:
        """Extra settings that the syncer has for all learners."""
        return dict(self._status.settings.extra)

    def stats(self) -> LearnerStats:
        """Return counters. In an island of several ranks, times and memory are of this rank, and counts of the
        learner."""
        return self._rank.stats()

    # ---------------------------------------------------------------------------------------------------- leaving

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error if error is not None else kind)

    def _close(self, error: BaseException | type[BaseException] | None) -> None:
        """Leave the run, unless it is over. All threads are stopped, even after an error.

        A forked child (os.fork, a worker of a DataLoader) that exits its copy of the block does not leave the run:
        threads, sockets and the tape belong to its parent.
        """
        if self._loop_check is not None:
            self._loop_check.close(ended_well=error is None and os.getpid() == self._pid)
        try:
            if os.getpid() == self._pid:
                self._rank.close(error)
        finally:
            self._signals.uninstall()
