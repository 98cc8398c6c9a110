"""What the benchmarks of the network share: the machine, a real syncer as a process of its own, figures of processes.

A syncer that was started here ends with the benchmark, also when that is killed: it listens on its standard input.
"""

from __future__ import annotations

import contextlib
import cProfile
import json
import logging
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from atoll.store.run_settings import RunSettings
from atoll.syncer.main import serve_syncer
from atoll.transport.endpoint import read_address_file, send_request
from atoll.transport.tls import find_key_files

START_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 10.0
MIB = 2**20


class Spread(NamedTuple):
    """Middle and quartiles of repeated measurements."""

    low: float
    median: float
    high: float
    repeats: int


def spread(values: Sequence[float]) -> Spread:
    """
    >>> spread([3.0, 1.0, 2.0])
    Spread(low=1.5, median=2.0, high=2.5, repeats=3)
    """
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, median, high, len(values))


def to_json_line(found: dict[str, Any]) -> str:
    """Figures for programs."""
    return json.dumps(_plain(found), indent=2)


def _plain(value: Any) -> Any:
    if isinstance(value, Spread):
        return value._asdict()
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list) else value


def describe_machine() -> dict[str, Any]:
    """Return the machine and the date. `load` is the load of the last minute; above 0.5 other processes are running."""
    name = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": name,
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def machine_line(machine: dict[str, Any]) -> str:
    return (
        f"{machine['date']}, {machine['cores']} cores ({machine['cpu']}), Python {machine['python']},"
        f" torch {machine['torch']}, load {machine['load']} at the start"
    )


# --------------------------------------------------------------------------------------------------------------------
# Processes


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def collect_machine() -> dict[str, Any]:
    """Start a benchmark: one thread, the machine, and an orderly end after SIGTERM."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return describe_machine()


def stop_process(process: subprocess.Popen[str]) -> None:
    """Ask it to end, then make it."""
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def start_python(script: str, *arguments: str, core: int | None = None) -> subprocess.Popen[str]:
    """A script of ours as a process with one thread for arithmetic, on one core only where `core` says so."""
    process = subprocess.Popen(
        [sys.executable, script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if core is not None:
        os.sched_setaffinity(process.pid, {core})
    return process


def exit_with_parent() -> None:
    """In a child of `start_python`: the pipe closes when the parent ends, however it does."""

    def watch() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


class SyncerProcess(NamedTuple):
    """A syncer that serves a run in a process of its own."""

    address: str
    pid: int
    directory: Path

    def status(self) -> dict[str, Any]:
        """Asked for as commands on its machine do."""
        found = read_address_file(self.directory)
        assert found is not None
        reply: dict[str, Any] = send_request(
            found.address, found.token, "GET", "/v1/status", START_TIMEOUT_S, tls=found.tls
        )
        return reply


@contextlib.contextmanager
def run_syncer(
    settings: RunSettings,
    core: int | None = None,
    profile: str | None = None,
    keys: Path | None = None,
    token: str = "",
    host: str = "127.0.0.1",
) -> Iterator[SyncerProcess]:
    """A real syncer on a free port of this machine, with a directory of its own that goes away with it.

    `profile`: a file for the profile of its event loop. A syncer that is profiled is slower. `keys`: of the syncer, as
    atoll keys makes them; only those with a key of the same authority are let in. `token`: asked for, if there is one.
    `host`: an address of a network on this machine, in plain text; it needs a token.
    """
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as name:
        settings_json = json.dumps(settings.to_json())
        arguments = (name, settings_json, profile or "", str(keys or ""), token, host)
        process = start_python(__file__, "syncer", *arguments, core=core)
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            if not address:
                raise RuntimeError("the syncer did not start; its words are above")
            yield SyncerProcess(address, process.pid, Path(name))
        finally:
            stop_process(process)


def serve(directory: str, settings: str, profile: str, keys: str, token: str, host: str) -> None:
    """In the child."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR, format="syncer: %(message)s")
    exit_with_parent()
    profiler = cProfile.Profile() if profile else None
    if profiler is not None:
        profiler.enable()
    serve_syncer(
        Path(directory),
        RunSettings.from_json(json.loads(settings)),
        host=host,
        port=0,
        token=token or None,
        on_ready=lambda address: print(address, flush=True),
        keys=find_key_files(Path(keys), for_syncer=True) if keys else None,
        plain_text=bool(token) and not keys,
    )
    if profiler is not None:
        profiler.disable()
        profiler.dump_stats(profile)


def wait_until_idle(counter: Callable[[], object], still_s: float = 0.3, max_s: float = 10.0) -> None:
    """Until a figure has stood still for so long: what was under way has arrived."""
    until, seen, since = time.monotonic() + max_s, counter(), time.monotonic()
    while time.monotonic() < until and time.monotonic() - since < still_s:
        time.sleep(still_s / 6)
        now = counter()
        if now != seen:
            seen, since = now, time.monotonic()


if __name__ == "__main__":
    if sys.argv[1:2] == ["syncer"]:
        serve(*sys.argv[2:])
