"""Tests of benchmarks/million_chips.py in its short form, and of benchmarks/many_runs.py."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks import million_chips
from benchmarks.many_runs import read_results, run_all
from benchmarks.million_chips import Setting


@pytest.mark.long
def test_short_form_trains_equal_tokens_with_and_without_failures(capsys):
    assert million_chips.main(["--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| 0 ")]
    assert [row[0] for row in rows] == ["0", "0"]
    assert (rows[0][1], rows[0][6]) == ("0", "-")
    assert int(rows[1][1]) > 0, "no failure was simulated"
    assert rows[0][3] == rows[1][3] == "4,800"
    assert float(rows[0][2]) > float(rows[1][2]) > 60.0, "goodput"
    assert float(rows[0][4]) > 3.8 > float(rows[1][4]) > 1.0, "contributions per merge"
    assert lines[-1].startswith("Mean of 1 seeds: loss ")


def test_tapes_that_end_too_early_are_refused(monkeypatch):
    monkeypatch.setattr(Setting, "days", 20.0 / 86_400.0)
    with pytest.raises(ValueError, match=r"are over after [\d,]+ of 4,800 tokens"):
        million_chips.run_one(Setting(**million_chips.QUICK_OPTIONS))


def test_every_seed_runs_with_and_without_failures():
    options = million_chips.parser().parse_args(["--seeds", "0,2", "--tokens", "5"])
    found = [(s.seed, s.mtbi_days, s.tokens) for s in million_chips.settings_of(options)]
    assert found == [(0, None, 5), (0, 365.0, 5), (2, None, 5), (2, 365.0, 5)]


def line(seed, mtbi_days, loss):
    figures = {"failures": 3, "goodput": 0.8, "trained": 10, "contributions_per_merge": 3.0, "loss": loss}
    return {**dataclasses.asdict(Setting(mtbi_days, seed)), **figures}


def test_difference_is_computed_per_seed_and_incomplete_pairs_are_ignored():
    lines = [line(0, None, 2.0), line(0, 365.0, 2.1), line(1, None, 4.0), line(1, 365.0, 4.0), line(2, None, 9.0)]
    summary = million_chips.table(lines).splitlines()[-1]
    assert summary == "Mean of 2 seeds: loss 3.0000 without failures, 3.0500 with them: +2.50 % (+0.00 to +5.00)."


@dataclasses.dataclass(frozen=True)
class Number:
    value: int = 0


def test_finished_runs_are_skipped_and_failed_runs_are_counted(tmp_path, capsys):
    script = tmp_path / "double.py"
    script.write_text(
        "import json, sys\ngiven = json.loads(sys.argv[2])\nprint(json.dumps({**given, 'is': 1 // given['value']}))\n"
    )
    results = tmp_path / "results.jsonl"
    results.write_text('{"value": 5, "is": 0}\n{"value": 1, "i\n')

    def describe(setting, result):
        return f"{setting.value} gave {result['is']}"

    numbers = [Number(5), Number(1), Number(0)]
    assert run_all(str(script), numbers, results, 2, describe) == 1
    out, err = capsys.readouterr()
    assert "3 runs, 1 of them done before" in out
    assert "1 gave 1" in out
    assert "failed: Number(value=0)" in out
    assert "passed over a broken line" in err
    assert json.loads(results.read_text().splitlines()[-1]) == {"value": 1, "is": 1}
    assert run_all(str(script), numbers[:2], results, 2, describe) == 0
    assert "2 runs, 2 of them done before" in capsys.readouterr().out
    assert len(read_results(results)) == 2
