"""Tests of the settings of a job: their JSON, and the errors for invalid settings."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from atoll.reference.job_settings import JobSettings, PlannedKill
from atoll.tensors.settings import Numerics

UNUSUAL = JobSettings(
    learners=3,
    seed=5,
    tokens=1000,
    data="some/folder",
    context=32,
    step_time_s=0.05,
    speeds=(1.0, 0.5, 0.8),
    kills=(PlannedKill(3, 0.4), PlannedKill(1, 0.5, 10.0)),
    quorum=2,
    adopt="blend",
    numerics=Numerics(outer_lr=0.7, up="int4"),
)


@pytest.mark.parametrize("settings", [JobSettings(), UNUSUAL], ids=["defaults", "unusual"])
def test_settings_are_unchanged_by_json_and_a_file(settings, tmp_path):
    assert JobSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    settings.save(tmp_path / "config.json")
    assert JobSettings.load(tmp_path / "config.json") == settings


@pytest.mark.parametrize("name", [each.name for each in fields(JobSettings)])
def test_missing_unknown_or_mistyped_field_is_refused(name):
    data = UNUSUAL.to_json()
    with pytest.raises(ValueError, match=f"lack field '{name}'"):
        JobSettings.from_json({key: value for key, value in data.items() if key != name})
    with pytest.raises(ValueError, match=f"{name}x"):
        JobSettings.from_json({**data, f"{name}x": 1})
    with pytest.raises(ValueError, match=f"as {name}"):
        JobSettings.from_json({**data, name: {"not": "this"} if name != "numerics" else 7})


def test_settings_of_another_format_are_refused():
    with pytest.raises(ValueError, match="format 2, this Atoll reads 1"):
        JobSettings.from_json({**JobSettings().to_json(), "format": 2})


def test_error_names_a_damaged_file(tmp_path):
    (tmp_path / "config.json").write_text("[1, 2", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json: "):
        JobSettings.load(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": "sail"}, "--method 'sail' is unknown; give one of decoupled, ddp"),
        ({"learners": 0}, "learners must be a whole number of at least 1"),
        ({"learners": 1000}, "give at most 256"),
        ({"tokens": 0}, "tokens must be"),
        ({"method": "single"}, "--method single has one learner, not 4"),
        ({"method": "streaming", "every_steps": 2, "overlap_steps": 2}, "give a --tau below --every"),
        ({"quorum": 5}, "quorum 5 with 4 learners never merges"),
        ({"speeds": (1.0,), "step_time_s": 0.1}, "1 speeds for 4 learners"),
        ({"speeds": (1.0, 1.0, 1.0, 0.0), "step_time_s": 0.1}, "never ends a step"),
        ({"speeds": (1.0, 1.0, 1.0, 0.5)}, "--step-time 50ms"),
        ({"kills": (PlannedKill(5, 0.4),)}, "learner 5 of 4"),
        ({"kills": (PlannedKill(3, 0.4),), "method": "ddp"}, "would end a run of --method ddp"),
        ({"grace_margin": 1.5}, "grace_margin is 1.5; give a number from 0 up to"),
        ({"warmup": 1.0}, "warmup is 1"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"adopt": "steal"}, "adopt is 'steal'; give one of carry, overwrite or blend"),
    ],
)
def test_invalid_settings_are_refused_with_the_fix(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        JobSettings(**changes)


@pytest.mark.parametrize(
    ("text", "kill"),
    [("3@0.4", PlannedKill(3, 0.4, 4.0)), ("3@40%", PlannedKill(3, 0.4, 4.0)), ("1@0+0.5s", PlannedKill(1, 0.0, 0.5))],
)
def test_kill_is_parsed(text, kill):
    assert PlannedKill.parse(text) == kill


@pytest.mark.parametrize("text", ["3", "x@0.4", "3@", "3@1.5", "0@0.4", "3@0.4+", "3@0..4", "3@0.4-1"])
def test_invalid_kill_is_refused(text):
    with pytest.raises(ValueError, match="--kill"):
        PlannedKill.parse(text)


def test_minimum_step_time_follows_from_speed():
    paced = replace(UNUSUAL, step_time_s=0.1)
    assert [round(paced.min_step_s(n), 6) for n in (1, 2, 3, 4)] == [0.1, 0.2, 0.125, 0.1]
    assert paced.is_paced
    assert not JobSettings().is_paced


def test_lockstep_methods_train_at_least_the_token_budget():
    settings = JobSettings(tokens=1_000_000, batch=8, learners=4)
    steps = settings.lockstep_steps(context=64)
    assert (steps - 1) * 4 * 8 * 64 < 1_000_000 <= steps * 4 * 8 * 64


def test_run_config_has_the_settings_of_the_job():
    config = UNUSUAL.run_config("r")
    assert (config.budget_tokens, config.quorum, config.adopt) == (1000, 2, "blend")
