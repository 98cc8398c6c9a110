"""Stages of one large fragment: at once, or one after the other? Figures are in benchmarks/README.md.

    python benchmarks/bench_stages.py [--json] [--values 48e6] [--rate 2gbit] [--codec int4] [--rounds 12]

One learner and a syncer, each a process of its own, a model of two fragments of `--values` parameters, and a link that
carries `--rate` each way (paced by the learner). Rounds take turns: in one, bytes are sent while later ones are encoded
and added to the value while later ones arrive; in the next, each stage waits for the end of the one before it.

- up: from the copy to the contribution at the syncer
- down: from the durable version to the value at the learner, with its digest checked

`alone` is what the bytes take on the link and nothing else.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from atoll.core.protocol import Accumulate, CopyFragment, MessageArrived, Persisted, Published
from atoll.core.types import Limits, RoundId, RunConfig
from atoll.island.fragments import FragmentTensors, PulledCopy
from atoll.learner import background
from atoll.learner.api import Learner
from atoll.store.run_settings import RunSettings
from atoll.tape.files import RunTapes
from atoll.tensors.codecs import get_codec
from atoll.tensors.settings import CodecOption, Numerics
from atoll.transport.buffers import ByteSink
from atoll.transport.http_client import DownloadedFragment
from atoll.transport.pacing import parse_rate
from benchmarks.measurement import collect_machine, machine_line, run_syncer, spread, to_json_line

STEP_S = 0.05
EVERY_STEPS = 40
WARMUP_ROUNDS = 2  # rounds of each fragment before the first that counts


class TwoTables(nn.Module):
    def __init__(self, values: int) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(values // 1000, 1000))
        self.other = nn.Parameter(torch.randn(values // 1000, 1000))


class _BufferUntilEnd:
    """Tells of what is written when all of it is."""

    def __init__(self, sink: ByteSink) -> None:
        self.size = sink.size
        self._sink = sink
        self._data: Tensor | None = None

    def set_buffer(self, data: Tensor) -> None:
        self._data = data

    def mark_written(self, spans: list[tuple[int, int]]) -> None:
        pass

    def end(self) -> None:
        assert self._data is not None
        self._sink.set_buffer(self._data)
        self._sink.mark_written([(0, self.size)])


def is_sequential_version(version: int) -> bool:
    """The round that makes this version, and its way down, have their stages one after the other."""
    return version % 2 == 0


def make_stages_sequential() -> None:
    encode, on_bytes = FragmentTensors.encode, background._IncomingDownload.on_bytes

    def encode_in_turns(self: FragmentTensors, copied: PulledCopy, sink: ByteSink) -> None:
        if not is_sequential_version(copied.round.base + 1):
            encode(self, copied, sink)
            return
        late = _BufferUntilEnd(sink)
        encode(self, copied, late)
        late.end()

    def on_bytes_in_turns(self: Any, downloaded: DownloadedFragment, first_bytes: int) -> None:
        if not is_sequential_version(downloaded.header.version) or first_bytes == downloaded.header.total_bytes:
            on_bytes(self, downloaded, first_bytes)

    FragmentTensors.encode = encode_in_turns  # type: ignore[method-assign]
    background._IncomingDownload.on_bytes = on_bytes_in_turns  # type: ignore[method-assign]


def measure(values: int, rate: str, by: CodecOption, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    make_stages_sequential()
    model = TwoTables(values)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    patient = Limits(initial_wait_s=60.0, min_wait_s=60.0)
    config = RunConfig(
        fragments=2, every_steps=EVERY_STEPS, overlap_steps=EVERY_STEPS - 1, budget_merges=rounds, limits=patient
    )
    with (
        tempfile.TemporaryDirectory(prefix="atoll-bench-") as own,
        run_syncer(RunSettings(config, Numerics(up=by, down=by))) as there,
    ):
        with Learner(model, optimizer, there.address, learner=1, run_directory=own, max_rate=rate) as learner:
            while not learner.finished:
                time.sleep(STEP_S)
                with torch.no_grad():
                    model.one[0] += 1e-4
                learner.step(tokens=1)
        return stage_times(RunTapes(own), RunTapes(there.directory)) | {
            "bytes": get_codec(by).encoded_size(values),
            "alone_s": get_codec(by).encoded_size(values) / parse_rate(rate),
        }


def stage_times(learner: RunTapes, syncer: RunTapes) -> dict[str, Any]:
    copied: dict[RoundId, float] = {}
    durable: dict[tuple[int, int], float] = {}
    found: dict[str, list[float]] = {"up": [], "up_apart": [], "down": [], "down_apart": []}
    for entry in read_entries(learner):
        copied |= {e.round: entry.at for e in entry.effects if isinstance(e, CopyFragment)}
    for entry in read_entries(syncer):
        for effect in entry.effects:
            if isinstance(effect, Accumulate) and effect.round.base >= WARMUP_ROUNDS:
                turn = "up_apart" if is_sequential_version(effect.round.base + 1) else "up"
                found[turn].append(entry.at - copied[effect.round])
        if isinstance(entry.event, Persisted) and entry.event.key.kind == "version":
            for effect in entry.effects:
                body = getattr(getattr(effect, "envelope", None), "body", None)
                if isinstance(body, Published):
                    durable[body.fragment, body.version] = entry.at
    for entry in read_entries(learner):
        if isinstance(entry.event, MessageArrived) and isinstance(body := entry.event.envelope.body, Published):
            sent = durable.get((body.fragment, body.version))
            if sent is not None and body.version > WARMUP_ROUNDS:
                found["down_apart" if is_sequential_version(body.version) else "down"].append(entry.at - sent)
    return {f"{name}_s": spread(times) for name, times in found.items()}


def read_entries(tapes: RunTapes) -> list[Any]:
    return [entry for reader in tapes.readers.values() for entry in reader]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--values", type=float, default=48e6)
    parser.add_argument("--rate", default="2gbit")
    parser.add_argument("--codec", default="int4", choices=("f32", "bf16", "int8", "int4"))
    parser.add_argument("--rounds", type=int, default=20, help="merges, of both fragments together")
    options = parser.parse_args()
    machine = collect_machine()
    found = measure(int(options.values), options.rate, options.codec, options.rounds)
    if options.json:
        print(to_json_line({"machine": machine, **found}))
        return
    print(machine_line(machine))
    size = f"{options.values:,.0f} values in {options.codec}, {found['bytes'] / 1e6:.0f} MB"
    print(f"a fragment of {size}, at {options.rate}")
    print(f"alone on the link {found['alone_s']:.3f} s\n")
    for way in ("up", "down"):
        at_once, apart = found[f"{way}_s"], found[f"{way}_apart_s"]
        print(
            f"  {way:5} at once {at_once.median:.3f} s ({at_once.low:.3f} to {at_once.high:.3f}), one after the other"
            f" {apart.median:.3f} s ({apart.low:.3f} to {apart.high:.3f}): {at_once.median / apart.median:.2f}"
        )


if __name__ == "__main__":
    main()
