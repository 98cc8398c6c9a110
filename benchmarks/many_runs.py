"""Many runs of one benchmark, each a process of its own: results as JSON lines, and what is done is not done again.

The benchmark is called as `--one SETTING` with a setting as JSON, and prints its result as one line of JSON in which
all fields of the setting are.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

S = TypeVar("S")
"""A frozen dataclass, every field of which has a default and is plain JSON."""


def read_results(path: Path) -> list[dict[str, Any]]:
    """A line that was cut off by a full disk or a kill is passed over: its run is done again."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            print(f"{path}: passed over a broken line", file=sys.stderr)
    return lines


def setting_from_json(kind: type[S], line: dict[str, Any]) -> S:
    """A field that is younger than the line has its default."""
    return kind(**{f.name: line.get(f.name, f.default) for f in dataclasses.fields(kind)})  # type: ignore[arg-type]


def run_all(
    script: str, settings: Sequence[S], results: Path, processes: int, describe: Callable[[S, dict[str, Any]], str]
) -> int:
    """All settings that are not in the results yet, `processes` at a time. Returns how many failed."""
    done = {setting_from_json(type(settings[0]), line) for line in read_results(results)} if settings else set()
    left = [s for s in settings if s not in done]
    print(f"{len(settings)} runs, {len(settings) - len(left)} of them done before", flush=True)
    running: list[tuple[S, subprocess.Popen[str]]] = []
    failed = 0
    try:
        while left or running:
            while left and len(running) < processes:
                setting = left.pop(0)
                command = [sys.executable, script, "--one", json.dumps(dataclasses.asdict(setting))]  # type: ignore[call-overload]
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
                running.append((setting, subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)))
            time.sleep(0.2)
            for setting, child in [r for r in running if r[1].poll() is not None]:
                running.remove((setting, child))
                line = child.communicate()[0].strip()
                if child.returncode or not line:
                    failed += 1
                    print(f"failed: {setting}", flush=True)
                    continue
                with results.open("a") as f:
                    f.write(line + "\n")
                print(describe(setting, json.loads(line)), flush=True)
    finally:
        for _, child in running:  # of a sweep that was stopped
            child.kill()
            child.communicate()
    return failed
