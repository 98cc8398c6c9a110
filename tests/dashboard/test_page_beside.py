"""`--dash` beside a job: what was said of the page is checked before anything begins, and reaches it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.request import urlopen

import pytest

from atoll.cli.dash import DashboardOptions, dashboard_process
from atoll.cli.main import main
from tests.tiny_run import TinyRun

WAIT_S = 300.0


@pytest.mark.parametrize("command", ["train", "syncer"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rules", "{rules}"], "--rules has no effect without --dash"),
        (["--dash", "--rules", "{rules}"], "there is no rule 'gone'"),
    ],
)
def test_a_slip_is_told_before_anything_begins(tmp_path, capsys, command, words, said):
    rules = tmp_path / "rules.toml"
    rules.write_text("gone = 3\n")
    out = tmp_path / "run"
    assert main([command, "--out", str(out), *(word.format(rules=rules) for word in words)]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.long
def test_rules_reach_the_page(tmp_path, capfd):
    """Learner 2 is dead for 20 s: by these rules that is an alert, by those without a file it is not."""
    tiny = TinyRun().run_until(10.0)
    tiny.kill(2)
    run = tiny.run_until(30.0).save(tmp_path / "run")
    rules = tmp_path / "rules.toml"
    rules.write_text("down_s = 5\n")
    assert alerts_on_the_page(DashboardOptions(True, 0), run, capfd) == set()
    assert alerts_on_the_page(DashboardOptions(True, 0, rules), run, capfd) == {("learner-down", "learner 2")}


def alerts_on_the_page(page: DashboardOptions, run: Path, capfd: pytest.CaptureFixture[str]) -> set[tuple[str, str]]:
    with dashboard_process(page, run, None):
        address = re.findall(r"http://\S+", capfd.readouterr().err)[0].rstrip("/")
        with urlopen(f"{address}/api/run/0/live", timeout=WAIT_S) as events:
            for line in events:
                if line.startswith(b"data: ") and (shown := json.loads(line.removeprefix(b"data: ")))["islands"]:
                    return {(each["rule"], each["subject"]) for each in shown["alerts"] if each["rule"] != "stale"}
    raise AssertionError("the page has shown no run")
