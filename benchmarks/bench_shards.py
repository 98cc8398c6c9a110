"""What shards change: who carries the values, rounds per second, and what goes on when one of them is killed.

    python benchmarks/bench_shards.py [--shards 0,1,2,4] [--pace 0.05] [--kib 1024] [--sites 2,4] [--json]

Real processes: one syncer, the shards, and light learners (real cores, connections and fragments, no training) that
share one other process. 0 shards: the syncer holds the fragments itself. `MB/s`: values, in and out together, of the
syncer and of a shard, all of which have equally many fragments. The last line kills one of the most shards and counts
the rounds of the fragments that the others hold, before and after.

Then D sites of a wide network on this machine (`wan.py`, as root), each with one learner and, the second time,
one shard; the syncer is at a site of its own. What a site sends is counted by the kernel at its device: bytes of IP
packets, with everything that is not values, for each byte of a fragment, as it is encoded, in each round. With a shard
beside every learner it is the learner's to the other shards and the shard's to the other learners, 2 (D - 1) / D;
without, it is 1, and D at the syncer's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import logging

import torch

from atoll.chaos.netns import enter_namespace
from atoll.core.types import RunConfig
from atoll.store.run_settings import RunSettings
from atoll.syncer.shards.process import serve_shard
from atoll.tensors.codecs import get_codec
from atoll.tensors.settings import Numerics
from atoll.transport.endpoint import parse_endpoint, send_request
from atoll.transport.http_client import SyncerRefusedError
from benchmarks import wan
from benchmarks.light_learner import SimulatedLearner, even_plan
from benchmarks.measurement import (
    SyncerProcess,
    collect_machine,
    cpu_s,
    exit_with_parent,
    machine_line,
    run_syncer,
    start_python,
    stop_process,
    to_json_line,
)

FRAGMENTS = EVERY_STEPS = 24
TOKEN = "of a network on this machine"


@contextlib.contextmanager
def run_shards(served: SyncerProcess, count: int) -> Iterator[list[Any]]:
    started = []
    try:
        for number in range(count):
            folder = str(served.directory / "shards" / str(number))
            started.append(start_python(__file__, "shard", folder, str(number), str(count), served.address))
        yield started
    finally:
        for process in started:
            stop_process(process)


def serve_measured_shard(folder: str, number: str, count: str, head: str) -> None:
    """In the child."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR, format="shard: %(message)s")
    exit_with_parent()
    serve_shard(Path(folder), int(number), int(count), parse_endpoint(head))


def make_payload(settings: RunSettings, kib: int) -> torch.Tensor:
    numel = kib * 1024 // 4
    return get_codec(settings.numerics.upload_codecs[0]).encode(
        1e-3 * torch.randn(numel, generator=torch.Generator().manual_seed(0))
    )


async def fetch_versions(learner: SimulatedLearner) -> list[int]:
    status = await learner.link.request("GET", "/v1/status")
    return [each["version"] for each in status["fragments"]]


async def measure(
    served: SyncerProcess, shards: list[Any], settings: RunSettings, options: Any, kill: bool
) -> dict[str, Any]:
    payload, plan = make_payload(settings, options.kib), even_plan(FRAGMENTS, options.kib * 1024 // 4)
    learners = [SimulatedLearner(served.address, n + 1, settings, plan, payload) for n in range(options.learners)]
    for each in learners:
        each.bulk.shards = settings.shards
    pids, tasks = [served.pid, *(shard.pid for shard in shards)], []
    try:
        for each in learners:
            await each.link.start()
        while settings.shards and None in (await learners[0].link.request("GET", "/v1/shards"))["shards"]:
            await asyncio.sleep(0.1)
        await learners[0].provide_model()
        await asyncio.gather(*(each.join() for each in learners))
        await asyncio.gather(*(each.training.wait() for each in learners))
        tasks += [asyncio.ensure_future(each.train(options.pace)) for each in learners]
        await asyncio.sleep(max(3.0, EVERY_STEPS * options.pace))

        async def window() -> tuple[float, list[int], int, list[float]]:
            bytes_ = sum(each.link.bytes_up + each.link.bytes_down for each in learners)
            return time.monotonic(), await fetch_versions(learners[0]), bytes_, [cpu_s(pid) for pid in pids]

        before = await window()
        await asyncio.sleep(options.seconds)
        after = await window()
        row = _row(settings.shards, options.learners, before, after)
        if kill:
            row |= await _after_a_kill(learners, shards, settings.shards, row, options.seconds)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(each.leave() for each in learners), return_exceptions=True)
    return row


