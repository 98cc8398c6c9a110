"""History of a run: everything that its tapes and metrics contain, at any time, while it grows.

`RunHistory.update` reads new entries within a time budget. All state comes from the tapes: the state of rounds, members
and ledger is that of the syncer's own core, which replays the recorded events. The rest is sums and rates.
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
"""Minimum length of the interval over which rates are computed."""

RECENT_MERGES = 3
"""Number of merges per fragment that count as recent, for the weights of learners."""

LATE_JOIN_S = 60.0
"""Minimum delay after the start of the run at which a joining learner counts as added, and not as slow to start."""

SEEK_POINT_INTERVAL = 256
MAX_SEEK_POINTS = 4096
"""Limit on the seek points of a tape: positions at which a read can start. At the limit, their interval doubles."""

STALE_AFTER_S = 5.0
"""Time without a new entry after which the syncer of a live run may be down."""


class RunHistory(RunTimeline):
    """Content of one run directory: of a local run, of a syncer with remote islands, or of a simulation."""

    def __init__(self, run: Path, rules: AlertRules | None = None, keep: int | None = EXACT_ROWS) -> None:
        """Open the run directory. Raise TapeError if it has no tapes.

        Args:
            rules: limits of the alerts.
            keep: number of exact rows, as in `RunTimeline`; also the number of exact points per series.
        """
        super().__init__(keep)
        self.run = run
        self.rules = rules if rules is not None else AlertRules()
        self.samples = SampleHistory()
        self.files = RunFiles(run)
        self.config: RunConfig | None = None
        self.simulated = False
        self.version = 0  # increases with every new entry or metric
        self.tape_errors: list[str] = []  # errors of tapes that are readable only up to an entry
        self._tails: dict[Actor, TapeTail] = {}
        self._handlers: dict[Actor, Callable[[Entry], None]] = {}
        self.seek_points: dict[Actor, list[tuple[float, TapePosition]]] = {}  # time and position of every n-th entry
        self._last_growth_at: float | None = None  # monotonic clock; None until the first complete read
        self._seek_intervals: dict[Actor, int] = {}  # entries between two seek points
        self.metrics = MetricsHistory(self.files, self.to_run_time, keep)
        list(self._find_tapes())  # raise the error of an invalid directory here, not at the first request

    # --------------------------------------------------------------------------------------------------- updates

    def update(self, budget_s: float = 0.5) -> bool:
        """Read new entries for at most `budget_s` seconds. Return whether entries remain."""
        until = time.monotonic() + budget_s
        for actor in self._find_tapes():
            if not self._read_tape(actor, until):
                self._refresh_members()
                self.version += 1
                return True
        self.end_tenures()
        self._refresh_members()
        if self._last_growth_at is None:
            self._last_growth_at = time.monotonic() - self._seconds_since_write()
        lines_before = self.metrics.lines_read
        more = self.metrics.read_new(until)
        if self.metrics.lines_read > lines_before:
            self.version += 1
        self.files.refresh()
        return more

    def _refresh_members(self) -> None:
        self.expected_learners = read_expected_learners(self.run) if self.processes else 0
        self.refresh()

    def _seconds_since_write(self) -> float:
        """Return the age of the newest tape by its modification time, for tapes that have not grown since the start."""
        written_at = max((_size_and_mtime(tail.reader.path)[1] for tail in self._tails.values()), default=0.0)
        return max(0.0, time.time() - written_at)

    def age_s(self) -> float:
        """Return the time since a tape last grew, on the local monotonic clock: clocks of other hosts do not matter."""
        return time.monotonic() - self._last_growth_at if self._last_growth_at is not None else 0.0

    def loading_progress(self) -> float | None:
        """Return the share of the tapes that has been read, or None if at most 4 MiB are unread."""
        total = sum(_size_and_mtime(tail.reader.path)[0] for tail in self._tails.values())
        done = sum(tail.offset for tail in self._tails.values())
        return done / total if total - done > 4 * 2**20 else None

    def _find_tapes(self) -> Iterator[Actor]:
        """Yield the actors of all tapes, syncers first, because the entries of learners refer to those of syncers."""
        found = list_tapes(self.run)
        if not found:
            raise TapeError("no tapes in this directory; give the directory of a run", str(self.run / TAPE_FOLDER))
        for actor, path in sorted(found):
            if actor not in self._tails:
                try:
                    tail = TapeTail(TapeReader(path))
                    if not tail.reader.has_header():
                        continue
                    handle = self._make_handler(actor, tail)
                except (TapeError, OSError) as error:
                    self._record_tape_error(error)
                    continue
                self._tails[actor] = tail
                self._handlers[actor] = handle
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
        """Read all new entries of one tape. Return False if the time ran out before."""
        handle = self._handlers.get(actor)
        if handle is None:
            return True
        count, tail = 0, self._tails[actor]
        try:
            for entry in tail.read_new_entries():
                handle(entry)
                count += 1
                if entry.tick % SEEK_POINT_INTERVAL == 0:
                    self._add_seek_point(actor, entry)
                    if time.monotonic() > until:
                        return False
        except TapeError as error:
            self._record_tape_error(error)
            del self._handlers[actor]  # continue with the other tapes
        except OSError as error:
            self._record_tape_error(error)  # perhaps a network file system: the next update retries
        if count:
            self.version += 1
            if self._last_growth_at is not None:
                self._last_growth_at = time.monotonic()
        return True

    def _add_seek_point(self, actor: Actor, entry: Entry) -> None:
        interval = self._seek_intervals.setdefault(actor, SEEK_POINT_INTERVAL)
        if entry.tick % interval:
            return
        points = self.seek_points.setdefault(actor, [])
        points.append((entry.at, self._tails[actor].position()))
        if len(points) >= MAX_SEEK_POINTS:
            self.seek_points[actor] = points[1::2]  # keep the points of the doubled interval
            self._seek_intervals[actor] = 2 * interval

    def _handle_syncer_entry(self, tenure: SyncerTenure, entry: Entry) -> None:
        if self.samples.is_due(entry.at) and tenure.first_entry_at is not None and not tenure.is_over:
            self.samples.add(take_sample(tenure, entry.at))
        self.handle_syncer_entry(tenure, entry)

    def entries(self, actor: Actor, begin: float, end: float) -> Iterator[Entry]:
        """Yield the entries of one tape between two times on the run's clock, read again from the file."""
        points = self.seek_points.get(actor, [])
        offset_s = self.clock_offset_s(actor.learner, actor.generation)
        index = bisect_left(points, begin + offset_s, key=lambda each: each[0])
        tail = TapeTail(self._tails[actor].reader, points[index - 1][1] if index else None)
        for entry in tail.read_new_entries():
            if entry.at - offset_s > end:
                return
            if entry.at - offset_s >= begin:
                yield entry._replace(at=entry.at - offset_s) if offset_s else entry

    def actors(self) -> list[Actor]:
        """Return the processes that have a tape."""
        return list(self._tails)

    # -------------------------------------------------------------------------------------------------- queries

    @property
    def wall0(self) -> float | None:
        """Unix time at 0 on the run's clock; None for a simulated run."""
        return None if self.simulated else self.files.founded_at

    def sample_at(self, at: float | None) -> SyncerSample | None:
        """Return the syncer's state: the current one for None, else the newest sample before that time."""
        if at is not None and at < self.newest_at:
            return self.samples.before(at)
        tenure = self.current_tenure
        if tenure is None or tenure.first_entry_at is None:
            return None
        return take_sample(tenure, tenure.last_entry_at)

    def reported_time_shares(self, learner: int, at: float) -> TimeShares | None:
        """Return how a learner spent its time until `at`, including its reported waiting and copying."""
        waited_s, copied_s = (self.metrics.value(name, learner, at) or 0.0 for name in ("waited_s", "boundary_s"))
        return self.time_shares(learner, at, (), waited_s, copied_s)

    def rate(self, name: str, at: float, span_s: float) -> float | None:
        """Return the growth per second of a learner counter, summed over all learners; None if it is unknown."""
        rates = [self.metrics.rate(name, learner, at - span_s, at) for learner in self.learners()]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else None

    def rate_window_s(self, at: float) -> float:
        """Return the interval for rates: several steps long, and not longer than the run has trained."""
        steps = [s for s in (self.typical_step_s(learner, at) for learner in self.learners()) if s is not None]
        window_s = max(RATE_WINDOW_S, 5 * median(steps)) if steps else RATE_WINDOW_S
        since = self.training_started_at
        return window_s if since is None or at <= since else min(window_s, at - since)


