"""Settings that a learner reads from environment variables."""

from __future__ import annotations

import pytest
import torch

import atoll
from tests.learner.in_process import train
from tests.learner.runs import Run, endless
from tests.learner.small_models import work


@pytest.fixture
def bare() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_script_without_arguments_joins_the_run_that_its_environment_names(tmp_path, monkeypatch):
    with Run(tmp_path, endless(), token="a secret of the test") as run:
        job = work()
        monkeypatch.setenv("ATOLL_SYNCER", run.address)
        monkeypatch.setenv("ATOLL_TOKEN", "a secret of the test")
        monkeypatch.setenv("ATOLL_LEARNER", "3")
        monkeypatch.setenv("ATOLL_RUN_DIRECTORY", str(tmp_path / "island"))
        with atoll.Learner(job.model, job.optimizer) as learner:
            assert learner.id == 3
            train(learner, job, 3)
        assert list((tmp_path / "island" / "tapes").iterdir())


def test_missing_syncer_address_raises_error_with_advice(bare, monkeypatch):
    monkeypatch.delenv("ATOLL_SYNCER", raising=False)
    with pytest.raises(ValueError, match="ATOLL_SYNCER"):
        atoll.Learner(bare[0], bare[1])


def test_invalid_learner_number_is_refused(bare, monkeypatch):
    monkeypatch.setenv("ATOLL_LEARNER", "first")
    with pytest.raises(ValueError, match=r"ATOLL_LEARNER.*'first'"):
        atoll.Learner(bare[0], bare[1], "127.0.0.1:1")


def test_empty_variable_counts_as_unset(bare, monkeypatch):
    monkeypatch.setenv("ATOLL_LEARNER", "")
    monkeypatch.setenv("ATOLL_KEYS", "")
    atoll.Learner(bare[0], bare[1], "127.0.0.1:1")


def test_join_timeout_from_the_environment_ends_the_wait(bare, monkeypatch):
    monkeypatch.setenv("ATOLL_JOIN_TIMEOUT_S", "0.3")
    with (
        pytest.raises(atoll.SyncerUnreachableError, match="cannot reach syncer at"),
        atoll.Learner(bare[0], bare[1], "127.0.0.1:1"),
    ):
        pass
    for invalid in ("soon", "0", "nan", "inf"):
        monkeypatch.setenv("ATOLL_JOIN_TIMEOUT_S", invalid)
        with pytest.raises(ValueError, match=f"ATOLL_JOIN_TIMEOUT_S is how long .* seconds; got '{invalid}'"):
            atoll.Learner(bare[0], bare[1], "127.0.0.1:1")
