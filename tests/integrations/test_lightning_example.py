"""examples/with_lightning.py as a command: one learner with DDP by torchrun and one of a single process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import test_examples
from tests.test_examples import EXAMPLES, Processes, differing, finished, saved

# A merge needs both learners. Leases are long enough that neither runs out of samples.
SYNCER = """
import sys
from pathlib import Path

from atoll.core.types import RunConfig
from atoll.store.run_settings import RunSettings
from atoll.syncer.main import serve_syncer

settings = RunSettings(RunConfig(
    run_id="lightning", fragments=4, every_steps=8, quorum=2, budget_merges=28, lease_samples=2000
))
sys.exit(not serve_syncer(Path(sys.argv[1]), settings, port=0, on_ready=lambda address: print(address, flush=True)))
"""


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    monkeypatch.setattr(test_examples, "LIMIT_S", 300.0)  # three of them load Lightning at once
    started = Processes()
    yield started
    started.end()


@pytest.mark.long
def test_an_island_of_two_ranks_and_one_alone_end_with_the_same_model(processes, tmp_path):
    syncer = processes.start("-c", SYNCER, tmp_path / "run", cwd=tmp_path)
    assert syncer.stdout is not None
    address = syncer.stdout.readline().strip()
    script = EXAMPLES / "with_lightning.py"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", 2)
    common = ("--leases", "--syncer", address, "--learner")
    ranked = processes.start(*torchrun, script, *common, 1, "--out", "model-1.pt", cwd=tmp_path)
    mixed = ("--precision", "bf16-mixed", "--out", "model-2.pt")
    alone = processes.start(script, *common, 2, *mixed, cwd=tmp_path)
    outputs = [finished(ranked), finished(alone)]
    assert any("MEMBER: 2/2" in line for line in outputs[0]), outputs[0]
    losses = [[line for line in lines if line.startswith("held-out loss ")] for lines in outputs]
    assert len(losses[0]) == len(losses[1]) == 1, outputs
    assert losses[0] == losses[1]
    assert float(losses[0][0].split()[-1]) < 4.0, "the loss of guessing is 5.5"
    assert differing(saved(tmp_path / "model-1.pt"), saved(tmp_path / "model-2.pt")) == []
    finished(syncer)
