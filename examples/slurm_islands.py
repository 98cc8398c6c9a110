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

from atoll.launch.engine import Unit, UnitStanding
from atoll.launch.slurm import SlurmEngine

SCRIPT = Path(__file__).resolve().with_name("many_ranks.py")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
ISLANDS = {"alone": (), "sharded": TORCHRUN, "copied": TORCHRUN}
REQUEUED = "sharded"
OVER = (UnitStanding.ENDED, UnitStanding.FAILED, UnitStanding.STOPPED, UnitStanding.GONE)
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
keep = lambda syncer: write_tensors(syncer.published(), out / MODEL)
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


def units() -> list[Unit]:
    run, token = options.run.resolve(), secrets.token_urlsafe(16)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    threads = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONUNBUFFERED": "1"}

    def unit(name: str, *command: str, cpus: int = 1, restarts: int = 2) -> Unit:
        return Unit(
            "slurm-islands",
            name,
            (sys.executable, *command),
            run / "units" / name,
            environment={"ATOLL_TOKEN": token, "ATOLL_RUN_DIRECTORY": str(run / "run"), **threads},
            secret=frozenset({"ATOLL_TOKEN"}),
            cpus=cpus,
            restarts=restarts,
            notice_s=20.0,
            options={"nodelist": options.node},
        )

    made = [unit("syncer", "-c", SYNCER, str(run / "run"), port, options.merges, restarts=0)]
    for number, (name, launcher) in enumerate(ISLANDS.items(), start=1):
        place = ("--syncer", f"127.0.0.1:{port}", "--learner", str(number), "--out", str(run / f"{name}.pt"))
        shape = ("--ddp",) if name == "copied" else ()
        made.append(unit(name, *launcher, str(SCRIPT), *place, *shape, cpus=2 if launcher else 1))
    return made


class Watch:
    """What the units are, told when it changes."""

    def __init__(self, engine: SlurmEngine, handles: Handles) -> None:
        self.engine, self.handles = engine, handles
        self.said: dict[str, str] = {}
        self.end = time.monotonic() + options.within

    def printed(self, name: str) -> str:
        return "\n".join(path.read_text() for path in self.engine.log(self.handles[name]))

    def step(self, name: str) -> int:
        """The last one that the island has told, of whichever incarnation."""
        return int((re.findall(r"^step (\d+) of", self.printed(name), re.MULTILINE) or ["0"])[-1])

    def look(self) -> dict[str, UnitStanding]:
        if time.monotonic() > self.end:
            sys.exit(f"given up after {options.within:g} s: {self.said}")
        found = {}
        for name, handle in self.handles.items():
            told = self.engine.status(handle)
            found[name] = told.standing
            words = f"{told.standing}: {told.why}"
            if self.said.get(name) != words:
                print(f"{name:8} | {words}", flush=True)
                self.said[name] = words
        failed = [name for name, standing in found.items() if standing in OVER and standing is not UnitStanding.ENDED]
        if failed:
            sys.exit(f"{failed[0]} is {found[failed[0]].value}:\n{self.printed(failed[0])[-3000:]}")
        time.sleep(0.3)
        return found

    def until_printed(self, name: str, words: str) -> None:
        while words not in self.printed(name):
            if self.look()[name] is UnitStanding.ENDED and words not in self.printed(name):
                sys.exit(f"{name} ended without {words!r}; what it has printed is in {options.run}/units/{name}")


def checked(watch: Watch, before: dict[str, int], after: dict[str, int]) -> list[tuple[str, bool]]:
    """Sentences, and whether they hold."""
    models = {name: torch.load(options.run / f"{name}.pt", weights_only=True) for name in ISLANDS}
    published = load_file(options.run / "run" / "model.safetensors")
    restarts = {name: watch.engine.status(handle).restarts for name, handle in watch.handles.items()}
    others = [name for name in ISLANDS if name != REQUEUED]
    steps = ", ".join(f"{name} from step {before[name]} to {after[name]}" for name in others)
    return [
        (f"{REQUEUED} was requeued and came back as incarnation 2", "incarnation 2," in watch.printed(REQUEUED)),
        ("nobody else was started again", all(count == 0 for name, count in restarts.items() if name != REQUEUED)),
        (f"the others trained on: {steps}", all(after[name] > before[name] for name in others)),
        (
            f"all {len(models)} islands ended with the published model",
            all(torch.equal(model[name], value) for model in models.values() for name, value in published.items()),
        ),
    ]


def main() -> int:
    with ExitStack() as stack:
        engine = SlurmEngine()
        handles: Handles = {}
        for unit in units():
            handles[unit.name] = engine.start(unit)
            stack.callback(engine.stop, handles[unit.name])
        watch = Watch(engine, handles)
        for name in ISLANDS:
            watch.until_printed(name, "step 50 of incarnation 1")
        print("all of them train", flush=True)
        before = {name: watch.step(name) for name in ISLANDS}
        print(f"{REQUEUED:8} > scontrol requeue {handles[REQUEUED]['job']}", flush=True)
        engine.requeue(handles[REQUEUED])
        watch.until_printed(REQUEUED, "incarnation 2,")
        after = {name: watch.step(name) for name in ISLANDS}
        while set(watch.look().values()) != {UnitStanding.ENDED}:
            pass
        verdict = checked(watch, before, after)
    print()
    for sentence, holds in verdict:
        print(f"{'yes' if holds else 'NO ':3}  {sentence}")
    return 0 if all(holds for _, holds in verdict) else 1


signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nothing is left behind
sys.exit(main())
