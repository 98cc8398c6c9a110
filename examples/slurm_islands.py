"""A run of mixed islands under Slurm: one rank, two with FSDP2, two with DDP. One is requeued while it trains.

    python examples/slurm_islands.py --node NAME      # all on this node of a cluster; --run on a disk that it shares

Syncer and islands are jobs. The island that Slurm takes away comes back as a new incarnation, the others train on, and
all end with the same model.
"""

import argparse
import re
import secrets
import signal
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from atoll.launch.launcher import Unit, UnitState
from atoll.launch.slurm import SlurmLauncher

SCRIPT = Path(__file__).resolve().with_name("many_ranks.py")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
ISLANDS = {"alone": (), "sharded": TORCHRUN, "copied": TORCHRUN}
REQUEUED_ISLAND = "sharded"
FINAL_STATES = (UnitState.ENDED, UnitState.FAILED, UnitState.STOPPED, UnitState.LOST)
Handles = dict[str, dict[str, Any]]

# `atoll syncer` ends by tokens. Here the end is one of merges, and a merge needs all three: while one is away the
# others train on, but the run cannot end without it.
SYNCER = """
import os, sys
from pathlib import Path

from atoll.core.types import RunConfig
from atoll.store.run_settings import RunSettings
from atoll.syncer.main import serve_syncer
from atoll.checkpoint.model_file import MODEL, write_tensors

out, port, merges = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
settings = RunSettings(RunConfig(run_id="slurm-islands", quorum=3, budget_merges=merges))
keep = lambda syncer: write_tensors(syncer.published_model(), out / MODEL)
sys.exit(not serve_syncer(out, settings, port=port, token=os.environ["ATOLL_TOKEN"], on_finished=keep))
"""

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--node", required=True, help="a node of the cluster to which this machine submits")
parser.add_argument("--run", type=Path, default=Path("runs/slurm"), help="directory of the run")
parser.add_argument("--merges", default="100", help="budget of the run; five are about 24 steps of the slowest")
parser.add_argument(
    "--within",
    type=float,
    default=900.0,
    metavar="SECONDS",
    help="then it is given up; Slurm keeps a requeued job back for two minutes",
)
options = parser.parse_args()
if (options.run / "units").exists():
    parser.error(f"{options.run} holds a run already: remove it, or name another with --run")


def make_units() -> list[Unit]:
    run, token = options.run.resolve(), secrets.token_urlsafe(16)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    threads = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONUNBUFFERED": "1"}

    def unit(name: str, *command: str, cpus: int = 1, max_restarts: int = 2) -> Unit:
        return Unit(
            "slurm-islands",
            name,
            (sys.executable, *command),
            run / "units" / name,
            environment={"ATOLL_TOKEN": token, "ATOLL_RUN_DIRECTORY": str(run / "run"), **threads},
            secret_names=frozenset({"ATOLL_TOKEN"}),
            cpus=cpus,
            max_restarts=max_restarts,
            notice_s=20.0,
            options={"nodelist": options.node},
        )

    made = [unit("syncer", "-c", SYNCER, str(run / "run"), port, options.merges, max_restarts=0)]
    for number, (name, launcher) in enumerate(ISLANDS.items(), start=1):
        place = ("--syncer", f"127.0.0.1:{port}", "--learner", str(number), "--out", str(run / f"{name}.pt"))
        shape = ("--ddp",) if name == "copied" else ()
        made.append(unit(name, *launcher, str(SCRIPT), *place, *shape, cpus=2 if launcher else 1))
    return made


class UnitMonitor:
    """What the units are, told when it changes."""

    def __init__(self, launcher: SlurmLauncher, handles: Handles) -> None:
        self.launcher, self.handles = launcher, handles
        self.last_status: dict[str, str] = {}
        self.deadline = time.monotonic() + options.within

    def read_output(self, name: str) -> str:
        return "\n".join(path.read_text() for path in self.launcher.log(self.handles[name]))

    def last_step(self, name: str) -> int:
        """The last one that the island has told, of whichever incarnation."""
        return int((re.findall(r"^step (\d+) of", self.read_output(name), re.MULTILINE) or ["0"])[-1])

    def poll(self) -> dict[str, UnitState]:
        if time.monotonic() > self.deadline:
            sys.exit(f"given up after {options.within:g} s: {self.last_status}")
        found = {}
        for name, handle in self.handles.items():
            told = self.launcher.status(handle)
            found[name] = told.state
            words = f"{told.state}: {told.cause}"
            if self.last_status.get(name) != words:
                print(f"{name:8} | {words}", flush=True)
                self.last_status[name] = words
        failed = [name for name, state in found.items() if state in FINAL_STATES and state is not UnitState.ENDED]
        if failed:
            sys.exit(f"{failed[0]} is {found[failed[0]].value}:\n{self.read_output(failed[0])[-3000:]}")
        time.sleep(0.3)
        return found

    def wait_until_printed(self, name: str, words: str) -> None:
        while words not in self.read_output(name):
            if self.poll()[name] is UnitState.ENDED and words not in self.read_output(name):
                sys.exit(f"{name} ended without {words!r}; what it has printed is in {options.run}/units/{name}")


def check_results(watch: UnitMonitor, before: dict[str, int], after: dict[str, int]) -> list[tuple[str, bool]]:
    """Sentences, and whether they hold."""
    models = {name: torch.load(options.run / f"{name}.pt", weights_only=True) for name in ISLANDS}
    published = load_file(options.run / "run" / "model.safetensors")
    restarts = {name: watch.launcher.status(handle).restarts for name, handle in watch.handles.items()}
    others = [name for name in ISLANDS if name != REQUEUED_ISLAND]
    steps = ", ".join(f"{name} from step {before[name]} to {after[name]}" for name in others)
    return [
        (
            f"{REQUEUED_ISLAND} was requeued and came back as incarnation 2",
            "incarnation 2," in watch.read_output(REQUEUED_ISLAND),
        ),
        (
            "nobody else was started again",
            all(count == 0 for name, count in restarts.items() if name != REQUEUED_ISLAND),
        ),
        (f"the others trained on: {steps}", all(after[name] > before[name] for name in others)),
        (
            f"all {len(models)} islands ended with the published model",
            all(torch.equal(model[name], value) for model in models.values() for name, value in published.items()),
        ),
    ]


def main() -> int:
    with ExitStack() as stack:
        launcher = SlurmLauncher()
        handles: Handles = {}
        for unit in make_units():
            handles[unit.name] = launcher.start(unit)
            stack.callback(launcher.stop, handles[unit.name])
        watch = UnitMonitor(launcher, handles)
        for name in ISLANDS:
            watch.wait_until_printed(name, "step 50 of incarnation 1")
        print("all of them train", flush=True)
        before = {name: watch.last_step(name) for name in ISLANDS}
        print(f"{REQUEUED_ISLAND:8} > scontrol requeue {handles[REQUEUED_ISLAND]['job']}", flush=True)
        launcher.requeue(handles[REQUEUED_ISLAND])
        watch.wait_until_printed(REQUEUED_ISLAND, "incarnation 2,")
        after = {name: watch.last_step(name) for name in ISLANDS}
        while set(watch.poll().values()) != {UnitState.ENDED}:
            pass
        verdict = check_results(watch, before, after)
    print()
    for sentence, holds in verdict:
        print(f"{'yes' if holds else 'NO ':3}  {sentence}")
    return 0 if all(holds for _, holds in verdict) else 1


signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nothing is left behind
sys.exit(main())
