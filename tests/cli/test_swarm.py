"""`atoll swarm`: text and JSON output, tapes, and refused options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.cli.main import main
from atoll.cli.swarm import SwarmResult, print_result
from atoll.sim.swarm import Coverage, SeedResult


def test_clean_swarm_prints_its_coverage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "--seeds", "20", "--small", "--jobs", "1"]) == 0
    output = capsys.readouterr().out
    assert "20 worlds" in output
    assert "seeds/s" in output
    assert "of a state and an event met" in output
    assert output.rstrip().endswith("no violation")


def test_json_is_one_object_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "--seeds", "5", "--start", "3", "--jobs", "1", "--digest", "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["seeds"] == 5
    assert fields["violations"] == []
    assert set(fields["coverage"]) == {"moves", "reasons", "faults"}
    assert len(fields["digest"]) == 16
    assert len(fields["pairs_met"]) == fields["pairs"] > 20
    assert all(pair["count"] > 0 and pair["state"] and pair["event"] for pair in fields["pairs_met"])


def test_the_digest_is_of_the_seeds_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    digests = []
    for jobs in ("1", "2"):
        assert main(["swarm", "--seeds", "4", "--small", "--jobs", jobs, "--digest", "--json"]) == 0
        digests.append(json.loads(capsys.readouterr().out)["digest"])
    assert digests[0] == digests[1]


def test_a_violation_names_its_seed_and_the_command_that_replays_it(capsys: pytest.CaptureFixture[str]) -> None:
    result = SeedResult(17, 100, 3, "quorum", "1 contributions, the quorum is 2", ("fragment", 0), {}, {}, {}, {})
    print_result(SwarmResult(1, 100, 0.5, Coverage(), [result], digest=None), small=True)
    output = capsys.readouterr().out
    assert "seed 17: quorum: 1 contributions, the quorum is 2" in output
    assert "atoll swarm --seeds 1 --start 17 --small --story" in output


def test_tapes_of_a_seed_can_be_checked_replayed_and_shown_as_story(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "seed")
    assert main(["swarm", "--seeds", "1", "--start", "3", "--jobs", "1", "--tape", run]) == 0
    assert main(["check", run]) == 0
    assert main(["replay", run]) == 0
    capsys.readouterr()
    assert main(["story", run, "--learner", "1"]) == 0
    assert "incarnation 1" in capsys.readouterr().out


def test_tapes_are_not_written_to_a_folder_with_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "letter").write_text("dear")
    assert main(["swarm", "--seeds", "1", "--tape", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["letter"]


def test_seeds_for_years_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "--seeds", str(10**9 + 1)]) == 2
    assert "give at most 1000000000 at a time" in capsys.readouterr().err


def test_tapes_of_many_worlds_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "--seeds", "2", "--tape", str(tmp_path / "two")]) == 2
    assert "--seeds 1" in capsys.readouterr().err


def test_seeds_of_a_file_are_run_and_an_invalid_line_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds_file = tmp_path / "kept.txt"
    seeds_file.write_text("# why\n7  # once found\n")
    assert main(["swarm", "--seeds", "1", "--small", "--jobs", "1", "--also", str(seeds_file)]) == 0
    assert "2 worlds" in capsys.readouterr().out
    seeds_file.write_text("seven\n")
    assert main(["swarm", "--seeds", "1", "--also", str(seeds_file)]) == 2
    assert "line 1" in capsys.readouterr().err
