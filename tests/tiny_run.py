"""A small run of real cores on a virtual clock, for tests that need real entries.

One syncer and a few learners over links with a fixed delay; processes can be killed and restarted, and their clocks
can be offset. Nothing is random, and nothing fails unless a test requests it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atoll.core.protocol import ControlRequested, FinishRequested, ShardLost, ShardReconnected, Stop
from atoll.core.syncer.state import RestoredState
from atoll.core.types import SYNCER, ControlKind, RunConfig
from atoll.sim.driver import SimDriver, SimLinks, SimProcess, SimStore, StepSimulator
from atoll.tape.files import TapeWriter, new_header, tape_path
from atoll.tape.format import Actor, Entry, Header

LINK_DELAY_S, STORE_DELAY_S, STEP_S, TOKENS_PER_STEP = 0.05, 0.01, 1.0, 100
SAMPLES_PER_STEP = 4  # in a run with leases


class TinyRun:
    """A run that `run_until` advances. Processes may be killed and started between two calls.

    `clocks_s` is the clock offset of each process by learner id.
    """

    def __init__(self, learners: int = 3, clocks_s: dict[int, float] | None = None, **settings: object) -> None:
        self.config = RunConfig(**({"fragments": 3, "every_steps": 3, "quorum": 2} | settings))  # type: ignore[arg-type]
        self.entries: list[Entry] = []  # in the order of virtual time
        self.headers: dict[Actor, Header] = {}
        self._driver = driver = SimDriver(self.config, clocks_s=clocks_s)
        ids = range(1, 10)  # more may be started later
        SimLinks(driver, LINK_DELAY_S, LINK_DELAY_S)
        SimStore(driver, STORE_DELAY_S, STORE_DELAY_S)
        StepSimulator(
            driver,
            dict.fromkeys(ids, STEP_S),
            dict.fromkeys(ids, TOKENS_PER_STEP),
            dict.fromkeys(ids, SAMPLES_PER_STEP),
        )
        driver.handlers[Stop] = self._on_stop
        driver.on_start.append(self._started)
        driver.on_entry.append(self.entries.append)
        for actor_id in range(learners + 1):
            self.start(actor_id)

    def _started(self, actor: Actor, restored: RestoredState | None) -> None:
        self.headers[actor] = new_header(actor, self.config, seed=7, restored=restored, note="tiny")

    def _on_stop(self, proc: SimProcess, effect: Stop) -> None:
        """A learner process ends when its core has stopped; it leaves no timers on its tape."""
        self._driver.engine.schedule(self._driver.engine.now, self._driver.kill, proc)

    def _process(self, actor_id: int) -> SimProcess:
        proc = self._driver.learners[actor_id] if actor_id != SYNCER else self._driver.syncer
        assert proc is not None
        return proc

    @property
    def syncer(self) -> Any:
        return self._process(SYNCER).core

    def start(self, actor_id: int) -> None:
        if actor_id == SYNCER:
            self._driver.start_syncer()
        else:
            self._driver.start_learner(actor_id)

    def kill(self, actor_id: int) -> None:
        self._driver.kill(self._process(actor_id))

    def suspend(self, actor_id: int, for_s: float) -> None:
        """Suspend a process as SIGSTOP and SIGCONT do: events wait, and the current step ends later."""
        self._process(actor_id).paused_until = self._driver.engine.now + for_s

    def finish(self) -> None:
        self._driver.deliver(self._process(SYNCER), FinishRequested())

    def request_control(self, what: ControlKind, value: float | None, requested_by: str) -> None:
        """Send an operator request."""
        self._driver.deliver(self._process(SYNCER), ControlRequested(what, value, requested_by))

    def disconnect_shard(self, *fragments: int) -> None:
        self._driver.deliver(self._process(SYNCER), ShardLost(fragments, "connection reset by peer"))

    def reconnect_shard(self, *fragments: int) -> None:
        """Reconnect the shard with the durable versions of these fragments."""
        versions = tuple((p, self._driver.disk.durable_version(p)) for p in fragments)
        self._driver.deliver(self._process(SYNCER), ShardReconnected(versions))

    def run_until(self, end: float) -> TinyRun:
        self._driver.engine.run_until(end)
        self._driver.engine.now = end
        return self

    def tapes(self) -> list[tuple[Header, list[Entry]]]:
        return [(self.headers[a], [e for e in self.entries if e.actor == a]) for a in sorted(self.headers)]

    def save(self, run: Path) -> Path:
        for header, entries in self.tapes():
            with TapeWriter(tape_path(run, header.actor), header) as writer:
                for entry in entries:
                    writer.write(entry)
        return run


def eventful_run(**settings: object) -> TinyRun:
    """Return a run with rounds, a killed and restarted learner, a killed and restarted syncer, and a regular end."""
    run = TinyRun(**settings)  # type: ignore[arg-type]
    run.run_until(12.0)
    run.kill(2)
    run.run_until(14.0)
    run.start(2)
    run.run_until(20.0)
    run.kill(SYNCER)
    run.run_until(22.0)
    run.start(SYNCER)
    run.run_until(60.0)
    run.finish()
    return run.run_until(120.0)
