"""Tests of training on simulated tapes: samples, end of training, returning learners, invalid requests."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from atoll.cli.main import main
from atoll.core.protocol import StartTraining, StepTaken
from atoll.reference.loop import InnerLoop
from atoll.reference.simulated_training import SampleAllocator, train_simulated
from atoll.tape.files import SIMULATION_FILE, RunTapes, SimulationRecord
from atoll.tape.format import Actor
from atoll.tensors import optimizer_state
from tests.reference.small_jobs import small_settings, small_text
from tests.tiny_run import eventful_run

CONTEXT = 16
TOKENS = CONTEXT * 300
MODEL = ("--model", "100k", "--context", str(CONTEXT), "--batch", "2", "--eval-tokens", "256", "--inner", "adamw")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Tapes of three learners whose chips fail about every minute, and a fourth that leaves and joins again."""
    run = tmp_path_factory.mktemp("simulated") / "run"
    arguments = (
        "--learners",
        "3",
        "--chips",
        "1800000",
        "--days",
        "0.0021",
        "--seed",
        "3",
        "--extra",
        "1@20-50,80-999",
    )
    assert main(["simulate", *arguments, "--every", "8", "--fragments", "4", "--tape", str(run)]) == 0
    return run


def replay_model(capsys, run, text, *arguments):
    capsys.readouterr()
    assert main(["replay", str(run), *MODEL, "--data", str(text), "--json", *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["difference"] is None
    return result["training"]


def tokens_on_tape(run):
    """Return tokens and steps on the tapes by learner, counted without the code under test."""
    tokens: Counter[int] = Counter()
    steps: Counter[int] = Counter()
    for actor, reader in RunTapes(run).readers.items():
        for entry in reader:
            if type(entry.event) is StepTaken:
                tokens[actor.learner] += entry.event.tokens
                steps[actor.learner] += entry.event.steps
    return tokens, steps


# --------------------------------------------------------------------------------------------------------------------
# Assignment of samples


@given(
    full=st.integers(1, 10**7), batch=st.integers(1, 64), shares=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=50)
)
def test_samples_of_a_step_are_at_most_a_batch_and_exact_on_average(full, batch, shares):
    allocator = SampleAllocator({7: full}, batch)
    tokens = [round(share * full) for share in shares]
    assigned = [allocator.samples(7, each) for each in tokens]
    assert all(0 <= samples <= batch for samples in assigned)
    for end in range(1, len(tokens) + 1):
        exact = batch * sum(tokens[:end]) / full
        assert exact - 1 < sum(assigned[:end]) <= exact + 1e-6
    assert [SampleAllocator({7: full}, batch).samples(7, full)] == [batch]


def test_fraction_of_a_sample_is_carried_per_learner():
    allocator = SampleAllocator({1: 10, 2: 10}, 1)
    assert [allocator.samples(1, 9), allocator.samples(2, 9), allocator.samples(1, 1), allocator.samples(2, 1)] == [
        0,
        0,
        1,
        1,
    ]


# --------------------------------------------------------------------------------------------------------------------
# Training


@pytest.fixture
def watched_steps(monkeypatch):
    """Samples, progress and learning rate scale of every trained step, in order."""
    steps = []
    original = InnerLoop.step

    def step(self, samples, progress, lr_scale=1.0):
        steps.append((tuple(samples), progress, lr_scale))
        return original(self, samples, progress, lr_scale)

    monkeypatch.setattr(InnerLoop, "step", step)
    return steps


def test_same_command_gives_the_same_bits_and_another_seed_does_not(run, text, capsys):
    first = replay_model(capsys, run, text, "--tokens", str(TOKENS))
    assert replay_model(capsys, run, text, "--tokens", str(TOKENS)) == first
    assert replay_model(capsys, run, text, "--tokens", str(TOKENS), "--seed", "1")["digest"] != first["digest"]
    assert (first["ended_by"], first["tokens"]) == ("tokens", TOKENS)
    assert first["loss"] < first["loss_before"] - 0.5
    assert first["merges"] > 20
    assert 1.0 < first["contributions_per_merge"] == first["contributions"] / first["merges"]
    assert first["steps"] == sum(each["steps"] for each in first["learners"].values())
    assert first["tokens"] == sum(each["tokens"] for each in first["learners"].values())


def test_every_sample_is_trained_once_and_progress_is_its_share(run, text, watched_steps):
    settings = small_settings(text, tokens=TOKENS - 5)
    trained = train_simulated(RunTapes(run), settings)
    assert trained.tokens == TOKENS, "rounded up to a whole sample"
    trained_samples = [number for samples, _, _ in watched_steps for number in samples]
    assert trained_samples == list(range(TOKENS // CONTEXT))
    so_far = 0
    for samples, progress, _ in watched_steps:
        assert 1 <= len(samples) <= settings.batch
        so_far += len(samples)
        assert progress == pytest.approx(min(1.0, so_far * CONTEXT / settings.tokens))


@pytest.mark.long
def test_learner_without_some_slices_trains_that_share_of_the_tokens(run, text):
    trained = train_simulated(RunTapes(run), small_settings(text, tokens=10**9, batch=3))
    full = SimulationRecord.load(run).full_step_tokens
    tokens, steps = tokens_on_tape(run)
    assert trained.ended_by == "tapes"
    for learner, one in trained.learners.items():
        assert one.tokens == CONTEXT * (3 * tokens[learner] // full[learner])
        assert one.steps == steps[learner]
    assert any(one.tokens < CONTEXT * 3 * one.steps for one in trained.learners.values()), (
        "no slice was missing in the simulation"
    )


@pytest.mark.long
def test_step_without_a_sample_trains_nothing_and_counts_as_a_step(run, text, watched_steps):
    trained = train_simulated(RunTapes(run), small_settings(text, tokens=10**9, batch=1))
    empty = sum(one.empty_steps for one in trained.learners.values())
    assert empty > 0
    assert all(len(samples) == 1 for samples, _, _ in watched_steps)
    assert trained.steps == len(watched_steps) + empty == sum(tokens_on_tape(run)[1].values())


@pytest.mark.long
def test_returning_learner_starts_with_the_optimizer_state_of_a_peer(run, text, monkeypatch):
    sizes = []
    original = optimizer_state.unpack

    def unpack(data, optimizer, model):
        sizes.append(len(data))
        original(data, optimizer, model)

    monkeypatch.setattr(optimizer_state, "unpack", unpack)
    started = {
        actor: effect.state_source.code
        for actor, reader in RunTapes(run).readers.items()
        for entry in reader
        for effect in entry.effects
        if type(effect) is StartTraining
    }
    assert started[Actor(4, 2)] == "state-from-peer", "no learner returns on the tapes"
    trained = train_simulated(RunTapes(run), small_settings(text, tokens=10**9))
    assert (trained.learners[4].starts, trained.learners[1].starts) == (2, 1)
    assert len(sizes) == sum(code == "state-from-peer" for code in started.values()) >= 2


@pytest.mark.long
def test_steps_of_one_entry_are_taken_one_by_one(run, text, monkeypatch):
    """A coarse driver may report several steps in one entry: here two, with half of the tokens each."""
    expected = train_simulated(RunTapes(run), small_settings(text, tokens=TOKENS))
    original = RunTapes.merged_entries

    def doubled(self, report=None):
        for entry in original(self, report):
            if type(entry.event) is StepTaken:
                event = entry.event
                entry = entry._replace(event=structs.replace(event, steps=2, tokens=2 * event.tokens))
            yield entry

    monkeypatch.setattr(RunTapes, "merged_entries", doubled)
    trained = train_simulated(RunTapes(run), small_settings(text, tokens=2 * TOKENS))
    assert trained.tokens == 2 * TOKENS
    assert trained.simulated_s == pytest.approx(expected.simulated_s, abs=2.0)
    assert trained.steps == pytest.approx(2 * expected.steps, abs=4)


# --------------------------------------------------------------------------------------------------------------------
# Output and errors


@pytest.mark.long
def test_output_says_whether_the_tokens_or_the_tapes_ended_first(run, text, capsys):
    arguments = ["replay", str(run), *MODEL, "--data", str(text)]
    assert main([*arguments, "--tokens", str(TOKENS)]) == 0
    out = capsys.readouterr().out
    assert "every effect is as recorded" in out
    assert f"trained on simulated tapes: {TOKENS:,} tokens in " in out
    assert f"all {TOKENS:,} requested tokens are trained" in out
    assert "held-out loss " in out
    assert "learner 4: " in out
    assert main([*arguments, "--tokens", "1G"]) == 0
    out = capsys.readouterr().out
    assert "the tapes ended before the 1,000,000,000 requested tokens" in out
    assert "in 2 incarnations" in out


def test_replay_without_options_says_which_to_add(run, capsys):
    assert main(["replay", str(run)]) == 0
    assert f"atoll replay {run} --model 100k --batch 2 --tokens 2M" in capsys.readouterr().out
    assert main(["replay", str(run), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["training"] is None
    assert "give its settings" in result["not_trained"]
    assert main(["replay", str(run), "--effects-only"]) == 0
    assert "--model" not in capsys.readouterr().out


def test_replay_can_be_interrupted(run, text, monkeypatch, capsys):
    def interrupted(self, samples, progress, lr_scale=1.0):
        raise KeyboardInterrupt

    monkeypatch.setattr(InnerLoop, "step", interrupted)
    assert main(["replay", str(run), *MODEL, "--data", str(text)]) == 130
    assert capsys.readouterr().err == "atoll: interrupted\n"


def refused(capsys, *arguments):
    capsys.readouterr()
    assert main(["replay", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "", "the error came after the start of the replay"
    return err


def test_model_with_few_tensors_is_cut_by_rows_unless_a_plan_is_given(text, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["simulate", "--learners", "2", "--chips", "9000", "--days", "0.0005", "--tape", str(run)]) == 0
    assert replay_model(capsys, run, text, "--tokens", "2000")["plan"] == "rows"
    error = refused(capsys, run, *MODEL, "--plan", "balanced")
    assert "the tapes have 24 fragments, but this model has 15; simulate with --fragments 15" in error


def test_options_of_simulated_tapes_are_refused_for_a_real_run(tmp_path, capsys):
    other = eventful_run().save(tmp_path / "run")
    error = refused(capsys, other, "--model", "100k")
    assert "--model is for tapes of atoll simulate" in error
    assert "with its own settings; omit it" in error
    assert "--seed is for tapes" in refused(capsys, other, "--seed", "0")


def test_contradicting_options_and_missing_files_are_refused(run, tmp_path, capsys):
    assert "--effects-only trains nothing" in refused(capsys, run, "--effects-only", "--context", "16")
    assert "there is no model '7b'" in refused(capsys, run, "--model", "7b")
    other = shutil.copytree(run, tmp_path / "run")
    (other / "tapes" / "learner-1-i1.tape").unlink()
    assert "are not those of its simulated.json" in refused(capsys, other, *MODEL)
    (other / SIMULATION_FILE).write_text('{"format": 1}')
    assert "simulated.json ('full_step_tokens'); simulate again" in refused(capsys, other, *MODEL)
    (other / SIMULATION_FILE).unlink()
    assert "simulated.json is missing" in refused(capsys, other, *MODEL)


@pytest.mark.long
def test_tapes_of_a_sample_of_fragments_are_refused(tmp_path, capsys):
    run = tmp_path / "run"
    arguments = ("--learners", "2", "--chips", "600000", "--days", "3", "--protocol-hours", "6", "--tape", str(run))
    assert main(["simulate", *arguments]) == 0
    assert "the tapes contain 1 of 24 fragments as a sample of all; simulate with --full" in refused(
        capsys, run, "--model", "100k"
    )
