"""A hostile world in virtual time: real cores, unreal network, disks and clocks, all drawn by one seed.

The world breaks things while checkers watch, then heals everything and demands that rounds complete, that everybody
ends with the published versions and that the ledger balances.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from atoll.core.protocol import (
    ControlRequested,
    Envelope,
    FinishRequested,
    Hello,
    LeaveWanted,
    MessageArrived,
    ShardBack,
    ShardLost,
    SnapshotRequested,
    StoreFenced,
    VersionRecord,
)
from atoll.core.states import Mode, Stage, Standing
from atoll.core.types import ControlWhat, FragmentId, LearnerId
from atoll.sim.checkers import Violation
from atoll.sim.draws import Fault
from atoll.sim.driver import Driver
from atoll.sim.processes import Process

HEALED_PATIENCE_S = 3000.0
"""Virtual seconds after healing within which everything must have come right; many times what the limits add up to."""


class World(Driver):
    """A plan, carried out: faults, healing, the end."""

    # ---------------------------------------------------------------------------------------------------- the story

    def run(self) -> None:
        """Faults, then healing, then the end. Raises Violation."""
        self._start_syncer()
        for learner, at in self.plan.starts_s.items():
            self.engine.at(at, self._start_learner, learner)
        for fault in self.plan.faults:
            self.engine.at(fault.at_s, self._inject, fault)
        self.engine.run_until(self.plan.faulty_s)
        self._heal()
        self._demand("rounds complete", self._rounds_complete)
        self._demand("what the dead had leased returns", self._dead_settled)
        self._demand("who was asked to leave has left", self._drained_left)
        if self.plan.shards:
            self._do_without_a_shard()
        if self.plan.ends_paused:
            self._control("pause")
        self.engine.at(self.engine.now + (2.0 if self.plan.ends_paused else 0.0), self._ask_finish)
        if self.plan.lost_at_the_end is not None:
            self._end_without_a_shard(self.plan.lost_at_the_end)
        self._demand("everybody ends with the published versions", self._all_stopped)
        self._check_cores()
        self.watch.finish()

    def _do_without_a_shard(self) -> None:
        """All else is well: the fragments of the other shards go on, and its own when it is back."""
        shard = self.rng.randrange(self.plan.shards)
        mine = self._fragments_of(shard)
        self._aim()
        self._lose_shard(shard, math.inf)
        waiting = {p: self._target.pop(p) for p in mine}
        self._demand("rounds of other shards complete", self._versions_reached, self._lacks_quorum)
        self._target.update(waiting)
        self._find_shard(shard)
        self._demand("rounds complete when a shard is back", self._rounds_complete)

    def _end_without_a_shard(self, shard: int) -> None:
        """It is lost while the last merges are under way, or just before, and is back when all is over."""
        self.engine.run_until(self.engine.now + self.rng.choice((0.0, 2.0, 4.0)) * self.rng.random())
        self._lose_shard(shard, math.inf)
        self._demand("the run ends without a shard", self._is_over)
        self._find_shard(shard)

    def _is_over(self) -> bool:
        core = self._syncer_core()
        return core is not None and core.stage is Stage.FINISHED

    def _demand(self, what: str, done: Callable[[], bool], excused: Callable[[], bool] | None = None) -> None:
        end = self.engine.now + HEALED_PATIENCE_S
        self.engine.run_until(end, done)
        if not done() and not (excused is not None and excused()):
            stuck = self._stuck()
            raise Violation("liveness", f"{what}: not within {HEALED_PATIENCE_S:g} s; {stuck[1]}", None, stuck[0])

    def _rounds_complete(self) -> bool:
        core = self._syncer_core()
        if core is not None and core.stage is not Stage.RUNNING:
            return True
        return self._versions_reached() and all(
            proc.core.mode is Mode.TRAINING for i, proc in self.learners.items() if i not in self.gone
        )

    def _lacks_quorum(self) -> bool:
        """Whoever joins wants every fragment, and waits for a shard that is away."""
        core = self._syncer_core()
        return core is not None and len(core.live) < core.config.quorum

    def _versions_reached(self) -> bool:
        core = self._syncer_core()
        if core is None:
            return False
        fragments = core.fragments
        return core.stage is not Stage.RUNNING or all(fragments[p].version >= v for p, v in self._target.items())

    def _dead_settled(self) -> bool:
        """Nobody who died for good holds samples, nor has an open account."""
        core = self._syncer_core()
        if core is None:
            return False
        if core.stage is not Stage.RUNNING:
            return True
        holding = {key[0] for key in core.state.leases.holders} | set(core.ledger.accounts)
        return not holding & self.died

    def _drained_left(self) -> bool:
        core = self._syncer_core()
        if core is None:
            return False
        return core.stage is not Stage.RUNNING or all(
            not m.drained_by or m.standing is Standing.AWAY for m in core.members.values()
        )

    def _all_stopped(self) -> bool:
        core = self._syncer_core()
        return (
            core is not None
            and core.stage is Stage.FINISHED
            and all(proc.core.mode is Mode.STOPPED for i, proc in self.learners.items() if i not in self.gone)
        )

    def _stuck(self) -> tuple[tuple[str, int] | None, str]:
        core = self._syncer_core()
        if core is None:
            return None, "the syncer does not run"
        for i, proc in self.learners.items():
            if i not in self.gone and proc.core.mode not in (Mode.TRAINING, Mode.STOPPED):
                return ("learner", i), f"learner {i} is {proc.core.mode.value}, link {proc.core.link.value}"
        for f in core.fragments.values():
            if core.stage is Stage.FINISHING and not f.final:
                return ("fragment", f.id), f"fragment {f.id} is {f.phase.value}, not final: {core.explain(f)}"
        for p, f in core.fragments.items():
            if core.stage is Stage.RUNNING and f.version < self._target.get(p, 0):
                return ("fragment", p), f"fragment {p} is {f.phase.value} at version {f.version}: {core.explain(f)}"
        if not self._dead_settled():
            return None, f"some of {sorted(self.died)}, who died for good, hold samples or an open account"
        for i, proc in self.learners.items():
            if i not in self.gone and proc.core.mode is not Mode.STOPPED:
                return ("learner", i), f"learner {i} is {proc.core.mode.value}, link {proc.core.link.value}"
        return None, f"the run is {core.stage.value}"

    def _heal(self) -> None:
        self.healed = True
        self.cut_up.clear()
        self.cut_down.clear()
        self.cut_bulk.clear()
        self.disk_bad_until = self.disk_slow_until = self.engine.now
        self.merge_bad = False
        self.poison.clear()
        now = self.engine.now
        for shard in self.shards_away:
            self._find_shard(shard)
        for proc in ([self.syncer] if self.syncer is not None else []) + self.processes:
            proc.paused_until = min(proc.paused_until, now)
            proc.slow = 1.0
        if self.syncer is None:
            self.engine.at(now + self.rng.random(), self._start_syncer)
        if "pause" in self.disk.wishes and not self._control("resume"):
            self.disk.wishes["pause"] = ControlRequested("resume", None, "the operator")
        for learner in self.plan.starts_s:
            self._revive(learner)
        for learner in list(self.learners):
            self._revive(learner)
        self._aim()

    def _aim(self) -> None:
        """From here on every fragment has to be merged twice."""
        self._target = {p: self.disk.version(p) + 2 for p in self.config.fragment_ids()}

    def _revive(self, learner: LearnerId) -> None:
        proc = self.learners.get(learner)
        if learner in self.gone:
            return
        if proc is None or not proc.alive:
            self.engine.at(self.engine.now + self.rng.random(), self._start_if_down, learner)

    def _ask_finish(self) -> None:
        if self.syncer is not None:
            if "pause" in self.disk.wishes:
                self.disk.wishes["pause"] = ControlRequested("resume", None, "the end")
            self._run(self.syncer, FinishRequested())

    # ---------------------------------------------------------------------------------------------------- operators

    def _control(self, what: ControlWhat, value: float | None = None) -> bool:
        """Durable first, then the core is told; a syncer that starts later is told again."""
        now = self.engine.now
        if self.syncer is None or max(self.disk_bad_until, self.syncer.paused_until) > now:
            return False
        event = ControlRequested(what, value, "the operator")
        if what != "drain":
            self.disk.wishes["pause" if what == "resume" else what] = event
        self._run(self.syncer, event)
        return True

    def _fault_pause_run(self, fault: Fault) -> bool:
        if not self._control("pause"):
            return False
        self.engine.at(self.engine.now + fault.lasts_s, self._resume_run)
        return True

    def _resume_run(self) -> None:
        wish = self.disk.wishes.get("pause")
        if not self.healed and wish is not None and wish.what == "pause" and not self._control("resume"):
            self.engine.at(self.engine.now + 1.0, self._resume_run)  # nobody takes the wish yet

    def _fault_drain(self, fault: Fault) -> bool:
        core = self._syncer_core()
        if core is None or fault.learner not in core.members or self._running(fault.learner) is None:
            return False
        return self._control("drain", fault.learner)

    def _fault_quorum(self, fault: Fault) -> bool:
        return self._control("quorum", int(fault.size))

    def _fault_grace(self, fault: Fault) -> bool:
        return self._control("grace", fault.size)

    # ---------------------------------------------------------------------------------------------------- faults

    def _inject(self, fault: Fault) -> None:
        if _FAULTS[fault.kind](self, fault):
            self.faults_fired[fault.kind] += 1

    def _fault_kill_learner(self, fault: Fault) -> bool:
        proc = self._running(fault.learner)
        if proc is None:
            return False
        self._kill_learner(proc)
        self.engine.at(self.engine.now + fault.lasts_s, self._start_if_down, fault.learner)
        return True

    def _fault_pause_learner(self, fault: Fault) -> bool:
        proc = self._running(fault.learner)
        if proc is None:
            return False
        proc.paused_until = max(proc.paused_until, self.engine.now + fault.lasts_s)
        return True

    def _fault_second_start(self, fault: Fault) -> bool:
        """The same learner is started elsewhere while the old process goes on, unaware."""
        if self._running(fault.learner) is None:
            return False
        self._start_learner(fault.learner)
        self.doubled.add(fault.learner)
        return True

    def _fault_reset(self, fault: Fault) -> bool:
        proc = self._running(fault.learner)
        if proc is None or proc.conn is None or not proc.conn.open:
            return False
        self._close(proc.conn, tell_learner=True, tell_syncer=True, why="connection reset by peer")
        return True

    def _fault_cut_both(self, fault: Fault) -> bool:
        return self._fault_cut_up(fault) and self._fault_cut_down(fault)

    def _fault_cut_up(self, fault: Fault) -> bool:
        self.cut_up[fault.learner] = max(self.cut_up.get(fault.learner, 0.0), self.engine.now + fault.lasts_s)
        return True

    def _fault_cut_down(self, fault: Fault) -> bool:
        self.cut_down[fault.learner] = max(self.cut_down.get(fault.learner, 0.0), self.engine.now + fault.lasts_s)
        return True

    def _fault_cut_bulk(self, fault: Fault) -> bool:
        """The connection for fragments hangs while control messages pass: alive, and yet nothing comes of it."""
        self.cut_bulk[fault.learner] = max(self.cut_bulk.get(fault.learner, 0.0), self.engine.now + fault.lasts_s)
        return True

    def _fault_kill_syncer(self, fault: Fault) -> bool:
        proc = self.syncer
        if proc is None:
            return False
        self.syncer = None
        self._end_syncer(proc)
        # What was being written has reached the disk or not: between durable and published is one of these moments.
        for record in self._writing.values():
            if self.disk_bad_until <= self.engine.now and self.rng.random() < 0.5:
                self.disk.write(record)
        self._writing.clear()
        self.engine.at(self.engine.now + fault.lasts_s, self._start_syncer)
        return True

    def _fault_second_syncer(self, fault: Fault) -> bool:
        """A standby takes the store over while the old syncer lives on with the learners that are connected to it."""
        if self.syncer is None or self.shards_away:  # it starts from what all shards hold
            return False
        # Whoever writes nothing finds out by looking: a driver reads the store's epoch every few seconds.
        old = self.syncer
        self.old_syncers.append(old)
        self.syncer = None
        self._start_syncer()
        self.engine.at(self.engine.now + 10 * self.rng.random(), self._deliver, old, StoreFenced(self.disk.epoch))
        return True

    def _fault_stranger(self, fault: Fault) -> bool:
        """Somebody who does not belong here says hello."""
        if self.syncer is None:
            return False
        learner = len(self.plan.starts_s) + 7
        hello = Hello(self.config.run_id, self.config.fingerprint, (-1,) * len(self.config.fragment_ids()), 0, 0, False)
        if fault.size > 5:
            hello = structs.replace(hello, fingerprint=("embedding 8x8 f32", "head 9x9 f32"))
        elif fault.lasts_s > 1:
            hello = structs.replace(hello, run_id="another")
        else:
            learner = -3
        self._run(self.syncer, MessageArrived(Envelope(learner, 1, 1, 0, 0, 0, 0, hello)))
        return True

    def _fault_pause_syncer(self, fault: Fault) -> bool:
        if self.syncer is None:
            return False
        self.syncer.paused_until = max(self.syncer.paused_until, self.engine.now + fault.lasts_s)
        return True

    def _fault_fail_disk(self, fault: Fault) -> bool:
        self.disk_bad_until = max(self.disk_bad_until, self.engine.now + fault.lasts_s)
        return True

    def _fault_slow_disk(self, fault: Fault) -> bool:
        self.disk_slow_until = max(self.disk_slow_until, self.engine.now + fault.lasts_s)
        return True

    def _fault_jump_clock(self, fault: Fault) -> bool:
        proc = self.syncer if fault.lasts_s < 1.0 else self._running(fault.learner)
        if proc is None:
            return False
        proc.clock_s += fault.size
        proc.stepping_since -= fault.size  # a learner measures its steps with the clock that jumped
        proc.timer_at = None
        self._arm(proc)
        return True

    def _fault_poison(self, fault: Fault) -> bool:
        self.poison[fault.learner] += int(fault.size)
        return True

    def _fault_join(self, fault: Fault) -> bool:
        if fault.learner in self.learners:
            return False
        self._start_learner(fault.learner)
        return True

    def _fault_leave(self, fault: Fault) -> bool:
        proc = self._running(fault.learner)
        if proc is None:
            return False
        self.gone.add(fault.learner)
        self._run(proc, LeaveWanted("the operator said so"))
        self._kill_learner(proc)
        if fault.size > 5:
            self.engine.at(self.engine.now + fault.lasts_s, self._come_back, fault.learner)
        return True

    def _fault_notice(self, fault: Fault) -> bool:
        """Its machine is taken away, and it is told so many seconds before. Perhaps it is given another one."""
        proc = self._running(fault.learner)
        if proc is None or proc.is_noticed or proc.core.mode is not Mode.TRAINING:
            return False
        proc.is_noticed = True
        if proc.stands:
            self._heed_notice(proc)
        self.engine.at(self.engine.now + fault.lasts_s, self._end_notice, proc, fault.size > 5)
        return True

    def _end_notice(self, proc: Process, comes_back: bool) -> None:
        learner = proc.actor.learner
        if proc.alive:
            if proc.core.mode is not Mode.STOPPED:
                self._run(proc, LeaveWanted("the notice is over"))
            self._kill_learner(proc)
            if self.learners.get(learner) is proc:
                self.gone.add(learner)
        if comes_back and learner in self.gone and self.learners.get(learner) is proc:
            self._come_back(learner)

    def _fault_die(self, fault: Fault) -> bool:
        """For good: with a reset link, or with its whole host, which tells nobody."""
        proc = self._running(fault.learner)
        if proc is None or fault.learner in self.doubled:  # an older process of it may live on
            return False
        if fault.size > 5:
            self._fault_cut_both(replace(fault, lasts_s=self.plan.faulty_s))
        self.gone.add(fault.learner)
        self.died.add(fault.learner)
        self._kill_learner(proc)
        return True

    def _come_back(self, learner: LearnerId) -> None:
        self.gone.discard(learner)
        self._start_if_down(learner)

    def _fault_snapshot(self, fault: Fault) -> bool:
        if self.syncer is None:
            return False
        self._deliver(self.syncer, SnapshotRequested())
        return True

    def _fragments_of(self, shard: int) -> tuple[FragmentId, ...]:
        return tuple(p for p in self.config.fragment_ids() if self._shard_of(p) == shard)

    def _lose_shard(self, shard: int, until: float) -> None:
        """What it was writing has reached its disk or not, and nobody hears of it."""
        self.shards_away[shard] = until
        self.shard_starts[shard] += 1
        for serial, record in list(self._writing.items()):
            if self._shard_of_record(record) == shard:
                del self._writing[serial]
                assert isinstance(record, VersionRecord)
                current = record.round.epoch == self.disk.epoch  # an older syncer is fenced
                if current and self.disk_bad_until <= self.engine.now and self.rng.random() < 0.5:
                    self.disk.write(record)
        self.shards_untold.add(shard)
        self._tell_lost(shard)
        if until < math.inf:
            self.engine.at(until, self._return_shard, shard)

    def _tell_lost(self, shard: int) -> None:
        syncer = self.syncer
        if shard not in self.shards_untold:
            return
        if syncer is not None and syncer.paused_until > self.engine.now:
            self.engine.at(syncer.paused_until, self._tell_lost, shard)
            return
        self.shards_untold.discard(shard)
        if syncer is not None:
            self._run(syncer, ShardLost(self._fragments_of(shard), "connection reset by peer"))

    def _return_shard(self, shard: int) -> None:
        """A syncer that stands still takes nobody back: until then it may still ask what the old process should do."""
        now = self.engine.now
        if self.shards_away.get(shard, now + 1.0) > now:
            return
        syncer = self.syncer
        if syncer is not None and syncer.paused_until > now:
            self.engine.at(syncer.paused_until, self._return_shard, shard)
            return
        self._tell_lost(shard)
        del self.shards_away[shard]
        if syncer is not None:
            ids = self._fragments_of(shard)
            if syncer.core.manifest is not None:
                self.disk.go_back(syncer.core.manifest, self.config.fragment_ids())
            self._run(syncer, ShardBack(tuple((p, self.disk.version(p)) for p in ids)))

    def _find_shard(self, shard: int) -> None:
        self.shards_away[shard] = self.engine.now
        self.engine.at(self.engine.now, self._return_shard, shard)

    def _fault_lose_shard(self, fault: Fault) -> bool:
        if self.syncer is None or fault.learner in self.shards_away:
            return False
        self._lose_shard(fault.learner, self.engine.now + fault.lasts_s)
        return True

    def _fault_fail_merge(self, fault: Fault) -> bool:
        self.merge_bad = True
        return True

    def _fault_slow_down(self, fault: Fault) -> bool:
        proc = self._running(fault.learner)
        if proc is None:
            return False
        proc.slow = fault.size
        return True


_FAULTS: dict[str, Callable[[World, Fault], bool]] = {
    "kill learner": World._fault_kill_learner,
    "pause learner": World._fault_pause_learner,
    "second start": World._fault_second_start,
    "reset link": World._fault_reset,
    "cut both ways": World._fault_cut_both,
    "cut upwards": World._fault_cut_up,
    "cut downwards": World._fault_cut_down,
    "cut bulk": World._fault_cut_bulk,
    "kill syncer": World._fault_kill_syncer,
    "second syncer": World._fault_second_syncer,
    "pause syncer": World._fault_pause_syncer,
    "fail disk": World._fault_fail_disk,
    "slow disk": World._fault_slow_disk,
    "jump clock": World._fault_jump_clock,
    "poison": World._fault_poison,
    "join": World._fault_join,
    "leave": World._fault_leave,
    "stranger": World._fault_stranger,
    "snapshot": World._fault_snapshot,
    "fail merge": World._fault_fail_merge,
    "slow down": World._fault_slow_down,
    "die": World._fault_die,
    "pause run": World._fault_pause_run,
    "drain": World._fault_drain,
    "quorum": World._fault_quorum,
    "grace": World._fault_grace,
    "lose shard": World._fault_lose_shard,
    "notice": World._fault_notice,
}
