"""The one place that computes facts about a run from its tapes: states, steps, merges, goodput, at any moment.

`RunTimeline` takes entries (`handle_learner_entry`, `handle_syncer_entry`) and answers after `refresh`; `read_timeline` reads a run.
docs/accounting.md defines goodput, uptime and the parts of a learner's time.
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
"""A process without a link may still be there for this long after its last entry."""

MAX_CLOCK_SKEW_S = 10.0
"""Clocks of two hosts that differ by less are not corrected: messages take time, too."""

CLOCK_SAMPLES = 8
"""Messages of a process whose times are compared: this many of its first, and of its newest."""

MAX_ROWS = 64 * 1024
"""Steps, or several as one, that are kept of a learner with many processes."""

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
"""By the standing that a learner has with the syncer."""


class StateSpan(NamedTuple):
    """A learner was in this state from `begin` to `end`: a value of STATES, or alone, stopped or paused."""

    begin: float
    end: float
    state: str


class StepGap(NamedTuple):
    """The time between the ends of two consecutive steps of one process."""

    learner: int
    at: float  # where it began
    gap_s: float
    usual_s: float


class RunTimeline:
    def __init__(self, keep: int | None = EXACT_ROWS) -> None:
        """`keep`: number of newest entries of every log that stay exact; None: all."""
        self.keep = keep
        self.processes: dict[int, list[LearnerProcess]] = {}  # by learner, in order, from their own tapes
        self.taped_learners: set[int] = set()  # learners whose tapes are here
        self.untaped_processes: dict[int, list[LearnerProcess]] = {}  # of all other learners, from the syncer's tapes
        self.tenures: list[SyncerTenure] = []
        self.newest_at = 0.0  # the newest entry, as of the last `refresh`
        self.expected_learners = 0  # learners 1 to this one should be there from the start
        self._arrival_times: dict[
            tuple[int, int], dict[int, float]
        ] = {}  # by process: ticks of messages, and their arrival
        self._send_times: dict[
            tuple[int, int], dict[int, float]
        ] = {}  # the same of tapes that are ahead of the syncer's
        self._sections: list[Span] = []
        self.training_started_at: float | None = None  # when the first learner may train
        self.ended_at = 0.0  # the last step of any learner if the run is over, else the newest entry
        self.pauses: list[Span] = []  # when an operator had paused the run
        self._learners: list[int] = []

    # ---------------------------------------------------------------------------------------------------- taking

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
        heard = self._arrival_times.get((learner, incarnation))
        if heard and entry.tick in heard:
            self._update_clock_offset(process, entry.at - heard.pop(entry.tick))
        elif not process.is_clock_known:
            _record_time(self._send_times, (learner, incarnation), entry.tick, entry.at)
        process.handle_entry(entry)

    def _process(
        self, processes: dict[int, list[LearnerProcess]], learner: int, incarnation: int, at: float
    ) -> LearnerProcess:
        """Find a process by its number: an old process may go on writing beside its successor."""
        them = processes.setdefault(learner, [])
        process = next((each for each in reversed(them) if each.incarnation == incarnation), None)
        if process is None:
            process = LearnerProcess(incarnation, at, at, None, self.keep)
            them.append(process)
            them.sort(key=lambda each: each.incarnation)
            if self.keep is not None and sum(len(each.log) for each in them) > MAX_ROWS:
                for each in them[:-1]:
                    each.log.halve()
        return process

    def _update_clock_offset(self, process: LearnerProcess, lead_s: float) -> None:
        """`lead_s`: time of sending less time of arrival of a message, each by its own clock. The largest counts."""
        known = process.is_clock_known
        process.is_clock_known = True
        if abs(lead_s) < MAX_CLOCK_SKEW_S:
            lead_s = 0.0
        if lead_s != process.clock_offset_s and (lead_s > process.clock_offset_s or not known):
            process.set_clock_offset(lead_s)

    def _update_late_clock_offsets(self) -> None:
        """Compare clocks of processes whose tapes were read before the syncer's had their messages."""
        for (learner, incarnation), said in list(self._send_times.items()):
            process = self._process(self.processes, learner, incarnation, 0.0)
            heard = self._arrival_times.get((learner, incarnation), {})
            for tick in said.keys() & heard.keys():
                self._update_clock_offset(process, said[tick] - heard.pop(tick))
            if process.is_clock_known:
                del self._send_times[learner, incarnation]

    def end_tenures(self) -> None:
        """End all tenures but the newest that has begun. Call it when their tapes are read to the end."""
        begun = [tenure for tenure in self.tenures if tenure.first_entry_at is not None]
        for tenure in begun[:-1]:
            tenure.close()

    def refresh(self) -> None:
        """Compute what depends on more than one tape, after new entries were taken."""
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
        there = [(process.first_entry_at, process.present_until) for process in processes]
        self._sections = merge_spans(
            [*there, *((r.first_entry_at, r.last_entry_at) for r in tenures if r.first_entry_at is not None)]
        )

    def _extend_open_process(self, learner: int) -> None:
        """A learner that is there after its newest entry is in a step, unless the run is paused."""
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
        """The newest syncer process that has begun."""
        return next((tenure for tenure in reversed(self.tenures) if tenure.first_entry_at is not None), None)

    @property
    def started_at(self) -> float:
        """The first entry of a syncer, on the run's clock."""
        return min((tenure.first_entry_at for tenure in self.tenures if tenure.first_entry_at is not None), default=0.0)

    @property
    def is_finished(self) -> bool:
        tenure = self.current_tenure
        return tenure is not None and tenure.stage == "finished"

    def learners(self) -> list[int]:
        return self._learners

    def processes_of(self, learner: int) -> list[LearnerProcess]:
        """The processes of a learner, from its own tapes if they are here, else as the syncer saw them."""
        return self.processes.get(learner) or self.untaped_processes.get(learner, [])

    def is_derived(self, learner: int) -> bool:
        """Whether its time is derived from its messages to the syncer."""
        return learner not in self.processes

    def wall_s(self, at: float = float("inf")) -> float:
        """Since the first learner may train, without the time in which no process of the run was there."""
        return (
            self._counted_s((self.training_started_at, min(at, self.ended_at)))
            if self.training_started_at is not None
            else 0.0
        )

    def _counted_s(self, span: Span) -> float:
        return sum(overlap_s(section, span) for section in self._sections)

    def _find_pauses(self) -> Iterator[Span]:
        """A pause goes on while the syncer is down."""
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
        """Goodput: the share of learners' allocated time that was spent in steps. This is its only definition."""
        whole = in_steps = 0.0
        for learner in self._expected_ids():
            span = self.allocated_span(learner, at)
            if span is not None:
                allocated_s = self._counted_s(span)
                whole += allocated_s
                in_steps += stepping_s(self.processes_of(learner), span, allocated_s)
        return in_steps / whole if whole > 0 else None

    def uptime(self, at: float = float("inf")) -> float | None:
        """Uptime: the share of the run's time in which at least one learner was in a step."""
        whole_s = self.wall_s(at)
        if self.training_started_at is None or whole_s <= 0.0:
            return None
        end = min(at, self.ended_at)
        processes = (process for learner in self.learners() for process in self.processes_of(learner))
        spells = (spell for process in processes for spell in process.all_stepping_spans(end))
        return min(1.0, union_length_s(spells, (self.training_started_at, end)) / whole_s)

    def _expected_ids(self) -> Iterable[int]:
        return sorted({*self.learners(), *range(1, self.expected_learners + 1)})

    def merges(self, begin: float = float("-inf"), end: float = float("inf")) -> Iterator[MergeRow]:
        """After `begin`, up to `end`; ordered by time within the tenure of each syncer."""
        for tenure in self.tenures:
            yield from tenure.merges.between(begin, end)

    def merges_until(self, at: float) -> int:
        return sum(tenure.merges.until(at) for tenure in self.tenures)

    def newest_merges(self, at: float, count: int) -> list[MergeRow]:
        """Return the last `count` merges before this moment, newest first."""
        found: list[MergeRow] = []
        for tenure in reversed(self.tenures):
            if count > 0:
                newest = tenure.merges.newest(at, count)
                count -= sum(each.merge_count for each in newest)
                found += newest
        return found

    # ---------------------------------------------------------------------------------------------------- islands

    def member_state(self, learner: int, at: float) -> MemberStateChange | None:
        """The standing of a learner with the syncer of that moment."""
        for tenure in reversed(self.tenures):
            if tenure.first_entry_at is None or tenure.first_entry_at > at:
                continue
            track = tenure.member_states.get(learner, [])
            index = bisect_right(track, at, key=lambda each: each.at)
            if index:
                return track[index - 1]
        return None

    def is_present(self, learner: int, process: LearnerProcess) -> bool:
        """Whether its process is still there: between two steps its tape says nothing.

        For the syncer a learner whose link is cut is away; then its own tape goes on. What a syncer knows from before
        its restart says nothing.
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
        """The span in which it should have trained, until `at`; None if it had not come and should not have.

        It begins when the first learner may train, or when this one came if it was added later. It ends with the
        run, or when this learner left for good. docs/accounting.md explains it.
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
            if self.expected_learners:  # a job that was resumed with fewer does not ask for it any more
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
        """The time around this moment in which some process of the run was there."""
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
        """Return where its time went until then."""
        span = self.allocated_span(learner, at)
        if span is None:
            return None
        pauses = [found for found in (clip(pause, span) for pause in self.pauses) if found is not None]
        processes, counted_s = self.processes_of(learner), self._counted_s(span)
        return compute_time_shares(learner, processes, span, list(stops), pauses, waited_s, copied_s, counted_s)

    def state_spans(self, learner: int, begin: float, end: float, stops: Iterable[Span] = ()) -> list[StateSpan]:
        """What a learner did when, without gaps: by its own tapes if they are here, else as the syncer saw it.

        `stops`: when its process was stopped by SIGSTOP, which no tape says.
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
        """What a learner does at this moment, and since when."""
        bands = self.state_spans(learner, self.started_at, max(at, self.started_at) + 1e-6)
        return next((band for band in reversed(bands) if band.begin <= at), StateSpan(at, at, "gone"))

    def _member_states(self, learner: int) -> list[tuple[MemberStateChange, Span]]:
        """The standings of a learner, each with the span in which it had it."""
        changes = [each for tenure in self.tenures for each in tenure.member_states.get(learner, ())]
        ends = [*(each.at for each in changes[1:]), self.newest_at]
        return [(change, (change.at, end)) for change, end in zip(changes, ends, strict=False)]

    def _disconnected_spans(self, learner: int) -> list[Span]:
        processes = self.processes[learner]
        alone = [span for process in processes for span in process.all_disconnected()]
        if processes[-1].disconnected_since is not None:
            alone[-1] = processes[-1].disconnected_since, self.newest_at  # still alone after its newest entry
        return alone

    def _own_bands(self, learner: int) -> Iterator[StateSpan]:
        """Joining, training and being away, from its tapes."""
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
        """The longest gap between steps of any learner, without gaps that touch an excused span of that learner."""
        worst: StepGap | None = None
        for learner, processes in self.processes.items():
            times = [end - begin for process in processes for begin, end in process.step_spans()]
            for process in processes:
                for before, after in pairwise(process.log.ends):
                    if worst is not None and after - before <= worst.gap_s:
                        continue
                    if not any(overlap_s((before, after), span) > 0.0 for span in excused.get(learner, ())):
                        worst = StepGap(learner, before, after - before, median(times))
        return worst

    def effective_h(self) -> float | None:
        """Steps of a learner between two merges of a fragment, if it is there all the time."""
        processes = [process for each in self.processes.values() for process in each]
        present_s = sum(process.present_s for process in processes)
        merges = self.merges_until(float("inf"))
        if not merges or not present_s or self.current_tenure is None:
            return None
        steps = sum(process.steps for process in processes) * self.wall_s() / present_s
        return steps * len(self.current_tenure.core.state.config.fragment_ids()) / merges

    def progress(self, learner: int, at: float) -> tuple[int, float]:
        """Return the steps of its newest process and the tokens of all its processes, by then."""
        steps, tokens = 0, 0.0
        for process in self.processes_of(learner):
            if process.first_entry_at > at:
                break
            steps = process.log.steps_until(at)
            tokens += process.log.tokens_until(at)
        return steps, tokens

    def tokens_until(self, at: float) -> float:
        found = 0.0
        for learner in self._learners:
            for process in self.processes_of(learner):
                if process.first_entry_at <= at:
                    found += process.log.tokens_until(at)
        return found

    def typical_step_s(self, learner: int, at: float) -> float | None:
        """Return the median of its last steps."""
        for process in reversed(self.processes_of(learner)):
            usual_s = process.log.usual_s(at)
            if usual_s is not None:
                return usual_s
        return None

    def to_run_time(self, learner: int, incarnation: int, step: int | None, at: float) -> float:
        """Return when a process wrote a line at `at` of its own clock, which may be wrong and may have jumped.

        `step`: the steps it had taken by then; its tape has their times.
        """
        process = next((each for each in self.processes.get(learner, ()) if each.incarnation == incarnation), None)
        if process is None:
            return at
        at -= process.clock_offset_s
        row = bisect_left(process.log.steps, step) if step is not None else len(process.log)
        if row == len(process.log):  # its tape is not as far
            begin, end = process.last_entry_at, max(process.present_until, self.newest_at)
        else:
            begin, end = process.log.begins[row], process.log.ends[row]
        return at if begin - MAX_CLOCK_SKEW_S <= at <= end + MAX_CLOCK_SKEW_S else end

    def clock_offset_s(self, learner: int, incarnation: int) -> float:
        """Return by how much the clock of a process is ahead."""
        return next(
            (
                process.clock_offset_s
                for process in self.processes.get(learner, ())
                if process.incarnation == incarnation
            ),
            0.0,
        )


def _cover(bands: Iterable[StateSpan], covers: Sequence[tuple[Span, str]]) -> Iterator[StateSpan]:
    """Replace training by the states that lie over it; of two that overlap, the first one counts."""
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
    """Keep some of the first ticks of a process, and some of the newest."""
    known = times.get(process)
    if known is None:
        known = times[process] = {}
    known[tick] = at
    if len(known) > 2 * CLOCK_SAMPLES:
        del known[next(islice(known, CLOCK_SAMPLES, None))]


def read_expected_learners(run: Path) -> int:
    """Return the number of learners that the job on this machine should start; 0 if unknown."""
    try:
        told = json.loads((run / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    learners = told.get("learners") if isinstance(told, dict) else None
    return learners if type(learners) is int else 0


def read_timeline(run: Path, keep: int | None = EXACT_ROWS, learners: int | None = None) -> RunTimeline:
    """Read all tapes of a run; they may be cut short. `learners`: that the job should start; None: by its config."""
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
