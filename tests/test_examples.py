"""The examples run as processes on this machine with a small budget, as in the tutorial."""

from __future__ import annotations

import difflib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.shared_runs import make_once

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
TUTORIAL = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")

MAX_ADDED, MAX_REMOVED = 8, 3
"""Maximum number of lines that Atoll may change in a training script, without indentation and empty lines."""

LIMIT_S = 300.0
"""Timeout of every process. One takes a few seconds; a machine under load needs longer."""


class Processes:
    """Start processes, and kill those that exceed the timeout or are left at the end."""

    def __init__(self) -> None:
        self._started: list[tuple[subprocess.Popen[str], threading.Timer]] = []

    def start(self, *command: object, cwd: Path) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
        child = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=cwd,
            env=environment | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},  # docs/islands.md
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        watchdog = threading.Timer(LIMIT_S, _kill, (child,))
        watchdog.start()
        self._started.append((child, watchdog))
        return child

    def end(self) -> None:
        for child, watchdog in self._started:
            watchdog.cancel()
            if child.poll() != 0:
                _kill(child)
            child.wait()
            if child.stdout is not None:
                child.stdout.close()


def _kill(child: subprocess.Popen[str]) -> None:
    """Kill a process and its children: ranks of torchrun have their own sessions and outlive it."""
    for pid in [child.pid, *children_of(child.pid)]:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.end()


def finished(child: subprocess.Popen[str]) -> list[str]:
    """Return the output lines of a process that must succeed."""
    output, _ = child.communicate()
    assert child.returncode == 0, output
    return output.splitlines()


def saved(path: Path) -> dict[str, Tensor]:
    model: dict[str, Tensor] = torch.load(path, weights_only=True)
    return model


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert list(one) == list(other)
    return [name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])]


# --------------------------------------------------------------------------------------------------------------------
# The pages


def difference(before: str, after: str, context: int = 1) -> list[str]:
    """Return the difference as in `diff -wB`, which ignores indentation and empty lines."""
    old, new = before.splitlines(), after.splitlines()
    matcher = difflib.SequenceMatcher(None, [line.strip() for line in old], [line.strip() for line in new], False)
    shown: list[str] = []
    for index, group in enumerate(matcher.get_grouped_opcodes(context)):
        shown += ["..."] if index else []
        for what, i, k, m, n in group:
            if what == "equal":
                shown += [f" {line}" for line in new[m:n] if line]
            else:
                shown += [f"-{line}" for line in old[i:k] if line] + [f"+{line}" for line in new[m:n] if line]
    return shown


def test_the_script_with_atoll_differs_in_a_few_lines():
    lines = difference((EXAMPLES / "plain.py").read_text(), (EXAMPLES / "with_atoll.py").read_text())
    print("\n".join(lines))
    assert len([line for line in lines if line.startswith("+")]) <= MAX_ADDED
    assert len([line for line in lines if line.startswith("-")]) <= MAX_REMOVED


def test_a_line_that_is_only_moved_in_is_no_difference():
    assert difference("a\nb\nc\n", "a\nwith x:\n    b\nc\n") == [" a", "+with x:", "     b"]


def test_the_tutorial_shows_the_scripts_as_they_are():
    plain, with_atoll = (EXAMPLES / "plain.py").read_text(), (EXAMPLES / "with_atoll.py").read_text()
    shown: dict[str, str] = {}
    for kind, block in re.findall(r"^```(python|diff)\n(.*?)^```$", TUTORIAL, re.DOTALL | re.MULTILINE):
        shown.setdefault(kind, block)  # later blocks are for other loops
    assert shown["python"] in plain
    assert shown["diff"].splitlines() == difference(plain, with_atoll)


