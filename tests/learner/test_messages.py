"""Messages for learners and operators: they name the cause, and warn only if there is something to do."""

from __future__ import annotations

import logging
import math
import re
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from atoll.core.reasons import REASONS, because
from atoll.errors import LearnerRefusedError
from atoll.logs import DEBUG_REASONS, REPEATED_REASONS, SILENCE_REASONS, WARNING_REASONS, LogRateLimiter, ReasonLogger
from atoll.tensors.codecs import get_codec
from atoll.tensors.plan import FragmentPlan, Piece, TensorInfo, describe_tensors, make_plan
from atoll.tensors.robust_merge import find_nonfinite_in_fragment
from atoll.tensors.settings import Numerics
from tests.learner.in_process import STEPS, learner_of, train
from tests.learner.runs import QUICK, Run, endless
from tests.learner.small_models import Work, work


def job_of(model: nn.Module) -> Work:
    return Work(model, torch.optim.SGD(model.parameters(), 0.01), 1)


def layers(count: int, width: int = 8) -> Work:
    return job_of(nn.Sequential(*(nn.Linear(8, width), *(nn.Linear(width, width) for _ in range(count)))))


def refusal(run: Run, job: Work, number: int) -> str:
    """Return the error message of a learner that is refused when it joins."""
    with pytest.raises(LearnerRefusedError) as caught, learner_of(run, job, number, run_directory=None):
        pass
    return str(caught.value)


# --------------------------------------------------------------------------------------------------------------------
# Another model


def test_one_layer_too_many_is_refused_with_its_name_and_shape(tmp_path):
    with Run(tmp_path) as run, learner_of(run, layers(2), 1):
        sentence = refusal(run, layers(3), 2)
        assert "the first difference is '3.bias' (8 float32 weight), which the run does not have" in sentence
        assert "2 tensors differ" in sentence
        sentence = refusal(run, layers(1), 3)
        assert "the first difference is '2.bias' (8 float32 weight), which only the run has" in sentence
        assert "'0.bias', 9 at the learner and 8 in the run" in refusal(run, layers(2, 9), 4)


def test_other_model_is_refused_with_the_run_directory_and_advice(tmp_path):
    with Run(tmp_path / "the run") as run, learner_of(run, layers(2), 1):
        sentence = refusal(run, layers(3), 2)
        assert f"the model of the run is in {tmp_path / 'the run'} at the syncer" in sentence
        assert "start a new run in another directory: atoll syncer --out DIR" in sentence
        (line,) = run.log_lines(run.syncer, "learner 2: refused by the run in")
        assert line.startswith("atoll.syncer WARNING")
        assert "'3.bias' (8 float32 weight), which the run does not have" in line


# --------------------------------------------------------------------------------------------------------------------
# Values that are not finite


def test_infinite_buffer_of_a_first_model_is_refused_with_its_name_and_count(tmp_path):
    model = nn.Linear(8, 4)
    model.register_buffer("mask", torch.tensor([0.0, float("-inf"), 0.0]))
    with Run(tmp_path) as run:
        sentence = refusal(run, job_of(model), 1)
        problem = "'mask' (buffer): 1 infinite of 3 values"
        assert f"the model holds values that are not finite: {problem}" in sentence
        assert "persistent=False" in sentence
        assert [line for line in run.log_lines(run.syncer, problem) if "WARNING" in line]
        assert run.status()["founded"] is False


def quarantined(run: Run, job: Work, poison: Callable[[], object]) -> str:
    """Train, then poison before every step until the learner is quarantined, because adopting overwrites buffers."""
    with learner_of(run, job, 1) as learner:
        train(learner, job, 10)
        try:
            for _ in range(STEPS):
                poison()
                train(learner, job, 1)
        except LearnerRefusedError as error:
            return str(error)
    raise AssertionError(f"not quarantined after {STEPS} steps")


@pytest.mark.parametrize("up", ["f32", "int8"])
def test_nan_weights_end_in_an_error_that_names_tensor_and_cause(tmp_path, caplog, up):
    """In int8 one NaN affects its whole block of 256 values: only the learner can tell which tensor holds it."""
    job = work()
    with Run(tmp_path, endless(), Numerics(up=up)) as run, caplog.at_level(logging.WARNING):
        sentence = quarantined(run, job, lambda: nn.init.constant_(job.model.get_parameter("first.weight"), math.nan))
        assert "quarantined after 3 invalid messages, the last: invalid values: not finite: '" in sentence
        assert ("; counted in blocks of 256 values, as int8 encodes them" in sentence) == (up == "int8")
        assert "correct the cause, then restart the learner to join again" in sentence
        tensors = "'first.bias' (parameter): 24 NaN of 24 values, 'first.weight' (parameter): 192 NaN of 192 values"
        assert f"the model of this process holds {tensors}" in sentence
        (warning,) = [record.getMessage() for record in caplog.records if record.name == "atoll.learner"]
        assert "syncer refused contribution to fragment" in warning
        assert "(parameter): " in warning
        warning, *repeated = run.log_lines(run.syncer, "learner 1: contribution to fragment")
        assert "WARNING" in warning
        assert "(parameter): " in warning
        assert not [line for line in repeated if "WARNING" in line]
        (warning,) = run.log_lines(run.syncer, "learner 1: quarantined")
        assert "WARNING" in warning
        assert "(parameter): " in warning


