"""`atoll swarm`: hostile worlds by seed, watched by every checker."""

from __future__ import annotations

import time
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from atoll.cli.output import ExitCode, JsonOption, Result, progress, usable_cores
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from atoll.sim.swarm import Coverage, SeedResult

STORY_LINES = 60
MOST_SEEDS = 10**9
"""Weeks on a large machine: whoever asks for more has mistyped."""


def run(
    seeds: Annotated[int, Setting("How many worlds.", "COUNT", min=1)] = 500,
    start: Annotated[int, Setting("The first seed.", "SEED", min=0)] = 0,
    small: Annotated[bool, Setting("Only worlds of up to 4 learners and 3 fragments.")] = False,
    also: Annotated[Path | None, Setting("File of further seeds, one per line; # begins a comment.", "FILE")] = None,
    story: Annotated[bool, Setting("Tell the story of the first violation.")] = False,
    tape: Annotated[Path | None, Setting("Write the tapes of one seed, for story, check and replay.", "DIR")] = None,
    digest: Annotated[bool, Setting("Print one digest of everything that happened.")] = False,
    jobs: Annotated[int | None, Setting("Processes; default: one per core.", "COUNT", min=1)] = None,
    keep_going: Annotated[bool, Setting("Do not stop at the first violation.")] = False,
    as_json: JsonOption = False,
) -> Result:
    """Try to break the protocol, one hostile world per seed.

    Each world runs under faults while every checker watches, is healed, and must come right. A seed draws the learners,
    their speeds and links, the settings of the run and every fault with its time: kills, pauses, cut and lossy links,
    syncer restarts, full disks, clock jumps. A violation prints the one command that replays its seed with its story.
    Exit code 1 if any checker found something.
    """
    from atoll.sim.swarm import Coverage, sweep

    if tape is not None and (seeds != 1 or also is not None):
        raise ValueError("--tape writes one world; add --seeds 1")
    if seeds > MOST_SEEDS:
        raise ValueError(f"{seeds} seeds would take years; give at most {MOST_SEEDS} at a time, and go on with --start")
    kept = _kept(also)
    if tape is not None:
        _write_tape(start, small, tape)
    coverage = Coverage()
    failed: list[SeedResult] = []
    events = 0
    began = time.perf_counter()
    done = 0
    whole = sha256()
    numbers = chain(kept, range(start, start + seeds))
    with progress("swarm", len(kept) + seeds, shown=not as_json) as tell:
        for result in sweep(numbers, jobs or usable_cores(), small, digest):
            done += 1
            tell(done)
            coverage.add(result)
            events += result.events
            whole.update(result.digest.encode())
            if result.checker is not None:
                failed.append(result)
                if not keep_going:
                    break
    digests = whole.hexdigest()[:16] if digest else None
    found = Swarm(done, events, time.perf_counter() - began, coverage, failed, digests)

    def text() -> None:
        _show(found, small)
        if story and failed:
            _tell_story(failed[0], small)

    return Result(partial(_fields, found), text, ExitCode.FAILED if failed else ExitCode.OK)


class Swarm(NamedTuple):
    """The worlds that were run, and what their checkers found."""

    worlds: int
    events: int
    spent_s: float
    coverage: Coverage
    failed: list[SeedResult]
    digest: str | None


def _kept(path: Path | None) -> list[int]:
    """Seeds that once failed are worth repeating for ever."""
    if path is None:
        return []
    numbers = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if text:
            if not text.isdigit():
                raise ValueError(f"{path}, line {number}: '{text}' is not a seed; write one whole number per line")
            numbers.append(int(text))
    return numbers


def _replay_command(seed: int, small: bool) -> str:
    return f"atoll swarm --seeds 1 --start {seed}{' --small' if small else ''} --story"


def _show(found: Swarm, small: bool) -> None:
    done, spent_s, coverage = found.worlds, max(found.spent_s, 1e-9), found.coverage
    worlds = f"{done} world{'' if done == 1 else 's'}"
    print(f"{worlds}, {found.events} events in {spent_s:.1f} s: {done / spent_s:.0f} seeds/s")
    for what, (met, every) in coverage.counts().items():
        print(f"  {what:<8} {met} of {every} met")
    print(f"  pairs    {len(coverage.pairs)} of a state and an event met")
    for what, missing in _not_met(coverage).items():
        if missing and done >= 100:
            print(f"  {what} not met: {'; '.join(missing)}")
    if found.digest is not None:
        print(f"digest {found.digest}")
    if not found.failed:
        print("no violation")
    for result in found.failed:
        print(f"seed {result.seed}: {result.checker}: {result.sentence}")
        print(f"  replay it: {_replay_command(result.seed, small)}")


def _not_met(coverage: Coverage) -> dict[str, list[str]]:
    return {
        "moves": coverage.missing_moves(),
        "reasons": coverage.missing_reasons(),
        "faults": coverage.missing_faults(),
    }


def _fields(found: Swarm) -> dict[str, object]:
    coverage = found.coverage
    fields: dict[str, object] = {
        "seeds": found.worlds,
        "events": found.events,
        "seconds": round(found.spent_s, 3),
        "coverage": {what: {"met": met, "all": every} for what, (met, every) in coverage.counts().items()},
        "pairs": len(coverage.pairs),
        "pairs_met": [
            {"state": state, "event": event, "count": count} for (state, event), count in sorted(coverage.pairs.items())
        ],
        "not_met": _not_met(coverage),
        "violations": [
            {"seed": r.seed, "checker": r.checker, "sentence": r.sentence, "subject": r.subject} for r in found.failed
        ],
    }
    return fields if found.digest is None else {**fields, "digest": found.digest}


def _tell_story(result: SeedResult, small: bool) -> None:
    from collections import deque

    from atoll.cli.check import indented
    from atoll.sim.swarm import story_entries
    from atoll.tape.story import story

    _, entries = story_entries(result.seed, small)
    subject = result.subject if result.subject is not None else ("run", 0)
    print(f"\nthe story of {subject[0]} {subject[1]}, its last {STORY_LINES} lines:")
    for line in deque(story(entries, subject), maxlen=STORY_LINES):
        print(indented(line))


def _write_tape(seed: int, small: bool, run_dir: Path) -> None:
    from contextlib import suppress

    from atoll.sim.checkers import Violation
    from atoll.sim.draws import draw
    from atoll.sim.world import SwarmWorld
    from atoll.tape.files import SimulatedTapes, check_tape_directory

    check_tape_directory(run_dir)
    plan = draw(seed, small)
    # The sweep that follows reports a violation.
    with SimulatedTapes(run_dir, plan.config, seed, f"swarm seed {seed}") as tapes, suppress(Violation):
        SwarmWorld(plan, on_entry=tapes.write, on_start=tapes.start).run()