# --------------------------------------------------------------------------------------------------------------------
# The scripts


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Path of the model that plain.py has saved, and its output."""
    directory, output = make_once(tmp_path_factory, "plain", train_plain)
    return directory / "model.pt", output


def train_plain(directory: Path) -> list[str]:
    started = Processes()
    try:
        return finished(started.start(EXAMPLES / "plain.py", "--steps", 100, cwd=directory))
    finally:
        started.end()


def test_the_plain_script_trains_and_saves_its_model(plain_run):
    path, output = plain_run
    first, last = (float(line.rpartition(" ")[2]) for line in output)
    assert output[0].startswith("step 100: loss ")
    assert output[1].startswith("held-out loss ")
    assert max(first, last) < 3.5, "a random guess has 5.5"
    assert saved(path)["embed.weight"].shape == (256, 64)


# A run that one island cannot end alone: a merge needs both islands, and the budget is in merges.
SYNCER = """
import sys
from pathlib import Path

from atoll.core.types import RunConfig
from atoll.store.run_settings import RunSettings
from atoll.syncer.main import serve_syncer

settings = RunSettings(RunConfig(run_id="example", quorum=2, budget_merges=60))
sys.exit(not serve_syncer(Path(sys.argv[1]), settings, port=0, on_ready=lambda where: print(where, flush=True)))
"""


def test_an_island_is_killed_and_comes_back_and_both_end_with_the_same_model(processes, tmp_path):
    syncer = processes.start("-c", SYNCER, tmp_path / "run", cwd=tmp_path)
    assert syncer.stdout is not None
    address = syncer.stdout.readline().strip()

    def island(number: int) -> subprocess.Popen[str]:
        arguments = ("--syncer", address, "--learner", number, "--out", f"model-{number}.pt")
        child: subprocess.Popen[str] = processes.start(EXAMPLES / "with_atoll.py", *arguments, cwd=tmp_path)
        return child

    first, second = island(1), island(2)
    assert second.stdout is not None
    assert second.stdout.readline().startswith("step 100: loss ")
    second.kill()
    output, _ = second.communicate()
    assert second.returncode == -signal.SIGKILL, output
    again = island(2)
    outputs = [finished(first), finished(again)]
    assert outputs[0][-1] == outputs[1][-1]
    assert outputs[0][-1].startswith("held-out loss ")
    assert not (tmp_path / "model.pt").exists()
    assert differing(saved(tmp_path / "model-1.pt"), saved(tmp_path / "model-2.pt")) == []
    finished(syncer)


@pytest.mark.long
def test_two_islands_fine_tune_one_model_from_one_command(processes, plain_run, tmp_path):
    """A frozen backbone, a head in bf16 and a norm with buffers, started by two_islands.py."""
    backbone, _ = plain_run
    run = ("--run", "run", "--tokens", "120k", "--port", free_port())
    script = (EXAMPLES / "finetune.py", "--backbone", backbone)
    output = finished(processes.start(EXAMPLES / "two_islands.py", *run, *script, cwd=tmp_path))
    shares = re.findall(r"([\d.]+) % is right", "\n".join(output))
    assert len(shares) == 2, output
    assert shares[0] == shares[1]
    assert float(shares[0]) > 50, "the most frequent kind has 32 %"
    one, other = saved(tmp_path / "run/model-1.pt"), saved(tmp_path / "run/model-2.pt")
    assert set(differing(one, other)) <= {"norm.num_batches_tracked"}
    assert one["head.0.weight"].dtype is torch.bfloat16
    assert torch.equal(one["embed.weight"], saved(backbone)["embed.weight"])
    published = load_file(tmp_path / "run/model.safetensors")
    assert {"norm.running_mean", "head.2.bias"} < set(published)
    assert differing({name: one[name] for name in published}, published) == []


@pytest.mark.long
def test_an_island_of_torchrun_loses_a_rank_and_ends_with_the_model_of_one_without(processes, tmp_path):
    """FSDP2 on two ranks, and an island of one process: a rank is killed, and torchrun restarts all ranks."""
    syncer = processes.start("-c", SYNCER, tmp_path / "run", cwd=tmp_path)
    assert syncer.stdout is not None
    address = syncer.stdout.readline().strip()
    script = EXAMPLES / "many_ranks.py"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--max-restarts", 3)
    arguments = ("--syncer", address, "--learner")
    sharded = processes.start(
        *torchrun, "--nproc-per-node", 2, script, *arguments, 1, "--out", "model-1.pt", cwd=tmp_path
    )
    assert sharded.stdout is not None
    output: list[str] = []
    while not any(line.startswith("step 50 of incarnation 1") for line in output):
        output.append(sharded.stdout.readline())
        assert output[-1], output
    alone = processes.start(script, *arguments, 2, "--out", "model-2.pt", cwd=tmp_path)
    os.kill(rank_of(sharded.pid, 1), signal.SIGKILL)
    ended = [*finished(sharded), *finished(alone)]
    assert any("of incarnation 2" in line for line in ended), ended
    losses = [line for line in ended if line.startswith("held-out loss ")]
    assert len(losses) == 2, ended
    assert losses[0] == losses[1]
    assert differing(saved(tmp_path / "model-1.pt"), saved(tmp_path / "model-2.pt")) == []
    finished(syncer)


@pytest.mark.long
def test_an_island_goes_on_with_fewer_ranks_when_one_of_its_hosts_is_lost(processes, tmp_path):
    """Two torchrun agents with a rank each. One is killed with its rank, and the other restarts alone: with a smaller
    batch, and as the same learner."""
    syncer = processes.start(
        "-c",
        SYNCER.replace("quorum=2, budget_merges=60", "quorum=1, budget_merges=200"),
        tmp_path / "run",
        cwd=tmp_path,
    )
    assert syncer.stdout is not None
    address, port = syncer.stdout.readline().strip(), free_port()
    arguments = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "island")
    timeouts = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    torchrun = ("-m", "torch.distributed.run", "--nnodes", "1:2", "--local-addr", "127.0.0.1", "--max-restarts", 3)
    job = (EXAMPLES / "many_ranks.py", "--ddp", "--syncer", address, "--learner", 1, "--out", "model.pt")
    output: queue.Queue[str] = queue.Queue()
    survivor, lost = (  # they meet at the first one
        processes.start(*torchrun, *arguments, "--rdzv-conf", f"{timeouts},is_host={is_host}", *job, cwd=tmp_path)
        for is_host in ("true", "false")
    )
    readers = [_read_on(child, output) for child in (survivor, lost)]
    try:
        _until(output, "ranks: 2")
        before = _until(output, "step 50 of incarnation ")[-1]
        os.kill(rank_of(lost.pid), signal.SIGKILL)
        _kill(lost)
        after = _until(output, "ranks: 1")[-1]
        assert int(after.split()[1].rstrip(",")) > int(before.split()[4].rstrip(":"))
        _until(output, "held-out loss ")
        assert survivor.wait(LIMIT_S) == 0
    finally:
        for child in (survivor, lost):
            with suppress(AssertionError):
                os.kill(rank_of(child.pid), signal.SIGKILL)  # torchrun gives its ranks sessions of their own
            _kill(child)
        for reader in readers:
            reader.join()
    finished(syncer)


def _read_on(child: subprocess.Popen[str], into: queue.Queue[str]) -> threading.Thread:
    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            into.put(line)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def _until(output: queue.Queue[str], text: str) -> list[str]:
    lines = [""]
    while text not in lines[-1]:
        lines.append(output.get(timeout=LIMIT_S))
    return lines


def children_of(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(folder.name))
    return found


def rank_of(parent: int, rank: int | None = None) -> int:
    """Return the process of a rank, or of any rank, among the children of torchrun."""
    for pid in children_of(parent):
        with suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_text()
            if (f"\0RANK={rank}\0" if rank is not None else "\0RANK=") in environment:
                return pid
    raise AssertionError(f"torchrun has no rank {rank}")


def free_port() -> int:
    """Return a free port below the ephemeral ports, which outgoing connections could take."""
    for port in range(21_000 + os.getpid() % 5_000, 32_000):
        if not is_open(port):
            return port
    raise AssertionError("no port is free")


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
