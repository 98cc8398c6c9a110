"""Joining a run: waits, timeouts and errors."""

from __future__ import annotations

import json
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from atoll.errors import JoinTimeoutError, LearnerRefusedError, SyncerUnreachableError
from atoll.learner.api import Learner
from tests.chaos.relays import relay_to
from tests.learner.in_process import learner_of, train
from tests.learner.runs import LIMIT_S, Child, LearnerSpec, Run, config
from tests.learner.small_models import values, work

pytestmark = pytest.mark.usefixtures("no_leaked_threads")


def test_join_fails_after_join_timeout_without_a_syncer(caplog):
    job = work()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        free = listening.getsockname()[1]
    learner = Learner(job.model, job.optimizer, f"127.0.0.1:{free}", join_timeout_s=0.7)
    with caplog.at_level(logging.WARNING), pytest.raises(SyncerUnreachableError, match=f"127.0.0.1:{free}"), learner:
        pass
    assert "cannot reach syncer at" in caplog.text


def test_join_timeout_holds_for_a_peer_that_never_replies():
    job = work()
    with socket.create_server(("127.0.0.1", 0)) as listening:  # accepts connections and never replies
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(SyncerUnreachableError), Learner(job.model, job.optimizer, address, join_timeout_s=0.7):
            pass


def test_learner_reconnects_when_the_connection_stalls_during_the_join(tmp_path):
    """The connection stalls between the reply with the number and the hello. The join timeout covers both."""
    job = work()
    with Run(tmp_path) as run, relay_to(run.address) as relay:
        learner = Learner(job.model, job.optimizer, relay.address, learner=1, join_timeout_s=1.5)
        request_number = learner._background.request_number

        def request_number_and_stall(*args: Any) -> tuple[int, int]:
            number = request_number(*args)
            relay.cut()
            return number

        learner._background.request_number = request_number_and_stall  # type: ignore[method-assign, assignment]
        with pytest.raises(JoinTimeoutError, match="could not join within join_timeout_s"), learner:
            pass
        assert relay.counts().connections > 0


def test_learner_waits_for_a_syncer_that_is_not_started_yet(tmp_path, caplog):
    job = work()
    with Run(tmp_path) as run:
        run.syncer.kill()
        has_warned = threading.Event()

        class WarningHandler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                has_warned.set()

        log = logging.getLogger("test.waits")
        log.addHandler(WarningHandler(logging.WARNING))
        learner = learner_of(run, job, 1, log=log)

        def island() -> bool:
            with learner:
                train(learner, job)
                return learner.finished

        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(island)
            assert has_warned.wait(LIMIT_S), "the learner did not log that it waits"
            run.start_syncer()
            assert ended.result(LIMIT_S)


def test_two_learners_upload_the_initial_model_concurrently(tmp_path):
    """The model is large, so that the others are still uploading when the first upload is complete."""
    with Run(tmp_path, config(budget_merges=3)) as run:
        specs = [LearnerSpec(number, "wide") for number in (1, 2, 3)]
        learners = [run.start(spec) for spec in specs]
        for learner in learners:
            learner.expect("joined")
        assert len(run.log_lines(run.syncer, "created the run: ")) == 1
        run.go(*learners)
        published = run.finish(*learners)
        run.assert_same(published, 1, 2, 3)
        run.assert_clean()


def test_a_learner_without_a_number_gets_the_next_free_one(tmp_path):
    with Run(tmp_path) as run:
        run.joined(1, 3)
        job = work()
        with learner_of(run, job, None) as learner:
            assert (learner.id, learner.incarnation) == (2, 1)


def test_number_assigned_by_a_killed_syncer_is_not_reused(tmp_path):
    """Interleaving:

    1. A learner gets incarnation 1 and opens its tape.
    2. The learner and the syncer are killed before the syncer has made the admission durable.
    3. The restarted syncer assigns incarnation 1 again.
    """
    with Run(tmp_path, config(budget_merges=3)) as run:
        assert json.loads(run.request("POST", "/v1/join", b'{"learner": 1}')[1])["incarnation"] == 1
        (tmp_path / "tapes").mkdir()
        (tmp_path / "tapes" / "learner-1-i1.tape").touch()
        run.syncer.kill()
        run.start_syncer()
        one = run.start(1)
        assert one.expect("joined")["incarnation"] == 2
        one.command("go")
        run.assert_same(run.finish(one), 1)


def test_tapes_of_another_run_in_the_directory_raise_an_error(tmp_path):
    (tmp_path / "tapes").mkdir()
    for incarnation in range(1, 20):
        (tmp_path / "tapes" / f"learner-1-i{incarnation}.tape").touch()
    with Run(tmp_path) as run:
        job = work()
        with pytest.raises(LearnerRefusedError, match="another run directory"), learner_of(run, job, 1):
            pass


def test_learner_that_joins_after_the_end_gets_the_final_model(tmp_path):
    with Run(tmp_path) as run:
        learners = run.joined(1)
        run.go(*learners)
        published = run.finish(*learners)
        run.start_syncer()
        for number in (1, 2):  # a known number, and an unknown one
            job = work("plain", seed=7)
            with learner_of(run, job, number) as learner:
                assert learner.finished
                assert train(learner, job) == 0
            for name, value in values(job.model).items():
                assert torch.equal(value, published[name])
        assert run.status()["merges"] >= 12


def test_learner_number_started_twice_while_joining_leaves_the_newer_process(tmp_path):
    """The newer process joins when the older one has its number and has not sent its hello."""
    job = work()
    with Run(tmp_path) as run:
        older = learner_of(run, job, 1)
        request_number = older._background.request_number
        newer: list[Child] = []

        def request_number_and_start_another(*args: Any) -> tuple[int, int]:
            number = request_number(*args)
            newer.append(run.start(1))
            assert newer[0].expect("joined")["incarnation"] == number[1] + 1
            return number

        older._background.request_number = request_number_and_start_another  # type: ignore[method-assign, assignment]
        with pytest.raises(LearnerRefusedError, match="incarnation 1 was replaced by 2"), older:
            pass
        run.go(*newer)
        run.finish(*newer)
