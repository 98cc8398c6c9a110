"""Three islands of different shapes in a Ray cluster of four nodes, one of which is killed while they train.

    python examples/ray_islands.py

Ray's own cluster utility starts the nodes on this machine: a head with the syncer, and a node for each island, whose
resources say where it belongs. `atoll up` starts the run and ends; the cluster keeps it. The island of the killed node
comes back when another node has what it needs, and nobody else notices more than an island that left. The last line
says whether all of that was so.
"""

import argparse
import atexit
import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from atoll.launch.fleet import Fleet, UnitReport
from atoll.launch.islands_file import IslandsFile
from atoll.launch.launcher import UnitState
from atoll.transport.endpoint import NoAnswerError, read_address_file, send_request

ISLANDS_FILE = """
run = "ray-islands"
directory = "."

[syncer]
launcher = "ray"
address = "127.0.0.1:{port}"
arguments = ["--tokens", "{tokens}", "--quorum", "3", "--outer-lr", "1", "--outer-momentum", "0"]
options = {{ resources = {{ syncer = 1 }} }}

[islands.single] # one process
command = "python {script}"
options = {{ resources = {{ single = 1 }} }}

[islands.sharded] # FSDP2 on two ranks
command = "torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 {script}"
cpus = 2
options = {{ resources = {{ sharded = 1 }} }}

[islands.copied] # DDP on two ranks
command = "torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 {script} --ddp"
cpus = 2
options = {{ resources = {{ copied = 1 }} }}
"""
ISLANDS = ("single", "sharded", "copied")
KILLED_ISLAND = "sharded"
OTHER_ISLANDS = tuple(name for name in ISLANDS if name != KILLED_ISLAND)
OBJECT_STORE_BYTES = 80 * 2**20  # of Ray's object store: the least that it takes, and nothing is put there

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--run", type=Path, default=Path("runs/ray"), help="directory of the run; has to be new")
parser.add_argument("--tokens", default="600k", help="budget of the run, all islands together")
parser.add_argument("--port", type=int, help="of the syncer; without it one that is free")
parser.add_argument("--limit-s", type=float, default=600.0, help="after this long without news the example gives up")
options = parser.parse_args()
if options.run.exists():
    parser.error(f"{options.run} is there already: choose another --run, or remove it")
started_at = time.monotonic()


