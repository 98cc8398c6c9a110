"""`--dash` next to a job: its options are validated before the job starts, and reach the page."""

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
    ("options", "message"),
    [
        (["--rules", "{rules}"], "--rules has no effect without --dash"),
        (["--dash", "--rules", "{rules}"], "unknown rule 'gone'"),
    ],
)
def test_invalid_dashboard_options_are_refused_before_start(tmp_path, capsys, command, options, message):
    rules = tmp_path / "rules.toml"
    rules.write_text("gone = 3\n")
    out = tmp_path / "run"
    assert main([command, "--out", str(out), *(option.format(rules=rules) for option in options)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.long
def test_rules_apply_to_page_of_job(tmp_path, capfd):
    """Learner 2 is down for 20 s: an alert by these rules, and none by the default ones."""
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
    raise AssertionError("the page did not show the run")
