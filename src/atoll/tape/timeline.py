"""Timeline of a run, computed from its tapes: states, steps, merges and goodput at any time.

No other module computes these figures. `RunTimeline` handles entries (`handle_learner_entry`, `handle_syncer_entry`).
Call `refresh` before queries. `read_timeline` reads a complete run. docs/accounting.md defines goodput, uptime and the
parts of the time of a learner.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from atoll.core.protocol import LearnerDisconnected, MessageArrived, Report
from atoll.core.types import SYNCER
from atoll.tape.bounded_logs import EXACT_ROWS, MergeRow, Span
from atoll.tape.files import RunTapes
from atoll.tape.format import Entry, Header
from atoll.tape.learner_processes import LearnerProcess
from atoll.tape.syncer_tenures import MemberStateChange, SyncerTenure
from atoll.tape.time_shares import (
    TimeShares,
    clip,
    compute_time_shares,
    merge_spans,
    overlap_s,
    stepping_s,
    union_length_s,
)

LINGER_TIMEOUT_S = 1.0
"""A process without a connection counts as present for this long after its last entry."""

MAX_CLOCK_SKEW_S = 10.0
"""Smaller differences between two clocks are not corrected, because messages also take time."""

CLOCK_SAMPLES = 8
"""Number of the first, and of the newest, messages of a process that are used to compare clocks."""

MAX_ROWS = 64 * 1024
"""Limit on step rows of a learner with many processes."""

NEVER = (0.0, 0.0)

STATE_LABELS = {
    "live": "training",
    "suspect": "suspected",
    "joining": "recovering",
    "admitting": "recovering",
    "disconnected": "gone",
    "left": "left",
    "lost": "gone",
    "quarantined": "quarantined",
}
"""State labels by member state at the syncer."""


class StateSpan(NamedTuple):
    """State of a learner from `begin` to `end`: a value of STATE_LABELS, "alone", "stopped" or "paused"."""

    begin: float
    end: float
    state: str


class StepGap(NamedTuple):
    """The time between the ends of two consecutive steps of one process."""

    learner: int
    at: float  # start of the gap
    gap_s: float
    typical_s: float


class RunTimeline:
    """Timeline of a run, from entries of its tapes.

    Args:
        keep: number of newest entries of every log that stay exact; None: all.
    """

    def __init__(self, keep: int | None = EXACT_ROWS) -> None:
        self.keep = keep
        self.processes: dict[int, list[LearnerProcess]] = {}  # by learner, in order, from the tapes of learners
        self.taped_learners: set[int] = set()  # learners with tapes
        self.untaped_processes: dict[int, list[LearnerProcess]] = {}  # other learners, from the tapes of syncers
        self.tenures: list[SyncerTenure] = []
        self.newest_at = 0.0  # time of the newest entry at the last `refresh`
        self.expected_learners = 0  # highest learner id that is expected from the start
        # Times of messages by process and tick: arrival at the syncer, and sending if the learner tape was read first.
        self._arrival_times: dict[tuple[int, int], dict[int, float]] = {}
        self._send_times: dict[tuple[int, int], dict[int, float]] = {}
        self._sections: list[Span] = []
        self.training_started_at: float | None = None  # start of training of the first learner
        self.ended_at = 0.0  # last step of a finished run, else the newest entry
        self.pauses: list[Span] = []  # pauses by operators
        self._learners: list[int] = []

    # ---------------------------------------------------------------------------------------------------- input

    def add_tenure(self, header: Header) -> SyncerTenure:
        tenure = SyncerTenure(header, self.keep)
        self.tenures.append(tenure)
        return tenure

    def handle_syncer_entry(self, tenure: SyncerTenure, entry: Entry) -> None:
        if tenure.is_over:
            return
        if tenure.first_entry_at is None:
            before = next(
                (r for r in reversed(self.tenures) if r.epoch < tenure.epoch and r.first_entry_at is not None), None
            )
            tenure.merged_with = dict(before.merged_with) if before is not None else {}
        tenure.handle_entry(entry)
        event = entry.event
        if type(event) is MessageArrived:
            envelope = event.envelope
            key = envelope.learner, envelope.incarnation
            _record_time(self._arrival_times, key, envelope.tick, entry.at)
            if envelope.learner not in self.taped_learners:
                body = envelope.body
                member = tenure.core.state.members.get(envelope.learner)
                is_live = member is not None and member.state.value == "live"
                process = self._process(self.untaped_processes, *key, entry.at)
                process.is_clock_known = True
                process.handle_message(entry.at, body if type(body) is Report else None, is_live)
        elif type(event) is LearnerDisconnected and event.learner in self.untaped_processes:
            for process in self.untaped_processes[event.learner]:
                if process.incarnation == event.incarnation:
                    process.handle_disconnect(entry.at)

    def handle_learner_entry(self, learner: int, incarnation: int, entry: Entry) -> None:
        if learner not in self.taped_learners:
            self.taped_learners.add(learner)
            self.untaped_processes.pop(learner, None)
        process = self._process(self.processes, learner, incarnation, entry.at)
        arrivals = self._arrival_times.get((learner, incarnation))
        if arrivals and entry.tick in arrivals:
            self._update_clock_offset(process, entry.at - arrivals.pop(entry.tick))
        elif not process.is_clock_known:
            _record_time(self._send_times, (learner, incarnation), entry.tick, entry.at)
        process.handle_entry(entry)

    def _process(
        self, processes: dict[int, list[LearnerProcess]], learner: int, incarnation: int, at: float
    ) -> LearnerProcess:
        """Find or create a process by its incarnation. An old process may continue together with its successor."""
        incarnations = processes.setdefault(learner, [])
        process = next((each for each in reversed(incarnations) if each.incarnation == incarnation), None)
        if process is None:
            process = LearnerProcess(incarnation, at, at, None, self.keep)
            incarnations.append(process)
            incarnations.sort(key=lambda each: each.incarnation)
            if self.keep is not None and sum(len(each.log) for each in incarnations) > MAX_ROWS:
                for each in incarnations[:-1]:
                    each.log.halve()
        return process

    def _update_clock_offset(self, process: LearnerProcess, offset_s: float) -> None:
        """Update the clock offset by one message. `offset_s` is the sending time minus the arrival time."""
        known = process.is_clock_known
        process.is_clock_known = True
        if abs(offset_s) < MAX_CLOCK_SKEW_S:
            offset_s = 0.0
        if offset_s != process.clock_offset_s and (offset_s > process.clock_offset_s or not known):
            process.set_clock_offset(offset_s)

    def _update_late_clock_offsets(self) -> None:
        """Compare clocks of processes whose tapes were read before the tape of the syncer."""
        for (learner, incarnation), sent in list(self._send_times.items()):
            process = self._process(self.processes, learner, incarnation, 0.0)
            arrivals = self._arrival_times.get((learner, incarnation), {})
            for tick in sent.keys() & arrivals.keys():
                self._update_clock_offset(process, sent[tick] - arrivals.pop(tick))
            if process.is_clock_known:
                del self._send_times[learner, incarnation]

    def end_tenures(self) -> None:
        """End all started tenures except the newest. Call it after reading their tapes to the end."""
        started = [tenure for tenure in self.tenures if tenure.first_entry_at is not None]
        for tenure in started[:-1]:
            tenure.close()

    def refresh(self) -> None:
        """Compute the values that depend on several tapes. Call it after new entries and before queries."""
        self._update_late_clock_offsets()
        own = [process for processes in self.processes.values() for process in processes]
        processes = [*own, *(process for processes in self.untaped_processes.values() for process in processes)]
        tenures = [tenure for tenure in self.tenures if tenure.first_entry_at is not None]
        ends = [process.last_entry_at for process in processes if process.is_clock_known or not tenures]
        self.newest_at = max([*ends, *(tenure.last_entry_at for tenure in tenures)], default=0.0)
        self.training_started_at = min(
            (process.training_started_at for process in processes if process.training_started_at is not None),
            default=None,
        )
        self.pauses = list(self._find_pauses())
        known = {learner for tenure in tenures for learner in tenure.member_states}
        self._learners = sorted(known | set(self.processes) | set(self.untaped_processes))
        for learner in self._learners:
            self._extend_open_process(learner)
        self.ended_at = self.newest_at
        if self.is_finished:
            self.ended_at = max(
                (process.log.ends[-1] for process in processes if process.log.ends), default=self.newest_at
            )
        present = [(process.first_entry_at, process.present_until) for process in processes]
        self._sections = merge_spans(
            [*present, *((r.first_entry_at, r.last_entry_at) for r in tenures if r.first_entry_at is not None)]
        )

    def _extend_open_process(self, learner: int) -> None:
        """Presume that a present learner is in a step after its newest entry, unless the run is paused."""
        processes = self.processes_of(learner)
        for process in processes:
            process.presumed_until = process.stepping_until = None
        if processes and self.is_present(learner, processes[-1]):
            process = processes[-1]
            process.presumed_until = self.newest_at
            paused = self.pauses[-1] if self.pauses and self.pauses[-1][1] >= self.newest_at else None
            process.stepping_until = self.newest_at if paused is None else paused[0]

    # ---------------------------------------------------------------------------------------------------- the run

    @property
    def current_tenure(self) -> SyncerTenure | None:
        """Newest syncer process that has started."""
        return next((tenure for tenure in reversed(self.tenures) if tenure.first_entry_at is not None), None)

    @property
    def started_at(self) -> float:
        """Time of the first entry of a syncer, on the clock of the run."""
        return min((tenure.first_entry_at for tenure in self.tenures if tenure.first_entry_at is not None), default=0.0)

    @property
    def is_finished(self) -> bool:
        tenure = self.current_tenure
        return tenure is not None and tenure.stage == "finished"

    def learners(self) -> list[int]:
        return self._learners

    def processes_of(self, learner: int) -> list[LearnerProcess]:
        """Return the processes of a learner, from its own tapes if they exist, else from the tapes of syncers."""
        return self.processes.get(learner) or self.untaped_processes.get(learner, [])

    def is_derived(self, learner: int) -> bool:
        """Return whether the times of a learner are derived from its messages to the syncer."""
        return learner not in self.processes

    def wall_s(self, at: float = float("inf")) -> float:
        """Return the time since the start of training, without times in which no process of the run was present."""
        return (
            self._counted_s((self.training_started_at, min(at, self.ended_at)))
            if self.training_started_at is not None
            else 0.0
        )

    def _counted_s(self, span: Span) -> float:
        return sum(overlap_s(section, span) for section in self._sections)

    def _find_pauses(self) -> Iterator[Span]:
        """Yield the pauses by operators. A pause continues while the syncer is down."""
        for number, tenure in enumerate(self.tenures):
            for begin, end in tenure.pauses:
                if end == tenure.last_entry_at and tenure.is_paused:
                    later = next(
                        (r.first_entry_at for r in self.tenures[number + 1 :] if r.first_entry_at is not None),
                        self.newest_at,
                    )
                    end = max(end, later)
                yield begin, end

    def is_paused(self, at: float) -> bool:
        return any(begin <= at <= end for begin, end in self.pauses)

    def goodput(self, at: float = float("inf")) -> float | None:
        """Return the goodput: the share of allocated time in steps. This is its only definition."""
        total_s = in_steps_s = 0.0
        for learner in self._expected_ids():
            span = self.allocated_span(learner, at)
            if span is not None:
                allocated_s = self._counted_s(span)
                total_s += allocated_s
                in_steps_s += stepping_s(self.processes_of(learner), span, allocated_s)
        return in_steps_s / total_s if total_s > 0 else None

    def uptime(self, at: float = float("inf")) -> float | None:
        """Return the uptime: the share of the run time in which at least one learner was in a step."""
        wall_s = self.wall_s(at)
        if self.training_started_at is None or wall_s <= 0.0:
            return None
        end = min(at, self.ended_at)
        processes = (process for learner in self.learners() for process in self.processes_of(learner))
        spans = (span for process in processes for span in process.all_stepping_spans(end))
        return min(1.0, union_length_s(spans, (self.training_started_at, end)) / wall_s)

    def _expected_ids(self) -> Iterable[int]:
        return sorted({*self.learners(), *range(1, self.expected_learners + 1)})

    def merges(self, begin: float = float("-inf"), end: float = float("inf")) -> Iterator[MergeRow]:
        """Yield the merges after `begin`, up to `end`, in order of time within each tenure."""
        for tenure in self.tenures:
            yield from tenure.merges.between(begin, end)

    def merges_until(self, at: float) -> int:
        return sum(tenure.merges.until(at) for tenure in self.tenures)

    def newest_merges(self, at: float, count: int) -> list[MergeRow]:
        """Return the last `count` merges before this time, newest first."""
        found: list[MergeRow] = []
        for tenure in reversed(self.tenures):
            if count > 0:
                newest = tenure.merges.newest(at, count)
                count -= sum(each.merge_count for each in newest)
                found += newest
        return found

    # ---------------------------------------------------------------------------------------------------- learners

    def member_state(self, learner: int, at: float) -> MemberStateChange | None:
        """Return the last change of the member state of a learner, at the syncer of that time."""
        for tenure in reversed(self.tenures):
            if tenure.first_entry_at is None or tenure.first_entry_at > at:
                continue
            changes = tenure.member_states.get(learner, [])
            index = bisect_right(changes, at, key=lambda each: each.at)
            if index:
                return changes[index - 1]
        return None

    def is_present(self, learner: int, process: LearnerProcess) -> bool:
        """Return whether a process is still present, although its tape has no entries during a step.

        A learner that is disconnected from the syncer is present while its own tape continues. A member state from
        before a restart of the syncer is no evidence.
        """
        last = self.member_state(learner, self.newest_at)
        if last is None or last.incarnation != process.incarnation:
            return False
        if last.state in ("live", "suspect", "joining"):
            return True
        if self.newest_at - process.last_entry_at > max(
            LINGER_TIMEOUT_S, 3 * (self.typical_step_s(learner, self.newest_at) or 0.0)
        ):
            return False
        restored = any(
            last is tenure.member_states[learner][0] for tenure in self.tenures[1:] if learner in tenure.member_states
        )
        return last.state == "disconnected" and (restored or process.last_entry_at >= last.at)

    def allocated_span(self, learner: int, at: float = float("inf")) -> Span | None:
        """Return the span in which a learner should train, until `at`; None if it had not joined and was not expected.

        The span starts with the training of the first learner, or when this learner joins if it was added later. It
        ends with the run, or when this learner leaves for good. docs/accounting.md has the details.
        """
        processes, since = self.processes_of(learner), self.training_started_at
        if since is None or (not processes and learner > self.expected_learners):
            return None
        end = min(at, self.ended_at)
        if not processes:
            return max(since, self._active_section(self.ended_at)[0]), end
        first = processes[0].first_entry_at
        if learner <= self.expected_learners:
            begin = max(since, self._active_section(first)[0])
        elif first > at:
            return None
        else:
            begin = max(since, first)
            if self.expected_learners:  # a job that resumed with fewer learners does not expect it
                end = min(end, self._active_section(max(process.present_until for process in processes))[1])
        last = self.member_state(learner, at)
        if last is not None and last.state == "left":
            end = min(
                end,
                last.at,
                max((process.last_entry_at for process in processes if process.first_entry_at <= at), default=end),
            )
        return begin, max(begin, end)

    def _active_section(self, at: float) -> Span:
        """Return the time span around `at` in which at least one process of the run was present."""
        sections = self._sections or [NEVER]
        return next((each for each in sections if at <= each[1]), sections[-1])

    def time_shares(
        self,
        learner: int,
        at: float = float("inf"),
        stops: Iterable[Span] = (),
        waited_s: float = 0.0,
        copied_s: float = 0.0,
    ) -> TimeShares | None:
        """Return the parts of the time of a learner until `at`; see `compute_time_shares`."""
        span = self.allocated_span(learner, at)
        if span is None:
            return None
        pauses = [part for part in (clip(pause, span) for pause in self.pauses) if part is not None]
        processes, counted_s = self.processes_of(learner), self._counted_s(span)
        return compute_time_shares(learner, processes, span, list(stops), pauses, waited_s, copied_s, counted_s)

    def state_spans(self, learner: int, begin: float, end: float, stops: Iterable[Span] = ()) -> list[StateSpan]:
        """Return the states of a learner without gaps, from its own tapes if they exist, else from the syncers' tapes.

        Args:
            stops: spans in which its process was stopped by SIGSTOP, which tapes do not show.
        """
        changes = self._member_states(learner)
        states: Iterable[StateSpan] = (
            StateSpan(*span, STATE_LABELS.get(change.state, change.state)) for change, span in changes
        )
        if self.processes.get(learner):
            suspicions = [(span, STATE_LABELS[c.state]) for c, span in changes if c.state in ("suspect", "quarantined")]
            covers = sorted([*((span, "alone") for span in self._disconnected_spans(learner)), *suspicions])
            states = _cover(self._own_bands(learner), [(stop, "stopped") for stop in sorted(stops)])
            states = _cover(states, covers)
        found: list[StateSpan] = []
        for band in _cover(states, [(pause, "paused") for pause in self.pauses]):
            clipped = StateSpan(max(band.begin, begin), min(band.end, end), band.state)
            if clipped.end <= clipped.begin:
                continue
            if found and found[-1].state == clipped.state and clipped.begin - found[-1].end < 1e-9:
                found[-1] = found[-1]._replace(end=clipped.end)
            else:
                found.append(clipped)
        return found

    def current_state(self, learner: int, at: float) -> StateSpan:
        """Return the state of a learner at this time, and since when."""
        bands = self.state_spans(learner, self.started_at, max(at, self.started_at) + 1e-6)
        return next((band for band in reversed(bands) if band.begin <= at), StateSpan(at, at, "gone"))

    def _member_states(self, learner: int) -> list[tuple[MemberStateChange, Span]]:
        """Return the member states of a learner, each with its span."""
        changes = [each for tenure in self.tenures for each in tenure.member_states.get(learner, ())]
        ends = [*(each.at for each in changes[1:]), self.newest_at]
        return [(change, (change.at, end)) for change, end in zip(changes, ends, strict=False)]

    def _disconnected_spans(self, learner: int) -> list[Span]:
        processes = self.processes[learner]
        alone = [span for process in processes for span in process.all_disconnected()]
        if processes[-1].disconnected_since is not None:
            alone[-1] = processes[-1].disconnected_since, self.newest_at  # still disconnected after its newest entry
        return alone

    def _own_bands(self, learner: int) -> Iterator[StateSpan]:
        """Yield the states of joining, training and absence, from the tapes of a learner."""
        processes = self.processes[learner]
        at = processes[0].first_entry_at
        for process in processes:
            if process.first_entry_at > at:
                yield StateSpan(at, process.first_entry_at, "gone")
            yield StateSpan(process.first_entry_at, process.joined_at, "recovering")
            yield StateSpan(process.joined_at, process.present_until, "training")
            at = max(at, process.present_until)
        if at < self.newest_at:
            last = self.member_state(learner, self.newest_at)
            state = last.state if last is not None and last.state in ("left", "quarantined") else "gone"
            yield StateSpan(at, self.newest_at, state)

    def longest_gap(self, excused: Mapping[int, Sequence[Span]]) -> StepGap | None:
        """Return the longest gap between steps of any learner, except gaps that overlap an excused span."""
        longest: StepGap | None = None
        for learner, processes in self.processes.items():
            times = [end - begin for process in processes for begin, end in process.step_spans()]
            for process in processes:
                for before, after in pairwise(process.log.ends):
                    if longest is not None and after - before <= longest.gap_s:
                        continue
                    if not any(overlap_s((before, after), span) > 0.0 for span in excused.get(learner, ())):
                        longest = StepGap(learner, before, after - before, median(times))
        return longest

    def effective_h(self) -> float | None:
        """Return the effective H: steps between two merges of a fragment, for a learner that is always present."""
        processes = [process for each in self.processes.values() for process in each]
        present_s = sum(process.present_s for process in processes)
        merges = self.merges_until(float("inf"))
        if not merges or not present_s or self.current_tenure is None:
            return None
        steps = sum(process.steps for process in processes) * self.wall_s() / present_s
        return steps * len(self.current_tenure.core.state.config.fragment_ids()) / merges

    def progress(self, learner: int, at: float) -> tuple[int, float]:
        """Return the steps of the newest process and the tokens of all processes of a learner, up to this time."""
        steps, tokens = 0, 0.0
        for process in self.processes_of(learner):
            if process.first_entry_at > at:
                break
            steps = process.log.steps_until(at)
            tokens += process.log.tokens_until(at)
        return steps, tokens

    def tokens_until(self, at: float) -> float:
        tokens = 0.0
        for learner in self._learners:
            for process in self.processes_of(learner):
                if process.first_entry_at <= at:
                    tokens += process.log.tokens_until(at)
        return tokens

    def typical_step_s(self, learner: int, at: float) -> float | None:
        """Return the median of the last step times of a learner."""
        for process in reversed(self.processes_of(learner)):
            typical_s = process.log.typical_s(at)
            if typical_s is not None:
                return typical_s
        return None

    def to_run_time(self, learner: int, incarnation: int, step: int | None, at: float) -> float:
        """Return the time, on the clock of the run, of a line that a process wrote at `at` on its own clock.

        Args:
            step: steps of the process at that time. The times on its tape correct a clock that has jumped.
        """
        process = next((each for each in self.processes.get(learner, ()) if each.incarnation == incarnation), None)
        if process is None:
            return at
        at -= process.clock_offset_s
        row = bisect_left(process.log.steps, step) if step is not None else len(process.log)
        if row == len(process.log):  # its tape ends earlier
            begin, end = process.last_entry_at, max(process.present_until, self.newest_at)
        else:
            begin, end = process.log.begins[row], process.log.ends[row]
        return at if begin - MAX_CLOCK_SKEW_S <= at <= end + MAX_CLOCK_SKEW_S else end

    def clock_offset_s(self, learner: int, incarnation: int) -> float:
        """Return the offset of a process's clock from the syncer's (positive: ahead)."""
        return next(
            (
                process.clock_offset_s
                for process in self.processes.get(learner, ())
                if process.incarnation == incarnation
            ),
            0.0,
        )


def _cover(bands: Iterable[StateSpan], covers: Sequence[tuple[Span, str]]) -> Iterator[StateSpan]:
    """Replace the training state where a cover overlaps it. If two covers overlap, the first one counts."""
    for band in bands:
        at = band.begin
        for (begin, end), state in covers if band.state == "training" else ():
            begin, end = max(begin, at), min(end, band.end)
            if end <= begin:
                continue
            if begin > at:
                yield StateSpan(at, begin, band.state)
            yield StateSpan(begin, end, state)
            at = end
        if at < band.end:
            yield StateSpan(at, band.end, band.state)


def _record_time(
    times: dict[tuple[int, int], dict[int, float]], process: tuple[int, int], tick: int, at: float
) -> None:
    """Store the time of a tick. Only some of the first and of the newest ticks are kept."""
    known = times.get(process)
    if known is None:
        known = times[process] = {}
    known[tick] = at
    if len(known) > 2 * CLOCK_SAMPLES:
        del known[next(islice(known, CLOCK_SAMPLES, None))]


def read_expected_learners(run: Path) -> int:
    """Return the number of learners that the job on this machine starts; 0 if unknown."""
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    learners = config.get("learners") if isinstance(config, dict) else None
    return learners if type(learners) is int else 0


def read_timeline(run: Path, keep: int | None = EXACT_ROWS, learners: int | None = None) -> RunTimeline:
    """Read all tapes of a run, which may be incomplete.

    Args:
        keep: number of exact entries in every log; None: all.
        learners: number of expected learners; None: from the config of the job.
    """
    timeline, tapes = RunTimeline(keep), RunTapes(run)
    timeline.taped_learners = set(tapes.learners())
    for actor, reader in tapes.readers.items():  # syncers first
        if actor.learner == SYNCER:
            tenure = timeline.add_tenure(reader.header)
            for entry in reader:
                timeline.handle_syncer_entry(tenure, entry)
            timeline.end_tenures()
        else:
            for entry in reader:
                timeline.handle_learner_entry(actor.learner, actor.generation, entry)
    timeline.expected_learners = read_expected_learners(run) if timeline.processes else 0
    timeline.refresh()
    if learners is not None:
        timeline.expected_learners = learners
    return timeline
