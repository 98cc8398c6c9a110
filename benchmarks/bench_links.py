"""Thin, long and lossy links: is anybody suspected who is there? Figures are kept in benchmarks/README.md.

    python benchmarks/bench_links.py [--quick] [--rates 10,30,100] [--round-trips 40,150,300] [--loss 0.01] [--json]

Every cell is a run of real processes, four learners and a syncer, over links of this rate, delay and loss, up and down
(`benchmarks/wide_runs.py` says how; root). Values go in f32 or bf16 and steps are short, so that the plan wants more
than the thinnest link carries: there bulk is under way all the time, and reports have to get through beside it. Links
are shaped when all learners train. In the last cell, `joining`, they are so from the start: a small model is founded,
handed out and joined over the thinnest and longest of them.

A cell passes if, from the tapes: the syncer suspected, lost or quarantined no learner, as all learners were there all
the time; merges went on, without a pause of many times the usual distance between two; and every learner got published
fragments. The command fails if a cell does not pass.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from atoll.reference.job_settings import JobSettings
from benchmarks import wan
from benchmarks.measurement import collect_machine, machine_line, to_json_line
from benchmarks.wide_runs import (
    RESULTS,
    LinkParameters,
    ObservedRun,
    append_results,
    describe_emulation,
    fragment_count,
    log_progress,
    open_links,
    paced_job,
    read_rounds,
    run_observed,
)

MIN_PAUSE_S, PAUSE_ROUNDS, PAUSE_DELAYS = 5.0, 10.0, 20.0
"""How long there may be no merge: the first, or so many usual distances between merges and so many delays."""


def measure_cell(
    name: str, settings: JobSettings, shape: LinkParameters, run_s: float, out: Path, from_the_start: bool = False
) -> dict[str, Any]:
    """One run, and what its tapes say about the time in which all trained."""
    steps = max(4, round(run_s / settings.step_time_s))
    with open_links(settings.learners) as links:
        seen = run_observed(name, settings, out, links, [(shape, steps)], 3 * run_s, from_the_start).seen
    return evaluate_cell(name, settings, shape, seen)


def evaluate_cell(name: str, settings: JobSettings, shape: LinkParameters, seen: ObservedRun) -> dict[str, Any]:
    """From the moment at which links had their shape; but a suspicion counts from the first moment on."""
    run, begin_at, end_at = seen.run, seen.shaped_at, seen.ended_at
    suspicions = read_rounds(run, 0.0, end_at).suspicions
    rounds = read_rounds(run, begin_at, end_at)
    wall_s = end_at - begin_at
    fragments = fragment_count(run)
    step_s = seen.step_s(skip=0)
    effective_h = rounds.effective_h(wall_s / step_s, fragments)
    usual_s = wall_s / max(rounds.merges, 1)
    most_pause_s = max(MIN_PAUSE_S, PAUSE_ROUNDS * usual_s + PAUSE_DELAYS * shape.delay_s)
    broken = [
        f"learner {each.learner} was suspected {each.at - begin_at:+.1f} s after links had their shape: {each.sentence}"
        for each in suspicions
    ]
    broken += [f"learner {n} got nothing" for n in range(1, settings.learners + 1) if not rounds.delivered.get(n)]
    if not rounds.merges or rounds.longest_pause_s > most_pause_s:
        broken.append(f"no merge for {rounds.longest_pause_s:.1f} s, allowed are {most_pause_s:.1f}")
    return {
        "cell": name,
        "rate_bit_s": shape.rate_bit_s,
        "round_trip_s": 2 * shape.delay_s,
        "loss": shape.loss,
        "wall_s": wall_s,
        "merges_per_min": 60.0 * rounds.merges / wall_s,
        "contributions_per_merge": rounds.contributions / max(rounds.merges, 1),
        "effective_h": effective_h,
        "every_steps": settings.every_steps,
        "longest_pause_s": rounds.longest_pause_s,
        "delivered": rounds.delivered,
        "step_s": step_s,
        "wire_bytes_per_s": seen.bytes_per_s(skip=0),
        "stands": not broken,
        "broken": broken,
    }


def show(rows: list[dict[str, Any]]) -> None:
    heads = (
        "rate, Mbit/s",
        "round trip, ms",
        "loss",
        "step, s",
        "merges/min",
        "contr./merge",
        "effective H",
        "pause, s",
    )
    print(f"{'':10}" + "".join(f"{head:>15}" for head in heads) + f"{'Mbit/s up, down':>18}   ")
    for row in rows:
        wire = row["wire_bytes_per_s"]
        rates = f"{8e-6 * wire[0]:.2f}, {8e-6 * wire[1]:.2f}" if wire else "-"
        cells = (
            f"{row['rate_bit_s'] / 1e6:g}",
            f"{1e3 * row['round_trip_s']:.0f}",
            f"{row['loss']:.1%}",
            f"{row['step_s']:.3f}",
            f"{row['merges_per_min']:.0f}",
            f"{row['contributions_per_merge']:.2f}",
            f"{row['effective_h']:.1f} ({row['every_steps']})",
            f"{row['longest_pause_s']:.1f}",
        )
        print(f"{row['cell']:10}" + "".join(f"{each:>15}" for each in cells) + f"{rates:>18}", end="   ")
        print("stands" if row["stands"] else "DOES NOT STAND")
        for line in row["broken"]:
            print(f"{'':10}  {line}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="10,30,100", help="Mbit/s of every learner's link, each way")
    parser.add_argument("--round-trips", default="40,150,300", help="ms")
    parser.add_argument("--loss", type=float, default=0.01, help="share of packets, each way")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--model", default="10m")
    parser.add_argument("--step", type=float, default=0.5, help="least seconds of a step")
    parser.add_argument("--codec", default="bf16")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a cell")
    parser.add_argument("--quick", action="store_true", help="two cells, the thinnest link and joining, 20 s each")
    parser.add_argument("--keep", type=Path, help="a folder in which the runs stay, with their tapes and logs")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--results", type=Path, default=RESULTS / "links.jsonl", help="file that lines are added to")
    options = parser.parse_args()
    where = collect_machine()
    rates = [1e6 * float(rate) for rate in options.rates.split(",")]
    trips = [1e-3 * float(trip) for trip in options.round_trips.split(",")]
    run_s = 20.0 if options.quick else options.seconds
    grid = [(min(rates), max(trips))] if options.quick else [(rate, trip) for rate in rates for trip in trips]
    log_progress(f"links: {describe_emulation()}")
    loss = options.loss if wan.unavailable_reason() is None else 0.0  # a relay loses nothing
    rows = []
    with tempfile.TemporaryDirectory(prefix="atoll-links-") as name:
        folder = options.keep or Path(name)
        big = paced_job(
            "decoupled", learners=options.learners, model=options.model, step_time_s=options.step, codec=options.codec
        )
        for number, (rate, trip) in enumerate(grid):
            shape = LinkParameters(rate, trip / 2, loss)
            rows.append(measure_cell(f"{number + 1}", big, shape, run_s, folder / f"{number + 1}"))
        small = paced_job("decoupled", learners=options.learners, model="1m", step_time_s=0.2, codec="f32")
        shape = LinkParameters(min(rates), max(trips) / 2, loss)
        rows.append(measure_cell("joining", small, shape, run_s, folder / "joining", from_the_start=True))
    append_results(options.results, rows, where)
    if options.json:
        print(to_json_line({"machine": where, "emulation": describe_emulation(), "rows": rows}))
    else:
        print(machine_line(where))
        print(f"links: {describe_emulation()}")
        show(rows)
    return 0 if all(row["stands"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
