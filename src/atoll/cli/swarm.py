"""`atoll swarm`: run the protocol in simulated worlds with faults, one per seed, under every checker."""

from __future__ import annotations

import time
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from atoll.cli.output import ExitCode, JsonOption, Result, progress_bar, usable_cores
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from atoll.sim.swarm import Coverage, SeedResult

STORY_LINES = 60
MAX_SEEDS = 10**9
"""Maximum number of seeds. They take weeks on a large machine, so a larger number is probably a typing error."""


def run(
    seeds: Annotated[int, Setting("Number of worlds.", "COUNT", min=1)] = 500,
    start: Annotated[int, Setting("First seed.", "SEED", min=0)] = 0,
    small: Annotated[bool, Setting("Use only worlds of up to 4 learners and 3 fragments.")] = False,
    also: Annotated[
        Path | None, Setting("Also run the seeds in FILE, one per line; # starts a comment.", "FILE")
    ] = None,
    story: Annotated[bool, Setting("Show the story of the first violation.")] = False,
    tape: Annotated[Path | None, Setting("Write the tapes of one seed, for story, check and replay.", "DIR")] = None,
    digest: Annotated[bool, Setting("Print one digest of all events.")] = False,
    jobs: Annotated[int | None, Setting("Number of processes. [default: one per core]", "COUNT", min=1)] = None,
    keep_going: Annotated[bool, Setting("Do not stop at the first violation.")] = False,
    as_json: JsonOption = False,
) -> Result:
    """Search for violations of the protocol, in one simulated world per seed.

    Each world runs under faults with every checker. Then the faults end, and the run must recover and finish. A seed
    determines the learners, their speeds and links, the settings of the run and every fault with its time: kills,
    pauses, cut and lossy links, syncer restarts, full disks, clock jumps. A violation prints the command that replays
    its seed with its story. Exits with code 1 if a checker finds a violation.
    """
    from atoll.sim.swarm import Coverage, run_seeds

    if tape is not None and (seeds != 1 or also is not None):
        raise ValueError("--tape writes one world; add --seeds 1")
    if seeds > MAX_SEEDS:
        raise ValueError(
            f"{seeds} seeds would take years; give at most {MAX_SEEDS} at a time, and continue with --start"
        )
    extra = read_seeds(also)
    if tape is not None:
        _write_tape(start, small, tape)
    coverage = Coverage()
    failed: list[SeedResult] = []
    events = 0
    started_at = time.perf_counter()
    done = 0
    total_digest = sha256()
    numbers = chain(extra, range(start, start + seeds))
    with progress_bar("swarm", len(extra) + seeds, is_shown=not as_json) as report:
        for result in run_seeds(numbers, jobs or usable_cores(), small, digest):
            done += 1
            report(done)
            coverage.add(result)
            events += result.events
            total_digest.update(result.digest.encode())
            if result.checker is not None:
                failed.append(result)
                if not keep_going:
                    break
    digests = total_digest.hexdigest()[:16] if digest else None
    found = SwarmResult(done, events, time.perf_counter() - started_at, coverage, failed, digests)

    def text() -> None:
        print_result(found, small)
        if story and failed:
            _print_story(failed[0], small)

    return Result(partial(_result_fields, found), text, ExitCode.FAILED if failed else ExitCode.OK)


class SwarmResult(NamedTuple):
    """Totals over the worlds, and the results of their checkers."""

    worlds: int
    events: int
    duration_s: float
    coverage: Coverage
    failures: list[SeedResult]
    digest: str | None


def read_seeds(path: Path | None) -> list[int]:
    """Return the seeds in a file, such as those that once failed; none if there is no file."""
    if path is None:
        return []
    numbers = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if text:
            if not text.isdigit():
                raise ValueError(f"{path}, line {number}: '{text}' is not a seed; write one integer per line")
            numbers.append(int(text))
    return numbers


def _replay_command(seed: int, small: bool) -> str:
    return f"atoll swarm --seeds 1 --start {seed}{' --small' if small else ''} --story"


def print_result(found: SwarmResult, small: bool) -> None:
    done, duration_s, coverage = found.worlds, max(found.duration_s, 1e-9), found.coverage
    worlds = f"{done} world{'' if done == 1 else 's'}"
    print(f"{worlds}, {found.events} events in {duration_s:.1f} s: {done / duration_s:.0f} seeds/s")
    for kind, (met, every) in coverage.counts().items():
        print(f"  {kind:<8} {met} of {every} met")
    print(f"  pairs    {len(coverage.state_event_counts)} of a state and an event met")
    for kind, missing in _not_met(coverage).items():
        if missing and done >= 100:
            print(f"  {kind} not met: {'; '.join(missing)}")
    if found.digest is not None:
        print(f"digest {found.digest}")
    if not found.failures:
        print("no violation")
    for result in found.failures:
        print(f"seed {result.seed}: {result.checker}: {result.message}")
        print(f"  replay it: {_replay_command(result.seed, small)}")


def _not_met(coverage: Coverage) -> dict[str, list[str]]:
    return {
        "moves": coverage.missing_transitions(),
        "reasons": coverage.missing_reasons(),
        "faults": coverage.missing_faults(),
    }


def _result_fields(found: SwarmResult) -> dict[str, object]:
    coverage = found.coverage
    fields: dict[str, object] = {
        "seeds": found.worlds,
        "events": found.events,
        "seconds": round(found.duration_s, 3),
        "coverage": {kind: {"met": met, "all": every} for kind, (met, every) in coverage.counts().items()},
        "pairs": len(coverage.state_event_counts),
        "pairs_met": [
            {"state": state, "event": event, "count": count}
            for (state, event), count in sorted(coverage.state_event_counts.items())
        ],
        "not_met": _not_met(coverage),
        "violations": [
            {"seed": r.seed, "checker": r.checker, "sentence": r.message, "subject": r.subject} for r in found.failures
        ],
    }
    return fields if found.digest is None else {**fields, "digest": found.digest}


def _print_story(result: SeedResult, small: bool) -> None:
    from collections import deque

    from atoll.cli.check import format_story_line
    from atoll.sim.swarm import record_seed
    from atoll.tape.story import build_story

    _, entries = record_seed(result.seed, small)
    subject = result.subject if result.subject is not None else ("run", 0)
    print(f"\nthe story of {subject[0]} {subject[1]}, its last {STORY_LINES} lines:")
    for line in deque(build_story(entries, subject), maxlen=STORY_LINES):
        print(format_story_line(line))


def _write_tape(seed: int, small: bool, run_dir: Path) -> None:
    from contextlib import suppress

    from atoll.sim.checkers import InvariantViolationError
    from atoll.sim.scenarios import draw_scenario
    from atoll.sim.world import SwarmWorld
    from atoll.tape.files import SimulatedTapeWriter, require_empty_directory

    require_empty_directory(run_dir)
    plan = draw_scenario(seed, small)
    # The caller runs the same seed next and reports a violation.
    with (
        SimulatedTapeWriter(run_dir, plan.config, seed, f"swarm seed {seed}") as tapes,
        suppress(InvariantViolationError),
    ):
        SwarmWorld(plan, on_entry=tapes.write, on_start=tapes.start_tape).run()
