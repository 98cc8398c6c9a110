"""A run as people look at it: everything that tapes and metrics say, at any moment of it, while it grows.

`RunHistory.update` reads what is new, for as long as it is given. Nothing is computed that a tape does not say: state
of rounds, members and books is that of the syncer's own core, told again what it was told; the rest is sums and rates.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from atoll.core.types import SYNCER, RunConfig
from atoll.dashboard.alerts import AlertRules
from atoll.dashboard.run_files import MetricsHistory, RunFiles
from atoll.tape.bounded_logs import EXACT_ROWS
from atoll.tape.files import SIMULATED_NOTE, TAPE_FOLDER, TapePosition, TapeReader, TapeTail, list_tapes
from atoll.tape.format import Actor, Entry, TapeError
from atoll.tape.story import StoryLine, Subject, build_story
from atoll.tape.syncer_tenures import SampleHistory, SyncerSample, SyncerTenure, take_sample
from atoll.tape.time_shares import TimeShares
from atoll.tape.timeline import RunTimeline, read_expected_learners

RATE_WINDOW_S = 10.0
"""Rates are of so long; simulated runs take so many steps."""

RECENT_MERGES = 3
"""Of every fragment: who weighs how much lately."""

LATE_JOIN_S = 60.0
"""After the others: such a learner was added to the run, and did not just start slowly."""

SEEK_POINT_INTERVAL = 256
MAX_SEEK_POINTS = 4096
"""Of a tape, from which it can be read again: so many entries apart, and twice as many when there are too many."""

STALE_AFTER_S = 5.0
"""A run without a new entry for so long is perhaps not being written."""


class RunHistory(RunTimeline):
    """One run directory: of this machine, of a syncer that serves islands elsewhere, or simulated."""

    def __init__(self, run: Path, rules: AlertRules | None = None, keep: int | None = EXACT_ROWS) -> None:
        """`keep`: see `RunTimeline`; so much of every curve too."""
        super().__init__(keep)
        self.run = run
        self.rules = rules if rules is not None else AlertRules()
        self.samples = SampleHistory()
        self.files = RunFiles(run)
        self.config: RunConfig | None = None
        self.simulated = False
        self.version = 0  # rises whenever something new was read
        self.tape_errors: list[str] = []  # tapes that cannot be read any further
        self._tails: dict[Actor, TapeTail] = {}
        self._handlers: dict[Actor, Callable[[Entry], None]] = {}
        self.seek_points: dict[
            Actor, list[tuple[float, TapePosition]]
        ] = {}  # every so many entries: the time before, and where
        self._last_growth_at: float | None = None  # on the monotonic clock; None until all that there was is read
        self._seek_intervals: dict[Actor, int] = {}  # how many
        self.metrics = MetricsHistory(self.files, self.to_run_time, keep)
        list(self._find_tapes())  # a wrong directory is told now, not when somebody looks

    # ---------------------------------------------------------------------------------------------------- growing

    def update(self, budget_s: float = 0.5) -> bool:
        """Read on. True: there is still more than that time allowed."""
        until = time.monotonic() + budget_s
        for actor in self._find_tapes():
            if not self._read_tape(actor, until):
                self._settle()
                self.version += 1
                return True
        self.end_tenures()
        self._settle()
        if self._last_growth_at is None:
            self._last_growth_at = time.monotonic() - self._seconds_since_write()
        read = self.metrics.lines_read
        more = self.metrics.read_new(until)
        if self.metrics.lines_read > read:
            self.version += 1
        self.files.refresh()
        return more

    def _settle(self) -> None:
        self.expected_learners = read_expected_learners(self.run) if self.processes else 0
        self.refresh()

    def _seconds_since_write(self) -> float:
        """Since the newest tape was written, when nobody has seen it grow yet: by the clock of its disk."""
        return max(
            0.0, time.time() - max((_size_and_mtime(tail.reader.path)[1] for tail in self._tails.values()), default=0.0)
        )

    def age_s(self) -> float:
        """Since a tape has grown, as it was seen from here: clocks of other hosts do not matter."""
        return time.monotonic() - self._last_growth_at if self._last_growth_at is not None else 0.0

    def loading_progress(self) -> float | None:
        """How much of the tapes is read, as a share; None where it is all."""
        whole = sum(_size_and_mtime(tail.reader.path)[0] for tail in self._tails.values())
        done = sum(tail.offset for tail in self._tails.values())
        return done / whole if whole - done > 4 * 2**20 else None

    def _find_tapes(self) -> Iterator[Actor]:
        """All tapes, those of syncers first: they say what the others mean."""
        found = list_tapes(self.run)
        if not found:
            raise TapeError("there are no tapes here", str(self.run / TAPE_FOLDER))
        for actor, path in sorted(found):
            if actor not in self._tails:
                try:
                    tail = TapeTail(TapeReader(path))
                    if not tail.reader.has_header():
                        continue
                    take = self._make_handler(actor, tail)
                except (TapeError, OSError) as error:
                    self._record_tape_error(error)
                    continue
                self._tails[actor] = tail
                self._handlers[actor] = take
            yield actor

    def _record_tape_error(self, error: Exception) -> None:
        if str(error) not in self.tape_errors:
            self.tape_errors.append(str(error))
            self.version += 1

    def _make_handler(self, actor: Actor, tail: TapeTail) -> Callable[[Entry], None]:
        header = tail.reader.header
        if self.config is None:
            self.config = header.config
            self.simulated = header.note == SIMULATED_NOTE
        if actor.learner != SYNCER:
            self.taped_learners.add(actor.learner)
            self.untaped_processes.pop(actor.learner, None)
            return lambda entry: self.handle_learner_entry(actor.learner, actor.generation, entry)
        tenure = self.add_tenure(header)
        return lambda entry: self._handle_syncer_entry(tenure, entry)

    def _read_tape(self, actor: Actor, until: float) -> bool:
        """All of one tape that is new; False: time is over."""
        take = self._handlers.get(actor)
        if take is None:
            return True
        count, tail = 0, self._tails[actor]
        try:
            for entry in tail.read_new_entries():
                take(entry)
                count += 1
                if entry.tick % SEEK_POINT_INTERVAL == 0:
                    self._add_seek_point(actor, entry)
                    if time.monotonic() > until:
                        return False
        except TapeError as error:
            self._record_tape_error(error)
            del self._handlers[actor]  # it is read no further; all others are
        except OSError as error:
            self._record_tape_error(error)  # a disk far away, perhaps: the next look tries again
        if count:
            self.version += 1
            if self._last_growth_at is not None:
                self._last_growth_at = time.monotonic()
        return True

    def _add_seek_point(self, actor: Actor, entry: Entry) -> None:
        every = self._seek_intervals.setdefault(actor, SEEK_POINT_INTERVAL)
        if entry.tick % every:
            return
        places = self.seek_points.setdefault(actor, [])
        places.append((entry.at, self._tails[actor].position()))
        if len(places) >= MAX_SEEK_POINTS:
            self.seek_points[actor] = places[1::2]  # those that twice the distance would have had
            self._seek_intervals[actor] = 2 * every

    def _handle_syncer_entry(self, tenure: SyncerTenure, entry: Entry) -> None:
        if self.samples.is_due(entry.at) and tenure.first_entry_at is not None and not tenure.is_over:
            self.samples.add(take_sample(tenure, entry.at))
        self.handle_syncer_entry(tenure, entry)

    def entries(self, actor: Actor, begin: float, end: float) -> Iterator[Entry]:
        """Of one tape, in this span of time, read again from the file."""
        places = self.seek_points.get(actor, [])
        lead_s = self.clock_offset_s(actor.learner, actor.generation)
        index = bisect_left(places, begin + lead_s, key=lambda each: each[0])
        tail = TapeTail(self._tails[actor].reader, places[index - 1][1] if index else None)
        for entry in tail.read_new_entries():
            if entry.at - lead_s > end:
                return
            if entry.at - lead_s >= begin:
                yield entry._replace(at=entry.at - lead_s) if lead_s else entry

    def actors(self) -> list[Actor]:
        return list(self._tails)

    # ---------------------------------------------------------------------------------------------------- looking

    @property
    def wall0(self) -> float | None:
        return None if self.simulated else self.files.founded_at

    def sample_at(self, at: float | None) -> SyncerSample | None:
        """The syncer's own view: now, or the newest one that was kept before this moment."""
        if at is not None and at < self.newest_at:
            return self.samples.before(at)
        tenure = self.current_tenure
        return (
            take_sample(tenure, tenure.last_entry_at)
            if tenure is not None and tenure.first_entry_at is not None
            else None
        )

    def reported_time_shares(self, learner: int, at: float) -> TimeShares | None:
        """Where its time went until then, with what it told of waiting and copying."""
        waited_s, copied_s = (self.metrics.value(name, learner, at) or 0.0 for name in ("waited_s", "boundary_s"))
        return self.time_shares(learner, at, (), waited_s, copied_s)

    def rate(self, name: str, at: float, span_s: float) -> float | None:
        """Growth per second of a running sum of the learners' metrics, over all of them."""
        rates = [self.metrics.rate(name, learner, at - span_s, at) for learner in self.learners()]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else None

    def rate_window_s(self, at: float) -> float:
        """Over which rates are taken: long enough for some steps, and not longer than somebody trained."""
        steps = [s for s in (self.typical_step_s(learner, at) for learner in self.learners()) if s is not None]
        wished_s = max(RATE_WINDOW_S, 5 * median(steps)) if steps else RATE_WINDOW_S
        since = self.training_started_at
        return wished_s if since is None or at <= since else min(wished_s, at - since)


