"""`learner.take`: every number is leased to one learner of the run, and the tapes record all of it."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.cli.main import main
from atoll.core.ledger import SampleCursor
from atoll.core.protocol import Lease, MessageArrived, StepTaken
from atoll.learner.api import Learner
from atoll.tape.files import TapeReader, tape_path
from atoll.tape.format import Actor
from tests.learner.in_process import STEPS, learner_of
from tests.learner.runs import LIMIT_S, Run, config, endless
from tests.learner.small_models import BATCH, work

pytestmark = pytest.mark.usefixtures("no_leaked_threads")

TAKE = 4
LEASES = {"lease_samples": 3 * TAKE + 1, "leases_ahead": 3}  # a lease is no whole number of steps


def numbers_of_tape(run: Path, learner: int, incarnation: int = 1) -> list[tuple[int, ...]]:
    """Return the samples of every step, computed from the tape alone."""
    cursor = SampleCursor(LEASES["lease_samples"])
    leases: dict[int, tuple[int, int]] = {}
    found: list[tuple[int, ...]] = []
    for entry in TapeReader(tape_path(run, Actor(learner, incarnation))):
        event = entry.event
        if type(event) is MessageArrived and type(event.envelope.body) is Lease:
            body = event.envelope.body
            leases.setdefault(body.number, (body.begin, body.end))
        elif type(event) is StepTaken:
            fresh = event.new_samples
            for _ in range(event.steps):
                found.append(cursor.replayed(leases, TAKE, min(fresh, TAKE)))
                fresh -= min(fresh, TAKE)
    return found


def test_no_sample_is_leased_to_two_learners_and_the_tape_records_all(tmp_path, capsys):
    with Run(tmp_path, config(quorum=2, **LEASES)) as run:
        started = threading.Barrier(2, timeout=LIMIT_S)

        def island(seed: int) -> tuple[Learner, list[tuple[int, ...]]]:
            job, taken = work("plain", seed), []
            with learner_of(run, job, None) as learner:
                started.wait()
                for number in range(STEPS):
                    if learner.finished:
                        break
                    taken.append(learner.take(TAKE))
                    learner.step(tokens=BATCH, loss=job.step(number))
                assert learner.finished
                assert learner.take(TAKE) == ()
            return learner, taken

        with ThreadPoolExecutor(2) as pool:
            islands = list(pool.map(island, (1, 2)))
        assert run.syncer.expect("ended") is True
        run.assert_clean()
    for learner, taken in islands:
        recorded = numbers_of_tape(tmp_path, learner.id)
        assert len(recorded) > 10
        assert recorded == taken[: len(recorded)]
        stats = learner.stats()
        assert stats.samples + TAKE * stats.repeated_steps >= TAKE * len(recorded)
    samples = [{n for step in taken for n in step} for _, taken in islands]
    assert samples[0].isdisjoint(samples[1])
    for (learner, taken), numbers in zip(islands, samples, strict=True):
        if not learner.stats().repeated_steps:
            assert len(numbers) == TAKE * len(taken)
    assert main(["ledger", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("the ledger balances\n")


def test_learner_without_leases_repeats_its_last_samples_and_never_waits(tmp_path):
    with Run(tmp_path, endless(**LEASES)) as run:
        job = work("plain", 1)
        with learner_of(run, job, 1, join_timeout_s=LIMIT_S) as learner:
            learner.take(TAKE)
            learner.step(tokens=BATCH, loss=job.step(0))
            run.syncer.kill()
            taken: list[tuple[int, ...]] = []
            while learner.stats().repeated_steps < 12:  # more than one lease
                taken.append(learner.take(TAKE))
                learner.step(tokens=BATCH, loss=job.step(len(taken)))
            fresh, again = taken[:-12], taken[-12:]
            consumed = Counter(n for step in fresh for n in step)
            assert set(consumed.values()) <= {1}
            repeated = Counter(n for step in again for n in step)
            assert set(repeated) <= {n for step in fresh[-4:] for n in step}, "samples of an older lease were repeated"
            run.start_syncer()
            newest = max(consumed)
            for number in range(STEPS):
                newest = max(newest, *learner.take(TAKE))
                learner.step(tokens=BATCH, loss=job.step(number))
                if number % 100 == 0 and run.status()["leases"]["merged"] > max(consumed):
                    break
            assert newest > max(consumed), "no new samples were merged after the restart of the syncer"


def test_invalid_calls_of_take_raise_value_error(tmp_path):
    with Run(tmp_path, endless()) as run:
        job = work("plain", 1)
        learner = learner_of(run, job, 1)
        with pytest.raises(ValueError, match="enter it first"):
            learner.take(4)
        with learner, pytest.raises(ValueError, match="this run has no leases"):
            learner.take(4)
    with Run(tmp_path / "leases", endless(**LEASES)) as run:
        job = work("plain", 1)
        with learner_of(run, job, 1) as learner:
            for invalid in (0, -1, True, 1.5):
                with pytest.raises(ValueError, match="count must be a whole number of at least 1"):
                    learner.take(invalid)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="start a new run with `atoll syncer --batch 40`"):
                learner.take(40)
