"""`atoll.Learner`: the three lines in a training loop, and what happens behind them.

Two threads share one `LearnerCore` under a lock that is held for microseconds. The training thread tells it of steps,
copies and adopts; the background thread does everything that may take long: sockets, encoding, decoding, the tape.
What the training thread has to do at a step boundary is a list of actions, so that an island of many ranks can agree on
one list and all of its ranks carry it out at the same step.
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
    """One island of a run, around a training loop that already works.

        batches = epochs(loader)  # from atoll.integrations.data
        with atoll.Learner(model, optimizer, syncer="head:7400", keys="keys/far") as learner:
            while not learner.finished:
                batch = next(batches)
                loss = train_step(batch)
                learner.step(tokens=batch.numel(), loss=loss)

    `optimizer` is one optimizer or a list of them, such as `[muon, adamw]`. A wrapper around several that has no state
    of its own is not enough: their state would not be found.

    Entering joins the run: the model takes the published values, the optimizer a peer's state where there is one. The
    first learner of a run provides the model. `step` never waits for the network; while an operator has paused the run
    it blocks. When the run is over `finished` is True and the model holds the final published values; a learner that
    joins after the end gets them on entering. So check `finished` before each step, and let the run end the training:
    `epochs` repeats the data. Leaving the block early, by an exception or Ctrl-C, leaves the run; the other learners
    continue. When an operator asks this learner to leave, `finished` and `drained` are True.

    In a run with leases (`RunConfig.lease_samples`) the data is one line of numbered samples, and the run says which of
    them are whose: `samples = learner.take(batch)` before a step gives the numbers to train on, each to one learner of
    the run and no other. What a number means is yours; with N samples on disk, `number // N` is the epoch and
    `number % N` the place in that epoch's permutation. What a learner has taken and nobody has merged when it is killed
    is given to others.

    `syncer` may name several addresses, as in "head:7400,other:7400": those of standbys, which are asked in turn. To
    another machine everything goes by TLS: with `keys`, the directory of this island's key (`atoll keys add`), or with
    `ca`, a file with the authority of the syncer's certificate, and a token; "https://head:7400" alone trusts the
    authorities of this system. Keys that are renewed are used from the next dial on.

    `learner` is the number of this island, from 1. With it a restart is told as the same island; without it the syncer
    gives the next free one. `run_directory` gets this learner's tape and its parts of snapshots; without one it keeps
    neither. A part holds parameters, the optimizer's state and torch's generators, and what `extra_state` returns: any
    value that JSON knows, such as a place in the data. When everybody has died and nobody is left to take inner state
    from, a learner starts from its own part, and `restored_state` is what `extra_state` had returned then.

    In a torchrun job all ranks together are one island: DDP, FSDP2 and tensor parallelism are seen from the parameters,
    and every rank enters, steps and leaves. Rank 0 speaks to the syncer. Ranks that hold whole rows send and fetch
    their own, with the same token or keys; where one has none, rank 0 does it for all.

    With `notice_s` SIGTERM is the notice of a machine that is taken away in so many seconds: at the next step boundary
    what was trained and not merged is merged, then `finished` and `drained` are True. A second one leaves at once.

    A learner that cannot reach the syncer trains on, warns, and redials. After `disconnect_timeout_s` (a day; `math.inf` for
    ever) `step` raises `SyncerUnreachableError`: the run may be over, and nothing else would end this loop. The model is as
    the last step left it.

    What is not given is taken from ATOLL_SYNCER, ATOLL_TOKEN, ATOLL_KEYS, ATOLL_LEARNER, ATOLL_RUN_DIRECTORY,
    ATOLL_NOTICE_S, ATOLL_JOIN_TIMEOUT_S and ATOLL_DISCONNECT_TIMEOUT_S, which an engine sets:
    `atoll.Learner(model, optimizer)` is enough then.

    `max_rate`, as "500mbit" or "2gbit", bounds what values take of the link, each way; messages are not counted. A
    large value goes over four connections at once; `streams` sets another number.
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
            raise ValueError(f"extra_state is a function that returns what to keep, got {extra_state!r}")
        self.log = ContextLogger(log if log is not None else logging.getLogger("atoll.learner"), learner=learner)
        self._model = model
        self._optimizers = unwrap_optimizers(optimizer)
        optimizer_state.track_counters(self._optimizers)
        self._wrapped_optimizer = optimizer  # as a framework has wrapped it
        run = check_directory("run_directory", run_directory) if run_directory is not None else None
        own_keys = check_path("keys", keys) if keys is not None else None
        syncer_place = parse_endpoint(syncer, own_keys, check_path("ca", ca) if ca is not None else None)
        rate = parse_rate(max_rate) if max_rate is not None else None
        bounds = rate, check_streams(streams)
        disconnect_s = resolve_seconds(
            "disconnect_timeout_s", "how long to train without a syncer, inf for ever", disconnect_timeout_s, True
        )
        self._background = BackgroundThread(
            syncer_place, token, self.log, *bounds, disconnect_s or DEFAULT_DISCONNECT_TIMEOUT_S
        )
        self._entered = False
        self._pid = 0  # of the process that has entered
        self._signals = DeferredSignals()
        self._preemption = Preemption(
            resolve_seconds("notice_s", "the time from SIGTERM to the end", notice_s), self.log
        )
        self.published_values = PublishedValues(model, self._signals)
        self._trained: ParameterCheck | None = None  # from the join on
        self._loop_check: LoopCheck | None = None  # from the join on
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
        except BaseException as wrong:
            self._close(wrong)
            raise
        self._trained = ParameterCheck(self._model, self._optimizers, self.log)
        self._loop_check = LoopCheck(self._model, list(self._optimizers), lambda: self._status.finished, self.log)
        self._preemption.listen(self._signals)
        return self

    # ---------------------------------------------------------------------------------------------------- training

    def take(self, count: SupportsIndex) -> tuple[int, ...]:
        """The numbers of the samples for the next step; `step` then tells how many were taken. Never waits.

        Where no lease is left, because the syncer has been out of reach for very long, numbers of the last lease come
        again. In an island of several ranks all of them call it, each for its own part of the step; ranks that train
        on the same data (tensor parallelism) get the same numbers.
        """
        if not self._rank.is_open:
            raise ValueError("take outside of `with atoll.Learner(...)`: enter it first")
        if not self._status.settings.config.lease_samples:
            raise ValueError("this run has no leases: train on data of your own, or in a run of `atoll syncer`")
        wanted = to_int(count)
        if wanted is None or wanted < 1:
            raise ValueError(f"count must be a whole number of at least 1, got {count!r}")
        return self._rank.take(wanted) if not self._status.finished else ()

    def step(self, tokens: SupportsIndex, loss: float | Tensor | None = None) -> None:
        """Report one optimizer step. Copies and adopts what is due at this boundary; never waits for the network.

        `tokens` is an integer of any kind; one that is a tensor on an accelerator is read, which waits for the device.

        In an island of several ranks all of them call it after every step, each with the tokens of its own batch; they
        are added up, those of ranks that train on the same data once. The loss that is shown is that of rank 0.
        """
        if not self._rank.is_open:
            raise ValueError("step outside of `with atoll.Learner(...)`: enter it first")
        count = to_int(tokens)
        if count is None or not 0 < count <= MAX_TOKENS_PER_STEP:
            raise ValueError(f"tokens must be a whole number from 1 to {MAX_TOKENS_PER_STEP}, got {tokens!r}")
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise ValueError(f"loss is one number, got a tensor of shape {tuple(loss.shape)}: give its mean")
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
        """Inside of this block the model has the newest published values, as adopted by the last step boundary;
        afterwards it has its own again, to the last bit. For evaluation and for checkpoints in the middle of a run.

            with learner.published():
                print(evaluate(model))

        No step is taken in it. Nothing is sent: of several ranks those use it that evaluate, which are all of them
        where the model is sharded. It takes memory for one more copy of the model on the host.
        """
        return self.published_values.swap_in(self._rank.fragments)

    # ---------------------------------------------------------------------------------------------------- showing

    @property
    def id(self) -> int:
        """The number of this learner, from 1."""
        return self._require_identity("id")[0]

    @property
    def incarnation(self) -> int:
        """How many times a learner of this number has joined, from 1."""
        return self._require_identity("incarnation")[1]

    def _require_identity(self, asked: str) -> tuple[int, int]:
        if self._status.identity is None:
            raise ValueError(f"{asked} is known once the learner has joined: enter `with atoll.Learner(...)` first")
        return self._status.identity

    @property
    def progress(self) -> float:
        """Of the run's budget, 0..1, as heard by the last step boundary, for learning-rate schedules.

        Not as heard by now: what a step depends on would then not be on the tape, and nobody could take it again.
        """
        return 1.0 if self._status.finished and not self._status.drained else self._status.progress

    @property
    def finished(self) -> bool:
        """There is nothing more to do here: the run is over, or this learner was asked to leave (`drained`)."""
        return self._status.finished

    @property
    def drained(self) -> bool:
        """An operator, or the notice of its machine, has asked this learner to leave: the others go on, and the model
        is as its last step left it, with what was adopted since."""
        return self._status.drained

    @property
    def paused_s(self) -> float:
        """How long it has stood still in all because the run was paused."""
        return self._status.paused_s

    @property
    def lr_scale(self) -> float:
        """Below 1 during the first steps of a learner that found no peer to take inner state from."""
        step, warmup_steps = self._rank.steps, self._status.warmup_steps
        return (step + 1) / (warmup_steps + 1) if step < warmup_steps else 1.0

    @property
    def restored_state(self) -> Any:
        """What `extra_state` had returned for the part that this learner has started from; None where it did not."""
        return self._status.restored_state

    @property
    def extra(self) -> dict[str, Any]:
        """What the syncer was given for all learners."""
        return dict(self._status.settings.extra)

    def stats(self) -> LearnerStats:
        """In an island of several ranks: what the leader has counted; times and memory are those of this rank."""
        return self._rank.stats()

    # ---------------------------------------------------------------------------------------------------- leaving

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error if error is not None else kind)

    def _close(self, wrong: BaseException | type[BaseException] | None) -> None:
        """Leave the run, unless it is over; no thread is left behind, whatever went wrong.

        A forked child (os.fork, a worker of a DataLoader) that unwinds its copy of the block leaves nothing: threads,
        sockets and the tape belong to its parent.
        """
        if self._loop_check is not None:
            self._loop_check.close(ended_well=wrong is None and os.getpid() == self._pid)
        try:
            if os.getpid() == self._pid:
                self._rank.close(wrong)
        finally:
            self._signals.uninstall()
