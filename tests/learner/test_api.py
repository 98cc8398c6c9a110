"""`atoll.Learner` around real loops: it trains to the end, and every error is reported and leaves nothing behind."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.core.protocol import MessageArrived, StepTaken
from atoll.core.types import RoundId
from atoll.errors import BackgroundFailedError, LearnerRefusedError
from atoll.island.boundary import Action, CopyAction, SingleRankIsland, StartAction
from atoll.island.fragments import FragmentTensors, plan_for_run
from atoll.island.rank_connection import BoundaryStatus
from atoll.learner.api import Learner
from atoll.store.run_settings import RunSettings
from atoll.tensors.codecs import get_codec
from atoll.tensors.model_view import ModelView
from atoll.tensors.plan import describe_tensors, make_plan
from atoll.tensors.settings import Numerics
from tests.learner.fault_injection import inject
from tests.learner.in_process import driver_of, leading_rank, learner_of, train
from tests.learner.runs import LIMIT_S, LearnerSpec, Run, config, endless, model_file
from tests.learner.small_models import BATCH, Work, values, work

pytestmark = pytest.mark.usefixtures("no_leaked_threads")


# --------------------------------------------------------------------------------------------------------------------
# Training to the end of the run

KINDS = {
    "f32": (Numerics(up="f32", down="f32", merge="average"), config(), LearnerSpec(2)),
    "bf16 mixed": (Numerics(), config(), LearnerSpec(2, "mixed", flip=True)),
    "int8 overwrite, bf16 weights": (
        Numerics(up="int8", down="int8"),
        config(adopt="overwrite"),
        LearnerSpec(2, dtype="bfloat16", flip=True),
    ),
    "int4 blend, f64 weights": (
        Numerics(up="int4", down="int4"),
        config(adopt="blend", quorum=2),
        LearnerSpec(2, dtype="float64"),
    ),
    "int4 up, f32 down, bf16 mixed by rows": (
        Numerics(up="int4", down="f32", plan="rows"),
        config(fragments=5, every_steps=5, quorum=2),
        LearnerSpec(2, "mixed", dtype="bfloat16", flip=True),
    ),
    "f32 up, int8 down, f64 mixed by layers, adam": (
        Numerics(up="f32", down="int8", plan="layers", outer="adam", outer_lr=0.01),
        config(fragments=2, every_steps=2, adopt="overwrite"),
        LearnerSpec(2, "mixed", dtype="float64"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_learners_train_to_the_end_and_all_models_are_the_same_to_the_last_bit(tmp_path, kind):
    numerics, settings, second = KINDS[kind]
    first = LearnerSpec(1, second.model, second.dtype)
    with Run(tmp_path, settings, numerics) as run:
        learners = run.joined(first, second)
        run.go(*learners)
        published = run.finish(*learners)
        run.assert_same(published, 1, 2)
        run.assert_clean()
    assert settings.budget_merges is not None
    one, two = (load_file(model_file(tmp_path, number)) for number in (1, 2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one), "local tensors were equal from the start"
    fresh = values(work(second.model, 1, second.dtype).model)
    assert any(not torch.equal(one[name], fresh[name]) for name in one), "nothing was learned"


def test_tape_records_contributions_of_every_learner_and_end_by_budget(tmp_path):
    with Run(tmp_path, config(quorum=2), extra={"lr": 0.5}) as run:
        one, two = run.joined(1, 2)
        status = run.until(run.learner(2), "learner 2 is shown")
        assert status["incarnation"] == 1
        run.go(one, two)
        report = one.expect("ended")
        assert report["stats"]["contributed"] >= 12
        assert report["stats"]["adopted"] >= 12
        assert report["stats"]["bytes_up"] > 0
        assert report["stats"]["boundary_s"] < report["stats"]["training_s"]
        two.expect("ended")
        run.syncer.expect("ended")
        run.syncer.ended()
        run.assert_clean()
        assert run.log_lines(run.syncer, "the budget is used up (12 merges)")


def test_two_learners_in_threads_of_one_process(tmp_path):
    with Run(tmp_path, config(quorum=2), extra={"lr": 0.5}) as run:
        jobs = [work("plain", seed) for seed in (1, 2)]
        started = threading.Barrier(2, timeout=LIMIT_S)

        def island(job: Work) -> Learner:
            with learner_of(run, job, None) as learner:
                assert learner.extra == {"lr": 0.5}
                assert learner.lr_scale == 1.0
                assert learner.progress == 0.0
                started.wait()
                train(learner, job)
                assert learner.finished
                assert learner.progress == 1.0
            return learner

        with ThreadPoolExecutor(2) as pool:
            learners = list(pool.map(island, jobs))
        assert {learner.id for learner in learners} == {1, 2}
        assert run.syncer.expect("ended") is True
        published = load_file(tmp_path / "published.safetensors")
        for job in jobs:
            for name, value in values(job.model).items():
                assert torch.equal(value, published[name])
        run.assert_clean()


def test_plan_with_fewer_fragments_equals_plan_of_that_number():
    """A later learner gets the number of fragments, and not how the first learner computed it."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(50, 1))
    differing = 0
    for requested in range(1, 40):
        settings = RunSettings(config(fragments=requested), Numerics(plan="rows"))
        plan = plan_for_run(model, settings)
        same_count = RunSettings(config(fragments=len(plan.fragments)), Numerics(plan="rows"))
        assert plan_for_run(model, same_count) == plan
        differing += make_plan(describe_tensors(model), requested, "rows") != plan
    assert differing > 0, "the plans of this model are all stable: they show nothing"


