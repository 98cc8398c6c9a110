"""The end of a run for disconnected learners, and the timeout of a learner without a syncer."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import atoll
from atoll.checkpoint.published_model import learners_missing_end
from atoll.reference.job_settings import JobSettings
from atoll.store.run_settings import CONFIG_FILE
from tests.chaos.relays import relay_to
from tests.learner.in_process import learner_of, train
from tests.learner.runs import Child, LearnerSpec, Run, endless
from tests.learner.small_models import values, work


@contextmanager
def stopped_at_the_end(run: Run) -> Iterator[Child]:
    """Yield a learner that was stopped (SIGSTOP) before the end of the run. Another learner has received the end."""
    with relay_to(run.address) as relay:
        (one,) = run.joined(1)
        two = run.start(2, relay.address)
        two.expect("joined")
        run.go(one, two)
        run.until(run.merges(3), "the run trains")
        two.send(signal.SIGSTOP)
        relay.reset()  # the same disconnect as after a timeout, but immediate
        run.until(run.learner(2, standing="disconnected"), "learner 2 is disconnected")
        run.end()
        assert one.expect("ended")["finished"]
        assert one.ended() == 0
        yield two


def test_stopped_learner_receives_end_of_run_when_it_continues(tmp_path):
    with Run(tmp_path, endless(), serve_end_s=3600.0) as run, stopped_at_the_end(run) as two:
        run.until(lambda _: run.log_lines(run.syncer, "did not receive its end may come back: 2;"), "the end is served")
        assert (tmp_path / "published.safetensors").exists(), "the model waits for a learner that may never return"
        two.send(signal.SIGCONT)
        run.assert_same(run.finish(two), 1, 2)
        run.assert_clean()


def test_syncer_serves_end_until_timeout_or_ctrl_c(tmp_path):
    with Run(tmp_path, endless(), serve_end_s=0.1) as run, stopped_at_the_end(run):
        assert run.syncer.expect("ended") is True
        run.serve_end_s = 3600.0
        again = run.start_syncer()
        again.send(signal.SIGINT)
        assert again.expect("ended") is True


@pytest.mark.long
def test_resumed_finished_run_serves_end_to_every_learner(tmp_path):
    settings = JobSettings()
    with Run(tmp_path, endless(), extra=settings.to_json()) as run, stopped_at_the_end(run) as two:
        settings.save(tmp_path / CONFIG_FILE)
        assert run.syncer.expect("ended") is True
        assert run.syncer.ended() == 0
        two.send(signal.SIGCONT)
        port = run.address.rpartition(":")[2]
        resume = ["syncer", "--out", str(tmp_path), "--resume", "--port", port]
        again = subprocess.run([sys.executable, "-m", "atoll", *resume], capture_output=True, text=True, timeout=300.0)
        assert again.returncode == 0, again.stderr
        assert "learners 2 have not received its end." in again.stdout
        assert two.expect("ended")["finished"]
        assert two.ended() == 0
        assert learners_missing_end(tmp_path) == [], "another --resume does not wait"


def test_disconnect_timeout_raises_and_keeps_model_and_tape(tmp_path):
    job = work()
    with Run(tmp_path, endless()) as run:
        with learner_of(run, job, 1, disconnect_timeout_s=0.2) as learner:
            train(learner, job, 10)
            run.syncer.kill()
            with pytest.raises(
                atoll.SyncerUnreachableError, match=r"since \d{4}-.* disconnect_timeout_s = 0\.2: .*--resume"
            ):
                train(learner, job, 10**9)
        job.step(0)
        assert all(bool(torch.isfinite(value).all()) for value in values(job.model).values())
        run.verdict()


def test_disconnect_timeout_applies_to_paused_learner(tmp_path):
    with Run(tmp_path, endless()) as run:
        (one,) = run.joined(LearnerSpec(1, disconnect_timeout_s=0.2))
        run.go(one)
        assert run.request("POST", "/v1/control", b'{"kind": "pause", "value": null, "requested_by": "test"}')[0] == 200
        run.until(run.learner(1, reason="paused with the run"), "learner 1 is paused")
        run.syncer.kill()
        assert one.expect("failed")[0] == "SyncerUnreachableError"


def test_invalid_disconnect_timeout_is_refused(monkeypatch):
    job = work()
    for invalid in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="disconnect_timeout_s is how long to train without a syncer"):
            atoll.Learner(job.model, job.optimizer, "127.0.0.1:1", disconnect_timeout_s=invalid)
    monkeypatch.setenv("ATOLL_DISCONNECT_TIMEOUT_S", "soon")
    with pytest.raises(ValueError, match=r"ATOLL_DISCONNECT_TIMEOUT_S is how long .*; got 'soon'"):
        atoll.Learner(job.model, job.optimizer, "127.0.0.1:1")
    monkeypatch.setenv("ATOLL_DISCONNECT_TIMEOUT_S", "inf")
    atoll.Learner(job.model, job.optimizer, "127.0.0.1:1")
