"""Every kind of hostile peer at a port with the limits that are shipped, while honest learners train.

One run with keys and a token for all of it. Whatever comes, honest learners are merged, nobody else notices, and the
syncer holds no more connections and memory than it has said. `benchmarks/bench_hostile.py` is the long form.
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
"""Of the honest and of the syncer's own, besides those of clients."""

SILENT_MIB = 24.0
SPEAKING_MIB = 0.5 * MAX_PENDING
"""A connection in TLS has buffers of a third of a MiB, one that waits for its first byte has none."""

VISITS = {"wild values": 2, "slow-loris": MAX_PENDING + 44, "oversize": 60}
REFUSED = {
    "no token": {"token", "no-key"},
    "wrong key": {"authority"},
    "slow-loris": {"unfinished"},
    "oversize": {"no-key", "size"},
    "random bytes": {"handshake", "plain-text"},
    "wild values": set(),  # of a learner that is known: it is quarantined
    "replayed session": {"handshake"},
    "another's identity": {"identity"},
}


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> tuple[KeyRing, KeyRing]:
    """Keys of the run, and of another authority."""
    ring = KeyRing(tmp_path_factory.mktemp("keys") / "keys")
    ring.authority.add("bad", (9,))
    return ring, KeyRing(tmp_path_factory.mktemp("others") / "keys")


class Attacked(NamedTuple):
    run: Run
    prey: AttackTarget


def prey_of(run: Run, rings: tuple[KeyRing, KeyRing], records: tuple[bytes, ...] = ()) -> AttackTarget:
    ring, other = rings
    known = ring["authority.pem"], ring["bad"], 9, 1, other["one"]
    return AttackTarget(run.address, TOKEN, run.settings, plan_of(run), *known, records)


@pytest.fixture(scope="module")
def shipped(rings: tuple[KeyRing, KeyRing], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """Learner 1 trains. Learner 2 has left, and its traffic was recorded."""
    ring, settings = rings[0], endless(fragments=2, every_steps=2)
    with Run(tmp_path_factory.mktemp("run"), settings, token=TOKEN, keys=ring.syncer) as run:
        with Recorder(run.address) as recorder:
            brief = run.start(spec(ring, "two", 2), recorder.address)
            brief.expect("joined")
            brief.command("train", 30)
            brief.expect("trained")
            brief.command("break")
            brief.expect("ended")
            assert brief.ended() == 0
            records = tuple(bytes(record) for record in recorder.sent if record)
        # Its steps are longer than those of the hostile learner, whose contributions would come too late otherwise.
        (good,) = run.joined(replace(spec(ring, "one", 1), pace_s=0.05))
        run.go(good)
        run.until(run.merges(run.status()["merges"] + 2), "the run is under way")
        yield Attacked(run, prey_of(run, rings, records))
        run.end()
        run.assert_same(run.finish(good), 1)
        assert run.log_lines(good, "connection closed: ") == []
        assert run.log_lines(run.syncer, " ERROR ") == []
        assert run.log_lines(run.syncer, "never retrieved") == []
        run.verdict()


def spec(ring: KeyRing, name: str, number: int) -> LearnerSpec:
    return LearnerSpec(number, pace_s=0.005, keys=ring[name], token=TOKEN)


# --------------------------------------------------------------------------------------------------------------------
# Resources of unauthenticated connections


class Held(NamedTuple):
    files: int
    mib: float


def held(run: Run) -> Held:
    """By the syncer's process."""
    pages = int(Path(f"/proc/{run.syncer.pid}/statm").read_text().split()[1])
    return Held(len(os.listdir(f"/proc/{run.syncer.pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE") / 2**20)


def unbounded(before: Held, after: Held, most_mib: float) -> Iterator[str]:
    if after.files > before.files + MAX_PENDING + SPARE_FILES:
        yield f"{after.files} open files, {before.files} before"
    if after.mib > before.mib + most_mib:
        yield f"{after.mib:.0f} MiB, {before.mib:.0f} before"


def refused_incarnation(run: Run, codes: set[str]) -> int:
    counts: dict[str, int] = run.status()["refused"]
    return sum(counts.get(code, 0) for code in codes)


def storm(prey: AttackTarget, name: str, per_s: float, held: int) -> AttackProcess:
    return AttackProcess(processes(), prey, name, per_s, held)


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "half-open"])
def test_hostile_clients_do_not_affect_learners(shipped, name):
    run, prey = shipped
    before, refused, merges = held(run), refused_incarnation(run, REFUSED[name]), run.status()["merges"]
    count, lines = VISITS.get(name, 30), len(run.log_lines(run.syncer, "was refused"))
    left = MAX_PENDING if name == "slow-loris" else 0  # those for which there is room stay for half a minute
    with storm(prey, name, 400.0, 1 if name == "wild values" else count) as clients:
        run.until(lambda _: clients.tally().ends.total() >= count - left, "each of them has had its answer")
        assert list(unbounded(before, held(run), SPEAKING_MIB)) == []
        run.until(run.merges(merges + 2), "the run goes on")
        tally = clients.tally()
    assert set(tally.ends) <= ATTACKS[name].expected_outcomes | {DISCONNECTED}, tally.ends
    assert ATTACKS[name].expected_outcomes <= set(tally.ends), tally.ends
    assert not REFUSED[name] or refused_incarnation(run, REFUSED[name]) > refused
    assert len(run.log_lines(run.syncer, "was refused")) - lines < 12, "the log is filled by clients"
    one = run.until(run.learner(1), "learner 1 is shown")
    assert (one["standing"], one["link"], one["incarnation"]) == ("live", "up", 1)
    if name == "wild values":
        assert len(run.log_lines(run.syncer, "learner 9: quarantined")) >= count


# --------------------------------------------------------------------------------------------------------------------
# Half-open by the thousand


def half_open(run: Run, prey: AttackTarget, meanwhile: Callable[[], None]) -> Held:
    """What the syncer holds while thousands of connections that say nothing come, and go on coming."""
    with storm(prey, "half-open", 3000.0, HALF_OPEN) as clients:
        run.until(lambda _: clients.tally().begun >= HALF_OPEN, "thousands have come")
        found = held(run)
        meanwhile()
        tally = clients.tally()
    assert set(tally.ends) <= ATTACKS["half-open"].expected_outcomes | {DISCONNECTED}, tally.ends
    return found


@pytest.mark.long
def test_thousands_of_half_open_connections_do_not_block_learners(shipped, rings):
    run, prey = shipped
    before, refused = held(run), refused_incarnation(run, {"unfinished"})

    def meanwhile() -> None:
        run.until(run.merges(run.status()["merges"] + 2), "the run goes on")
        (new,) = run.joined(spec(rings[0], "two", 2))
        run.go(new)
        run.until(run.learner(2, standing="live", link="up"), "a new learner trains with the others")
        new.command("break")
        new.expect("ended")
        assert new.ended() == 0

    found = half_open(run, prey, meanwhile)
    assert list(unbounded(before, found, SILENT_MIB)) == []
    assert refused_incarnation(run, {"unfinished"}) - refused >= HALF_OPEN - MAX_PENDING


@pytest.mark.long
def test_without_the_limit_all_half_open_connections_stay_open(rings, tmp_path):
    with Run(tmp_path, endless(), token=TOKEN, keys=rings[0].syncer, planted="endless-room") as run:
        before = held(run)
        found = half_open(run, prey_of(run, rings), lambda: None)
        assert any("open files" in each for each in unbounded(before, found, SILENT_MIB))
