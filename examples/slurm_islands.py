"""Three islands under Slurm: one rank, two ranks with FSDP2, two ranks with DDP. One is requeued while it trains.

    python examples/slurm_islands.py --node NAME      # all jobs on this node; put --run on a shared disk

The syncer and the islands are jobs. The requeued island rejoins as a new incarnation, the others continue to train,
and all end with the same model.
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

# The budget of `atoll syncer` is in tokens. This syncer has a budget of merges with quorum 3: while one island is down,
# the others continue to train, but the run cannot end without it.
SYNCER = """
import os, sys
from pathlib import Path

from atoll.core.types import RunConfig
from atoll.store.run_settings import RunSettings
from atoll.syncer.main import serve_syncer
from atoll.checkpoint.model_file import MODEL_FILE, write_tensors

out, port, merges = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
settings = RunSettings(RunConfig(run_id="slurm-islands", quorum=3, budget_merges=merges))
save = lambda syncer: write_tensors(syncer.published_model(), out / MODEL_FILE)
sys.exit(not serve_syncer(out, settings, port=port, token=os.environ["ATOLL_TOKEN"], on_finished=save))
"""

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--node", required=True, help="node that runs the jobs")
parser.add_argument("--run", type=Path, default=Path("runs/slurm"), help="directory of the run")
parser.add_argument(
    "--merges", default="100", help="budget of the run in merges; five merges are about 24 steps of the slowest island"
)
parser.add_argument(
    "--within",
    type=float,
    default=900.0,
    metavar="SECONDS",
    help="time limit of the example; Slurm holds a requeued job back for two minutes",
)
options = parser.parse_args()
if (options.run / "units").exists():
    parser.error(f"{options.run} has a run already: remove it, or give another --run")


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

    units = [unit("syncer", "-c", SYNCER, str(run / "run"), port, options.merges, max_restarts=0)]
    for number, (name, launcher) in enumerate(ISLANDS.items(), start=1):
        arguments = ("--syncer", f"127.0.0.1:{port}", "--learner", str(number), "--out", str(run / f"{name}.pt"))
        mode = ("--ddp",) if name == "copied" else ()
        units.append(unit(name, *launcher, str(SCRIPT), *arguments, *mode, cpus=2 if launcher else 1))
    return units


class UnitMonitor:
    """Poll the state of the units, and print changes."""

    def __init__(self, launcher: SlurmLauncher, handles: Handles) -> None:
        self.launcher, self.handles = launcher, handles
        self.last_status: dict[str, str] = {}
        self.deadline = time.monotonic() + options.within

    def read_output(self, name: str) -> str:
        return "\n".join(path.read_text() for path in self.launcher.log(self.handles[name]))

    def last_step(self, name: str) -> int:
        """Return the last step that the island has printed."""
        return int((re.findall(r"^step (\d+) of", self.read_output(name), re.MULTILINE) or ["0"])[-1])

    def poll(self) -> dict[str, UnitState]:
        if time.monotonic() > self.deadline:
            sys.exit(f"not finished after {options.within:g} s: {self.last_status}")
        states = {}
        for name, handle in self.handles.items():
            status = self.launcher.status(handle)
            states[name] = status.state
            text = f"{status.state}: {status.cause}"
            if self.last_status.get(name) != text:
                print(f"{name:8} | {text}", flush=True)
                self.last_status[name] = text
        failed = [name for name, state in states.items() if state in FINAL_STATES and state is not UnitState.ENDED]
        if failed:
            sys.exit(f"{failed[0]} is {states[failed[0]].value}:\n{self.read_output(failed[0])[-3000:]}")
        time.sleep(0.3)
        return states

    def wait_until_printed(self, name: str, text: str) -> None:
        while text not in self.read_output(name):
            if self.poll()[name] is UnitState.ENDED and text not in self.read_output(name):
                sys.exit(f"{name} ended without printing {text!r}; its output is in {options.run}/units/{name}")


def check_results(monitor: UnitMonitor, before: dict[str, int], after: dict[str, int]) -> list[tuple[str, bool]]:
    """Return the expected results, and whether each is true."""
    models = {name: torch.load(options.run / f"{name}.pt", weights_only=True) for name in ISLANDS}
    published = load_file(options.run / "run" / "model.safetensors")
    restarts = {name: monitor.launcher.status(handle).restarts for name, handle in monitor.handles.items()}
    others = [name for name in ISLANDS if name != REQUEUED_ISLAND]
    steps = ", ".join(f"{name} from step {before[name]} to {after[name]}" for name in others)
    return [
        (
            f"{REQUEUED_ISLAND} was requeued and rejoined as incarnation 2",
            "incarnation 2," in monitor.read_output(REQUEUED_ISLAND),
        ),
        (
            "no other unit was restarted",
            all(count == 0 for name, count in restarts.items() if name != REQUEUED_ISLAND),
        ),
        (f"the others continued to train: {steps}", all(after[name] > before[name] for name in others)),
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
        monitor = UnitMonitor(launcher, handles)
        for name in ISLANDS:
            monitor.wait_until_printed(name, "step 50 of incarnation 1")
        print("all islands train", flush=True)
        before = {name: monitor.last_step(name) for name in ISLANDS}
        print(f"{REQUEUED_ISLAND:8} > scontrol requeue {handles[REQUEUED_ISLAND]['job']}", flush=True)
        launcher.requeue(handles[REQUEUED_ISLAND])
        monitor.wait_until_printed(REQUEUED_ISLAND, "incarnation 2,")
        after = {name: monitor.last_step(name) for name in ISLANDS}
        while set(monitor.poll().values()) != {UnitState.ENDED}:
            pass
        results = check_results(monitor, before, after)
    print()
    for sentence, holds in results:
        print(f"{'yes' if holds else 'NO ':3}  {sentence}")
    return 0 if all(holds for _, holds in results) else 1


signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # run the callbacks of ExitStack, so that no job is left
sys.exit(main())