# --------------------------------------------------------------------------------------------------------------------
# Invalid use


def test_invalid_arguments_raise_value_error_with_advice(tmp_path):
    job = work()
    with pytest.raises(ValueError, match="host:port"):
        Learner(job.model, job.optimizer, "somewhere")
    with pytest.raises(ValueError, match="numbered from 1"):
        Learner(job.model, job.optimizer, "head:7400", learner=0)
    learner = Learner(job.model, job.optimizer, "head:7400")
    with pytest.raises(ValueError, match="enter it first"):
        learner.step(tokens=1)
    assert learner.stats().steps == 0
    with Run(tmp_path) as run, learner_of(run, job, 1) as learner:
        for tokens in (0, -1, 1.5, True, 2**40):
            with pytest.raises(ValueError, match="whole number"):
                learner.step(tokens=tokens)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"loss is one number.*\(2,\)"):
            learner.step(tokens=1, loss=torch.zeros(2))
        with pytest.raises(ValueError, match="could not convert"):
            learner.step(tokens=1, loss="low")  # type: ignore[arg-type]
        assert learner.stats().steps == 0
        with pytest.raises(ValueError, match="entered once"):
            learner.__enter__()
        train(learner, job)
        assert learner.finished
        steps = learner.stats().steps
        learner.step(tokens=BATCH)  # after the end nothing happens
        assert learner.stats().steps == steps


def make_learner(job: Work, **settings: Any) -> Learner:
    """Return a learner that is never entered."""
    return Learner(job.model, job.optimizer, "head:7400", **settings)


