"""Start a syncer and two islands as processes on this machine: what the tutorial does in three terminals."""

import argparse
import subprocess
import sys
import threading
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--run", type=Path, default=Path("runs/tutorial"), help="directory of the run")
parser.add_argument("--tokens", default="1M", help="token budget of both islands")
parser.add_argument("--port", default="7400")
parser.add_argument("script", nargs=argparse.REMAINDER, help="script with arguments; default: with_atoll.py")
options = parser.parse_args()
script = options.script or [Path(__file__).with_name("with_atoll.py")]

processes: dict[str, subprocess.Popen[str]] = {}
output_threads: list[threading.Thread] = []


def start(name: str, *command: object) -> None:
    """Start a process, and print its output with its name before each line."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )

    def show() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{name:8} | {line}", end="", flush=True)

    processes[name] = process
    output_threads.append(threading.Thread(target=show))
    output_threads[-1].start()


run = ["--out", options.run, "--port", options.port, "--tokens", options.tokens]
start("syncer", "-m", "atoll", "syncer", *run, "--outer-lr", 1, "--outer-momentum", 0)
for number in (1, 2):
    arguments = [
        "--syncer",
        f"127.0.0.1:{options.port}",
        "--learner",
        number,
        "--out",
        options.run / f"model-{number}.pt",
    ]
    start(f"island {number}", *script, *arguments)

if processes["syncer"].wait() != 0:  # otherwise the islands would wait for a restart of the syncer
    for process in processes.values():
        process.terminate()
for thread in output_threads:
    thread.join()
sys.exit(any(process.wait() != 0 for process in processes.values()))
