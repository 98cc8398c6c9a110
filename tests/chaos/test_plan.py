"""Plans: equal seeds give equal plans, storms are Poisson, and no impossible fault is planned."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from random import Random
from statistics import mean, variance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.chaos.faults import FAULT_KINDS
from atoll.chaos.plan import SETTLE_TIME_S, Plan, draw_plan, poisson_times
from atoll.chaos.scenario import Scenario, ScenarioError, load_scenario, parse_scenario
from atoll.cli.main import main

SEEDS = st.integers(0, 10**6)
NAMES = st.sampled_from(["storm-light", "storm-heavy", "everything", "churn", "flaky-links", "kill-all-but-one"])


def plan_of(name: str, seed: int, duration_s: float = 120.0) -> Plan:
    return draw_plan(load_scenario(name), seed, duration_s)


def scenario_of(text: str) -> Scenario:
    return parse_scenario(f'about = "A test."\n{text}', "test", "test.toml")


@given(NAMES, SEEDS)
def test_equal_seeds_give_identical_plans(name, seed):
    assert plan_of(name, seed).to_text() == plan_of(name, seed).to_text()


def test_plan_is_stable_across_machines_and_releases():
    """A seed must give the same plan in every release, so that reported seeds stay reproducible."""
    text = '[[storm]]\nfault="kill"\ntarget="learner any"\nper_minute=6\n[[schedule]]\nfault="join"\nat="50%"'
    plan = draw_plan(scenario_of(text), 7, 120.0).to_text()
    assert hashlib.sha256(plan.encode()).hexdigest()[:16] == "7cea9e8f4aac96eb"


def test_different_seeds_give_different_plans():
    assert len({plan_of("storm-heavy", seed).to_text() for seed in range(20)}) == 20


@given(NAMES, SEEDS)
def test_faults_are_in_order_of_time_and_within_the_run(name, seed):
    plan = plan_of(name, seed)
    times = [fault.at_s for fault in plan.faults]
    assert times == sorted(times)
    assert all(0.0 <= at_s <= plan.duration_s for at_s in times)
    assert [fault.number for fault in plan.faults] == list(range(1, len(times) + 1))
    assert json.loads(plan.to_text())["faults"] == [fault.to_json() for fault in plan.faults]


@given(NAMES, SEEDS)
def test_storm_targets_only_settled_members(name, seed):
    """A storm targets a process only after its last fault has ended and it has had time to settle."""
    plan = plan_of(name, seed)
    present = set(range(1, plan.learners + 1))
    joined: dict[int, float] = {}
    for fault in plan.faults:
        number = fault.target.number
        if fault.target.kind == "shard":
            assert number < plan.shards
            continue
        if fault.fault == "join":
            assert number not in present
            present.add(number)
            joined[number] = fault.at_s
        elif number:
            assert number in present, fault
            assert fault.at_s >= joined.get(number, -SETTLE_TIME_S) + SETTLE_TIME_S
        if fault.fault == "leave":
            present.remove(number)
    assert present
    kinds = ("kill", "stop")
    for fault in plan.faults:
        if fault.fault not in kinds or not fault.origin.startswith("storm"):
            continue
        for other in plan.faults:
            if other is not fault and other.fault in kinds and other.target == fault.target:
                first, last = sorted((fault, other), key=lambda each: each.at_s)
                assert last.at_s >= first.at_s + first.duration_s + SETTLE_TIME_S


@given(NAMES, SEEDS)
def test_fault_has_all_options_and_a_description(name, seed):
    for fault in plan_of(name, seed).faults:
        assert set(fault.options) == {option.name for option in FAULT_KINDS[fault.fault].options}
        assert fault.describe().startswith(f"{fault.fault} {fault.target}")


@pytest.mark.parametrize("per_minute", [0.5, 6.0, 60.0])
def test_storm_times_are_a_poisson_process(per_minute):
    """Counts in 2,000 minutes: mean and variance are both the rate, within five standard errors."""
    rng = Random(5)
    counts = [0] * 2000
    for at_s in poisson_times(rng, per_minute, 0.0, 60.0 * len(counts)):
        counts[int(at_s // 60.0)] += 1
    error = (per_minute / len(counts)) ** 0.5
    assert mean(counts) == pytest.approx(per_minute, abs=5 * error)
    spread = ((per_minute + 2 * per_minute**2) / len(counts)) ** 0.5
    assert variance(counts) == pytest.approx(per_minute, abs=5 * spread)


def test_storm_with_free_targets_skips_no_fault():
    scenario = scenario_of(
        '[run]\nlearners = 64\n[[storm]]\nfault="kill"\ntarget="learner any"\nper_minute=6\ndowntime=1'
    )
    plans = [draw_plan(scenario, seed, 600.0) for seed in range(40)]
    assert sum(plan.skipped for plan in plans) == 0
    assert mean(len(plan.faults) for plan in plans) == pytest.approx(6 * 10 * 0.75, rel=0.05)


def test_storm_counts_skipped_faults():
    scenario = scenario_of('[run]\nlearners = 1\n[[storm]]\nfault="stop"\ntarget="learner 1"\nper_minute=60\nfor=5')
    plan = draw_plan(scenario, 1, 60.0)
    assert plan.skipped > 30
    times = [fault.at_s for fault in plan.faults]
    assert all(after - before >= 5 + SETTLE_TIME_S for before, after in pairwise(times))


def test_added_storm_does_not_change_the_others():
    one = '[[storm]]\nfault="kill"\ntarget="learner any"\nper_minute=3\n'
    two = one + '[[storm]]\nfault="slow"\ntarget="disk syncer"\nper_minute=3\n'

    def kills(text):
        plan = draw_plan(scenario_of(text), 4, 120.0)
        return [(fault.at_s, fault.target) for fault in plan.faults if fault.fault == "kill"]

    assert kills(one) == kills(two) != []


def test_all_but_one_leaves_out_one_by_the_seed():
    spared = {10 - sum(fault.target.number for fault in plan_of("kill-all-but-one", seed).faults) for seed in range(30)}
    assert spared == {1, 2, 3, 4}


def test_scheduled_time_after_the_run_is_refused():
    scenario = scenario_of('[[schedule]]\nfault="kill"\ntarget="learner 1"\nat="30s"')
    with pytest.raises(ScenarioError, match=r"at is 30 s, and the run takes 20 s"):
        draw_plan(scenario, 1, 20.0)


def test_storm_with_too_many_faults_is_refused():
    scenario = scenario_of('[[storm]]\nfault="join"\nper_minute=600')
    with pytest.raises(ScenarioError, match="more than 2000 faults"):
        draw_plan(scenario, 1, 3600.0)


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["chaos", "storm-heavy", "--dry-run", "--seed", "11", "--duration", "90s"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert main(arguments) == 0
    assert capsys.readouterr().out == printed
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan == plan_of("storm-heavy", 11, 90.0).to_json()
    assert len(printed.splitlines()) >= len(plan["faults"]) + 1
    assert list(tmp_path.iterdir()) == []


def test_list_has_a_sentence_for_each_scenario(capsys):
    assert main(["chaos", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11
    assert all(line.endswith(".") for line in lines)
    assert main(["chaos", "--list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["scenarios"]) == 11


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no scenario is given"),
        (["kill-two"], "there is no scenario 'kill-two'"),
        (["kill-one", "--duration", "long"], "--duration is 'long'; use a time"),
        (["kill-one", "--duration", "0s"], "--duration is 0 s; use a time from 1s"),
        (["kill-one", "--links", "wire"], "give one of auto, relay, netns"),
    ],
)
def test_invalid_arguments_give_one_line_error(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["chaos", *arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert len(output.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