def _row(shards: int, learners: int, before: Any, after: Any) -> dict[str, Any]:
    spent = after[0] - before[0]
    rounds = [new - old for old, new in zip(before[1], after[1], strict=True)]
    moved = (after[2] - before[2]) / spent / 1e6
    used = [(new - old) / spent for old, new in zip(before[3], after[3], strict=True)]
    return {
        "shards": shards,
        "learners": learners,
        "rounds_per_s": sum(rounds) / spent,
        "of_each": [sum(rounds[k :: max(1, shards)]) / spent for k in range(max(1, shards))],
        "syncer_mb_per_s": 0.0 if shards else moved,
        "shard_mb_per_s": moved / shards if shards else 0.0,
        "syncer_cpu": used[0],
        "shard_cpu": max(used[1:], default=0.0),
    }


async def _after_a_kill(
    learners: list[SimulatedLearner], shards: list[Any], count: int, row: dict[str, Any], seconds: float
) -> dict[str, Any]:
    shards[-1].kill()
    shards[-1].wait()
    await asyncio.sleep(1.0)
    began, before = time.monotonic(), await fetch_versions(learners[0])
    await asyncio.sleep(seconds)
    after, spent = await fetch_versions(learners[0]), time.monotonic() - began
    rounds = [new - old for old, new in zip(before, after, strict=True)]
    others = sum(n for p, n in enumerate(rounds) if p % count != count - 1)
    return {
        "others_before_per_s": sum(row["of_each"][:-1]),
        "others_after_per_s": others / spent,
        "own_after": sum(rounds) - others,
    }


# --------------------------------------------------------------------------------------------------------------------
# A learner at every site, with or without a shard beside it