OPTIMIZER = "optimizer must be a torch.optim.Optimizer, got"
INVALID_ARGUMENTS: dict[str, tuple[Callable[[Work], Any], str]] = {
    "optimizer=None": (
        lambda job: Learner(job.model, None, "head:7400"),  # type: ignore[arg-type]
        f"{OPTIMIZER} None; pass the one that updates the model",
    ),
    "an optimizer class": (
        lambda job: Learner(job.model, torch.optim.AdamW, "head:7400"),  # type: ignore[arg-type]
        f"{OPTIMIZER} the class AdamW; pass",
    ),
    "a list with something else": (
        lambda job: Learner(job.model, [job.optimizer, 3], "head:7400"),  # type: ignore[list-item]
        f"{OPTIMIZER} a int; pass",
    ),
    "swapped arguments": (
        lambda job: Learner(job.optimizer, job.model, "head:7400"),  # type: ignore[arg-type]
        "model and optimizer are swapped: write atoll.Learner(model, optimizer, ...)",
    ),
    "a function as model": (
        lambda job: Learner(job.model.forward, job.optimizer, "head:7400"),  # type: ignore[arg-type]
        "model must be a torch.nn.Module, got a method; pass the module",
    ),
    "a port as syncer": (
        lambda job: Learner(job.model, job.optimizer, 7400),  # type: ignore[arg-type]
        "syncer is 7400; give host:port",
    ),
    "learner='x'": (
        lambda job: make_learner(job, learner="x"),
        "learners are numbered from 1: learner must be a whole number of at least 1, got 'x'",
    ),
    "learner=True": (
        lambda job: make_learner(job, learner=True),
        "learners are numbered from 1: learner must be a whole number of at least 1, got True",
    ),
    "keys=3": (lambda job: make_learner(job, keys=3), "keys is a path, got a int"),
    "extra_state={}": (
        lambda job: make_learner(job, extra_state={}),
        "extra_state is a function that returns a JSON value to store, got {}",
    ),
    "max_rate=500": (lambda job: make_learner(job, max_rate=500), "a rate is a number with a unit, as 2gbit"),
    "max_rate=''": (lambda job: make_learner(job, max_rate=""), "a rate is a number with a unit, as 2gbit"),
    "streams='many'": (
        lambda job: make_learner(job, streams="many"),
        "streams is 'many'; give a number of connections from 1 to 16",
    ),
    "notice_s=-1": (
        lambda job: make_learner(job, notice_s=-1),
        "notice_s is the time from SIGTERM to the end, in seconds above 0; got -1",
    ),
}
for value in (-1, 0, float("nan"), float("inf"), "soon", True):
    INVALID_ARGUMENTS[f"join_timeout_s={value!r}"] = (
        partial(make_learner, join_timeout_s=value),
        f"join_timeout_s is how long to wait for the run, in seconds above 0; got {value!r}",
    )


@pytest.mark.parametrize("invalid", INVALID_ARGUMENTS)
def test_invalid_argument_raises_value_error_with_one_sentence(invalid):
    make, message = INVALID_ARGUMENTS[invalid]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        make(work())


def test_run_directory_that_is_a_file_raises_value_error(tmp_path):
    (file := tmp_path / "file").touch()
    for directory in (file, file / "run", str(file)):
        with pytest.raises(ValueError, match=f"^run_directory is {directory}, but {file} is a file: pass a directory"):
            make_learner(work(), run_directory=directory)


def test_integers_of_numpy_and_0_dimensional_tensors_are_accepted(tmp_path):
    job = work()
    with Run(tmp_path, endless(lease_samples=64)) as run, learner_of(run, job, numpy.int64(3)) as learner:  # type: ignore[arg-type]
        assert learner.id == 3
        for tokens in (64, numpy.int64(64), numpy.uint8(64), torch.tensor(64), torch.ones(64, dtype=torch.int32).sum()):
            assert len(learner.take(numpy.int64(4))) == 4
            learner.step(tokens=tokens, loss=job.step(0))
        assert learner.stats().tokens == 5 * 64
        for invalid in (
            numpy.float64(64),
            torch.tensor(64.0),
            torch.tensor([64]),
            torch.tensor(True),
            numpy.True_,
            "64",
        ):
            with pytest.raises(ValueError, match="tokens must be a whole number from 1 to"):
                learner.step(tokens=invalid)  # type: ignore[arg-type]


def test_an_optimizer_of_another_model_is_refused_before_anything_is_sent(tmp_path):
    with Run(tmp_path) as run:
        learner = Learner(work().model, work().optimizer, run.address, learner=1)
        with pytest.raises(ValueError, match="no parameter of the model"), learner:
            pass
        assert run.status()["founded"] is False


