"""Every kind of hostile peer against a syncer with default limits, while honest learners train.

All tests use one run with keys and a token. During each attack, contributions of honest learners are merged, and the
connections and memory of the syncer stay within its limits. `benchmarks/bench_hostile.py` is the long form.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from atoll.transport.listener import MAX_PENDING
from benchmarks.hostile import ATTACKS, DISCONNECTED, AttackProcess, AttackTarget
from tests.learner.runs import LearnerSpec, Run, endless, processes
from tests.syncer.raw_learner import plan_of
from tests.transport.key_rings import KeyRing
from tests.transport.recorder import Recorder

TOKEN = "correct horse battery staple"
HALF_OPEN = 4000
SPARE_FILES = 64
"""Open files of honest learners and of the syncer itself, without those of hostile clients."""

SILENT_MIB = 24.0
SPEAKING_MIB = 0.5 * MAX_PENDING
"""A TLS connection has buffers of a third of a MiB. A connection that has sent nothing has none."""

CONNECTIONS = {"wild values": 2, "slow-loris": MAX_PENDING + 44, "oversize": 60}
REFUSED = {
    "no token": {"token", "no-key"},
    "wrong key": {"authority"},
    "slow-loris": {"unfinished"},
    "oversize": {"no-key", "size"},
    "random bytes": {"handshake", "plain-text"},
    "wild values": set(),  # the learner has a valid key: it is quarantined
    "replayed session": {"handshake"},
    "another's identity": {"identity"},
}


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> tuple[KeyRing, KeyRing]:
    """Return the keys of the run, and keys of another authority."""
    ring = KeyRing(tmp_path_factory.mktemp("keys") / "keys")
    ring.authority.add("bad", (9,))
    return ring, KeyRing(tmp_path_factory.mktemp("others") / "keys")


class Attacked(NamedTuple):
    run: Run
    target: AttackTarget


def make_target(run: Run, rings: tuple[KeyRing, KeyRing], records: tuple[bytes, ...] = ()) -> AttackTarget:
    ring, other = rings
    known = ring["authority.pem"], ring["bad"], 9, 1, other["one"]
    return AttackTarget(run.address, TOKEN, run.settings, plan_of(run), *known, records)


@pytest.fixture(scope="module")
def attacked(rings: tuple[KeyRing, KeyRing], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """Start a run in which learner 1 trains. Learner 2 has left, and its traffic was recorded."""
    ring, settings = rings[0], endless(fragments=2, every_steps=2)
    with Run(tmp_path_factory.mktemp("run"), settings, token=TOKEN, keys=ring.syncer) as run:
        with Recorder(run.address) as recorder:
            recorded = run.start(spec(ring, "two", 2), recorder.address)
            recorded.expect("joined")
            recorded.command("train", 30)
            recorded.expect("trained")
            recorded.command("break")
            recorded.expect("ended")
            assert recorded.ended() == 0
            records = tuple(bytes(record) for record in recorder.sent if record)
        # Its steps are longer than those of the hostile learner, whose contributions would otherwise miss the merge.
        (honest,) = run.joined(replace(spec(ring, "one", 1), pace_s=0.05))
        run.go(honest)
        run.until(run.merges(run.status()["merges"] + 2), "the run trains")
        yield Attacked(run, make_target(run, rings, records))
        run.end()
        run.assert_same(run.finish(honest), 1)
        assert run.log_lines(honest, "connection closed: ") == []
        assert run.log_lines(run.syncer, " ERROR ") == []
        assert run.log_lines(run.syncer, "never retrieved") == []
        run.verdict()


def spec(ring: KeyRing, name: str, number: int) -> LearnerSpec:
    return LearnerSpec(number, pace_s=0.005, keys=ring[name], token=TOKEN)


# --------------------------------------------------------------------------------------------------------------------
# Resources of unauthenticated connections


class SyncerUsage(NamedTuple):
    files: int
    mib: float


def measure_usage(run: Run) -> SyncerUsage:
    """Measure open files and memory of the syncer process."""
    pages = int(Path(f"/proc/{run.syncer.pid}/statm").read_text().split()[1])
    return SyncerUsage(len(os.listdir(f"/proc/{run.syncer.pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE") / 2**20)


def exceeded_limits(before: SyncerUsage, after: SyncerUsage, max_mib: float) -> Iterator[str]:
    if after.files > before.files + MAX_PENDING + SPARE_FILES:
        yield f"{after.files} open files, {before.files} before"
    if after.mib > before.mib + max_mib:
        yield f"{after.mib:.0f} MiB, {before.mib:.0f} before"


def refused_count(run: Run, codes: set[str]) -> int:
    counts: dict[str, int] = run.status()["refused"]
    return sum(counts.get(code, 0) for code in codes)


def start_attack(target: AttackTarget, name: str, per_s: float, concurrent: int) -> AttackProcess:
    return AttackProcess(processes(), target, name, per_s, concurrent)


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "half-open"])
def test_hostile_clients_do_not_affect_learners(attacked, name):
    run, target = attacked
    before, refused, merges = measure_usage(run), refused_count(run, REFUSED[name]), run.status()["merges"]
    count, lines = CONNECTIONS.get(name, 30), len(run.log_lines(run.syncer, "was refused"))
    left = MAX_PENDING if name == "slow-loris" else 0  # connections within the limit stay open for half a minute
    with start_attack(target, name, 400.0, 1 if name == "wild values" else count) as clients:
        run.until(lambda _: clients.tally().ends.total() >= count - left, "each client has its result")
        assert list(exceeded_limits(before, measure_usage(run), SPEAKING_MIB)) == []
        run.until(run.merges(merges + 2), "the run continues")
        tally = clients.tally()
    assert set(tally.ends) <= ATTACKS[name].expected_outcomes | {DISCONNECTED}, tally.ends
    assert ATTACKS[name].expected_outcomes <= set(tally.ends), tally.ends
    assert not REFUSED[name] or refused_count(run, REFUSED[name]) > refused
    assert len(run.log_lines(run.syncer, "was refused")) - lines < 12, "the log is filled by clients"
    one = run.until(run.learner(1), "learner 1 is shown")
    assert (one["standing"], one["link"], one["incarnation"]) == ("live", "up", 1)
    if name == "wild values":
        assert len(run.log_lines(run.syncer, "learner 9: quarantined")) >= count


# --------------------------------------------------------------------------------------------------------------------
# Thousands of half-open connections


def half_open(run: Run, target: AttackTarget, meanwhile: Callable[[], None]) -> SyncerUsage:
    """Measure the syncer while thousands of silent connections open and new ones follow."""
    with start_attack(target, "half-open", 3000.0, HALF_OPEN) as clients:
        run.until(lambda _: clients.tally().begun >= HALF_OPEN, "thousands are open")
        found = measure_usage(run)
        meanwhile()
        tally = clients.tally()
    assert set(tally.ends) <= ATTACKS["half-open"].expected_outcomes | {DISCONNECTED}, tally.ends
    return found


@pytest.mark.long
def test_thousands_of_half_open_connections_do_not_block_learners(attacked, rings):
    run, target = attacked
    before, refused = measure_usage(run), refused_count(run, {"unfinished"})

    def meanwhile() -> None:
        run.until(run.merges(run.status()["merges"] + 2), "the run continues")
        (new,) = run.joined(spec(rings[0], "two", 2))
        run.go(new)
        run.until(run.learner(2, standing="live", link="up"), "a new learner trains with the others")
        new.command("break")
        new.expect("ended")
        assert new.ended() == 0

    found = half_open(run, target, meanwhile)
    assert list(exceeded_limits(before, found, SILENT_MIB)) == []
    assert refused_count(run, {"unfinished"}) - refused >= HALF_OPEN - MAX_PENDING


@pytest.mark.long
def test_without_the_limit_all_half_open_connections_stay_open(rings, tmp_path):
    with Run(tmp_path, endless(), token=TOKEN, keys=rings[0].syncer, planted="unlimited-connections") as run:
        before = measure_usage(run)
        found = half_open(run, make_target(run, rings), lambda: None)
        assert any("open files" in each for each in exceeded_limits(before, found, SILENT_MIB))
