"""Plans: the same seed gives the same plan, storms are Poisson, and nothing is planned that cannot happen."""

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
def test_the_same_seed_gives_the_same_plan_bit_for_bit(name, seed):
    assert plan_of(name, seed).to_text() == plan_of(name, seed).to_text()


def test_a_plan_is_the_same_on_every_machine():
    """What was drawn once is drawn for ever: a seed in somebody's report must mean the same tomorrow."""
    told = '[[storm]]\nfault="kill"\ntarget="learner any"\nper_minute=6\n[[schedule]]\nfault="join"\nat="50%"'
    text = draw_plan(scenario_of(told), 7, 120.0).to_text()
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "7cea9e8f4aac96eb"


def test_other_seeds_give_other_plans():
    assert len({plan_of("storm-heavy", seed).to_text() for seed in range(20)}) == 20


@given(NAMES, SEEDS)
def test_faults_are_in_the_order_of_time_and_within_the_run(name, seed):
    plan = plan_of(name, seed)
    times = [fault.at_s for fault in plan.faults]
    assert times == sorted(times)
    assert all(0.0 <= at_s <= plan.duration_s for at_s in times)
    assert [fault.number for fault in plan.faults] == list(range(1, len(times) + 1))
    assert json.loads(plan.to_text())["faults"] == [fault.to_json() for fault in plan.faults]


@given(NAMES, SEEDS)
def test_nobody_is_struck_who_is_not_there(name, seed):
    """A storm strikes a process only when the last fault of that process is over and it has had time to settle."""
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
def test_a_fault_has_all_its_options_and_a_sentence(name, seed):
    for fault in plan_of(name, seed).faults:
        assert set(fault.options) == {option.name for option in FAULT_KINDS[fault.fault].options}
        assert fault.describe().startswith(f"{fault.fault} {fault.target}")


@pytest.mark.parametrize("per_minute", [0.5, 6.0, 60.0])
def test_a_storm_has_the_mean_and_the_variance_of_a_poisson_process(per_minute):
    """Counts in 2,000 minutes: mean and variance are both the rate, within five standard errors."""
    draw = Random(5)
    counts = [0] * 2000
    for at_s in poisson_times(draw, per_minute, 0.0, 60.0 * len(counts)):
        counts[int(at_s // 60.0)] += 1
    error = (per_minute / len(counts)) ** 0.5
    assert mean(counts) == pytest.approx(per_minute, abs=5 * error)
    spread = ((per_minute + 2 * per_minute**2) / len(counts)) ** 0.5
    assert variance(counts) == pytest.approx(per_minute, abs=5 * spread)


def test_a_storm_that_nobody_stands_in_the_way_of_loses_nothing():
    scenario = scenario_of(
        '[run]\nlearners = 64\n[[storm]]\nfault="kill"\ntarget="learner any"\nper_minute=6\ndowntime=1'
    )
    plans = [draw_plan(scenario, seed, 600.0) for seed in range(40)]
    assert sum(plan.skipped for plan in plans) == 0
    assert mean(len(plan.faults) for plan in plans) == pytest.approx(6 * 10 * 0.75, rel=0.05)


def test_a_storm_leaves_out_what_cannot_happen_and_says_so():
    scenario = scenario_of('[run]\nlearners = 1\n[[storm]]\nfault="stop"\ntarget="learner 1"\nper_minute=60\nfor=5')
    plan = draw_plan(scenario, 1, 60.0)
    assert plan.skipped > 30
    times = [fault.at_s for fault in plan.faults]
    assert all(after - before >= 5 + SETTLE_TIME_S for before, after in pairwise(times))


def test_one_more_storm_leaves_the_others_as_they_were():
    one = '[[storm]]\nfault="kill"\ntarget="learner any"\nper_minute=3\n'
    two = one + '[[storm]]\nfault="slow"\ntarget="disk syncer"\nper_minute=3\n'

    def kills(text):
        plan = draw_plan(scenario_of(text), 4, 120.0)
        return [(fault.at_s, fault.target) for fault in plan.faults if fault.fault == "kill"]

    assert kills(one) == kills(two) != []


def test_all_but_one_spares_one_by_the_seed():
    spared = {10 - sum(fault.target.number for fault in plan_of("kill-all-but-one", seed).faults) for seed in range(30)}
    assert spared == {1, 2, 3, 4}


def test_a_scheduled_time_beyond_the_run_is_refused():
    scenario = scenario_of('[[schedule]]\nfault="kill"\ntarget="learner 1"\nat="30s"')
    with pytest.raises(ScenarioError, match=r"at is 30 s, and the run takes 20 s"):
        draw_plan(scenario, 1, 20.0)


def test_a_storm_without_end_is_refused():
    scenario = scenario_of('[[storm]]\nfault="join"\nper_minute=600')
    with pytest.raises(ScenarioError, match="more than 2000 faults"):
        draw_plan(scenario, 1, 3600.0)


def test_a_dry_run_prints_the_plan_and_touches_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["chaos", "storm-heavy", "--dry-run", "--seed", "11", "--duration", "90s"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert main(words) == 0
    assert capsys.readouterr().out == shown
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == plan_of("storm-heavy", 11, 90.0).to_json()
    assert len(shown.splitlines()) >= len(told["faults"]) + 1
    assert list(tmp_path.iterdir()) == []


def test_the_list_has_a_sentence_for_each(capsys):
    assert main(["chaos", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11
    assert all(line.endswith(".") for line in lines)
    assert main(["chaos", "--list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["scenarios"]) == 11


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "no scenario is given"),
        (["kill-two"], "there is no scenario 'kill-two'"),
        (["kill-one", "--duration", "long"], "--duration is 'long'; give a time"),
        (["kill-one", "--duration", "0s"], "--duration is 0 s; give a time from 1s"),
        (["kill-one", "--links", "wire"], "give one of auto, relay, netns"),
    ],
)
def test_a_wrong_wish_is_one_line(words, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["chaos", *words]) == 2
    told = capsys.readouterr()
    assert sentence in told.err
    assert len(told.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