@pytest.mark.parametrize("invalid", ["taller", "other"])
def test_other_model_is_refused_with_first_differing_tensor_and_run_continues(tmp_path, invalid):
    with Run(tmp_path) as run:
        (good,) = run.joined(1)
        job = work(invalid)
        difference = {
            "taller": "'first.bias', 25 at the learner and 24 in the run",
            "other": "'0.bias' (4 float32 weight), which the run does not have",
        }[invalid]
        with pytest.raises(LearnerRefusedError, match=re.escape(difference)), learner_of(run, job, 2):
            pass
        assert run.status()["refused"] == {"refused-fingerprint": 1}
        run.go(good)
        run.finish(good)
        assert [line for line in run.log_lines(good, "learner") if "WARNING" in line] == []


def test_other_model_that_is_uploaded_second_is_refused(tmp_path):
    """The learner downloads the settings before the run has a model, and another learner uploads its model first."""
    with Run(tmp_path) as run:
        late = learner_of(run, work("taller"), 2)
        upload = late._background.upload_model

        def upload_late(*args: Any) -> None:
            run.joined(1)
            upload(*args)

        late._background.upload_model = upload_late  # type: ignore[method-assign, assignment]
        with (
            pytest.raises(LearnerRefusedError, match=r"'first\.bias', 25 at the learner .* atoll syncer --out DIR"),
            late,
        ):
            pass


# --------------------------------------------------------------------------------------------------------------------
# Leaving


def test_loop_that_ends_early_leaves_and_other_learners_continue(tmp_path):
    with Run(tmp_path, endless()) as run:
        (other,) = run.joined(2)
        job = work()
        with learner_of(run, job, 1) as learner:
            run.go(other)
            train(learner, job, 20)
            assert not learner.finished
        left = run.until(run.learner(1), "learner 1 is shown")
        assert (left["standing"], left["reason"]) == ("left", "left: its loop ended")
        merges = run.status()["merges"]
        run.until(run.merges(merges + 3), "the other goes on")
        run.end()
        run.finish(other)
        run.assert_clean()


def test_exception_in_the_loop_is_propagated_and_the_learner_leaves(tmp_path):
    with Run(tmp_path, endless()) as run:
        run.joined(2)
        job = work()

        def island() -> None:
            with learner_of(run, job, 1) as learner:
                train(learner, job, 5)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            island()
        left = run.until(run.learner(1), "learner 1 is shown")
        assert left["reason"] == "left: its loop ended with ZeroDivisionError"


Handle = Callable[[float, Any], list[Any]]


def change_core(learner: Learner, change: Callable[[Handle, float, Any], list[Any]]) -> None:
    core = driver_of(learner).core
    core.handle = partial(change, core.handle)  # type: ignore[method-assign]


class InterruptedIsland(SingleRankIsland):
    """Island that raises KeyboardInterrupt after the core has returned an action of this kind, before its execution."""

    def __init__(self, kind: type[Action]) -> None:
        self.kind = kind
        self.fired = False

    def broadcast_actions(self, actions: list[Action], status: BoundaryStatus) -> list[Action]:
        if any(isinstance(action, self.kind) for action in actions):
            self.fired = True
            raise KeyboardInterrupt
        return actions


def test_ctrl_c_between_the_pull_and_the_copy_does_not_hang(tmp_path):
    """This is the worst moment: the copy is never made."""
    with Run(tmp_path, endless()) as run:
        job = work()
        learner = learner_of(run, job, 1)
        leading_rank(learner).island = island = InterruptedIsland(CopyAction)
        with pytest.raises(KeyboardInterrupt), learner:
            train(learner, job)
        assert island.fired
        left = run.until(run.learner(1), "learner 1 is shown")
        assert left["reason"] == "left: its loop ended with KeyboardInterrupt"


