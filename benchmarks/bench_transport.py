"""Throughput of fragments on loopback against a raw socket, in the same run. Figures are in benchmarks/README.md.

    python benchmarks/bench_transport.py [--json] [--mib 64] [--repeats 15]

The bytes are prepared; nothing is encoded. Between this process and the real syncer in another one:

- contribution: `LearnerLink.put`, from bytes in memory until the syncer has said that it has taken them. It has then
  received them, checked their digest, and looked for values that are not finite. The last is a pass over the values
  and no transport, so it is also shown without the time that this pass takes here.
- fragment: `LearnerLink.fragment`, from the request until all bytes are here and their digest is right.

Raw: a blocking socket between this process and a third one, `sendall` here and `recv_into` one buffer there, until one
byte comes back; and the other way round. All ways take turns.

Two ends on one core hand their bytes over in its cache, which no two hosts do. So all of it is measured twice: with
this process on one core and the others on another, and with processes where the system puts them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from atoll.core.protocol import Contribution, Envelope
from atoll.core.types import Limits, RoundId, RunConfig
from atoll.store.run_settings import RunSettings
from atoll.tensors.codecs import get_codec
from atoll.tensors.settings import Numerics
from atoll.transport.wire import as_bytes, digest
from benchmarks.light_learner import SimulatedLearner, even_plan
from benchmarks.measurement import (
    MIB,
    SyncerProcess,
    collect_machine,
    cpu_s,
    exit_with_parent,
    machine_line,
    run_syncer,
    spread,
    start_python,
    stop_process,
    to_json_line,
)

TARGET_SHARE = 0.7
TRANSFERS = ("raw out", "contribution", "raw in", "fragment")
CORES = sorted(os.sched_getaffinity(0))
PATIENT_LIMITS = Limits(initial_wait_s=300.0, min_wait_s=300.0)


class RawSocket:
    """The other end of a blocking socket, in a process of its own."""

    def __init__(self, size: int, core: int | None) -> None:
        self.process: subprocess.Popen[str] = start_python(__file__, "--other-end", str(size), core=core)
        assert self.process.stdout is not None
        port = int(self.process.stdout.readline())
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._buffer = bytearray(size)

    def send(self, data: memoryview) -> None:
        self._socket.sendall(b"s")
        self._socket.sendall(data)
        self._socket.recv(1)

    def receive(self) -> None:
        self._socket.sendall(b"r")
        receive_into(self._socket, memoryview(self._buffer))

    def close(self) -> None:
        self._socket.close()
        stop_process(self.process)


def receive_into(source: socket.socket, view: memoryview) -> None:
    while view.nbytes:
        count = source.recv_into(view)
        if not count:
            raise ConnectionError("the other end has gone")
        view = view[count:]


def run_raw_peer(size: int) -> None:
    """In the child: receive or send the requested number of bytes until the parent closes the connection."""
    exit_with_parent()
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    peer, _ = listener.accept()
    buffer = memoryview(bytearray(size))
    while wanted := peer.recv(1):
        if wanted == b"s":
            receive_into(peer, buffer)
            peer.sendall(b".")
        else:
            peer.sendall(buffer)


async def measure(
    served: SyncerProcess, settings: RunSettings, mib: int, repeats: int, core: int | None
) -> dict[str, Any]:
    numel = mib * MIB // 4
    plan = even_plan(1, numel)
    payload = torch.randn(numel, generator=torch.Generator().manual_seed(0)).view(torch.uint8)
    raw = RawSocket(payload.numel(), core)
    learner = SimulatedLearner(served.address, 1, settings, plan, payload)
    try:
        await learner.link.start()
        await learner.provide_model()
        await learner.join()
        await learner.training.wait()
        seconds: dict[str, list[float]] = {way: [] for way in TRANSFERS}
        here: dict[str, list[float]] = {way: [] for way in TRANSFERS}  # processor time of this end
        there: dict[str, list[float]] = {way: [] for way in TRANSFERS}
        for _ in range(repeats + 1):
            for way in TRANSFERS:
                pid = served.pid if way in ("contribution", "fragment") else raw.process.pid
                spent, spent_there, began = time.process_time(), cpu_s(pid), time.perf_counter()
                if way == "raw out":
                    raw.send(as_bytes(payload))
                elif way == "raw in":
                    raw.receive()
                elif way == "contribution":
                    await learner.upload(make_envelope(learner))
                else:
                    await learner.download(0, 0, None)
                seconds[way].append(time.perf_counter() - began)
                here[way].append(time.process_time() - spent)
                there[way].append(cpu_s(pid) - spent_there)
                await asyncio.sleep(0.02)  # whatever is left to do at the other end
    finally:
        await learner.leave()
        raw.close()
    for taken in (*seconds.values(), *here.values(), *there.values()):
        del taken[0]  # buffers were new
    passes = {
        "check_s": best_s(lambda: get_codec("f32").examine(payload, numel)),
        "digest_s": best_s(lambda: digest(payload)),
    }
    return figures(payload, seconds, here, there) | passes


def make_envelope(learner: SimulatedLearner) -> Envelope:
    """A contribution that the syncer takes, looks at, and does not merge: there is no such round."""
    state = learner.core.state
    body = Contribution(RoundId(0, 0, state.epoch, 1), state.step, 1, 1, 1, 0)
    place = (state.id, state.incarnation, state.session, state.epoch, state.tick, state.seen_tick, state.marker)
    return Envelope(*place, body)


def best_s(what: Callable[[], object]) -> float:
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        what()
        taken.append(time.perf_counter() - began)
    return min(taken)


def figures(
    payload: Tensor, seconds: dict[str, list[float]], here: dict[str, list[float]], there: dict[str, list[float]]
) -> dict[str, Any]:
    """A ratio is of neighbours in time: raw seconds by Atoll's."""
    mb = payload.numel() / 1e6
    pairs = {"contribution": "raw out", "fragment": "raw in"}
    return {
        "bytes": payload.numel(),
        "mb_per_s": {way: spread([mb / s for s in taken]) for way, taken in seconds.items()},
        "seconds": {way: spread(taken) for way, taken in seconds.items()},
        "cpu_here_s": {way: sum(taken) / len(taken) for way, taken in here.items()},
        "cpu_there_s": {way: sum(taken) / len(taken) for way, taken in there.items()},  # counted in ticks of 10 ms
        "ratio": {
            way: spread([r / s for r, s in zip(seconds[raw], seconds[way], strict=True)]) for way, raw in pairs.items()
        },
    }


