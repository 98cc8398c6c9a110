"""What happened in a training job, in sentences for somebody who sees one for the first time."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from atoll.dashboard.terminal import clock
from atoll.reference.baselines import ring_bytes
from atoll.reference.job_settings import JobSettings
from atoll.reference.report import JobReport, ProcessFault

WIDTH = 100


def summary(report: JobReport, settings: JobSettings, run: Path) -> Iterator[str]:
    """Paragraphs, wrapped, with an empty line between them."""
    paragraphs = [" ".join(_trained(report, settings))]
    paragraphs += [" ".join(_told(report, fault)) for fault in report.faults]
    if report.method == "decoupled":
        paragraphs.append(" ".join(_books(report)))
    paragraphs.append(" ".join(_exchange(report, settings)))
    for paragraph in paragraphs:
        yield textwrap.fill(paragraph, WIDTH)
        yield ""
    yield from _next(report, run)


def _trained(report: JobReport, settings: JobSettings) -> Iterator[str]:
    where = "one island" if report.learners == 1 else f"{report.learners} islands"
    yield (
        f"A model of {report.parameters:,} parameters was trained on {report.tokens.trained:,} tokens by {where}"
        f" in {clock(report.wall_s)}, {report.tokens.trained / max(report.wall_s, 1e-9):,.0f} tokens per second."
    )
    yield (
        f"On {report.eval_tokens:,} tokens of held-out text, which no island trained on, its loss fell from"
        f" {report.eval_loss_before:.3f} to {report.eval_loss:.3f}."
    )
    if report.paced is not None:
        yield f"Steps were paced: each took at least {_ms(report.paced.step_time_s)} at speed 1."


def _told(report: JobReport, fault: ProcessFault) -> Iterator[str]:
    name = fault.who.capitalize()
    how = "was killed on purpose" if fault.planned else f"ended before its time ({fault.what})"
    yield f"{name} {how} after {clock(max(0.0, fault.at_s or 0.0))}."
    if _is_absent(fault):
        yield "It did not train again before the run ended. What it had trained and not yet merged is lost."
    if fault.away_s is None:
        return
    yield (
        f"It trained again {fault.away_s:.1f} s later: model from the syncer,"
        f" {fault.came_back_with or 'nothing else'}. Samples that it had trained and not yet merged were leased again."
    )
    if fault.others_step_s_before is not None and fault.others_step_s_during is not None:
        before, during = fault.others_step_s_before, fault.others_step_s_during
        took = f"their steps took {_ms(before)} before and {_ms(during)} while it was away"
        if during > 1.1 * before:
            yield f"The others did not wait for it, but {took}: check what else this machine was running."
        elif during < 0.95 * before and report.paced is None:
            yield f"The others did not wait for it and had more of the cores: {took}."
        else:
            yield f"The others did not wait for it: {took}."


def _is_absent(fault: ProcessFault) -> bool:
    """Whether a learner ended and did not train again before the end of the run."""
    return fault.who.startswith("learner") and fault.away_s is None


def _books(report: JobReport) -> Iterator[str]:
    tokens = report.tokens
    trained = max(tokens.trained, 1)
    absent = " and ".join(dict.fromkeys(fault.who for fault in report.faults if _is_absent(fault)))
    merged = f"Of the {tokens.trained:,} tokens {_share(tokens.merged / trained)} are merged into the model"
    pending = _share(tokens.pending / trained)
    lost = f"{_share(tokens.dropped / trained)} were lost" + (" with a process that ended" if tokens.dropped else "")
    if absent:
        yield f"{merged}, and {lost}." if tokens.dropped else f"{merged}."
        yield (
            f"{pending} are in no version: trained while the last merges were made, or lost with {absent}, which did"
            " not come back."
        )
    else:
        yield f"{merged}, {pending} were trained while the last merges were made, and {lost}."
    if report.contributions_per_merge is not None and report.effective_h is not None:
        yield (
            f"There were {report.rounds:,} merges of one fragment each, on average of"
            f" {report.contributions_per_merge:.1f} of {report.learners} islands."
            f" Each fragment was merged every {report.effective_h:.0f} steps."
        )
    yield (
        f"Goodput was {_share(report.goodput)}: the share of the islands' time that went into steps."
        f" Uptime was {_share(report.uptime)}: the share of the time in which at least one island trained."
    )


def _exchange(report: JobReport, settings: JobSettings) -> Iterator[str]:
    moved = report.bytes.up + report.bytes.down
    if report.learners == 1 and not moved:
        yield "One island has nobody to exchange anything with."
        return
    yield (
        f"The islands sent {_size(report.bytes.up)} and received {_size(report.bytes.down)},"
        f" {report.bytes.per_token:.1f} bytes per token."
    )
    if report.method != "ddp" and report.learners > 1:
        steps = report.steps / report.learners  # of each, had all taken the same number
        parallel = 2 * report.learners * steps * ring_bytes(report.parameters, report.learners)
        yield (
            f"Data-parallel training on the same tokens would have moved {_size(parallel)},"
            f" {parallel / moved:.0f} times as much, and every step would have waited for it."
        )
    if report.method != "decoupled":
        waited_s = sum(island.waited_s for island in report.islands) / report.learners
        yield f"Each island waited {waited_s:.1f} s for the others; goodput was {_share(report.goodput)}."


def _next(report: JobReport, run: Path) -> Iterator[str]:
    yield f"Everything is in {run}: model.safetensors, report.json, tapes, logs, metrics. Try next:"
    commands = {f'atoll generate {run} "def main():"': "what the model has learned"}
    if report.method == "decoupled":
        struck = next((fault.who.split()[-1] for fault in report.faults if fault.who.startswith("learner")), "1")
        commands[f"atoll dash {run}"] = "all of it on a page in the browser"
        commands[f"atoll check {run}"] = "every invariant of the protocol, over the tapes"
        commands[f"atoll story {run} --learner {struck}"] = "what happened to one learner"
        commands[f"atoll ledger {run}"] = "who trained which samples, and where they were merged"
        commands[f"atoll replay {run}"] = "train it again from the tapes, to the same bits"
    width = max(map(len, commands))
    for command, meaning in commands.items():
        yield f"  {command:<{width}}   {meaning}"


def _ms(seconds: float) -> str:
    return f"{1000.0 * seconds:.0f} ms" if seconds < 10.0 else f"{seconds:.0f} s"


def _share(share: float) -> str:
    """
    >>> _share(0.5), _share(0.9999), _share(0.0)
    ('50.0 %', '99.99 %', '0 %')
    """
    if share in (0.0, 1.0):
        return f"{100.0 * share:.0f} %"
    near = min(share, 1.0 - share)
    return f"{100.0 * share:.{1 if near >= 0.005 else 2}f} %"


def _size(count: float) -> str:
    """
    >>> _size(1_250_000), _size(12)
    ('1.2 MB', '12 bytes')
    """
    for size, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {name}"
    return f"{count:.0f} bytes"