def test_ctrl_c_that_leaves_the_lock_locked_does_not_hang(tmp_path):
    """A signal can arrive after a lock is acquired and before the code that releases it is set up."""
    with Run(tmp_path, endless()) as run:
        job = work()

        def island() -> None:
            with learner_of(run, job, 1) as learner:
                train(learner, job, 5)
                driver_of(learner).lock.acquire()
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            island()
        left = run.until(run.learner(1, standing="left"), "it has left")
        assert left["reason"] == "left: its loop ended with KeyboardInterrupt"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_inside_of_the_core_is_raised_after_it(tmp_path, number):
    """Otherwise the core would be ahead of its tape, and the learner could not send its leave message."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with Run(tmp_path, endless()) as run:
        job = work()

        def interrupted(handle: Handle, now: float, event: Any) -> list[Any]:
            if isinstance(event, StepTaken) and event.tokens == 1:
                signal.raise_signal(number)
            return handle(now, event)

        def island() -> None:
            with learner_of(run, job, 1) as learner:
                change_core(learner, interrupted)
                train(learner, job, 5)
                learner.step(tokens=1)
                raise AssertionError("the interrupt was not raised")

        before = signal.signal(number, end)
        try:
            with pytest.raises(KeyboardInterrupt):
                island()
            assert signal.getsignal(number) is end, "the handler of the program is back"
        finally:
            signal.signal(number, before)
        left = run.until(run.learner(1, standing="left"), "it has left")
        assert left["reason"] == "left: its loop ended with KeyboardInterrupt"
        run.verdict()


def test_an_error_inside_of_the_core_ends_the_learner_without_a_hang(tmp_path):
    """The core is ahead of its tape, so the learner sends nothing more. The syncer sees the connection close."""
    with Run(tmp_path, endless()) as run:
        job = work()

        def failing(handle: Handle, now: float, event: Any) -> list[Any]:
            effects = handle(now, event)
            if isinstance(event, StepTaken) and event.tokens == 1:
                raise MemoryError
            return effects

        def island() -> None:
            with learner_of(run, job, 1) as learner:
                change_core(learner, failing)
                train(learner, job, 5)
                learner.step(tokens=1)

        with pytest.raises(MemoryError):
            island()
        status = run.until(run.learner(1, standing="disconnected"), "the syncer sees the link close")
        assert "connection closed" in status["reason"]
        run.verdict()


def test_a_learner_that_cannot_join_leaves_too(tmp_path):
    with Run(tmp_path, endless()) as run:
        job = work()
        learner = learner_of(run, job, 1)
        leading_rank(learner).island = island = InterruptedIsland(StartAction)
        with pytest.raises(KeyboardInterrupt), learner:
            pass
        assert island.fired
        left = run.until(run.learner(1), "learner 1 is shown")
        assert left["reason"] == "left: its loop ended with KeyboardInterrupt"


# --------------------------------------------------------------------------------------------------------------------
# The background


def test_error_in_the_background_thread_is_raised_by_the_next_step(tmp_path, caplog):
    with Run(tmp_path, endless()) as run:
        job = work()

        def decode(*args: Any) -> Any:
            raise MemoryError("injected: no memory")

        def island() -> None:
            with learner_of(run, job, 1) as learner:
                for fragment in learner._background.fragments:
                    fragment.begin_value = decode  # type: ignore[method-assign, assignment]
                train(learner, job)

        with pytest.raises(BackgroundFailedError, match="injected: no memory") as caught:
            island()
        assert isinstance(caught.value.__cause__, MemoryError)
        assert "the background thread of this learner failed" in caplog.text


@pytest.mark.parametrize("kind", [AssertionError, SystemExit])
def test_core_error_on_a_message_is_raised_by_the_next_step(tmp_path, kind):
    with Run(tmp_path, endless()) as run:
        job = work()

        def failing(handle: Handle, now: float, event: Any) -> list[Any]:
            if isinstance(event, MessageArrived):
                raise kind("an injected bug")
            return handle(now, event)

        def island() -> None:
            with learner_of(run, job, 1) as learner:
                change_core(learner, failing)
                train(learner, job)

        with pytest.raises(BackgroundFailedError, match="the background thread of this learner") as caught:
            island()
        assert isinstance(caught.value.__cause__, kind)


def test_end_of_the_background_thread_is_raised_by_the_next_step_and_cleaned_up(tmp_path):
    with Run(tmp_path, endless()) as run:
        job = work()

        def end() -> None:
            raise SystemExit("an injected end")

        def island() -> None:
            with learner_of(run, job, 1) as learner:
                train(learner, job, 5)
                learner._background._loop.call_soon_threadsafe(end)
                train(learner, job)

        with pytest.raises(BackgroundFailedError, match="an injected end"):
            island()
        run.until(run.learner(1, standing="left"), "it has left")


def test_optimizer_state_that_cannot_be_sent_does_not_stop_its_source(tmp_path):
    """Optimizer state can hold any object. A learner finds this only after its first step."""

    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["odd"] = {1, 2}
            return super().step(closure)

    def odd(seed: int) -> Work:
        job = work("plain", seed)
        return job._replace(optimizer=Odd(job.model.parameters(), lr=0.01))

    with Run(tmp_path, endless()) as run:
        source, receiver = odd(1), odd(2)
        done = threading.Event()
        with ThreadPoolExecutor(1) as pool, learner_of(run, source, 1) as one:

            def train_source() -> int:
                number = 0
                while not done.is_set():
                    one.step(tokens=BATCH, loss=source.step(number))
                    number += 1
                return number

            training = pool.submit(train_source)
            try:
                run.until(run.merges(3), "the run is under way")
                with learner_of(run, receiver, 2) as two:
                    assert two.lr_scale < 1, "fresh moments start with a warm-up"
            finally:
                done.set()
            assert training.result(LIMIT_S) > 0


# --------------------------------------------------------------------------------------------------------------------
# Tensors at the boundary


def copy_and_adopt_at_one_boundary() -> None:
    """Answer a pull and adopt a newer version at the same boundary, so that the copy is made but not used.

    The background must not decode into the buffer of the copy meanwhile.
    """
    model = nn.Linear(4, 4)
    view = ModelView(model, make_plan(describe_tensors(model), 1, "balanced"))
    fragment = FragmentTensors(view, 0, get_codec("f32"))
    fragment.set_newest(0, fragment.decode_whole(torch.zeros(4 * 20, dtype=torch.uint8)).buffer)
    fragment.release(*fragment.prepare_adoption(False))
    copied = fragment.prepare_copy(RoundId(0, 0, 1, 1))
    fragment.set_newest(1, fragment.decode_whole(torch.ones(20).view(torch.uint8)).buffer)
    adopting = fragment.prepare_adoption(False)
    other = fragment.decode_whole(torch.full((20,), 7.0).view(torch.uint8)).buffer
    assert other is not copied.buffer
    fragment.copy(copied)
    assert torch.equal(other.tensor, torch.full((20,), 7.0))
    fragment.release(*adopting, other)
    again = [fragment.decode_whole(torch.ones(20).view(torch.uint8)).buffer for _ in range(3)]
    assert copied.buffer in again, "a released buffer is reused"


def test_copy_retains_its_buffer_until_it_is_made_even_if_dropped_before():
    copy_and_adopt_at_one_boundary()


def test_the_test_above_fails_for_a_copy_that_does_not_retain_its_buffer(monkeypatch, tmp_path):
    monkeypatch.setattr(FragmentTensors, "prepare_copy", FragmentTensors.prepare_copy)  # restored by monkeypatch
    inject("shared-buffers", tmp_path)
    with pytest.raises(AssertionError):
        copy_and_adopt_at_one_boundary()


def test_package_exports_the_learner():
    assert atoll.Learner is Learner
