"""The thinnest link that does: decoupled int4 against data-parallel. Figures are kept in benchmarks/README.md.

    python benchmarks/bench_min_rate.py [--quick] [--json] [--model 1m] [--step 1.0] [--round-trip 40]

Four sites as in `bench_wide.py` (root). Each method runs once, and its links get thinner while it runs, around the rate
that `atoll.sim.bandwidth` predicts; the rate at which 95 % hold is interpolated between two of them.

Data-parallel: 95 % compute utilisation, pace of a step / time of a step. What a paced step hides is the time between
its work and its pace, which is more than the backward pass that hides gradients elsewhere.

Decoupled: by that definition any rate does, since a learner never waits for its link; the column shows it. What gives
way is H, so here a rate does when H / effective H is at least 95 %: by merges (every fragment is merged as often as
planned), and by contributions (and every learner is in it), which is stricter and is the one that is compared.

Published (arXiv 2604.21428, Table 13): 198 against 0.84 Gbit/s at 95 %, 8 sites, 5B parameters, a ratio of 236.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from atoll.reference.job_settings import JobSettings
from atoll.reference.loop import model_config
from atoll.reference.models import build_model, parameter_count
from atoll.sim.bandwidth import Workload, min_rate_for_period
from benchmarks import wan
from benchmarks.measurement import collect_machine, machine_line, to_json_line
from benchmarks.predictions import predict_steps
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

SITES = 4
TARGET_UTILISATION = 0.95
PUBLISHED_REDUCTION = 236.0
SETTLING_STEPS = {"ddp": 3, "decoupled": 8}
"""After links became thinner: TCP has to learn it, and rounds under way were begun on wider ones."""

RATE_FACTORS = {"ddp": (1.6, 1.25, 1.0, 0.75), "decoupled": (4.0, 3.0, 2.0, 1.3, 0.9)}
"""Rates that are tried, as multiples of the predicted one."""

QUICK_RATE_FACTORS = {"ddp": (1.5, 0.8), "decoupled": (4.0, 0.9)}


def find_crossing(points: list[tuple[float, float]], wanted: float = TARGET_UTILISATION) -> float:
    """The smallest rate that reaches it, by a line between neighbours; infinite, or 0, where none or all do.

    >>> crossing([(40.0, 1.0), (20.0, 0.98), (10.0, 0.92)])
    15.0
    >>> crossing([(40.0, 0.9)]), crossing([(40.0, 0.99)])
    (inf, 0.0)
    """
    points = sorted(points, reverse=True)
    if points[0][1] < wanted:
        return math.inf
    for (rate, share), (thinner, less) in itertools.pairwise(points):
        if less < wanted:
            return thinner + (rate - thinner) * (wanted - less) / (share - less)
    return 0.0


def predicted_rate(settings: JobSettings, load: Workload, work_s: float) -> float:
    """At which `predict` says that 95 % hold."""
    if settings.method == "decoupled":
        return TARGET_UTILISATION * min_rate_for_period(settings.numerics.upload_codecs[0], load, settings.every_steps)
    low, high = 1e3, 1e12
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        enough = predict_steps(settings.method, load, middle, work_s=work_s).utilisation >= TARGET_UTILISATION
        low, high = (low, middle) if enough else (middle, high)
    return high


def step_figures(seen: ObservedRun, settings: JobSettings) -> dict[str, float]:
    skipped = SETTLING_STEPS[settings.method]
    step_s = seen.step_s(skipped)
    carried = seen.bytes_per_s(skipped)
    assert carried is not None
    return {
        "step_s": step_s,
        "utilisation": min(1.0, settings.step_time_s / step_s),
        "sent_bit_s": 8.0 * carried.sent,
        "received_bit_s": 8.0 * carried.received,
    }


def round_figures(seen: ObservedRun, settings: JobSettings) -> dict[str, float]:
    skipped = SETTLING_STEPS[settings.method]
    spans = seen.span(skipped).values()
    begin_at, end_at = max(first.at for first, _ in spans), min(last.at for _, last in spans)
    rounds = read_rounds(seen.run, begin_at, end_at)
    steps, fragments = (end_at - begin_at) / seen.step_s(skipped), fragment_count(seen.run)
    h = rounds.effective_h(steps, fragments)
    h_of_each = rounds.effective_h_of_each(steps, fragments, settings.learners)
    return {
        "effective_h": h,
        "effective_h_of_each": h_of_each,
        "by_merges": min(1.0, settings.every_steps / h),
        "by_contributions": min(1.0, settings.every_steps / h_of_each),
        "contributions_per_merge": rounds.contributions / max(rounds.merges, 1),
    }


def search(settings: JobSettings, expected: float, delay_s: float, quick: bool, run: Path) -> list[dict[str, Any]]:
    """One run, over links that become thinner and thinner."""
    every = settings.every_steps
    steps = 8 if settings.method == "ddp" else every if quick else 2 * every
    steps += SETTLING_STEPS[settings.method] + 1
    around = (QUICK_RATE_FACTORS if quick else RATE_FACTORS)[settings.method]
    plan = [(LinkParameters(expected * share, delay_s), steps) for share in around]
    limit_s = 60.0 + 4.0 * len(plan) * steps * settings.step_time_s
    with open_links(SITES) as links:
        watch = run_observed(settings.method, settings, run, links, plan, limit_s)
    rows = []
    for shape, seen in watch.observations():
        row: dict[str, Any] = {
            "method": settings.method,
            "rate_bit_s": shape.rate_bit_s,
            **step_figures(seen, settings),
        }
        if settings.method == "decoupled":
            row |= round_figures(seen, settings)
        rows.append(row)
    return rows


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    base = paced_job("decoupled", learners=SITES, model=options.model, step_time_s=options.step, codec="int4")
    params = parameter_count(build_model(model_config(base), base.seed))
    delay_s = options.round_trip / 2e3
    found: dict[str, Any] = {
        "parameters": params,
        "paced_step_s": options.step,
        "round_trip_s": 2 * delay_s,
        "rows": [],
    }
    star = Workload(params, SITES, options.step, delay_s, star=True)
    expected = predicted_rate(base, star, 0.0)
    rows = search(base, expected, delay_s, options.quick, folder / "decoupled")
    found["decoupled_predicted"] = expected
    for name in ("by_merges", "by_contributions"):
        found[f"decoupled_{name}"] = find_crossing([(row["rate_bit_s"], row[name]) for row in rows])
    ddp = replace(base, method="ddp")
    expected = predicted_rate(ddp, replace(star, star=False), options.work)
    more = search(ddp, expected, delay_s, options.quick, folder / "ddp")
    found["ddp_predicted"] = expected
    found["ddp"] = find_crossing([(row["rate_bit_s"], row["utilisation"]) for row in more])
    found["rows"] = rows + more
    for name in ("by_merges", "by_contributions"):
        thin = found[f"decoupled_{name}"]
        found[f"ratio_{name}"] = found["ddp"] / thin if 0.0 < thin < math.inf and found["ddp"] < math.inf else None
    return found


def show(found: dict[str, Any]) -> None:
    print(
        f"{SITES} sites, {found['parameters'] / 1e6:.2f} M parameters, steps paced to {found['paced_step_s']:g} s,"
        f" {1e3 * found['round_trip_s']:.0f} ms there and back\n"
    )
    heads = ("Mbit/s", "step, s", "utilisation", "sent, Mbit/s", "got", "H, merges", "H, each", "contr./merge")
    print(f"{'':12}" + "".join(f"{head:>13}" for head in heads))
    for row in found["rows"]:
        cells = [f"{row['rate_bit_s'] / 1e6:.3f}", f"{row['step_s']:.3f}", f"{row['utilisation']:.1%}"]
        cells += [f"{row['sent_bit_s'] / 1e6:.3f}", f"{row['received_bit_s'] / 1e6:.3f}"]
        if "effective_h" in row:
            cells += [f"{row['effective_h']:.1f}", f"{row['effective_h_of_each']:.1f}"]
            cells += [f"{row['contributions_per_merge']:.2f}"]
        print(f"{row['method']:12}" + "".join(f"{each:>13}" for each in cells))
    print("\n  the thinnest link that does, Mbit/s (0: all that were tried do; inf: none does):")
    print(f"    data-parallel, 95 % utilisation: {found['ddp'] / 1e6:.2f} (plan: {found['ddp_predicted'] / 1e6:.2f})")
    print("    decoupled int4, 95 % utilisation: any, a step waits for nothing")
    text = f"    decoupled int4, H / effective H of 95 %, by merges: {found['decoupled_by_merges'] / 1e6:.3f}"
    print(f"{text}, by contributions: {found['decoupled_by_contributions'] / 1e6:.3f}", end=" ")
    print(f"(plan: {found['decoupled_predicted'] / 1e6:.3f})")
    for name in ("by_merges", "by_contributions"):
        ratio = found[f"ratio_{name}"]
        print(
            f"  ratio, {name.replace('_', ' ')}: {'-' if ratio is None else f'{ratio:.0f}'};"
            f" published: {PUBLISHED_REDUCTION:g}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1m", help="larger ones need more for data-parallel than the router carries")
    parser.add_argument("--step", type=float, default=1.0, help="least seconds of a step")
    parser.add_argument("--work", type=float, default=0.05, help="seconds of a step that are work, for the prediction")
    parser.add_argument("--round-trip", type=float, default=40.0, help="ms")
    parser.add_argument("--quick", action="store_true", help="two rates each, half as long")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--results", type=Path, default=RESULTS / "min_rate.jsonl", help="file that a line is added to")
    options = parser.parse_args()
    where = collect_machine()
    why_not = wan.unavailable_reason()
    if why_not is not None:
        print(f"a wide network cannot be made here ({why_not}), and relays join no learners to each other: be root")
        return 2
    log_progress(f"links: {describe_emulation()}")
    with tempfile.TemporaryDirectory(prefix="atoll-least-") as folder:
        found = measure(options, Path(folder))
    append_results(options.results, [found], where)
    if options.json:
        print(to_json_line({"machine": where, "emulation": describe_emulation()} | found))
        return 0
    print(machine_line(where))
    print(f"links: {describe_emulation()}")
    show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