def free_port() -> int:
    """Below those that the system gives to outgoing connections: an island that dials could get it."""
    for port in range(21_000 + os.getpid() % 5_000, 32_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise SystemExit("no port is free: give one with --port")


def log(message: str) -> None:
    print(f"{time.monotonic() - started_at:6.1f} s  {message}", flush=True)


# --------------------------------------------------------------------------------------------------------------------
# A cluster. Elsewhere there is one already, and RAY_ADDRESS says where.

temporary = tempfile.mkdtemp(prefix="atoll-ray-", dir="/tmp")  # sockets have paths of at most 107 letters
atexit.register(shutil.rmtree, temporary, ignore_errors=True)
os.environ |= {"RAY_TMPDIR": temporary, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
os.environ |= {"RAY_raylet_start_wait_time_s": "300"}  # a machine with other things to do is slow

from ray.cluster_utils import Cluster  # noqa: E402 - it reads the environment

head_options: dict[str, Any] = {
    "num_cpus": 1,
    "resources": {"syncer": 1},
    "include_dashboard": False,
    "object_store_memory": OBJECT_STORE_BYTES,
    "_system_config": {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000},
}
cluster: Any = Cluster(initialize_head=True, head_node_args=head_options)
os.environ["RAY_ADDRESS"] = cluster.address


def add_node(island: str) -> Any:
    return cluster.add_node(num_cpus=2, resources={island: 1}, object_store_memory=OBJECT_STORE_BYTES, wait=False)


# --------------------------------------------------------------------------------------------------------------------
# The run, and what is known of it

options.run.mkdir(parents=True)
file = options.run / "islands.toml"
script = Path(__file__).absolute().with_name("many_ranks.py")
file.write_text(ISLANDS_FILE.format(port=options.port or free_port(), tokens=options.tokens, script=script))
fleet = Fleet(IslandsFile.load(file))


def run_atoll(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "atoll", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def unit_statuses() -> dict[str, UnitReport]:
    """As the launcher knows them."""
    return {status.name: status for status in fleet.statuses()}


def read_output(name: str) -> str:
    """All lines of a unit so far; unlike the syncer, its logs can be read also after the end of the run."""
    return "\n".join(path.read_text() for path in fleet.logs(name))


def last_step(name: str) -> int:
    """Return the last step that an island has printed, one of fifty."""
    return int((re.findall(r"^step (\d+) of", read_output(name), re.MULTILINE) or ["0"])[-1])


def last_incarnation(name: str) -> int:
    return int((re.findall(r"^incarnation (\d+),", read_output(name), re.MULTILINE) or ["0"])[-1])


def count_merges() -> int | None:
    """Return the number of merges; None if the syncer did not answer, as on a machine with other work."""
    try:
        found = read_address_file(options.run)
        status = send_request(found.address, found.token, "GET", "/v1/status", 10.0) if found else {}
    except NoAnswerError as error:
        log(f"{error}; asking again")
        return None
    return status.get("merges")


def wait_until(poll: Callable[[], Any], goal: str) -> Any:
    """What is seen, as soon as there is something to see."""
    deadline = time.monotonic() + options.limit_s
    while not (seen := poll()):
        failed = [unit.name for unit in unit_statuses().values() if unit.state == UnitState.FAILED]
        if failed or time.monotonic() > deadline:
            why = f"{failed[0]} has failed" if failed else f"{options.limit_s:g} s have passed"
            raise SystemExit(f"{why} before this: {goal}; look into {options.run / 'units'}")
        time.sleep(0.5)
    return seen


def find_lost_unit() -> UnitReport | None:
    look = unit_statuses()[KILLED_ISLAND]
    return look if look.state == UnitState.WAITING and "its node is lost" in look.cause else None


def read_loss_and_digest(name: str) -> tuple[str, str]:
    loss = fleet.logs(name)[-1].read_text().rpartition("held-out loss ")[2].split()[0]
    model = torch.load(options.run / "units" / name / "model.pt", weights_only=True)
    whole = hashlib.sha256(b"".join(key.encode() + model[key].numpy().tobytes() for key in sorted(model)))
    return loss, whole.hexdigest()[:16]


def run_scenario() -> dict[str, bool]:
    """What happens; returns what was to be shown, and whether it was."""
    nodes = {island: add_node(island) for island in ISLANDS}
    cluster.wait_for_nodes(options.limit_s)
    log(f"a Ray cluster of {len(nodes) + 1} nodes at {cluster.address}")
    run_atoll("up", file, "--detach")
    log(f"atoll up has started {', '.join(unit_statuses())}; a merge needs all islands")
    wait_until(lambda: all(last_step(name) >= 50 for name in ISLANDS), "all islands train")
    log("all train: " + ", ".join(f"{name} is at step {last_step(name)}" for name in ISLANDS))

    run_atoll("control", options.run, "quorum", 2)
    cluster.remove_node(nodes[KILLED_ISLAND], allow_graceful=False)
    incarnations, steps = (
        {name: last_incarnation(name) for name in ISLANDS},
        {name: last_step(name) for name in OTHER_ISLANDS},
    )
    log(f"the node of {KILLED_ISLAND} is killed; a merge needs two")
    merged = wait_until(count_merges, "the syncer answers")
    look = wait_until(find_lost_unit, "the launcher sees it")
    log(f"{KILLED_ISLAND} is {look.state}: {look.cause}")
    wait_until(lambda: all(last_step(name) >= steps[name] + 100 for name in OTHER_ISLANDS), "the others train on")
    wait_until(lambda: (count_merges() or 0) > merged, "the others merge")
    log("meanwhile " + ", ".join(f"{name} has reached step {last_step(name)}" for name in OTHER_ISLANDS))

    run_atoll("control", options.run, "quorum", 3)
    add_node(KILLED_ISLAND)
    log(f"another node has room for {KILLED_ISLAND}; a merge needs all three again")
    wait_until(lambda: last_incarnation(KILLED_ISLAND) > incarnations[KILLED_ISLAND], "it comes back")
    same = [name for name in OTHER_ISLANDS if last_incarnation(name) == incarnations[name]]
    log(f"{KILLED_ISLAND} is back as incarnation {last_incarnation(KILLED_ISLAND)}, the others are who they were")

    wait_until(lambda: all(look.state.is_finished for look in unit_statuses().values()), "the end")
    log("the run has ended\n")
    print("unit      state     restarts  held-out loss  digest of the model")
    ends = unit_statuses()
    found = {name: read_loss_and_digest(name) for name in ISLANDS if ends[name].state == UnitState.ENDED}
    for name, look in ends.items():
        loss, digest = found.get(name, ("", ""))
        print(f"{name:8}  {look.state:8}  {look.restarts:8}  {loss:>13}  {digest}")
    print()
    return {
        "only the island of the killed node was started again": same == list(OTHER_ISLANDS)
        and all(look.restarts == (name == KILLED_ISLAND) for name, look in ends.items()),
        "all ended well": all(look.state == UnitState.ENDED for look in ends.values()),
        "all islands have the same model": len(found) == len(ISLANDS) and len(set(found.values())) == 1,
    }


try:
    verdict = run_scenario()
finally:
    cluster.shutdown()
for sentence, holds in verdict.items():
    print(f"{'yes' if holds else 'NO':3}  {sentence}")
log("as it should be" if all(verdict.values()) else f"not as it should be: look into {options.run / 'units'}")
sys.exit(not all(verdict.values()))
