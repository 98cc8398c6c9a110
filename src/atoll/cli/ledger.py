"""`atoll ledger`: who trained which samples, and what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple

from atoll.cli.check import RunArgument
from atoll.cli.output import ExitCode, JsonOption, Result, reading
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from atoll.core.ledger import Line
    from atoll.tape.files import RunTapes
    from atoll.tape.samples import DataHistory, Range, Stay


class Sums(NamedTuple):
    """Of samples: leased = merged + held + waiting."""

    leased: int
    merged: int
    held: int
    waiting: int
    held_trained: int  # of those held

    def balanced(self) -> bool:
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
    ranges, tokens = history.ranges(), history.tokens()
    sums = sums_of(history, ranges)
    balanced = sums.balanced() and not history.problems and all(line.balanced() for line in tokens.values())
    found = tapes, history, ranges, tokens, sums, balanced
    return Result(partial(_fields, *found), _lines(*found, rows), ExitCode.OK if balanced else ExitCode.FAILED)


def read_history(tapes: RunTapes) -> DataHistory:
    from atoll.tape.samples import DataHistory

    history = DataHistory(tapes.config)
    with reading("reading", tapes) as watched:
        for entry in watched(tapes.merged()):
            if entry.tick == 1:
                history.started(entry.actor, tapes.readers[entry.actor].header.restored)
            history.observe(entry)
    return history


def sums_of(history: DataHistory, ranges: Sequence[Range]) -> Sums:
    places: Counter[str] = Counter()
    for each in ranges:
        places[each.place] += each.end - each.begin
    trained = sum(each.end - each.begin for each in ranges if each.place == "held" and each.stays[-1].trained)
    return Sums(history.next, places["merged"], places["held"], places["waiting"], trained)


# --------------------------------------------------------------------------------------------------------------------
# For scripts


def _fields(
    tapes: RunTapes,
    history: DataHistory,
    ranges: Sequence[Range],
    tokens: dict[int, Line],
    sums: Sums,
    balanced: bool,
) -> dict[str, object]:
    return {
        "balanced": balanced,
        "problems": history.problems,
        "incomplete": _gaps(tapes, history),
        "lease_samples": tapes.config.lease_samples,
        "samples": sums._asdict(),
        "repeated_steps": sum(history.repeated.values()),
        "ranges": [
            {
                "begin": each.begin,
                "end": each.end,
                "place": each.place,
                "history": [stay._asdict() for stay in each.stays],
            }
            for each in ranges
        ],
        "tokens": [{"fragment": p, **line._asdict()} for p, line in tokens.items()],
    }


# --------------------------------------------------------------------------------------------------------------------
# For people


def _lines(
    tapes: RunTapes,
    history: DataHistory,
    ranges: Sequence[Range],
    tokens: dict[int, Line],
    sums: Sums,
    balanced: bool,
    rows: int,
) -> Iterator[str]:
    if tapes.config.lease_samples:
        yield from _sample_lines(compact(ranges), rows)
        held = f"{sums.held:,} held ({sums.held_trained:,} of them trained)" if sums.held else "0 held"
        yield f"samples: {sums.leased:,} leased = {sums.merged:,} merged + {held} + {sums.waiting:,} waiting"
        if repeated := sum(history.repeated.values()):
            yield f"{repeated:,} steps were on samples that their learner had had already: it had no lease left"
    else:
        yield "samples: this run has no leases, its learners bring their own data"
    yield _tokens_line(tokens)
    gaps = _gaps(tapes, history)
    yield from (f"incomplete: {sentence}" for sentence in gaps)
    yield from (f"wrong: {sentence}" for sentence in history.problems)
    if balanced:
        yield "what is on these tapes balances" if gaps else "everything balances"
    else:
        yield "the books do not balance"


def _gaps(tapes: RunTapes, history: DataHistory) -> list[str]:
    """Islands of other sites keep their tapes there, if they keep any."""
    known = "is on a tape here: only what was merged is known of it"
    return tapes.gaps() + [f"no step of {actor} {known}" for actor in history.untaped()]


def compact(ranges: Sequence[Range]) -> list[list[Range]]:
    """Neighbours with the same fate, whatever version they are in."""
    found: list[list[Range]] = []
    for each in ranges:
        last = found[-1][-1].stays if found else ()
        same = found and len(last) == len(each.stays)
        if same and all(a.same(b) for a, b in zip(last, each.stays, strict=True)):
            found[-1].append(each)
        else:
            found.append([each])
    return found


def _sample_lines(groups: Sequence[Sequence[Range]], rows: int) -> Iterator[str]:
    spans = [f"{group[0].begin:,} to {group[-1].end - 1:,}" for group in groups[:rows]]
    width = max(map(len, spans), default=0)
    for span, group in zip(spans, groups, strict=False):
        yield f"{span:>{width}}  {_told(group)}"
    if len(groups) > rows:
        yield f"... and {len(groups) - rows:,} more; --rows shows more of them, --json all"


def _told(group: Sequence[Range]) -> str:
    parts = []
    for place, stay in enumerate(group[0].stays):
        who = f"learner {stay.learner} incarnation {stay.incarnation}"
        if stay.fate == "merged":
            parts.append(f"{who}: merged, {_where(stay, group[-1].stays[place])}")
        else:
            trained = "trained, " if stay.trained else ""
            why = f": {stay.why}" if stay.why else ""
            parts.append(f"{who}: {trained}{stay.fate}{why}")
    return "; then ".join(parts) if parts else "nobody"


def _where(first: Stay, last: Stay) -> str:
    """
    >>> from atoll.tape.samples import Stay
    >>> a, b = (Stay(1, 1, True, "merged", "", 0, version) for version in (3, 9))
    >>> _where(a, a), _where(a, b)
    ('version 3 of fragment 0', 'version 3 of fragment 0 up to version 9 of fragment 0')
    """
    begin, end = (f"version {stay.version} of fragment {stay.fragment}" for stay in (first, last))
    return begin if begin == end else f"{begin} up to {end}"


def _tokens_line(tokens: dict[int, Line]) -> str:
    """Return the mean over fragments: a token settles in each of them at another time."""
    from atoll.tape.syncer_tenures import mean_line

    trained, merged, pending, dropped = mean_line(list(tokens.values()))
    lost = "".join(f" + {total:,} dropped ({why})" for why, total in sorted(dropped.items()))
    of = f", the mean of {len(tokens)} fragments" if len(tokens) > 1 else ""
    return f"tokens: {trained:,} trained = {merged:,} merged + {pending:,} pending{lost or ' + 0 dropped'}{of}"