def run_site_learner(
    namespace: str, host: str, head: str, number: str, settings_json: str, kib: str, pace: str, folder: str
) -> None:
    """In the child: one learner, or with a folder one shard, at a site of the wide network."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR, format=f"site {number}: %(message)s")
    exit_with_parent()
    enter_namespace(Path(namespace))
    settings = RunSettings.from_json(json.loads(settings_json))
    if folder:
        shard = int(number) - 1
        serve_shard(
            Path(folder), shard, settings.shards, parse_endpoint(f"http://{head}"), host, token=TOKEN, plain_text=True
        )
    else:
        asyncio.run(_run_learner(head, int(number), settings, int(kib), float(pace)))


async def _run_learner(head: str, number: int, settings: RunSettings, kib: int, pace: float) -> None:
    plan = even_plan(FRAGMENTS, kib * 1024 // 4)
    learner = SimulatedLearner(head, number, settings, plan, make_payload(settings, kib), TOKEN)
    learner.bulk.shards = settings.shards
    await learner.link.start()
    while not (await learner.link.request("GET", "/v1/status"))["founded"]:
        if number == 1:
            with contextlib.suppress(SyncerRefusedError):  # not all shards are here
                await learner.provide_model()
        await asyncio.sleep(0.1)
    await learner.join()
    await learner.training.wait()
    await learner.train(pace)


class TrafficWindow(NamedTuple):
    """By site, 0 being that of the syncer."""

    sent: list[int]
    received: list[int]
    rounds: int


def measure_sites(sites: int, shards: int, options: Any) -> dict[str, Any]:
    config = RunConfig("sites", FRAGMENTS, EVERY_STEPS, snapshot_every_merges=0)
    settings = RunSettings(config, Numerics(up="bf16", down="bf16"), shards=shards)
    with wan.Wan(sites) as wide, run_syncer(settings, host=wide.address(0), token=TOKEN) as served:
        started = []
        try:
            for site in range(1, sites + 1):
                where = (str(wide.namespace(site)), wide.address(site), served.address, str(site))
                words = (*where, json.dumps(settings.to_json()), str(options.kib), str(options.pace))
                if shards:
                    folder = str(served.directory / "shards" / str(site - 1))
                    started.append(start_python(__file__, "at-site", *words, folder))
                started.append(start_python(__file__, "at-site", *words, ""))
            _wait_for_rounds(served, FRAGMENTS)
            before = _window(wide, served)
            time.sleep(options.seconds)
            after = _window(wide, served)
        finally:
            for process in started:
                stop_process(process)
    rounds = after.rounds - before.rounds
    unit = rounds * make_payload(settings, options.kib).nbytes
    sent = [(new - old) / unit for old, new in zip(before.sent, after.sent, strict=True)]
    received = [(new - old) / unit for old, new in zip(before.received, after.received, strict=True)]
    return {
        "sites": sites,
        "shards": shards,
        "rounds_per_s": rounds / options.seconds,
        "sent": sent[1:],
        "received": received[1:],
        "expected": 2 * (sites - 1) / sites if shards else 1.0,
        "syncer_sent": sent[0],
        "syncer_received": received[0],
        "syncer_expected": 0.0 if shards else float(sites),
    }


def _wait_for_rounds(served: SyncerProcess, rounds: int) -> None:
    end_at = time.monotonic() + 120.0
    while _rounds(served) < rounds:
        if time.monotonic() > end_at:
            raise RuntimeError("no rounds at sites of a wide network within two minutes")
        time.sleep(0.2)


def _rounds(served: SyncerProcess) -> int:
    return int(send_request(served.address, TOKEN, "GET", "/v1/status", 10.0).get("merges", 0))


def _window(wide: wan.Wan, served: SyncerProcess) -> TrafficWindow:
    seen = [wide.interface(site) for site in range(wide.sites + 1)]
    return TrafficWindow(
        [each["sent_bytes"] for each in seen], [each["received_bytes"] for each in seen], _rounds(served)
    )


def show_sites(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    print("\n  a learner at each of D sites, and the syncer at another: bytes over bytes of fragments, per round\n")
    heads = ("shards", "rounds/s", "a site sends", "by formula", "receives", "syncer sends", "by formula")
    print("       D" + "".join(f"{head:>14}" for head in heads))
    for row in rows:
        sent, received = (sum(row[way]) / row["sites"] for way in ("sent", "received"))
        site = f"{sent:>14.3f}{row['expected']:>14.3f}{received:>14.3f}"
        own = f"{row['syncer_sent']:>14.3f}{row['syncer_expected']:>14.3f}"
        print(f"  {row['sites']:>6}{row['shards']:>14}{row['rounds_per_s']:>14.1f}{site}{own}")


def show(rows: list[dict[str, Any]], options: Any) -> None:
    said = f"{options.learners} light learners, steps of {1e3 * options.pace:g} ms"
    print(f"{said}, fragments of {options.kib} KiB in f32\n")
    heads = ("rounds/s", "MB/s of syncer", "of a shard", "core of syncer", "of a shard")
    print("  shards" + "".join(f"{head:>16}" for head in heads))
    for row in rows:
        shares = f"{100 * row['syncer_cpu']:>14.0f} %{100 * row['shard_cpu']:>14.0f} %"
        rates = f"{row['rounds_per_s']:>16.1f}{row['syncer_mb_per_s']:>16.1f}{row['shard_mb_per_s']:>16.1f}"
        print(f"  {row['shards']:>6}{rates}{shares}")
    last = rows[-1]
    if "own_after" in last:
        before, after = last["others_before_per_s"], last["others_after_per_s"]
        print(f"\n  one of {last['shards']} killed: rounds of the others {before:.1f}/s before,", end=" ")
        print(f"{after:.1f}/s after, of its own fragments {last['own_after']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--shards", default="0,1,2,4", help="how many, separated by commas")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--pace", type=float, default=0.05, help="seconds of a step")
    parser.add_argument("--kib", type=int, default=1024, help="size of a fragment in f32")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--sites", default="2,4", help="of the wide network, separated by commas; empty: none")
    options = parser.parse_args()
    where, rows = collect_machine(), []
    counts = [int(each) for each in options.shards.split(",")]
    for count in counts:
        settings = RunSettings(RunConfig("shards", FRAGMENTS, EVERY_STEPS, snapshot_every_merges=0), shards=count)
        with run_syncer(settings) as served, run_shards(served, count) as shards:
            is_last = count == counts[-1] and count > 1
            rows.append(asyncio.run(measure(served, shards, settings, options, kill=is_last)))
    why_not = wan.unavailable_reason()
    wished = [int(each) for each in options.sites.split(",") if each]
    sites = [measure_sites(d, d * beside, options) for d in wished for beside in (0, 1)] if why_not is None else []
    if options.json:
        print(to_json_line({"machine": where, "kib": options.kib, "rows": rows, "sites": sites}))
        return 0
    print(machine_line(where))
    show(rows, options)
    if why_not is not None:
        print(f"\n  no wide network on this machine ({why_not}): what a site sends was not measured")
    show_sites(sites)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["shard"]:
        serve_measured_shard(*sys.argv[2:])
    elif sys.argv[1:2] == ["at-site"]:
        run_site_learner(*sys.argv[2:])
    else:
        sys.exit(main())
