"""Optimizer state for a joining learner: what is sent, what is logged, and that a source without state trains on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from atoll.core.types import Limits
from atoll.learner.api import Learner
from tests.learner.runs import LIMIT_S, Run, endless
from tests.learner.small_models import BATCH, Work, work
from tests.syncer.test_snapshots import take_snapshot as snapshot_of
from tests.tensors.custom_optimizers import ChainedOptimizers, ScheduleFreeLike, Uncloneable, make_two_optimizers

pytestmark = pytest.mark.usefixtures("no_leaked_threads")

NEVER = Limits(initial_wait_s=20 * LIMIT_S, min_wait_s=20 * LIMIT_S, max_wait_s=20 * LIMIT_S)
"""Timeouts so long that a learner which waits for one of them does not join in time."""


class Odd(torch.optim.SGD):
    """Optimizer whose state cannot be copied after its first step."""

    def __init__(self, params: Any, odd: Callable[[], Any], key: Any = "odd") -> None:
        super().__init__(params, lr=0.01)
        self._odd, self._key = odd, key

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] |= {"even": 2, self._key: self._odd()}
        return super().step(closure)


ODD: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "out of memory": (lambda params: Odd(params, lambda: torch.zeros(()).expand(2**45)), "RuntimeError: "),
    "no clone": (
        lambda params: Odd(params, lambda: torch.ones(2).as_subclass(Uncloneable)),
        "odd of first.bias is a Uncloneable; the state of this optimizer cannot be sent to peers",
    ),
    "keys of two types": (lambda params: Odd(params, lambda: 3, key=7), "TypeError: "),
}


class Island(NamedTuple):
    """Learner in this process, with its own optimizers and log."""

    job: Work
    optimizers: list[Optimizer]
    learner: Learner
    lines: list[str]

    def step(self, number: int) -> None:
        self.learner.step(tokens=BATCH, loss=self.job.step(number))

    def warnings(self, words: str) -> list[str]:
        return [line for line in self.lines if line.startswith("WARNING") and words in line]


def island(run: Run, number: int, optimizer: Callable[[nn.Module], Any]) -> Island:
    job = work("plain", number)
    created = optimizer(job.model)
    optimizers: list[Optimizer] = created if isinstance(created, list) else [created]
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    log = logging.Logger(f"island {number}", logging.DEBUG)
    log.addHandler(Lines())
    settings: dict[str, Any] = {
        "learner": number,
        "run_directory": run.directory,
        "join_timeout_s": LIMIT_S,
        "log": log,
    }
    learner = Learner(job.model, created, run.address, run.token, **settings)
    return Island(
        job._replace(optimizer=created if isinstance(created, Optimizer) else ChainedOptimizers(*created)),
        optimizers,
        learner,
        lines,
    )


@contextmanager
def training(run: Run, *islands: Island) -> Iterator[None]:
    """Join these learners one after the other and train each in its own thread. Raise the errors of their loops."""
    done = threading.Event()

    def loop(each: Island) -> None:
        number = 0
        while not done.is_set() and not each.learner.finished:
            each.step(number)
            number += 1

    with ThreadPoolExecutor(len(islands)) as pool:
        loops = []
        try:
            for each in islands:
                each.learner.__enter__()
                loops.append(pool.submit(loop, each))
            run.until(run.merges(3), "the run is under way")
            yield
        finally:
            done.set()
            for ended, each in zip(loops, islands, strict=False):
                error = ended.exception(LIMIT_S)
                each.learner.__exit__(type(error) if error else None, error, None)
            for ended in loops:
                ended.result()


# --------------------------------------------------------------------------------------------------------------------
# Sources that cannot send their state


@pytest.mark.parametrize("name", ODD)
def test_sources_that_cannot_copy_their_state_report_it_and_continue(tmp_path, name):
    make, cause = ODD[name]
    with Run(tmp_path, endless(limits=NEVER)) as run:
        sources = [island(run, number, lambda model: make(model.parameters())) for number in (1, 2)]
        with training(run, *sources):
            three = island(run, 3, lambda model: make(model.parameters()))
            with three.learner as joined:
                assert joined.lr_scale < 1, "fresh moments start with a warm-up"
                merges = run.status()["merges"]
                run.until(run.merges(merges + 2), "the others train on")
        for source in sources:
            (line,) = source.warnings("cannot send optimizer state to learner 3: ")
            assert cause in line
        refused = [
            f"no optimizer state from learner {number}: the peer has no state to provide: {cause}" for number in (1, 2)
        ]
        assert all(any(words in line for line in three.lines) for words in refused)
        assert len(three.warnings("no optimizer state from learner")) == 1, "the second warning must be suppressed"
        (started,) = [line for line in three.lines if "training starts" in line]
        assert "fresh optimizer state" in started


def test_part_that_cannot_be_copied_does_not_raise_in_the_loop(tmp_path):
    make, cause = ODD["keys of two types"]
    with Run(tmp_path, endless()) as run:
        one = island(run, 1, lambda model: make(model.parameters()))
        with training(run, one):
            assert snapshot_of(run)["state"] == "abandoned"
            assert one.warnings(f"could not save its part: {cause}")
            steps = one.learner.stats().steps
            run.until(lambda _: one.learner.stats().steps > steps + 3, "it trains on")


# --------------------------------------------------------------------------------------------------------------------
# State that is sent, and its log lines


def test_counters_in_param_groups_are_sent_to_a_joining_learner(tmp_path):
    with Run(tmp_path, endless(limits=NEVER)) as run:
        one = island(run, 1, lambda model: ScheduleFreeLike(model.parameters()))
        with training(run, one):
            two = island(run, 2, lambda model: ScheduleFreeLike(model.parameters()))
            with two.learner as joined:
                assert joined.lr_scale == 1.0
                (group,) = two.optimizers[0].param_groups
                assert group["k"] > 0
                assert group["weight_sum"] > 0
        (started,) = [line for line in two.lines if "training starts" in line]
        assert started.endswith("optimizer state from learner 1: 4 state tensors and 4 counters")


def test_counters_in_param_groups_are_restored_from_a_part(tmp_path):
    with Run(tmp_path, endless()) as run:
        one = island(run, 1, lambda model: ScheduleFreeLike(model.parameters()))
        with training(run, one):
            number = snapshot_of(run)["snapshot"]
        restarted = island(run, 1, lambda model: ScheduleFreeLike(model.parameters()))
        with restarted.learner:
            (group,) = restarted.optimizers[0].param_groups
            assert group["k"] > 0
        (started,) = [line for line in restarted.lines if "training starts" in line]
        assert started.endswith(f"saved in snapshot {number}: 4 state tensors and 4 counters")


def test_a_part_with_no_state_of_a_wrapper_is_followed_by_a_warmup(tmp_path):
    with Run(tmp_path, endless()) as run:
        one = island(run, 1, lambda model: ChainedOptimizers(*make_two_optimizers(model)))
        with training(run, one):
            assert snapshot_of(run)["state"] == "durable"
        restarted = island(run, 1, lambda model: ChainedOptimizers(*make_two_optimizers(model)))
        with restarted.learner as joined:
            assert joined.lr_scale < 1
        assert "pass the list of optimizers" in restarted.warnings("has no optimizer state, warmup of")[0]
        assert [
            line for line in restarted.lines if "saved in snapshot" in line and "0 state tensors and 0 counters" in line
        ]


def test_list_of_optimizers_sends_the_state_of_all(tmp_path):
    with Run(tmp_path, endless(limits=NEVER)) as run:
        one = island(run, 1, make_two_optimizers)
        with training(run, one):
            two = island(run, 2, make_two_optimizers)
            with two.learner:
                sgd, adamw = two.optimizers
                assert all("momentum_buffer" in sgd.state[parameter] for parameter in sgd.param_groups[0]["params"])
                assert all(float(adamw.state[parameter]["step"]) > 0 for parameter in adamw.param_groups[0]["params"])
        (started,) = [line for line in two.lines if "training starts" in line]
        assert started.endswith("optimizer state from learner 1: 8 state tensors and 0 counters")


def test_wrapper_without_findable_state_is_not_reported_as_sent(tmp_path):
    fix = "pass the list of optimizers"
    with Run(tmp_path, endless(limits=NEVER)) as run:
        one = island(run, 1, lambda model: ChainedOptimizers(*make_two_optimizers(model)))
        with training(run, one):
            two = island(run, 2, lambda model: ChainedOptimizers(*make_two_optimizers(model)))
            with two.learner as joined:
                assert joined.lr_scale < 1
        assert (
            fix
            in one.warnings("cannot send optimizer state to learner 2: ChainedOptimizers holds no optimizer state")[0]
        )
        assert fix in two.warnings("no optimizer state from learner 1: ")[0]
        (started,) = [line for line in two.lines if "training starts" in line]
        assert "fresh optimizer state" in started
        assert "no healthy learner can send optimizer state" in started
        assert not run.log_lines(run.syncer, "optimizer state from learner 1")


def test_state_that_does_not_fit_is_not_reported_as_received(tmp_path):
    with Run(tmp_path, endless(limits=NEVER)) as run:
        one = island(run, 1, lambda model: torch.optim.AdamW(model.parameters()))
        with training(run, one):
            two = island(run, 2, lambda model: torch.optim.RMSprop(model.parameters()))
            with two.learner as joined:
                assert joined.lr_scale < 1
        assert two.warnings(
            "no optimizer state from learner 1: the optimizer state is of AdamW, the optimizer here is RMSprop"
        )
        assert not run.log_lines(run.syncer, "optimizer state from learner 1")


def test_an_empty_list_of_optimizers_is_refused():
    with pytest.raises(ValueError, match="the list of optimizers is empty"):
        Learner(nn.Linear(2, 2), [], "127.0.0.1:7400")
