"""A verdict in lines, for somebody at a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from atoll.chaos.judge import FaultReport, Verdict

WIDTH = 100
_MARKS = {True: "passed", False: "FAILED", None: "unknown"}


def summary(verdict: Verdict, run: Path) -> Iterator[str]:
    yield f"{verdict.scenario}, seed {verdict.seed}: {verdict.about}"
    yield ""
    yield from _faults(verdict)
    yield ""
    yield from _wrapped(" ".join(_figures(verdict)))
    yield ""
    width = max(len(check.name) for check in verdict.checks)
    for check in verdict.checks:
        first = f"{_MARKS[check.passed]:<8} {check.name:<{width}}  "
        yield from _wrapped(check.sentence, first, " " * len(first))
    yield ""
    judged = "The run survived." if verdict.passed else "The run did NOT survive."
    yield f"{judged} {run / 'verdict.html'} shows it, {run / 'verdict.json'} holds every figure."
    targets = [fault.target.split() for fault in verdict.faults]
    struck = next((words[-1] for words in targets if words[-1].isdigit() and words[0] != "shard"), "1")
    yield f"More: atoll story {run} --learner {struck}"


def _wrapped(text: str, first: str = "", rest: str = "") -> Iterator[str]:
    yield from textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False)


def _faults(verdict: Verdict) -> Iterator[str]:
    begin = verdict.timeline["began_s"]
    for fault in verdict.faults:
        at = "   never" if fault.began_s is None else f"{fault.began_s - begin:6.1f} s"
        yield f"{at}  {fault.sentence}{_after(fault)}"


def _after(fault: FaultReport) -> str:
    if not fault.fired:
        return f": did not happen ({fault.why_not})"
    told = []
    if fault.back_training_s is not None:
        told.append(f"trained again after {fault.back_training_s:.1f} s")
    if fault.back_merged_s is not None:
        told.append(f"merged again after {fault.back_merged_s:.1f} s")
    if fault.healed_merged_s is not None:
        told.append(f"merged again {fault.healed_merged_s:.1f} s after its end")
    return f" [{fault.how}]" + (f": {', '.join(told)}" if told else "")


def _figures(verdict: Verdict) -> Iterator[str]:
    yield (
        f"Goodput was {100.0 * verdict.goodput:.1f} % over {verdict.wall_s:.0f} s"
        f" ({100.0 * verdict.goodput_up:.1f} % of the time in which learners were up),"
        f" and somebody trained in {100.0 * verdict.uptime:.1f} % of the time."
    )
    rest = {
        "away": sum(each.away_s for each in verdict.islands),
        "joining": sum(each.joining_s for each in verdict.islands),
        "stopped": sum(each.stopped_s for each in verdict.islands),
        "between steps": sum(each.between_s for each in verdict.islands),
    }
    told = ", ".join(f"{seconds:.1f} s {name}" for name, seconds in rest.items() if seconds >= 0.05)
    if told:
        yield f"The rest of the islands' time: {told}."
    pause = verdict.worst_pause
    if pause is not None:
        during = f" during fault {', '.join(map(str, pause.during))}" if pause.during else ""
        yield (
            f"The longest gap between two steps of a learner that was not itself struck was {1000 * pause.gap_s:.0f} ms"
            f" (learner {pause.learner}{during}); its usual step takes {1000 * pause.usual_s:.0f} ms."
        )
    if verdict.merged_of_alive is not None:
        yield f"{verdict.merges:,} merges took {100.0 * verdict.merged_of_alive:.0f} % of the learners alive."
    if verdict.refused_contributions:
        whys = [
            f"{count:,} {why.removeprefix('contribution-')}" for why, count in verdict.refused_contributions.items()
        ]
        yield f"Contributions that were refused: {', '.join(whys)}."
    if verdict.failed_writes:
        yield f"{verdict.failed_writes:,} writes failed and were made again."
    yield f"Links: {verdict.links}."
