"""Test of snapshots of `atoll train --shards` and of a new run restored from one."""

from __future__ import annotations

import json

import pytest
import torch

from atoll.checkpoint.published_model import read_published_tensors
from atoll.checkpoint.restore import parse_restore_source, restore_run
from atoll.cli.main import main
from atoll.reference.job_settings import JobSettings
from atoll.reference.supervisor import run_settings_for
from atoll.store.run_settings import CONFIG_FILE
from atoll.store.snapshots import list_snapshots, snapshot_version_path
from atoll.store.tensor_file import read_tensors
from tests.cli.test_train import assert_tapes_are_sound, small
from tests.reference.small_jobs import small_text

STEP = 2 * 16
TOKENS = 2 * 150 * STEP


@pytest.mark.long
def test_snapshot_of_a_run_with_shards_is_restored_into_a_new_run(tmp_path, capsys):
    text, run, new = small_text(tmp_path / "text"), tmp_path / "run", tmp_path / "new"
    arguments = small(text, "--learners", "2", "--tokens", str(TOKENS), "--kill", "none", "--snapshot-every", "16")
    assert main(["train", "--out", str(run), *arguments, "--shards", "2", "--json"]) == 0
    capsys.readouterr()
    newest = list_snapshots(run)[-1]
    assert newest.record is not None
    assert [learner for learner, _ in newest.record.parts] == [1, 2]

    # The shards of the new run have the values of the snapshot, bit by bit.
    source = parse_restore_source(str(run))
    restore_run(
        source, tmp_path / "bare", run_settings_for(JobSettings.load(run / CONFIG_FILE), "bare-1"), lambda _: None
    )
    found, plan = read_published_tensors(tmp_path / "bare"), source.settings.plan
    assert plan is not None
    for p in range(len(plan.fragments)):
        _, tensors = read_tensors(snapshot_version_path(run, newest.number, p))
        for piece, begin, end in plan.spans(p):
            rows = found[piece.tensor].reshape(plan.by_name[piece.tensor].shape)[piece.start : piece.stop]
            assert torch.equal(rows.flatten(), tensors["published"][begin:end])
    assert sorted(path.name for path in (tmp_path / "bare" / "shards").iterdir()) == ["0", "1"]
    assert list((tmp_path / "bare" / "store" / "fragments").iterdir()) == []

    # The new run continues from there.
    assert main(["train", "--out", str(new), "--restore", str(run), "--tokens", str(2 * TOKENS), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    first = report["islands"][0]["inner_state"][0]
    assert first.endswith(f"saved in snapshot {newest.number}") or first.startswith("optimizer state from learner")
    assert report["steps"] * STEP < report["tokens"]["trained"] - 8 * STEP, "tokens of the snapshot were trained again"
    assert_tapes_are_sound(new)
    assert main(["replay", str(new)]) == 0
    assert "the model is bit-identical" in capsys.readouterr().out