@pytest.mark.parametrize("up", ["f32", "int8"])
def test_infinite_buffer_ends_in_an_error_that_names_it_and_no_other_tensor_of_its_fragment(tmp_path, up):
    """Buffers are sent in f32 with every codec."""
    job = work()
    job.model.register_buffer("mean", torch.zeros(5))
    with Run(tmp_path, endless(limits=replace(QUICK, max_strikes=1)), Numerics(up=up)) as run:
        sentence = quarantined(run, job, lambda: job.model.get_buffer("mean")[:2].fill_(-math.inf))
        assert sentence.endswith("the model of this process holds 'mean' (buffer): 2 infinite of 5 values")
        assert "not finite: 'mean' (buffer): 2 infinite of 5 values" in sentence


def test_values_too_large_to_square_are_named(tmp_path):
    plan = make_plan(describe_tensors(work().model), 1, "balanced")
    values = torch.zeros(plan.numel(0))
    values[-1] = 1e30
    found = find_nonfinite_in_fragment(plan, 0, get_codec("f32"), get_codec("f32").encode(values))
    assert found == "'last.weight' (parameter): values up to 1e+30, too large to sum their squares"


def test_tensor_that_is_cut_by_rows_is_counted_once():
    plan = make_plan([TensorInfo("table", (100, 10), "float32", "embedding")], 1, "rows")
    pieces = tuple(Piece("table", "embedding", start, start + 50, 500) for start in (0, 50))
    plan = FragmentPlan(plan.method, plan.tensors, (pieces,))
    values = torch.ones(1000)
    values[490:510] = math.nan
    found = find_nonfinite_in_fragment(plan, 0, get_codec("bf16"), get_codec("bf16").encode(values))
    assert found == "'table' (parameter): 20 NaN of 1000 values"


# --------------------------------------------------------------------------------------------------------------------
# Warnings


def test_every_log_level_belongs_to_an_existing_reason():
    assert REASONS.keys() >= WARNING_REASONS | REPEATED_REASONS | DEBUG_REASONS | SILENCE_REASONS


def test_retries_are_logged_once_and_then_counted(caplog):
    log = ReasonLogger(logging.getLogger("test"))
    with caplog.at_level(logging.DEBUG, "test"):
        for fragment in range(24):
            log.write(because("round-pull-retried", 0, 1, 2.0, 1), ("fragment", fragment))
    assert [record.levelname for record in caplog.records] == ["INFO", *["DEBUG"] * 23]
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "test"):
        for learner in (1, 1, 2):
            log.write(because("member-quarantined", 3, "invalid values"), ("learner", learner))
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG", "WARNING"]


def test_repeated_lines_are_logged_again_with_the_suppressed_count():
    repeats = LogRateLimiter(interval_s=0.0)
    assert [repeats.count_suppressed("a"), repeats.count_suppressed("a")] == [0, 0]
    repeats = LogRateLimiter()
    assert [repeats.count_suppressed(key) for key in "aaba"] == [0, None, 0, None]
    repeats._interval_s = 0.0
    assert [repeats.count_suppressed(key) for key in "aba"] == [2, 0, 0]


@pytest.mark.parametrize(("silent_s", "level"), [(1.02, "DEBUG"), (29.0, "DEBUG"), (31.0, "INFO")])
def test_short_silence_is_logged_at_debug_level(caplog, silent_s, level):
    with caplog.at_level(logging.DEBUG, "test"):
        log = ReasonLogger(logging.getLogger("test"))
        log.write(because("member-suspected", silent_s, 1.0), ("learner", 1))
        log.write(because("member-recovered", silent_s), ("learner", 1))
    assert [record.levelname for record in caplog.records] == [level, level]


def warnings_of(run: Run) -> list[str]:
    lines = [line for child in run.children for line in child.log.read_text().splitlines()]
    return [line for line in lines if line.startswith("atoll") and not re.match(r"[\w.]+ (DEBUG|INFO) ", line)]


def test_ordinary_run_with_a_pause_and_a_killed_learner_logs_no_warning(tmp_path):
    """The loops never call `take`. At the end NaN weights are injected into a learner, which must log a warning."""
    with Run(tmp_path, endless(lease_samples=64)) as run:
        one, two = run.joined(1, 2)
        run.go(one, two)
        run.until(run.merges(3), "the run is under way")
        one.send(signal.SIGSTOP)  # sends nothing from now on
        run.until(lambda _: run.log_lines(run.syncer, "learner 1: no message for"), "its silence is noticed")
        one.send(signal.SIGCONT)
        run.until(run.learner(1, standing="live"), "it goes on")
        two.kill()
        (two,) = run.joined(2)
        run.go(two)
        merges = run.status()["merges"]
        run.until(run.merges(merges + 3), "all of them go on")
        (line,) = run.log_lines(run.syncer, "they are leased again")
        assert warnings_of(run) == []
        at_info = [line for line in run.syncer.log.read_text().splitlines() if "syncer INFO" in line]
        assert [line for line in at_info if "s, the limit is" in line or "leased again" in line] == []
        assert line.startswith("atoll.syncer DEBUG")
        two.expected_to_end = True
        two.command("poison")
        two.expect("failed")
        assert "contribution to fragment" in warnings_of(run)[0]
        run.end()
        run.finish(one)
        assert all("refused" in line or "quarantined" in line for line in warnings_of(run)), warnings_of(run)
