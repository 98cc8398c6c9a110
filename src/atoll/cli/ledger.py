"""`atoll ledger`: who trained which samples, and what became of them."""

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
    """Of samples: leased = merged + held + waiting."""

    leased: int
    merged: int
    held: int
    waiting: int
    held_trained: int  # of those held

    def is_balanced(self) -> bool:
        return self.leased == self.merged + self.held + self.waiting


def run(
    run: RunArgument,
    rows: Annotated[int, Setting("Rows of the table, at most.", "N", min=1)] = 40,
    as_json: JsonOption = False,
) -> Result:
    """Say of every sample who trained it and where it was merged, and whether the books balance.

    The data of a run is one line of numbered samples, of which the syncer leases stretches to its learners. A sample is
    merged when a version of any fragment holds it; what a learner had not merged when it was gone for good is returned
    and leased to another one, first of all. What is held is with learners that are there, trained and not merged yet or
    still ahead of them. What is waiting was returned, and nobody has asked since.

    Everything is derived from the tapes alone, and what they lack is said. Ends with exit code 1 if a sample was merged
    twice or is nowhere, or if tokens trained are not tokens merged, pending and dropped.
    """
    from atoll.tape.files import RunTapes

    tapes = RunTapes(run)
    history = read_history(tapes)
    ranges, tokens = history.ranges(), history.token_ledger()
    sums = count_samples(history, ranges)
    balanced = sums.is_balanced() and not history.problems and all(line.is_balanced() for line in tokens.values())
    found = tapes, history, ranges, tokens, sums, balanced
    return Result(
        partial(_ledger_fields, *found), _ledger_lines(*found, rows), ExitCode.OK if balanced else ExitCode.FAILED
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
    places: Counter[str] = Counter()
    for each in ranges:
        places[each.status] += each.end - each.begin
    trained = sum(each.end - each.begin for each in ranges if each.status == "held" and each.leases[-1].trained)
    return SampleCounts(history.next_sample, places["merged"], places["held"], places["waiting"], trained)


# --------------------------------------------------------------------------------------------------------------------
# For scripts


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
                "history": [stay._asdict() for stay in each.leases],
            }
            for each in ranges
        ],
        "tokens": [{"fragment": p, **line._asdict()} for p, line in tokens.items()],
    }


# --------------------------------------------------------------------------------------------------------------------
# For people


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
            yield f"{repeated:,} steps were on samples that their learner had had already: it had no lease left"
    else:
        yield "samples: this run has no leases, its learners bring their own data"
    yield _tokens_line(tokens)
    gaps = _find_gaps(tapes, history)
    yield from (f"incomplete: {sentence}" for sentence in gaps)
    yield from (f"wrong: {sentence}" for sentence in history.problems)
    if balanced:
        yield "what is on these tapes balances" if gaps else "everything balances"
    else:
        yield "the books do not balance"


def _find_gaps(tapes: RunTapes, history: DataHistory) -> list[str]:
    """Islands of other sites keep their tapes there, if they keep any."""
    known = "is on a tape here: only what was merged is known of it"
    return tapes.describe_gaps() + [f"no step of {actor} {known}" for actor in history.untaped_actors()]


def group_ranges(ranges: Sequence[SampleRange]) -> list[list[SampleRange]]:
    """Neighbours with the same fate, whatever version they are in."""
    found: list[list[SampleRange]] = []
    for each in ranges:
        last = found[-1][-1].leases if found else ()
        same = found and len(last) == len(each.leases)
        if same and all(a.matches(b) for a, b in zip(last, each.leases, strict=True)):
            found[-1].append(each)
        else:
            found.append([each])
    return found


def _sample_lines(groups: Sequence[Sequence[SampleRange]], rows: int) -> Iterator[str]:
    spans = [f"{group[0].begin:,} to {group[-1].end - 1:,}" for group in groups[:rows]]
    width = max(map(len, spans), default=0)
    for span, group in zip(spans, groups, strict=False):
        yield f"{span:>{width}}  {_format_history(group)}"
    if len(groups) > rows:
        yield f"... and {len(groups) - rows:,} more; --rows shows more of them, --json all"


def _format_history(group: Sequence[SampleRange]) -> str:
    parts = []
    for place, stay in enumerate(group[0].leases):
        who = f"learner {stay.learner} incarnation {stay.incarnation}"
        if stay.outcome == "merged":
            parts.append(f"{who}: merged, {_format_versions(stay, group[-1].leases[place])}")
        else:
            trained = "trained, " if stay.trained else ""
            why = f": {stay.cause}" if stay.cause else ""
            parts.append(f"{who}: {trained}{stay.outcome}{why}")
    return "; then ".join(parts) if parts else "nobody"


def _format_versions(first: SampleLease, last: SampleLease) -> str:
    """
    >>> from atoll.tape.samples import Stay
    >>> a, b = (Stay(1, 1, True, "merged", "", 0, version) for version in (3, 9))
    >>> _format_versions(a, a), _format_versions(a, b)
    ('version 3 of fragment 0', 'version 3 of fragment 0 up to version 9 of fragment 0')
    """
    begin, end = (f"version {stay.version} of fragment {stay.fragment}" for stay in (first, last))
    return begin if begin == end else f"{begin} up to {end}"


def _tokens_line(tokens: dict[int, LedgerLine]) -> str:
    """Return the mean over fragments: a token settles in each of them at another time."""
    from atoll.tape.syncer_tenures import mean_ledger_line

    trained, merged, pending, dropped = mean_ledger_line(list(tokens.values()))
    lost = "".join(f" + {total:,} dropped ({why})" for why, total in sorted(dropped.items()))
    of = f", the mean of {len(tokens)} fragments" if len(tokens) > 1 else ""
    return f"tokens: {trained:,} trained = {merged:,} merged + {pending:,} pending{lost or ' + 0 dropped'}{of}"
