"""`atoll ledger`: show which learner trained which samples, and where they were merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple

from atoll.cli.check import RunArgument
from atoll.cli.output import ExitCode, JsonOption, Result, reading_progress
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from atoll.core.ledger import LedgerLine
    from atoll.tape.files import RunTapes
    from atoll.tape.samples import DataHistory, SampleLease, SampleRange


class SampleCounts(NamedTuple):
    """Numbers of samples: leased = merged + held + waiting."""

    leased: int
    merged: int
    held: int
    waiting: int
    held_trained: int  # part of `held` that is trained

    def is_balanced(self) -> bool:
        return self.leased == self.merged + self.held + self.waiting


def run(
    run: RunArgument,
    rows: Annotated[int, Setting("Maximum number of rows in the table.", "N", min=1)] = 40,
    as_json: JsonOption = False,
) -> Result:
    """Show which learner trained each sample and where it was merged, and whether the ledger balances.

    The data of a run is one sequence of numbered samples. The syncer leases intervals of it to learners. A sample is
    merged when a version of any fragment contains it. When a learner is lost for good, its unmerged samples are
    returned, and leased to other learners before new ones. Held samples are leased to a live learner: trained and not
    merged yet, or not trained yet. Waiting samples were returned and not leased again yet.

    Everything is derived from the tapes; gaps in them are listed. Exits with code 1 if a sample was merged twice or is
    missing, or if trained tokens are not the sum of merged, pending and dropped tokens.
    """
    from atoll.tape.files import RunTapes

    tapes = RunTapes(run)
    history = read_history(tapes)
    ranges, tokens = history.ranges(), history.token_ledger()
    sums = count_samples(history, ranges)
    balanced = sums.is_balanced() and not history.problems and all(line.is_balanced() for line in tokens.values())
    arguments = tapes, history, ranges, tokens, sums, balanced
    return Result(
        partial(_ledger_fields, *arguments),
        _ledger_lines(*arguments, rows),
        ExitCode.OK if balanced else ExitCode.FAILED,
    )


def read_history(tapes: RunTapes) -> DataHistory:
    from atoll.tape.samples import DataHistory

    history = DataHistory(tapes.config)
    with reading_progress("reading", tapes) as watched:
        for entry in watched(tapes.merged_entries()):
            if entry.tick == 1:
                history.on_process_started(entry.actor, tapes.readers[entry.actor].header.restored)
            history.observe(entry)
    return history


def count_samples(history: DataHistory, ranges: Sequence[SampleRange]) -> SampleCounts:
    counts: Counter[str] = Counter()
    for each in ranges:
        counts[each.status] += each.end - each.begin
    trained = sum(each.end - each.begin for each in ranges if each.status == "held" and each.leases[-1].trained)
    return SampleCounts(history.next_sample, counts["merged"], counts["held"], counts["waiting"], trained)


# --------------------------------------------------------------------------------------------------------------------
# JSON output


def _ledger_fields(
    tapes: RunTapes,
    history: DataHistory,
    ranges: Sequence[SampleRange],
    tokens: dict[int, LedgerLine],
    sums: SampleCounts,
    balanced: bool,
) -> dict[str, object]:
    return {
        "balanced": balanced,
        "problems": history.problems,
        "incomplete": _find_gaps(tapes, history),
        "lease_samples": tapes.config.lease_samples,
        "samples": sums._asdict(),
        "repeated_steps": sum(history.repeated.values()),
        "ranges": [
            {
                "begin": each.begin,
                "end": each.end,
                "place": each.status,
                "history": [lease._asdict() for lease in each.leases],
            }
            for each in ranges
        ],
        "tokens": [{"fragment": p, **line._asdict()} for p, line in tokens.items()],
    }


# --------------------------------------------------------------------------------------------------------------------
# Text output


def _ledger_lines(
    tapes: RunTapes,
    history: DataHistory,
    ranges: Sequence[SampleRange],
    tokens: dict[int, LedgerLine],
    sums: SampleCounts,
    balanced: bool,
    rows: int,
) -> Iterator[str]:
    if tapes.config.lease_samples:
        yield from _sample_lines(group_ranges(ranges), rows)
        held = f"{sums.held:,} held ({sums.held_trained:,} of them trained)" if sums.held else "0 held"
        yield f"samples: {sums.leased:,} leased = {sums.merged:,} merged + {held} + {sums.waiting:,} waiting"
        if repeated := sum(history.repeated.values()):
            yield f"{repeated:,} steps repeated samples of their learner, because it had no lease left"
    else:
        yield "samples: this run has no leases, its learners use their own data"
    yield _tokens_line(tokens)
    gaps = _find_gaps(tapes, history)
    yield from (f"incomplete: {sentence}" for sentence in gaps)
    yield from (f"problem: {sentence}" for sentence in history.problems)
    if balanced:
        yield "the ledger of these tapes balances" if gaps else "the ledger balances"
    else:
        yield "the ledger does not balance"


def _find_gaps(tapes: RunTapes, history: DataHistory) -> list[str]:
    """Return sentences about missing tapes. Learners at other sites store their tapes there, if they record any."""
    reason = "is on a tape here: only its merged tokens are known"
    return tapes.describe_gaps() + [f"no step of {actor} {reason}" for actor in history.untaped_actors()]


def group_ranges(ranges: Sequence[SampleRange]) -> list[list[SampleRange]]:
    """Group adjacent ranges with the same history. The versions that contain them may differ."""
    groups: list[list[SampleRange]] = []
    for each in ranges:
        last = groups[-1][-1].leases if groups else ()
        same = groups and len(last) == len(each.leases)
        if same and all(a.matches(b) for a, b in zip(last, each.leases, strict=True)):
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def _sample_lines(groups: Sequence[Sequence[SampleRange]], rows: int) -> Iterator[str]:
    spans = [f"{group[0].begin:,} to {group[-1].end - 1:,}" for group in groups[:rows]]
    width = max(map(len, spans), default=0)
    for span, group in zip(spans, groups, strict=False):
        yield f"{span:>{width}}  {_format_history(group)}"
    if len(groups) > rows:
        yield f"... and {len(groups) - rows:,} more; increase --rows, or use --json for all"


def _format_history(group: Sequence[SampleRange]) -> str:
    parts = []
    for index, lease in enumerate(group[0].leases):
        holder = f"learner {lease.learner} incarnation {lease.incarnation}"
        if lease.outcome == "merged":
            parts.append(f"{holder}: merged, {_format_versions(lease, group[-1].leases[index])}")
        else:
            trained = "trained, " if lease.trained else ""
            cause = f": {lease.cause}" if lease.cause else ""
            parts.append(f"{holder}: {trained}{lease.outcome}{cause}")
    return "; then ".join(parts) if parts else "never leased"


def _format_versions(first: SampleLease, last: SampleLease) -> str:
    """
    >>> from atoll.tape.samples import SampleLease
    >>> a, b = (SampleLease(1, 1, True, "merged", "", 0, version) for version in (3, 9))
    >>> _format_versions(a, a), _format_versions(a, b)
    ('version 3 of fragment 0', 'version 3 of fragment 0 up to version 9 of fragment 0')
    """
    begin, end = (f"version {lease.version} of fragment {lease.fragment}" for lease in (first, last))
    return begin if begin == end else f"{begin} up to {end}"


def _tokens_line(tokens: dict[int, LedgerLine]) -> str:
    """Return the means over all fragments. A token is merged into each fragment at another time."""
    from atoll.tape.syncer_tenures import mean_ledger_line

    trained, merged, pending, dropped = mean_ledger_line(list(tokens.values()))
    lost = "".join(f" + {total:,} dropped ({reason})" for reason, total in sorted(dropped.items()))
    mean = f", the mean of {len(tokens)} fragments" if len(tokens) > 1 else ""
    return f"tokens: {trained:,} trained = {merged:,} merged + {pending:,} pending{lost or ' + 0 dropped'}{mean}"
