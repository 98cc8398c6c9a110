"""`atoll replay`: does the core, told the same again, do the same again?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from atoll.commands.output import ExitCode, JsonOption, print_json
from atoll.commands.progress import reading
from atoll.commands.story import RunArgument

if TYPE_CHECKING:
    from atoll.core.replay import ReplayDifference

EXAMPLE = "atoll replay runs/first"


def run(run: RunArgument, as_json: JsonOption = False) -> None:
    """Derive every effect of a run anew from its tapes.

    Stops at the first difference, with exit code 1.
    """
    from atoll.core.replay import ReplayDifference, replay
    from atoll.tape_files import RunTapes

    tapes = RunTapes(run)
    entries = 0
    found: ReplayDifference | None = None
    with reading("replaying", tapes) as watched:
        for reader in tapes.readers.values():
            try:
                entries += replay(reader.header, watched(reader))
            except ReplayDifference as difference:
                entries += difference.tick
                found = difference
                break
    gaps = tapes.gaps()
    if as_json:
        print_json(
            {
                "tapes": len(tapes.readers),
                "entries": entries,
                "difference": found and _fields(found),
                "complete": not gaps,
                "incomplete": gaps,
            }
        )
    else:
        if found is None:
            rest = ", as far as the tapes go" if gaps else ""
            print(f"{len(tapes.readers)} tapes, {entries:,} entries: every effect came out as recorded{rest}")
        else:
            _show(found)
        for gap in gaps:
            print(f"incomplete: {gap}")
    if found is not None:
        raise typer.Exit(ExitCode.FAILED)


def _fields(difference: ReplayDifference) -> dict[str, object]:
    import json

    from atoll.core.tape import canonical

    derived = difference.derived
    return {
        "actor": str(difference.actor),
        "tick": difference.tick,
        "at": difference.at,
        "event": json.loads(canonical(difference.event)),
        "recorded": json.loads(canonical(difference.recorded)),
        "derived": None if derived is None else json.loads(canonical(derived)),
        "raised": difference.raised or None,
        "first": difference.first_place(),
    }


def _show(difference: ReplayDifference) -> None:
    from atoll.core.tape import canonical

    print(f"{difference.actor}, tick {difference.tick} at {difference.at:.3f} s: the replay does something else")
    print(f"  event     {canonical(difference.event)}")
    first = difference.first_place()
    for word, effects in (("recorded", difference.recorded), ("derived", difference.derived)):
        if effects is None:
            print(f"  {word:<9} raised {difference.raised}")
            continue
        print(f"  {word:<9} {len(effects)} effects")
        for place, effect in enumerate(effects):
            print(f"  {'>' if place == first else ' '} {place + 1:>3}     {canonical(effect)}")
