"""Scenario files: shipped ones are valid, and errors name the file, the key and the allowed values."""

from __future__ import annotations

import pytest

from atoll.chaos.faults import FAULT_KINDS
from atoll.chaos.injectors import INJECTORS
from atoll.chaos.plan import draw_plan
from atoll.chaos.scenario import EXPECTABLE_FIGURES, ScenarioError, load_scenario, parse_scenario, shipped_scenarios

SHIPPED = (
    "churn",
    "disk-full",
    "everything",
    "flaky-links",
    "kill-all-but-one",
    "kill-one",
    "poison",
    "shards-die",
    "storm-heavy",
    "storm-light",
    "syncer-dies",
)

VALID = """
about = "A kill."
[run]
learners = 3
[[schedule]]
fault = "kill"
target = "learner 2"
at = "40%"
downtime = "1500ms"
[[storm]]
fault = "cut"
target = "link any"
per_minute = 4.0
direction = "up"
[expect.goodput]
at_least = 0.5
reason = "it is a test"
"""


def test_documented_scenarios_are_shipped():
    assert tuple(shipped_scenarios()) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_scenario_is_valid_and_has_reasons(name):
    scenario = load_scenario(name)
    assert scenario.about.endswith(".")
    assert len(scenario.about.splitlines()) == 1
    assert {"goodput", "worst_pause_s", "loss_within"} <= {*scenario.expect, "goodput"}
    assert all(len(line.reason) > 10 for line in scenario.expect.values())
    assert draw_plan(scenario, 0, scenario.run.duration_s).faults


def test_shipped_scenarios_use_every_fault():
    scenarios = [load_scenario(name) for name in SHIPPED]
    used = {each.spec.fault for scenario in scenarios for each in scenario.schedule}
    used |= {each.spec.fault for scenario in scenarios for each in scenario.storms}
    assert used == set(FAULT_KINDS) == set(INJECTORS)


def test_valid_file_is_parsed():
    scenario = parse_scenario(VALID, "mine", "mine.toml")
    assert scenario.run.learners == 3
    (scheduled,) = scenario.schedule
    assert (scheduled.spec.fault, scheduled.spec.kind, scheduled.spec.number) == ("kill", "learner", 2)
    assert scheduled.spec.options == {"downtime": 1.5}
    assert scenario.storms[0].spec.options == {"for": 4.0, "direction": "up"}
    assert scenario.expect["goodput"].bound == 0.5


@pytest.mark.parametrize(
    ("valid", "invalid", "message"),
    [
        ('about = "A kill."', "", "mine.toml: about is missing"),
        ("[run]", "[runs]", "mine.toml: unknown key 'runs'; the file has about, run, schedule, storm, expect"),
        ("learners = 3", "learner = 3", r"mine.toml, \[run\]: unknown key 'learner'; the table has learners"),
        ("learners = 3", "learners = 0", r"mine.toml, \[run\]: learners must be a whole number of at least 1, got 0"),
        ("learners = 3", "step_time = 0", r"mine.toml, \[run\]: step_time is 0"),
        ("learners = 3", 'duration = "0s"', r"mine.toml, \[run\]: duration is 0 s; use a time from 1s"),
        ("learners = 3", "quorum = 9", r"mine.toml, \[run\]: quorum 9 with 4 learners never merges"),
        ('fault = "kill"', 'fault = "smash"', r"\[\[schedule\]\] 1: fault is 'smash'; use one of kill, stop"),
        ("learner 2", "shard 0", r"\[\[schedule\]\] 1: target is 'shard 0', and the run has no shards; set shards in"),
        (
            "learners = 3",
            "shards = 2",
            r"\[\[storm\]\] 1: target is 'link any'; with shards a learner has a link to each",
        ),
        ("learner 2", "learner 4", r"\[\[schedule\]\] 1: target is 'learner 4'; learners are 1 to 3"),
        (
            "learner 2",
            "link 2",
            r"\[\[schedule\]\] 1: target is 'link 2'; a kill has the target \"learner 2\", \"learner any\"",
        ),
        ('at = "40%"', "", r"\[\[schedule\]\] 1: at is missing"),
        ('at = "40%"', 'at = "140%"', r"\[\[schedule\]\] 1: at is '140%'; use a share"),
        (
            'downtime = "1500ms"',
            'downtime = "soon"',
            r"\[\[schedule\]\] 1: downtime is 'soon'; use a time such as 80ms",
        ),
        (
            'downtime = "1500ms"',
            'for = "1s"',
            r"\[\[schedule\]\] 1: unknown key 'for'; a kill here has fault, target, at, downtime",
        ),
        ("per_minute = 4.0", "per_minute = 0", r"\[\[storm\]\] 1: per_minute is 0; use a number above 0"),
        ("per_minute = 4.0", "rate = 4.0", r"\[\[storm\]\] 1: unknown key 'rate'"),
        ("link any", "link all", r"\[\[storm\]\] 1: a storm has one target at a time"),
        ('direction = "up"', 'direction = "left"', r"\[\[storm\]\] 1: direction is 'left'; use one of both, up, down"),
        ("[expect.goodput]", "[expect.godput]", r"\[expect\]: unknown key 'godput'; the table has goodput"),
        (
            "at_least = 0.5",
            "at_most = 0.5",
            r"\[expect.goodput\]: unknown key 'at_most'; the table has at_least, reason",
        ),
        ("at_least = 0.5", 'at_least = "half"', r"\[expect.goodput\]: at_least is 'half'; use a number"),
        ('reason = "it is a test"', "", r"\[expect.goodput\]: reason is missing"),
        ("[run]", "[run", "mine.toml: not TOML"),
    ],
)
def test_invalid_file_error_names_place_and_allowed_values(valid, invalid, message):
    assert valid in VALID
    with pytest.raises(ScenarioError, match=message):
        parse_scenario(VALID.replace(valid, invalid, 1), "mine", "mine.toml")


def test_shards_are_numbered_from_zero():
    text = 'about = "A kill."\n[run]\nshards = 2\n[[schedule]]\nfault = "kill"\ntarget = "shard 0"\nat = "40%"\n'
    scenario = parse_scenario(text, "mine", "mine.toml")
    assert scenario.run.settings(60.0).shards == 2
    assert [str(fault.target) for fault in draw_plan(scenario, 0, 60.0).faults] == ["shard 0"]
    with pytest.raises(ScenarioError, match="target is 'shard 2'; shards are 0 to 1"):
        parse_scenario(text.replace("shard 0", "shard 2"), "mine", "mine.toml")
    both = draw_plan(parse_scenario(text.replace("shard 0", "shard all"), "mine", "mine.toml"), 0, 60.0)
    assert [str(fault.target) for fault in both.faults] == ["shard 0", "shard 1"]


def test_file_without_faults_is_refused():
    with pytest.raises(ScenarioError, match="the scenario has no fault"):
        parse_scenario('about = "Nothing."', "mine", "mine.toml")


def test_unknown_scenario_name_is_refused(tmp_path):
    with pytest.raises(ScenarioError, match="shipped are churn, disk-full"):
        load_scenario("kill-two")
    path = tmp_path / "mine.toml"
    path.write_text(VALID)
    assert load_scenario(str(path)).name == "mine"
    with pytest.raises(ScenarioError, match=r"neither as a shipped name nor as a file$"):
        load_scenario(str(tmp_path / "other.toml"))


def test_every_expectable_figure_has_a_kind_of_bound():
    assert {side for side, _ in EXPECTABLE_FIGURES.values()} == {"at_least", "at_most"}
