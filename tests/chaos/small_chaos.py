"""Scenarios that take seconds: a small text, a tiny model, real processes and real faults."""

from __future__ import annotations

import json
from pathlib import Path

RUN = """
about = "A test."
[run]
learners = {learners}
step_time = "50ms"
duration = "{duration_s}s"
batch = 2
context = 16
fragments = 4
every_steps = 8
eval_tokens = 256
shards = {shards}
data = "{data}"
"""


def schedule(fault: str, target: str | None, at_s: float, **options: str | float) -> str:
    lines = ["[[schedule]]", f'fault = "{fault}"', f'at = "{at_s}s"']
    if target is not None:
        lines.append(f'target = "{target}"')
    lines += [f"{name.rstrip('_')} = {json.dumps(value)}" for name, value in options.items()]
    return "\n".join(lines) + "\n"


def small_scenario(path: Path, data: Path, duration_s: float, *tables: str, learners: int = 3, shards: int = 0) -> Path:
    text = RUN.format(learners=learners, shards=shards, duration_s=duration_s, data=data)
    path.write_text(text + "".join(tables), encoding="utf-8")
    return path
