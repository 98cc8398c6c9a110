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

from atoll.launch.engine import UnitStanding
from atoll.launch.fleet import Fleet, UnitStatus
from atoll.launch.islands_file import IslandsFile
from atoll.transport.endpoint import NoAnswerError, ask, read_address_file

ISLANDS_FILE = """
run = "ray-islands"
directory = "."

[syncer]
engine = "ray"
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
STRUCK = "sharded"
OTHERS = tuple(name for name in ISLANDS if name != STRUCK)
OBJECTS_BYTES = 80 * 2**20  # of Ray's object store: the least that it takes, and nothing is put there

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--run", type=Path, default=Path("runs/ray"), help="directory of the run; has to be new")
parser.add_argument("--tokens", default="600k", help="budget of the run, all islands together")
parser.add_argument("--port", type=int, help="of the syncer; without it one that is free")
parser.add_argument("--limit-s", type=float, default=600.0, help="after this long without news the example gives up")
options = parser.parse_args()
if options.run.exists():
    parser.error(f"{options.run} is there already: choose another --run, or remove it")
began = time.monotonic()


def free_port() -> int:
    """Below those that the system gives to outgoing connections: an island that dials could get it."""
    for port in range(21_000 + os.getpid() % 5_000, 32_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise SystemExit("no port is free: give one with --port")


def say(words: str) -> None:
    print(f"{time.monotonic() - began:6.1f} s  {words}", flush=True)


# --------------------------------------------------------------------------------------------------------------------
# A cluster. Elsewhere there is one already, and RAY_ADDRESS says where.

temporary = tempfile.mkdtemp(prefix="atoll-ray-", dir="/tmp")  # sockets have paths of at most 107 letters
atexit.register(shutil.rmtree, temporary, ignore_errors=True)
os.environ |= {"RAY_TMPDIR": temporary, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
os.environ |= {"RAY_raylet_start_wait_time_s": "300"}  # a machine with other things to do is slow

from ray.cluster_utils import Cluster  # noqa: E402 - it reads the environment

of_the_head: dict[str, Any] = {
    "num_cpus": 1,
    "resources": {"syncer": 1},
    "include_dashboard": False,
    "object_store_memory": OBJECTS_BYTES,
    "_system_config": {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000},
}
cluster: Any = Cluster(initialize_head=True, head_node_args=of_the_head)
os.environ["RAY_ADDRESS"] = cluster.address


def add_node(island: str) -> Any:
    return cluster.add_node(num_cpus=2, resources={island: 1}, object_store_memory=OBJECTS_BYTES, wait=False)


# --------------------------------------------------------------------------------------------------------------------
# The run, and what is known of it

options.run.mkdir(parents=True)
file = options.run / "islands.toml"
script = Path(__file__).absolute().with_name("many_ranks.py")
file.write_text(ISLANDS_FILE.format(port=options.port or free_port(), tokens=options.tokens, script=script))
fleet = Fleet(IslandsFile.load(file))


def atoll(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "atoll", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def units() -> dict[str, UnitStatus]:
    """As the engine knows them."""
    return {status.name: status for status in fleet.statuses()}


def printed(name: str) -> str:
    """All lines of a unit so far; unlike the syncer, its logs can be read also after the end of the run."""
    return "\n".join(path.read_text() for path in fleet.logs(name))


def step(name: str) -> int:
    """Return the last step that an island has printed, one of fifty."""
    return int((re.findall(r"^step (\d+) of", printed(name), re.MULTILINE) or ["0"])[-1])


def incarnation(name: str) -> int:
    return int((re.findall(r"^incarnation (\d+),", printed(name), re.MULTILINE) or ["0"])[-1])


def merges() -> int | None:
    """Return the number of merges; None if the syncer did not answer, as on a machine with other work."""
    try:
        found = read_address_file(options.run)
        status = ask(found.address, found.token, "GET", "/v1/status", 10.0) if found else {}
    except NoAnswerError as error:
        say(f"{error}; asking again")
        return None
    return status.get("merges")


def until(look: Callable[[], Any], what: str) -> Any:
    """What is seen, as soon as there is something to see."""
    deadline = time.monotonic() + options.limit_s
    while not (seen := look()):
        failed = [unit.name for unit in units().values() if unit.standing == UnitStanding.FAILED]
        if failed or time.monotonic() > deadline:
            why = f"{failed[0]} has failed" if failed else f"{options.limit_s:g} s have passed"
            raise SystemExit(f"{why} before this: {what}; look into {options.run / 'units'}")
        time.sleep(0.5)
    return seen


def lost() -> UnitStatus | None:
    look = units()[STRUCK]
    return look if look.standing == UnitStanding.WAITING and "its node is lost" in look.why else None


def loss_and_digest(name: str) -> tuple[str, str]:
    loss = fleet.logs(name)[-1].read_text().rpartition("held-out loss ")[2].split()[0]
    model = torch.load(options.run / "units" / name / "model.pt", weights_only=True)
    whole = hashlib.sha256(b"".join(key.encode() + model[key].numpy().tobytes() for key in sorted(model)))
    return loss, whole.hexdigest()[:16]


def story() -> dict[str, bool]:
    """What happens; returns what was to be shown, and whether it was."""
    nodes = {island: add_node(island) for island in ISLANDS}
    cluster.wait_for_nodes(options.limit_s)
    say(f"a Ray cluster of {len(nodes) + 1} nodes at {cluster.address}")
    atoll("up", file, "--detach")
    say(f"atoll up has started {', '.join(units())}; a merge needs all islands")
    until(lambda: all(step(name) >= 50 for name in ISLANDS), "all islands train")
    say("all train: " + ", ".join(f"{name} is at step {step(name)}" for name in ISLANDS))

    atoll("control", options.run, "quorum", 2)
    cluster.remove_node(nodes[STRUCK], allow_graceful=False)
    incarnations, steps = {name: incarnation(name) for name in ISLANDS}, {name: step(name) for name in OTHERS}
    say(f"the node of {STRUCK} is killed; a merge needs two")
    merged = until(merges, "the syncer answers")
    look = until(lost, "the engine sees it")
    say(f"{STRUCK} is {look.standing}: {look.why}")
    until(lambda: all(step(name) >= steps[name] + 100 for name in OTHERS), "the others train on")
    until(lambda: (merges() or 0) > merged, "the others merge")
    say("meanwhile " + ", ".join(f"{name} has reached step {step(name)}" for name in OTHERS))

    atoll("control", options.run, "quorum", 3)
    add_node(STRUCK)
    say(f"another node has room for {STRUCK}; a merge needs all three again")
    until(lambda: incarnation(STRUCK) > incarnations[STRUCK], "it comes back")
    same = [name for name in OTHERS if incarnation(name) == incarnations[name]]
    say(f"{STRUCK} is back as incarnation {incarnation(STRUCK)}, the others are who they were")

    until(lambda: all(look.standing.is_over for look in units().values()), "the end")
    say("the run has ended\n")
    print("unit      standing  restarts  held-out loss  digest of the model")
    ends = units()
    found = {name: loss_and_digest(name) for name in ISLANDS if ends[name].standing == UnitStanding.ENDED}
    for name, look in ends.items():
        loss, digest = found.get(name, ("", ""))
        print(f"{name:8}  {look.standing:8}  {look.restarts:8}  {loss:>13}  {digest}")
    print()
    return {
        "only the island of the killed node was started again": same == list(OTHERS)
        and all(look.restarts == (name == STRUCK) for name, look in ends.items()),
        "all ended well": all(look.standing == UnitStanding.ENDED for look in ends.values()),
        "all islands have the same model": len(found) == len(ISLANDS) and len(set(found.values())) == 1,
    }


try:
    verdict = story()
finally:
    cluster.shutdown()
for sentence, is_so in verdict.items():
    print(f"{'yes' if is_so else 'NO':3}  {sentence}")
say("as it should be" if all(verdict.values()) else f"not as it should be: look into {options.run / 'units'}")
sys.exit(not all(verdict.values()))
