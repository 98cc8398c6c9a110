"""`atoll.Learner`: the three lines in a training loop, and what happens behind them.

Two threads share one `LearnerCore` under a lock that is held for microseconds. The training thread tells it of steps,
copies and adopts; the background thread does everything that may take long: sockets, encoding, decoding, the tape.
What the training thread has to do at a step boundary is a list of actions, so that an island of many ranks can agree on
one list and all of its ranks carry it out at the same step.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from os import PathLike
from types import TracebackType
from typing import Any, SupportsIndex

from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.core.data_leases import SampleLine, Samples
from atoll.core.learner.core import LearnerCore
from atoll.core.protocol import (
    LeaveWanted,
    Started,
    StepTaken,
    Stop,
)
from atoll.core.types import MOST_TOKENS_PER_STEP
from atoll.errors import (
    AtollError,
    IslandBroken,
    JoinTimeout,
    KeysRefused,
    LearnerRefused,
    SyncerUnreachable,
)
from atoll.island.follower import Follower
from atoll.island.leader import Leader
from atoll.island.rank_connection import Ask, Told
from atoll.island.topology import meet
from atoll.learner.arguments import (
    check_directory,
    check_learner,
    check_model,
    check_path,
    check_seconds,
    whole_number,
)
from atoll.learner.background import Background
from atoll.learner.boundary import Action, Solo, StepBoundary
from atoll.learner.environment import (
    KEYS,
    RUN_DIRECTORY,
    TOKEN,
    away_timeout_told,
    join_timeout_told,
    learner_told,
    notice_told,
    syncer_told,
    told,
)
from atoll.learner.fragments import plan_of
from atoll.learner.loop_check import LoopCheck
from atoll.learner.pause import Resting
from atoll.learner.preemption import Notice
from atoll.learner.published import PublishedValues
from atoll.learner.signals import Interrupts
from atoll.learner.stats import NOTHING_UNTOLD, LearnerStats, Untold
from atoll.learner.trained_parameters import TrainedParameters
from atoll.logs import Named
from atoll.store.run_settings import RunSettings, start_anew
from atoll.tape.files import tape_path
from atoll.tape.format import Actor
from atoll.tensors import optimizer_state
from atoll.tensors.codecs import codec
from atoll.tensors.model_view import ModelView
from atoll.tensors.optimizers import check_whole_step, plain_optimizers
from atoll.tensors.plan import FragmentPlan
from atoll.transport.endpoint import place
from atoll.transport.pacing import check_streams
from atoll.transport.rates import rate_of
from atoll.transport.run_clock import RunClock

AWAY_TIMEOUT_S = 86_400.0
MOST_REJOINS = 5
STRANGERS = frozenset({"refused-run", "refused-fingerprint"})
MOST_UNTOLD = 256
"""Boundaries in a row at which the core may be busy with a message: on a crowded machine the background may stand still
in the middle of one. Steps are told together at the next boundary, and only then copied and adopted."""


class Learner(Resting):
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

    A learner that cannot reach the syncer trains on, warns, and redials. After `away_timeout_s` (a day; `math.inf` for
    ever) `step` raises `SyncerUnreachable`: the run may be over, and nothing else would end this loop. The model is as
    the last step left it.

    What is not given is taken from ATOLL_SYNCER, ATOLL_TOKEN, ATOLL_KEYS, ATOLL_LEARNER, ATOLL_RUN_DIRECTORY,
    ATOLL_NOTICE_S, ATOLL_JOIN_TIMEOUT_S and ATOLL_AWAY_TIMEOUT_S, which an engine sets:
    `atoll.Learner(model, optimizer)` is enough then.

    `max_rate`, as "500mbit" or "2gbit", bounds what values take of the link, each way; messages are not counted. Large
    values go over as many connections as are found to carry more; `streams` sets their number instead.
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
        away_timeout_s: float | None = None,
        extra_state: Callable[[], Any] | None = None,
        max_rate: str | None = None,
        streams: int | None = None,
        notice_s: float | None = None,
        log: logging.Logger | None = None,
    ) -> None:
        check_model(model, optimizer)
        syncer = syncer if syncer is not None else syncer_told()
        token = token if token is not None else told(TOKEN)
        keys = keys if keys is not None or ca is not None else told(KEYS)
        run_directory = run_directory if run_directory is not None else told(RUN_DIRECTORY)
        learner = learner if learner is not None else learner_told()
        learner = check_learner(learner) if learner is not None else None
        if join_timeout_s is not None:
            join_timeout_s = check_seconds("join_timeout_s", "how long to wait for the run", join_timeout_s)
        if extra_state is not None and not callable(extra_state):
            raise ValueError(f"extra_state is a function that returns what to keep, got {extra_state!r}")
        self.log = Named(log if log is not None else logging.getLogger("atoll.learner"), learner=learner)
        self._model = model
        self._optimizers = plain_optimizers(optimizer)
        optimizer_state.watch(self._optimizers)
        self._given = optimizer  # as a framework has wrapped it
        self._wanted = learner
        self._run_directory = check_directory("run_directory", run_directory) if run_directory is not None else None
        self._join_timeout_s = join_timeout_s if join_timeout_s is not None else join_timeout_told()
        self._extra_state = extra_state
        self._restored_state: Any = None
        self._join_by: float | None = None  # on the monotonic clock
        own_keys = check_path("keys", keys) if keys is not None else None
        self._place = place(syncer, own_keys, check_path("ca", ca) if ca is not None else None)
        rate = rate_of(max_rate) if max_rate is not None else None
        bounds = rate, check_streams(streams) if streams is not None else None
        away_timeout_s = away_timeout_s if away_timeout_s is not None else away_timeout_told() or AWAY_TIMEOUT_S
        if away_timeout_s != math.inf:
            away_timeout_s = check_seconds("away_timeout_s", "how long to train without a syncer", away_timeout_s)
        self._background = Background(self._place, token, self.log, *bounds, away_timeout_s)
        self._lock = threading.RLock()  # it knows whose it is: an interrupt may leave it locked
        self._news = threading.Condition(self._lock)  # actions for the training thread, while it joins
        self._actions: deque[Action] = deque()  # of events that the background told of; done at the next boundary
        self._core: LearnerCore | None = None
        self._boundary: StepBoundary | None = None
        self._island = Solo()
        self._entered = False
        self._pid = 0  # of the process that has entered
        self._interrupts = Interrupts()
        self._notice = Notice(notice_s if notice_s is not None else notice_told(), self.log)
        self._published = PublishedValues(model, self._interrupts)
        self._trained: TrainedParameters | None = None  # from the join on
        self._loop_check: LoopCheck | None = None  # from the join on
        self._follower: Follower | None = None  # in an island of many ranks, on all but one
        self._number: tuple[int, int] | None = None  # of the learner and its incarnation
        self._settings = RunSettings()
        self._clock = RunClock(time.time())
        self._stop: Stop | None = None
        self._untold = NOTHING_UNTOLD
        self._line: SampleLine | None = None
        self._fresh = 0  # samples that were taken for the step that is under way
        self._repeats = False  # and it has no new ones
        self._repeated = 0
        self._is_whole = True  # the newest event is on its way to the tape
        self._finished = False
        self._drained = False
        self._came = False  # something that the core was told of, since this thread last looked
        self._paused_s = 0.0
        self._warmup_steps = 0
        self._progress = 0.0  # at the last boundary
        self._last_end = 0.0  # of the previous boundary, on the monotonic clock
        self._began = 0.0
        self._boundary_s = 0.0
        self._lock_wait_s = 0.0
        self._adopted = 0
        self._contributed = 0

    # ---------------------------------------------------------------------------------------------------- joining

    def __enter__(self) -> Learner:
        if self._entered:
            raise ValueError("a Learner is entered once; make another one to join again")
        self._entered = True
        self._pid = os.getpid()
        ranks = meet(self._model)
        if ranks is not None and ranks.leads:
            self._island = Leader(ranks, self._model, self._background, self.log)
        elif ranks is not None:
            self._follower = Follower(self, ranks, self._model, self._optimizers, self.log)
        if self._join_timeout_s is not None:
            self._join_by = time.monotonic() + self._join_timeout_s
        self._interrupts.listen()
        try:
            if self._follower is not None:
                self._follower.join()
            else:
                self._place.check()
                self._background.start()
                self._background.while_waiting = self._island.pulse
                self._join()
                self._background.while_waiting = None
        except BaseException as wrong:
            self._close(wrong)
            raise
        self._trained = TrainedParameters(self._model, self._optimizers, self.log)
        self._loop_check = LoopCheck(self._model, list(self._optimizers), lambda: self._finished, self.log)
        self._notice.listen(self._interrupts)
        return self

    def _join(self) -> None:
        settings = self._background.fetch_settings(self._wanted, self._join_by)
        self._island.say([["settings", settings.to_json()]])
        plan = plan_of(self._model, settings)
        view = self._island.view(self._model, plan)
        optimizer_state.named(self._optimizers, self._model)  # raises for an optimizer of another model
        while not self._background.is_founded:
            self._background.found(plan, view, self._join_by)
            settings = self._background.fetch_settings(self._wanted, self._join_by)
        self._settings = settings
        self._clock = RunClock(settings.founded_at)
        for _ in range(MOST_REJOINS):
            if self._start(plan, view):
                return
        raise LearnerRefused(
            f"refused {MOST_REJOINS} times as learner {self._wanted}: {self._run_directory} holds tapes of other"
            " processes with these numbers, or the syncer gave them up; give another number, or another run directory"
        )

    def _start(self, plan: FragmentPlan, view: ModelView) -> bool:
        """Start one incarnation, up to its first step. Return False if its number is used up and it needs another."""
        learner, incarnation = self._background.ask_for_number(self._wanted, self._join_by)
        self._wanted = learner
        self.log.fields |= {"run": self._settings.config.run_id, "learner": learner, "incarnation": incarnation}
        if self._run_directory is not None and tape_path(self._run_directory, Actor(learner, incarnation)).exists():
            return False  # a process that was killed before it was admitted by a syncer that was killed had this number
        config = replace(self._settings.config, fragments=len(plan.fragments), fingerprint=plan.fingerprint())
        core = LearnerCore(config, learner, incarnation)
        up = codec(self._settings.numerics.ups[0])
        fragments = [self._island.fragment(view, p, up) for p in range(len(plan.fragments))]
        self._core = core
        self._line = SampleLine(config.lease_samples) if config.lease_samples else None
        self._number = (learner, incarnation)
        made_of = self._model, self._optimizers, fragments, config.blend_alpha, self._extra_state
        self._boundary = self._island.boundary(*made_of, self._settings.config.warmup_steps)
        self._island.say([["attach", learner, incarnation, self._island.generation, config.blend_alpha]])
        actor = Actor(learner, incarnation)
        self._background.attach(self, actor, config, fragments, self._run_directory)
        self._tell(Started())
        self._background.kick()
        while True:
            with self._news:
                if not self._actions:
                    if self._join_by is not None and time.monotonic() >= self._join_by:
                        raise JoinTimeout(f"could not join within the time given: {core.reason}")
                    self._background.check()
                    self._news.wait(0.2)
                actions = [self._with_state(action) for action in self._actions]
                self._actions.clear()
                is_paused = core.rests
            self._island.hear(Ask.JOIN)
            actions = self._island.agree(actions, Told(paused=is_paused))
            if actions and self._carry_out(actions):
                break
        if self._stop is not None:
            return self._stopped_at_the_door(core, self._stop)
        self._began = time.monotonic()
        if is_paused:
            self._rest()
        return True

    def _stopped_at_the_door(self, core: LearnerCore, stop: Stop) -> bool:
        if self._finished:
            return True  # while it joined: it has fetched the final versions, and that is all there was to do
        self._background.detach()
        if core.refused_for is not None and "refused-incarnation" not in core.said:
            # It was given up as lost. One that was replaced must not take a further number: it would evict the process
            # that was started after it.
            self._stop = None
            self._actions.clear()
            return False
        if "refused-finished" not in core.said:
            self._core = None  # it never was a learner of this run
            if self._run_directory is not None and not STRANGERS.isdisjoint(core.said):
                # The tape of another model or run would make the directory one of two runs.
                tape_path(self._run_directory, Actor(core.id, core.incarnation)).unlink(missing_ok=True)
            is_other_model = "refused-fingerprint" in core.said
            hint = f"; {start_anew(self._background.syncer_directory)}" if is_other_model else ""
            raise LearnerRefused(f"{stop.reason}{hint}")
        self.log.info("the run is over: taking the final model")
        assert self._boundary is not None
        self._background.fetch_final(self._boundary.fragments, self._join_by)
        self._island.say([["final", [fragment.newest_version for fragment in self._boundary.fragments]]])
        self._boundary.write_anchors()
        self._finished = True
        return True

    # ---------------------------------------------------------------------------------------------------- training

    def take(self, count: SupportsIndex) -> tuple[int, ...]:
        """The numbers of the samples for the next step; `step` then tells how many were taken. Never waits.

        Where no lease is left, because the syncer has been out of reach for very long, numbers of the last lease come
        again. In an island of several ranks all of them call it, each for its own part of the step; ranks that train
        on the same data (tensor parallelism) get the same numbers.
        """
        if self._core is None and self._follower is None:
            raise ValueError("take outside of `with atoll.Learner(...)`: enter it first")
        if not self._settings.config.lease_samples:
            raise ValueError("this run has no leases: train on data of your own, or in a run of `atoll syncer`")
        wanted = whole_number(count)
        if wanted is None or wanted < 1:
            raise ValueError(f"count must be a whole number of at least 1, got {count!r}")
        if self._finished:
            return ()
        if self._follower is not None:
            return self._follower.take(wanted)
        assert self._core is not None and self._line is not None
        config, count = self._core.config, self._island.hear(Ask.TAKE, wanted)
        if count > config.lease_samples * config.leases_ahead:
            raise ValueError(
                f"a step of {count} samples, with {config.leases_ahead} leases of {config.lease_samples} ahead, would"
                f" never have enough: take fewer, or start a new run with `atoll syncer --batch {count}`"
            )
        if self._repeats and self._untold.steps:
            # The core is told of several steps at once. That the new ones came first is then known.
            taken = Samples(self._line.again(count), 0)
        else:
            taken = self._line.next(self._core.leases, count)
        self._fresh += taken.fresh
        self._repeats = taken.fresh < count
        self._repeated += self._repeats
        return self._island.deal(taken.numbers)

    def step(self, tokens: SupportsIndex, loss: float | Tensor | None = None) -> None:
        """Report one optimizer step. Copies and adopts what is due at this boundary; never waits for the network.

        `tokens` is an integer of any kind; one that is a tensor on an accelerator is read, which waits for the device.

        In an island of several ranks all of them call it after every step, each with the tokens of its own batch; they
        are added up, those of ranks that train on the same data once. The loss that is shown is that of rank 0.
        """
        if self._core is None and self._follower is None:
            raise ValueError("step outside of `with atoll.Learner(...)`: enter it first")
        count = whole_number(tokens)
        if count is None or not 0 < count <= MOST_TOKENS_PER_STEP:
            raise ValueError(f"tokens must be a whole number from 1 to {MOST_TOKENS_PER_STEP}, got {tokens!r}")
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise ValueError(f"loss is one number, got a tensor of shape {tuple(loss.shape)}: give its mean")
            loss = loss.detach()
        elif loss is not None:
            loss = float(loss)
        self._published.check_step()
        check_whole_step(self._given)
        if self._finished:
            return
        if self._trained is not None:
            self._trained.check()
        if self._loop_check is not None:
            self._loop_check.begin_call()
        if self._follower is not None:
            self._follower.step(count)
        else:
            self._report_step(count, loss)
        if self._loop_check is not None:
            self._loop_check.end_call()

    def _report_step(self, tokens: int, loss: float | Tensor | None) -> None:
        """Count the step and carry out what is due, as the leader of the ranks or as the only one."""
        self._background.check()
        self._background.check_away()
        self._background.last_loss = loss
        tokens = self._island.hear(Ask.STEP, tokens)
        begin = time.monotonic()
        waited_s, actions, is_paused = self._told_of_step(tokens, begin)
        try:
            self._carry_out(self._island.agree(actions, self._told(is_paused)))
        finally:
            self._background.kick()  # not before: it would take the interpreter away in between the copies
        self._boundary_s += time.monotonic() - begin
        if waited_s is not None:
            # Copying and adopting are this learner's own work; only what it waited for the lock is somebody else's.
            self._last_end = begin + waited_s
        if is_paused and not self._finished:
            self._rest()

    def _told_of_step(self, tokens: int, begin: float) -> tuple[float | None, list[Action], bool]:
        """How long it waited for the lock, what is due at this boundary, and whether it stands still here. Where the
        background is busy, nothing is due, and the core is told at the next boundary: None."""
        assert self._core is not None
        before = self._untold
        self._untold = untold = Untold(before.steps + 1, before.tokens + tokens, before.samples + self._fresh)
        self._fresh = 0
        leaves = self._notice.came or self._island.noticed
        if self._background.is_behind and untold.steps <= MOST_UNTOLD and not leaves:
            return None, [], False  # steps of microseconds: several are told at once, or it would never catch up
        waited_s = 0.0
        if not self._lock.acquire(blocking=False):
            # The background has it, and waits for its turn on this machine, perhaps. This thread does not wait.
            if untold.steps <= MOST_UNTOLD and not leaves:
                return None, [], False
            self._lock.acquire()
            self._lock_wait_s += (waited_s := time.monotonic() - begin)
        try:
            actions = list(self._actions)
            self._actions.clear()
            if self._core.training:
                step_time_s = max(0.0, begin - self._last_end) / untold.steps
                event = StepTaken(untold.steps, untold.tokens, step_time_s, untold.samples)
                actions += self._handle(event, at=begin)
            self._untold = NOTHING_UNTOLD
            actions += self._heed_notice()
            return waited_s, actions, self._core.rests
        finally:
            self._lock.release()

    def published(self) -> AbstractContextManager[None]:
        """Inside of this block the model has the newest published values, as adopted by the last step boundary;
        afterwards it has its own again, to the last bit. For evaluation and for checkpoints in the middle of a run.

            with learner.published():
                print(evaluate(model))

        No step is taken in it. Nothing is sent: of several ranks those use it that evaluate, which are all of them
        where the model is sharded. It takes memory for one more copy of the model on the host.
        """
        if self._follower is not None:
            return self._published.shown(self._follower.fragments)
        return self._published.shown(self._boundary.fragments if self._boundary is not None else [])

    # ---------------------------------------------------------------------------------------------------- showing

    @property
    def id(self) -> int:
        """The number of this learner, from 1."""
        return self._joined_as("id")[0]

    @property
    def incarnation(self) -> int:
        """How many times a learner of this number has joined, from 1."""
        return self._joined_as("incarnation")[1]

    def _joined_as(self, asked: str) -> tuple[int, int]:
        if self._number is None:
            raise ValueError(f"{asked} is known once the learner has joined: enter `with atoll.Learner(...)` first")
        return self._number

    @property
    def progress(self) -> float:
        """Of the run's budget, 0..1, as heard by the last step boundary, for learning-rate schedules.

        Not as heard by now: what a step depends on would then not be on the tape, and nobody could take it again.
        """
        return 1.0 if self._finished and not self._drained else self._progress

    @property
    def finished(self) -> bool:
        """There is nothing more to do here: the run is over, or this learner was asked to leave (`drained`)."""
        return self._finished

    @property
    def drained(self) -> bool:
        """An operator, or the notice of its machine, has asked this learner to leave: the others go on, and the model
        is as its last step left it, with what was adopted since."""
        return self._drained

    @property
    def paused_s(self) -> float:
        """How long it has stood still in all because the run was paused."""
        return self._paused_s

    @property
    def lr_scale(self) -> float:
        """Below 1 during the first steps of a learner that found no peer to take inner state from."""
        step = self._core.step + self._untold.steps if self._core is not None else 0
        if self._follower is not None:
            step = self._follower.steps
        if step >= self._warmup_steps:
            return 1.0
        return (step + 1) / (self._warmup_steps + 1)

    @property
    def restored_state(self) -> Any:
        """What `extra_state` had returned for the part that this learner has started from; None where it did not."""
        return self._restored_state

    @property
    def extra(self) -> dict[str, Any]:
        """What the syncer was given for all learners."""
        return dict(self._settings.extra)

    def stats(self) -> LearnerStats:
        """In an island of several ranks: what the leader has counted; times and memory are those of this rank."""
        if self._follower is not None:
            return self._follower.stats()
        fragments = self._boundary.fragments if self._boundary is not None else []
        core, link = self._core, self._background
        return LearnerStats(
            steps=core.step + self._untold.steps if core is not None else 0,
            tokens=core.trained + self._untold.tokens if core is not None else 0,
            bytes_up=link.bytes_up,
            bytes_down=link.bytes_down,
            boundary_s=self._boundary_s,
            lock_wait_s=self._lock_wait_s,
            training_s=time.monotonic() - self._began if self._began else 0.0,
            adopted=self._adopted,
            contributed=self._contributed,
            link=core.link.value if core is not None else "down",
            samples=core.taken + self._untold.samples if core is not None else 0,
            repeated=self._repeated,
            paused_s=self._paused_s,
            island_s=self._island.waited_s,
            host_bytes=sum(fragment.host_bytes for fragment in fragments),
            device_bytes=max((fragment.device_bytes for fragment in fragments), default=0),
            parameters=fragments[0].parameters if fragments else 0,
            way=self._island.way,
            unmerged=core.unmerged_tokens() if core is not None else 0,
        )

    # ---------------------------------------------------------------------------------------------------- leaving

    def __exit__(
        self, kind: type[BaseException] | None, wrong: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(wrong if wrong is not None else kind)

    def _say_memory(self) -> None:
        stats = self.stats()
        if stats.parameters:
            host, device = stats.host_bytes / stats.parameters, stats.device_bytes / stats.parameters
            self.log.info("Atoll's memory per parameter: %.1f bytes on the host, %.1f on the device", host, device)

    def _close(self, wrong: BaseException | type[BaseException] | None) -> None:
        """Leave the run, unless it is over; no thread is left behind, whatever went wrong.

        A forked child (os.fork, a worker of a DataLoader) that unwinds its copy of the block leaves nothing: threads,
        sockets and the tape belong to its parent.
        """
        if self._loop_check is not None:
            self._loop_check.close(ended_well=wrong is None and os.getpid() == self._pid)
        try:
            if os.getpid() != self._pid:
                return
            if self._follower is not None:
                self._follower.close(wrong)
            else:
                self._leave(wrong)
        finally:
            self._interrupts.forget()

    def _leave(self, wrong: BaseException | type[BaseException] | None) -> None:
        self._say_memory()
        broken: BaseException | None = None
        if wrong is None:
            try:
                self._island.hear(Ask.CLOSE)
                if self._has_to_push():
                    self._island.stay()
                    self._push_after_the_loop()
                    self._island.hear(Ask.CLOSE)
            except (AtollError, KeyboardInterrupt) as gone:
                broken = wrong = gone
        if wrong is not None:
            self._island.fail(wrong)
        with contextlib.suppress(RuntimeError):  # until it is not ours any more
            while True:
                self._lock.release()
        with self._lock:
            speaks = self._background.is_attached and self._is_whole
        try:
            if speaks and not self._finished and self._stop is None:
                kind = wrong if wrong is None or isinstance(wrong, type) else type(wrong)
                why = "its loop ended" if kind is None else f"its loop ended with {kind.__name__}"
                self._tell(LeaveWanted(why))
            if self._finished and not self._drained and wrong is None and self._boundary is not None:
                self._boundary.before()
                self._boundary.write_anchors()  # a loop that checks `finished` after its step took one too many
        finally:
            self._background.while_waiting = None
            self._background.stop(self._notice.last_words_s())
            if wrong is None:
                self._island.close()
        if broken is not None and not (self._finished and isinstance(broken, AtollError)):
            raise broken


__all__ = [
    "IslandBroken",
    "JoinTimeout",
    "KeysRefused",
    "Learner",
    "LearnerRefused",
    "LearnerStats",
    "SyncerUnreachable",
]