def _size_and_mtime(path: Path) -> tuple[int, float]:
    """Return its size and when it was written; zeros where it cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0.0
    return found.st_size, found.st_mtime


# --------------------------------------------------------------------------------------------------------------------
# The newest sentences about one learner, one fragment or the run


FIRST_STORY_SPAN_S = 30.0
MAX_STORY_ENTRIES = 10_000
"""Read for one answer; about half a second. Whoever wants more of a quiet subject has `atoll story`."""


class Story(NamedTuple):
    lines: list[StoryLine]  # newest last
    has_more: bool  # there are older ones


def read_story(picture: RunHistory, subject: Subject, until: float | None, limit: int) -> Story:
    """Looks back as far as it takes, twice as far each time."""
    end = picture.newest_at if until is None else min(until, picture.newest_at)
    span_s = FIRST_STORY_SPAN_S
    while True:
        begin = end - span_s
        entries = _read_entries(picture, subject, begin, end)
        lines = deque(build_story(entries, subject, picture.config), maxlen=limit + 1)
        if len(lines) > limit or begin <= picture.started_at or len(entries) > MAX_STORY_ENTRIES:
            return Story(list(lines)[-limit:], begin > picture.started_at or len(lines) > limit)
        span_s *= 2


def _read_entries(picture: RunHistory, subject: Subject, begin: float, end: float) -> list[Entry]:
    """In the order of their times, which is that of causes but for clocks that differ."""
    kind, number = subject
    of_learners = {"learner": [number], "fragment": picture.learners(), "run": []}[kind]
    actors = [actor for actor in picture.actors() if actor.learner == SYNCER or actor.learner in of_learners]
    entries = [entry for actor in actors for entry in picture.entries(actor, begin, end)]
    entries.sort(key=lambda entry: (entry.at, entry.actor, entry.tick))
    return entries
