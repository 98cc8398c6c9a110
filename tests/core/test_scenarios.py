"""Scenario files match the behavior of the cores, and a changed scenario fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.scenario import Scenario, ScenarioError, scenario_files

FILES = scenario_files()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario_matches_the_core(path: Path, pytestconfig: pytest.Config) -> None:
    scenario = Scenario(path.read_text(encoding="utf-8"), f"tests/scenarios/{path.name}")
    if pytestconfig.getoption("--rewrite-scenarios"):
        path.write_text(scenario.played(), encoding="utf-8")
    else:
        scenario.check()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario_describes_itself(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert len(first) > 30


def test_main_protocol_paths_have_a_scenario():
    assert {path.stem for path in FILES} >= {
        "first_round",
        "grace",
        "late_contribution",
        "abandoned_round",
        "restart_between_durable_and_published",
        "new_incarnation_and_a_peer",
        "partition_and_resume",
        "disk_full",
        "snapshot_with_a_contribution_in_flight",
        "budget_and_orderly_finish",
    }


# --------------------------------------------------------------------------------------------------------------------
# A changed scenario must fail

TEXT = """\
# A learner that reports its first step is pulled.
core syncer fragments=1 every_steps=2
> quietly at 0 learner 1 joins
> at 1 learner 1 reports step 1
to learner 1: pull fragment 0 base 0 epoch 1 attempt 1
> at 2 learner 1 reports step 2
nothing
"""


def test_unchanged_scenario_passes():
    Scenario(TEXT).check()
    assert Scenario(TEXT).played() == TEXT


@pytest.mark.parametrize(
    ("expected", "changed", "line"),
    [
        ("base 0 epoch", "base 1 epoch", 5),
        ("to learner 1: pull", "to learner 2: pull", 5),
        ("attempt 1\n", "attempt 1\nto learner 1: pull fragment 0 base 0 epoch 1 attempt 1\n", 6),
        ("to learner 1: pull fragment 0 base 0 epoch 1 attempt 1\n", "", 5),
        ("nothing\n", "", 7),
        ("reports step 2\nnothing\n", "reports step 2\nto learner 1: pong serial 1\n", 7),
    ],
)
def test_changed_expectation_fails_with_its_line(expected, changed, line):
    assert expected in TEXT
    planted = TEXT.replace(expected, changed)
    with pytest.raises(AssertionError, match=f"planted, line {line}: expected"):
        Scenario(planted, "planted").check()
    assert Scenario(planted).played() == TEXT, "--rewrite-scenarios restores the text"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_expected_effect_is_compared(path: Path) -> None:
    """Remove the last effect of each file and expect a failure."""
    lines = Scenario(path.read_text(encoding="utf-8")).played().splitlines()
    last = max(n for n, line in enumerate(lines) if line and not line.startswith((">", "#", "core ")))
    with pytest.raises(AssertionError, match=f"line {last + 1}: expected"):
        Scenario("\n".join([*lines[:last], *lines[last + 1 :]]) + "\n").check()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("> at 1 learner 1 sings", "no such phrase: 'learner 1 sings'"),
        ("> learner 1 reports step 1", "expected `> at TIME ...`"),
        ("> at 1 learner 1 reports step", "names and values come in pairs"),
        ("> at 1 learner 1 reports step 1 color blue", "unknown fields"),
        ("core bystander", "a core is a syncer or a learner, not a bystander"),
    ],
)
def test_invalid_scenario_line_is_named(line, problem):
    text = "core syncer fragments=1\n> quietly at 0 learner 1 joins\n" + line + "\n"
    with pytest.raises(ScenarioError, match="scenario, line 3: ") as caught:
        Scenario(text).played()
    assert problem in str(caught.value)


def test_scenario_starts_with_its_core():
    with pytest.raises(ScenarioError, match="no core yet: start with"):
        Scenario("> at 1 learner 1 joins\n").played()