def show(found: dict[str, Any]) -> None:
    rates = {way: found["mb_per_s"][way] for way in TRANSFERS}
    print(f"{found['bytes'] / MIB:g} MiB on loopback, median (quartiles) of {rates['raw in'].repeats}; ", end="")
    print(f"wanted: {100 * TARGET_SHARE:g} % of the raw socket\n")
    print(f"  {'':14}{'MB/s':>22}{'of raw':>22}{'processor time here, there':>30}")
    for way, rate in rates.items():
        shares = [f"{100 * share:.0f}" for share in found["ratio"].get(way, ())[:3]]
        print(
            f"  {way:14}{f'{rate.median:.0f} ({rate.low:.0f} to {rate.high:.0f})':>22}"
            f"{f'{shares[1]} % ({shares[0]} to {shares[2]})' if shares else '':>22}"
            f"{1e3 * found['cpu_here_s'][way]:>19.1f} ms,{1e3 * found['cpu_there_s'][way]:>5.0f} ms"
        )
    seconds = {way: found["seconds"][way].median for way in TRANSFERS}
    without = seconds["raw out"] / (seconds["contribution"] - found["check_s"])
    print(f"\n  the syncer's look for values that are not finite takes {1e3 * found['check_s']:.1f} ms; ", end="")
    print(f"without it a contribution has {100 * without:.0f} %")
    print(f"  a digest takes {1e3 * found['digest_s']:.1f} ms, once at each end")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--mib", type=int, default=64, help="size of a fragment")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--profile", help="write a profile of the syncer's event loop to this file")
    parser.add_argument("--other-end", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.other_end:
        run_raw_peer(options.other_end)
        return 0
    where = collect_machine()
    settings = RunSettings(RunConfig("transport", 1, 24, limits=PATIENT_LIMITS), Numerics(up="f32", down="f32"))
    found = {}
    for placement, here, core in (("apart", {min(CORES)}, max(CORES)), ("free", set(CORES), None)):
        os.sched_setaffinity(0, here)
        with run_syncer(settings, core=core, profile=options.profile) as served:
            found[placement] = asyncio.run(measure(served, settings, options.mib, options.repeats, core))
    if options.json:
        print(to_json_line({"machine": where, "target": TARGET_SHARE} | found))
        return 0
    print(machine_line(where))
    for placement, title in (("apart", "each end on a core of its own"), ("free", "where the system puts them")):
        print(f"\n{title}: ", end="")
        show(found[placement])
    return 0


if __name__ == "__main__":
    sys.exit(main())
