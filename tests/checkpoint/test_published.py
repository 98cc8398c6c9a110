"""The published model, read from the directory of a finished run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from atoll.checkpoint.published_model import read_published_tensors
from atoll.core.protocol import ManifestRecord
from atoll.store.run_settings import RunSettings
from atoll.store.snapshots import SHARDS_FOLDER
from atoll.store.version_store import Store
from atoll.tensors.plan import describe_tensors, make_plan
from tests.store.store_samples import make_version


def make_run_with_shard(run: Path, manifest: ManifestRecord | None) -> None:
    """Create a run whose only fragment has version 2 at a shard. All values of version n are n."""
    plan = make_plan(describe_tensors(nn.Linear(2, 2, bias=False)), 1, "balanced")
    with Store.open(run / "store") as store:
        store.write_settings(RunSettings(plan=plan, shards=1).to_json())
        if manifest is not None:
            store.write(manifest)
    with Store.open(run / SHARDS_FOLDER / "0" / "store") as shard:
        shard.write_initial(0, {"published": torch.zeros(4)})
        for number in (1, 2):
            shard.write(make_version(0, number), {"published": torch.full((4,), float(number))})


@pytest.mark.parametrize(("final", "expected"), [(None, 2.0), (2, 2.0), (1, 1.0)])
def test_finished_run_has_the_final_versions_of_its_manifest(tmp_path, final, expected):
    """A shard that was disconnected at the end may have a later version, which was never published."""
    make_run_with_shard(tmp_path, ManifestRecord((final,), final, 100) if final is not None else None)
    assert read_published_tensors(tmp_path)["weight"].tolist() == [[expected] * 2] * 2


def test_missing_final_version_is_named(tmp_path):
    make_run_with_shard(tmp_path, ManifestRecord((3,), 3, 100))
    with pytest.raises(ValueError, match=r"000000003.safetensors is missing, and it is a final version of the run"):
        read_published_tensors(tmp_path)
