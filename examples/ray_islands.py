"""Three islands of different shapes in a Ray cluster of four nodes, one of which is killed while they train.

    python examples/ray_islands.py

Ray's own cluster utility starts the nodes on this machine: a head node with the syncer, and a node with matching
resources for each island. `atoll up` starts the run and exits; the cluster supervises it. The island of the killed
node restarts when another node has its resources. The other islands continue to train. The last line says whether all
of that happened.
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
OBJECT_STORE_BYTES = 80 * 2**20  # smallest object store that Ray accepts; the run does not use it

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--run", type=Path, default=Path("runs/ray"), help="new directory of the run")
parser.add_argument("--tokens", default="600k", help="token budget of all islands")
parser.add_argument("--port", type=int, help="port of the syncer; default: a free one")
parser.add_argument("--limit-s", type=float, default=600.0, help="time limit of each phase, in seconds")
options = parser.parse_args()
if options.run.exists():
    parser.error(f"{options.run} exists already: choose another --run, or remove it")
started_at = time.monotonic()


def free_port() -> int:
    """Return a free port below the ephemeral ports, which outgoing connections could take."""
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
os.environ |= {"RAY_raylet_start_wait_time_s": "300"}  # for machines under load

from ray.cluster_utils import Cluster  # noqa: E402 - Ray reads the environment when it is imported

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
# The run and its state

options.run.mkdir(parents=True)
file = options.run / "islands.toml"
script = Path(__file__).absolute().with_name("many_ranks.py")
file.write_text(ISLANDS_FILE.format(port=options.port or free_port(), tokens=options.tokens, script=script))
fleet = Fleet(IslandsFile.load(file))


def run_atoll(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "atoll", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def unit_statuses() -> dict[str, UnitReport]:
    return {status.name: status for status in fleet.statuses()}


def read_output(name: str) -> str:
    """Return the output of a unit so far."""
    return "\n".join(path.read_text() for path in fleet.logs(name))


def last_step(name: str) -> int:
    """Return the last step that an island has printed; it prints every 50th."""
    return int((re.findall(r"^step (\d+) of", read_output(name), re.MULTILINE) or ["0"])[-1])


def last_incarnation(name: str) -> int:
    return int((re.findall(r"^incarnation (\d+),", read_output(name), re.MULTILINE) or ["0"])[-1])


def count_merges() -> int | None:
    """Return the number of merges; None if the syncer did not answer in time."""
    try:
        found = read_address_file(options.run)
        status = send_request(found.address, found.token, "GET", "/v1/status", 10.0) if found else {}
    except NoAnswerError as error:
        log(f"{error}; retrying")
        return None
    return status.get("merges")


def wait_until(poll: Callable[[], Any], goal: str) -> Any:
    """Poll until the result is true, and return it."""
    deadline = time.monotonic() + options.limit_s
    while not (result := poll()):
        failed = [unit.name for unit in unit_statuses().values() if unit.state == UnitState.FAILED]
        if failed or time.monotonic() > deadline:
            cause = f"{failed[0]} has failed" if failed else f"timeout of {options.limit_s:g} s"
            raise SystemExit(f"{cause} while waiting for: {goal}; see {options.run / 'units'}")
        time.sleep(0.5)
    return result


def find_lost_unit() -> UnitReport | None:
    status = unit_statuses()[KILLED_ISLAND]
    return status if status.state == UnitState.WAITING and "its node is lost" in status.cause else None


def read_loss_and_digest(name: str) -> tuple[str, str]:
    loss = fleet.logs(name)[-1].read_text().rpartition("held-out loss ")[2].split()[0]
    model = torch.load(options.run / "units" / name / "model.pt", weights_only=True)
    digest = hashlib.sha256(b"".join(key.encode() + model[key].numpy().tobytes() for key in sorted(model)))
    return loss, digest.hexdigest()[:16]


def run_scenario() -> dict[str, bool]:
    """Run the example; return the expected results, and whether each is true."""
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
    status = wait_until(find_lost_unit, "the launcher reports it")
    log(f"{KILLED_ISLAND} is {status.state}: {status.cause}")
    wait_until(
        lambda: all(last_step(name) >= steps[name] + 100 for name in OTHER_ISLANDS), "the others continue to train"
    )
    wait_until(lambda: (count_merges() or 0) > merged, "the others merge")
    log("meanwhile " + ", ".join(f"{name} has reached step {last_step(name)}" for name in OTHER_ISLANDS))

    run_atoll("control", options.run, "quorum", 3)
    add_node(KILLED_ISLAND)
    log(f"another node has the resources of {KILLED_ISLAND}; a merge needs all three again")
    wait_until(lambda: last_incarnation(KILLED_ISLAND) > incarnations[KILLED_ISLAND], "it rejoins")
    same = [name for name in OTHER_ISLANDS if last_incarnation(name) == incarnations[name]]
    log(f"{KILLED_ISLAND} is back as incarnation {last_incarnation(KILLED_ISLAND)}; the others were not restarted")

    wait_until(lambda: all(status.state.is_finished for status in unit_statuses().values()), "the end")
    log("the run has ended\n")
    print("unit      state     restarts  held-out loss  digest of the model")
    ends = unit_statuses()
    found = {name: read_loss_and_digest(name) for name in ISLANDS if ends[name].state == UnitState.ENDED}
    for name, status in ends.items():
        loss, digest = found.get(name, ("", ""))
        print(f"{name:8}  {status.state:8}  {status.restarts:8}  {loss:>13}  {digest}")
    print()
    return {
        "only the island of the killed node was restarted": same == list(OTHER_ISLANDS)
        and all(status.restarts == (name == KILLED_ISLAND) for name, status in ends.items()),
        "all ended well": all(status.state == UnitState.ENDED for status in ends.values()),
        "all islands have the same model": len(found) == len(ISLANDS) and len(set(found.values())) == 1,
    }


try:
    results = run_scenario()
finally:
    cluster.shutdown()
for sentence, holds in results.items():
    print(f"{'yes' if holds else 'NO':3}  {sentence}")
log("passed" if all(results.values()) else f"failed: see {options.run / 'units'}")
sys.exit(not all(results.values()))