def _size_and_mtime(path: Path) -> tuple[int, float]:
    """Return size and modification time of a file, or zeros if it is unreadable."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0.0
    return found.st_size, found.st_mtime


# --------------------------------------------------------------------------------------------------------------------
# Story of one learner, one fragment or the run


FIRST_STORY_SPAN_S = 30.0
MAX_STORY_ENTRIES = 10_000
"""Limit on the entries read for one reply, about half a second. `atoll story` has no limit."""


class Story(NamedTuple):
    """Page of the story of one subject."""

    lines: list[StoryLine]  # newest last
    has_more: bool  # whether there are older lines


def read_story(history: RunHistory, subject: Subject, until: float | None, limit: int) -> Story:
    """Return the newest `limit` lines about a subject until a time; None means now.

    The number of entries per line is unknown, so the interval doubles until it has enough lines.
    """
    end = history.newest_at if until is None else min(until, history.newest_at)
    span_s = FIRST_STORY_SPAN_S
    while True:
        begin = end - span_s
        entries = _read_entries(history, subject, begin, end)
        lines = deque(build_story(entries, subject, history.config), maxlen=limit + 1)
        if len(lines) > limit or begin <= history.started_at or len(entries) > MAX_STORY_ENTRIES:
            return Story(list(lines)[-limit:], begin > history.started_at or len(lines) > limit)
        span_s *= 2


def _read_entries(history: RunHistory, subject: Subject, begin: float, end: float) -> list[Entry]:
    """Return the entries that can concern the subject, by time. That is causal order unless clocks differ."""
    kind, number = subject
    learners = {"learner": [number], "fragment": history.learners(), "run": []}[kind]
    actors = [actor for actor in history.actors() if actor.learner == SYNCER or actor.learner in learners]
    entries = [entry for actor in actors for entry in history.entries(actor, begin, end)]
    entries.sort(key=lambda entry: (entry.at, entry.actor, entry.tick))
    return entries
