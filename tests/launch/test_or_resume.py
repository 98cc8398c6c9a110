"""`atoll syncer --or-resume`: one command, whether there is a run or not. That it serves is shown by test_up."""

from __future__ import annotations

import pytest

from atoll.cli.main import main


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["syncer", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("other", ["--resume", "--standby"])
def test_it_is_one_of_three(tmp_path, capsys, other):
    words = said(capsys, "--out", str(tmp_path), "--or-resume", other)
    assert "--or-resume has no effect with --resume or --standby" in words


def test_a_store_without_settings_is_no_run_and_is_not_written_over(tmp_path, capsys):
    (tmp_path / "store").mkdir()
    words = said(capsys, "--out", str(tmp_path), "--or-resume", "--port", "0")
    assert "has a store but no settings of a run: choose another --out" in words
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
