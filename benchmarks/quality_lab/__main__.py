"""Quality at equal tokens: all learners and seeds of one setting as stacked tensors on one core.

    python benchmarks/quality_lab --list
    nice -n 19 python benchmarks/quality_lab --suite headline        resumes: a run that is in the results is skipped
    python benchmarks/quality_lab --suite headline --table
    python benchmarks/quality_lab --table                            all results

Each run is a process of its own and appends one JSON line to `benchmarks/results/quality_lab.jsonl`, keyed by all
fields of its setting. `quality_protocol.md` beside this folder has the rules that hold for every run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.many_runs import run_all
from benchmarks.quality_lab.engine import Run
from benchmarks.quality_lab.setting import Setting, describe
from benchmarks.quality_lab.suites import SUITES
from benchmarks.quality_lab.tables import table

RESULTS = Path(__file__).resolve().parents[1] / "results/quality_lab.jsonl"


def run_one(setting: Setting) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    result = Run(setting).execute()
    return {
        **dataclasses.asdict(setting),
        **result,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def summary(setting: Setting, found: dict[str, Any]) -> str:
    losses = " ".join(f"{loss:.4f}" for loss in found["losses"])
    name = f"{setting.method} {setting.size} {setting.text} {setting.tokens / 1e6:.1f}M"
    return f"{name} {describe(setting)}: {losses}, {found['wall_s']} s (cpu {found['cpu_s']})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", help="names of suites, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the suites and their sizes")
    parser.add_argument("--dry", action="store_true", help="print the settings instead of running them")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print tables of what is in the results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(run_one(Setting(**json.loads(options.one)))))
        return 0
    names = options.suite.split(",") if options.suite else []
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        parser.error(f"there is no suite {unknown[0]!r}; give some of {', '.join(SUITES)}")
    settings = list(dict.fromkeys(setting for name in names for setting in SUITES[name]()))
    if options.list:
        for name, found in SUITES.items():
            print(f"{name}: {len(found())} runs")
        return 0
    if options.table:
        print(table(options.results, settings))
        return 0
    if options.dry or not settings:
        for setting in settings:
            print(setting.method, setting.size, setting.text, setting.seeds, setting.tokens, describe(setting))
        print(f"{len(settings)} runs; give --suite NAME to run them")
        return 0
    return 1 if run_all(__file__, settings, options.results, options.processes, summary) else 0


if __name__ == "__main__":
    sys.exit(main())
