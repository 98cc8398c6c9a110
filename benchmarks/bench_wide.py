"""Four sites, far apart, on thin links: what a step costs each method. Figures are kept in benchmarks/README.md.

    python benchmarks/bench_wide.py [--quick] [--json] [--model 10m] [--step 1.0] [--round-trip 40] [--codec int4]

Four learners with paced steps, one per site, and a syncer in a site of its own whose link has no limit of rate
(`benchmarks/wide_runs.py` says how sites are made; root). The rate of a learner's link is computed: one step's
gradients of data-parallel training, 2 (4 - 1) / 4 of the model in f32, take 20 step times.

Step times are measured over these links for every method, and on loopback for the decoupled one. They are means between
lines of the learners' metrics, after links took their shape; bytes are those of IP packets that passed each site's
device, counted by the router and compared with the kernel's own count.

The loss at equal tokens is of other, shorter runs, without pace: training data-parallel over the thin links to where a
loss says something would take hours. Methods that wait for their exchange come to the same model over any link, and
are trained on loopback; decoupled is trained over the thin links. All have the same number of tokens and the same
settings; it is a small number (`--loss-tokens`), at which data-parallel training is ahead of everything.

The last columns are what `benchmarks.predictions` says of the same run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from atoll.reference.data import Corpus
from atoll.reference.job import finish_job
from atoll.reference.job_settings import ADAMW_BETA2, ADAMW_NUMERICS, JobSettings, Method
from atoll.reference.loop import model_config
from atoll.reference.models import build_model, parameter_count
from atoll.sim.bandwidth import Workload
from benchmarks import wan
from benchmarks.measurement import collect_machine, machine_line, to_json_line
from benchmarks.predictions import Prediction, predict_steps
from benchmarks.wide_runs import (
    RESULTS,
    ByteCounts,
    LinkParameters,
    Links,
    LoopbackLinks,
    ObservedRun,
    WanLinks,
    append_results,
    describe_emulation,
    fragment_count,
    log_progress,
    open_links,
    paced_job,
    read_rounds,
    run_job,
    run_observed,
)

SITES = 4
GRADIENT_STEPS = 20.0
"""Step times that the gradients of one step take on a link."""

SKIPPED_STEPS = 1  # the first step after links took their shape was begun on wide ones
SPARE_STEPS = 8
"""A line of metrics may be of several steps, and an exchange in it: among more there are two a whole period apart."""

SAME_STEP, TIMES_FASTER, PREDICTED_WITHIN = 1.02, 20.0, 0.25  # wanted
METHODS: tuple[Method, ...] = ("ddp", "diloco", "streaming", "decoupled")


def measure_method(
    name: str, settings: JobSettings, links: Links, shape: LinkParameters, steps: int, whole: int, out: Path
) -> dict[str, Any]:
    """The step time of one method over such links, and what it sent."""
    limit_s = 60.0 + 3.0 * (steps + whole) * settings.step_time_s * (GRADIENT_STEPS if whole == 1 else 2.0)
    spare = SKIPPED_STEPS + (1 if whole == 1 else SPARE_STEPS)
    seen = run_observed(name, settings, out, links, [(shape, steps + spare)], limit_s).seen
    row: dict[str, Any] = {
        "what": name,
        "method": settings.method,
        "step_s": seen.step_s(SKIPPED_STEPS, whole),
        "steps": seen.steps(SKIPPED_STEPS, whole),
        "work_s": seen.work_s(),
    }
    carried = seen.bytes_per_s(SKIPPED_STEPS, whole)
    if carried is not None:
        row["sent_bytes_per_step"], row["received_bytes_per_step"] = (round(way * row["step_s"]) for way in carried)
        row["sent_bit_s"] = 8 * carried.sent
    if settings.method == "decoupled":
        row |= round_figures(seen, out)
    return row


def round_figures(seen: ObservedRun, run: Path) -> dict[str, Any]:
    spans = seen.span(SKIPPED_STEPS).values()
    rounds = read_rounds(run, min(first.at for first, _ in spans), max(last.at for _, last in spans))
    return {
        "effective_h": rounds.effective_h(seen.steps(SKIPPED_STEPS), fragment_count(run)),
        "contributions_per_merge": rounds.contributions / max(rounds.merges, 1),
        "suspicions": [f"learner {each.learner}: {each.sentence}" for each in rounds.suspicions],
    }


def traffic_ratio(links: WanLinks) -> float:
    """Largest difference, as a share, between what the router and the kernel have counted at a site."""
    worst = 0.0
    for site, carried in enumerate(links.byte_counts(), start=1):
        seen = links.wan.interface(site)
        ours = ByteCounts(*carried)
        worst = max(worst, abs(ours.sent / max(seen["sent_bytes"], 1) - 1.0))
        worst = max(worst, abs(ours.received / max(seen["received_bytes"], 1) - 1.0))
    return worst


def predict_method(settings: JobSettings, params: int, shape: LinkParameters, work_s: float) -> Prediction:
    assert shape.rate_bit_s is not None
    is_decoupled = settings.method == "decoupled"
    load = Workload(params, SITES, settings.step_time_s, shape.delay_s, star=is_decoupled)
    return predict_steps(
        settings.method,
        load,
        shape.rate_bit_s,
        codec=settings.numerics.upload_codecs[0],
        every_steps=settings.every_steps,
        fragments=settings.fragments,
        tau_steps=settings.overlap_steps,
        work_s=work_s,
    )


def measure_loss(settings: JobSettings, tokens: int, links: Links, shape: LinkParameters, out: Path) -> float:
    """On held-out text, after so many tokens, without pace."""
    free = replace(settings, step_time_s=0.0, tokens=tokens, batch=2, lr=2e-3, beta2=ADAMW_BETA2, eval_tokens=32_768)
    numerics = replace(ADAMW_NUMERICS, up=settings.numerics.up, down=settings.numerics.down)
    free = replace(free, numerics=numerics)
    links.apply(shape)
    run_job(free, out, links, None)
    return finish_job(free, out, Corpus.load(free.data)).eval_loss


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    base = paced_job("decoupled", learners=SITES, model=options.model, step_time_s=options.step, codec=options.codec)
    params = parameter_count(build_model(model_config(base), base.seed))
    sent_bits = 2 * (SITES - 1) / SITES * 32 * params
    shape = LinkParameters(sent_bits / (GRADIENT_STEPS * options.step), options.round_trip / 2e3)
    log_progress(
        f"{params / 1e6:.1f} M parameters: the gradients of a step are {sent_bits / 8e6:.0f} MB; links: {shape}"
    )
    every = base.every_steps
    near_steps, ddp_steps, periods = (every, 1, 1) if options.quick else (2 * every, 3, 2)
    steps: dict[str, tuple[int, int]] = {
        "ddp": (ddp_steps, 1),
        "diloco": (periods * every, every),
        "streaming": (near_steps, 1),
        "decoupled": (near_steps, 1),
    }
    methods = METHODS if wan.unavailable_reason() is None else METHODS[-1:]
    near = measure_method(
        "decoupled, loopback", base, LoopbackLinks(), LinkParameters(None), near_steps, 1, folder / "near"
    )
    rows, difference = [near], None
    with open_links(SITES) as links:
        for method in reversed(methods):
            settings = replace(base, method=method)
            count, whole = steps[method]
            row = measure_method(f"{method}, links", settings, links, shape, count, whole, folder / method)
            rows.append(row | {"predicted": asdict(predict_method(settings, params, shape, near["work_s"]))})
        if isinstance(links, WanLinks):
            difference = traffic_ratio(links)
        for row in rows[1:]:
            log_progress(f"  loss of {row['method']} after {options.loss_tokens:,} tokens")
            settings = replace(base, method=row["method"])
            over, like = (links, shape) if row["method"] == "decoupled" else (LoopbackLinks(), LinkParameters(None))
            row["loss"] = measure_loss(settings, options.loss_tokens, over, like, folder / f"loss-{row['method']}")
    return summarize(rows) | {
        "model": options.model,
        "parameters": params,
        "paced_step_s": options.step,
        "rate_bit_s": shape.rate_bit_s,
        "round_trip_s": 2 * shape.delay_s,
        "codec": options.codec,
        "loss_tokens": options.loss_tokens,
        "counters_differ_by": difference,
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    near = rows[0]
    far = next(row for row in rows[1:] if row["method"] == "decoupled")
    ddp = next((row for row in rows[1:] if row["method"] == "ddp"), None)
    for row in rows[1:]:
        predicted = row["predicted"]
        row["step_off_by"] = row["step_s"] / predicted["step_s"] - 1.0
        row["sent_off_by"] = row["sent_bit_s"] / predicted["sent_bit_s"] - 1.0
        row["times_decoupled"] = row["step_s"] / far["step_s"]
    return {
        "far_by_near": far["step_s"] / near["step_s"],
        "ddp_by_decoupled": ddp["step_s"] / far["step_s"] if ddp is not None else None,
        "rows": rows,
    }


def show(found: dict[str, Any]) -> None:
    print(
        f"{SITES} sites, {found['parameters'] / 1e6:.1f} M parameters, steps paced to {found['paced_step_s']:g} s,"
        f" links of {found['rate_bit_s'] / 1e6:.1f} Mbit/s each way and {1e3 * found['round_trip_s']:.0f} ms there and"
        f" back, decoupled with {found['codec']}; loss at {found['loss_tokens']:,} tokens, in runs of their own\n"
    )
    heads = (
        "step, s",
        "/ decoupled",
        "sent, MB/step",
        "received",
        "loss",
        "step by plan",
        "off",
        "sent by plan",
        "off",
    )
    print(f"{'':22}" + "".join(f"{head:>14}" for head in heads))
    for row in found["rows"]:
        cells = [f"{row['step_s']:.3f}"]
        if "predicted" in row:
            predicted = row["predicted"]
            planned_mb = predicted["sent_bit_s"] * predicted["step_s"] / 8e6
            cells += [f"{row['times_decoupled']:.2f}", f"{row['sent_bytes_per_step'] / 1e6:.3f}"]
            cells += [f"{row['received_bytes_per_step'] / 1e6:.3f}", f"{row['loss']:.3f}"]
            cells += [f"{predicted['step_s']:.3f}", f"{row['step_off_by']:+.0%}", f"{planned_mb:.3f}"]
            cells += [f"{row['sent_off_by']:+.0%}"]
        print(f"{row['what']:22}" + "".join(f"{each:>14}" for each in cells))
    far = next(row for row in found["rows"][1:] if row["method"] == "decoupled")
    print(
        f"\n  decoupled over the links by loopback: {found['far_by_near']:.4f}, wanted: at most {SAME_STEP}", end="; "
    )
    print(f"effective H {far['effective_h']:.1f}, {far['contributions_per_merge']:.2f} contributions per merge")
    for line in far["suspicions"]:
        print(f"  SUSPECTED: {line}")
    if found["ddp_by_decoupled"] is None:
        print("  data-parallel, DiLoCo and streaming were not run: relays lead to the syncer only")
    else:
        print(f"  data-parallel by decoupled, step: {found['ddp_by_decoupled']:.1f}, wanted: at least {TIMES_FASTER:g}")
    worst = max(max(abs(row["step_off_by"]), abs(row["sent_off_by"])) for row in found["rows"][1:])
    print(f"  the plan is off by at most {worst:.0%}, wanted: at most {PREDICTED_WITHIN:.0%}; off: measured by plan")
    if found["counters_differ_by"] is not None:
        print(f"  the router's counts differ from the kernel's by at most {found['counters_differ_by']:.2%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="10m", help="of at least 10 M parameters for the figures that are kept")
    parser.add_argument("--step", type=float, help="least seconds of a step (1.0; quick: 0.5)")
    parser.add_argument("--round-trip", type=float, default=40.0, help="ms")
    parser.add_argument("--codec", default="int4", help="of decoupled, both ways")
    parser.add_argument("--loss-tokens", type=int, help="of the runs for the loss (60,000; quick: 15,000)")
    parser.add_argument("--quick", action="store_true", help="about 4 minutes instead of 12")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--results", type=Path, default=RESULTS / "wide.jsonl", help="file that a line is added to")
    options = parser.parse_args()
    options.step = options.step or (0.5 if options.quick else 1.0)
    options.loss_tokens = options.loss_tokens or (15_000 if options.quick else 60_000)
    where = collect_machine()
    log_progress(f"links: {describe_emulation()}")
    with tempfile.TemporaryDirectory(prefix="atoll-wide-") as folder:
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
