"""The one place that computes facts about a run from its tapes: states, steps, merges, goodput, at any moment.

`RunTimeline` takes entries (`take_learner`, `take_syncer`) and answers after `settle`; `read_timeline` reads a run.
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
from atoll.tape.bounded_logs import KEEP, Merge, Span
from atoll.tape.files import RunTapes
from atoll.tape.format import Entry, Header
from atoll.tape.learner_processes import LearnerProcess
from atoll.tape.syncer_tenures import StandingChange, SyncerTenure
from atoll.tape.time_shares import TimeShares, clip, covered_s, overlap_s, shares_of, stepping_s, union

LINGERS_S = 1.0
"""A process without a link may still be there for this long after its last entry."""

CLOCKS_S = 10.0
"""Clocks of two hosts that differ by less are not corrected: messages take time, too."""

COMPARED = 8
"""Messages of a process whose times are compared: this many of its first, and of its newest."""

MAX_ROWS = 64 * 1024
"""Steps, or several as one, that are kept of a learner with many processes."""

NEVER = (0.0, 0.0)

STATES = {
    "live": "training",
    "suspect": "suspected",
    "joining": "recovering",
    "admitting": "recovering",
    "away": "gone",
    "left": "left",
    "lost": "gone",
    "quarantined": "quarantined",
}
"""By the standing that a learner has with the syncer."""


class Band(NamedTuple):
    """A learner was in this state from `begin` to `end`: a value of STATES, or alone, stopped or paused."""

    begin: float
    end: float
    state: str


class Gap(NamedTuple):
    """The time between the ends of two consecutive steps of one process."""

    learner: int
    at: float  # where it began
    gap_s: float
    usual_s: float


class RunTimeline:
    def __init__(self, keep: int | None = KEEP) -> None:
        """`keep`: number of newest entries of every log that stay exact; None: all."""
        self.keep = keep
        self.processes: dict[int, list[LearnerProcess]] = {}  # by learner, in order, from their own tapes
        self.here: set[int] = set()  # learners whose tapes are here
        self.seen: dict[int, list[LearnerProcess]] = {}  # of all other learners, from the syncer's tapes
        self.tenures: list[SyncerTenure] = []
        self.to = 0.0  # the newest entry, as of the last `settle`
        self.asked_for = 0  # learners 1 to this one should be there from the start
        self._heard: dict[tuple[int, int], dict[int, float]] = {}  # by process: ticks of messages, and their arrival
        self._said: dict[tuple[int, int], dict[int, float]] = {}  # the same of tapes that are ahead of the syncer's
        self._sections: list[Span] = []
        self.trains_since: float | None = None  # when the first learner may train
        self.ended = 0.0  # the last step of any learner if the run is over, else the newest entry
        self.pauses: list[Span] = []  # when an operator had paused the run
        self._learners: list[int] = []

    # ---------------------------------------------------------------------------------------------------- taking

    def add_tenure(self, header: Header) -> SyncerTenure:
        tenure = SyncerTenure(header, self.keep)
        self.tenures.append(tenure)
        return tenure

    def take_syncer(self, tenure: SyncerTenure, entry: Entry) -> None:
        if tenure.is_over:
            return
        if tenure.first is None:
            before = next((r for r in reversed(self.tenures) if r.epoch < tenure.epoch and r.first is not None), None)
            tenure.merged_with = dict(before.merged_with) if before is not None else {}
        tenure.take(entry)
        event = entry.event
        if type(event) is MessageArrived:
            envelope = event.envelope
            key = envelope.learner, envelope.incarnation
            _note(self._heard, key, envelope.tick, entry.at)
            if envelope.learner not in self.here:
                body = envelope.body
                member = tenure.core.state.members.get(envelope.learner)
                is_live = member is not None and member.standing.value == "live"
                process = self._process(self.seen, *key, entry.at)
                process.is_clock_known = True
                process.see(entry.at, body if type(body) is Report else None, is_live)
        elif type(event) is LearnerDisconnected and event.learner in self.seen:
            for process in self.seen[event.learner]:
                if process.incarnation == event.incarnation:
                    process.see_gone(entry.at)

    def take_learner(self, learner: int, incarnation: int, entry: Entry) -> None:
        if learner not in self.here:
            self.here.add(learner)
            self.seen.pop(learner, None)
        process = self._process(self.processes, learner, incarnation, entry.at)
        heard = self._heard.get((learner, incarnation))
        if heard and entry.tick in heard:
            self._compare(process, entry.at - heard.pop(entry.tick))
        elif not process.is_clock_known:
            _note(self._said, (learner, incarnation), entry.tick, entry.at)
        process.take(entry)

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

    def _compare(self, process: LearnerProcess, lead_s: float) -> None:
        """`lead_s`: time of sending less time of arrival of a message, each by its own clock. The largest counts."""
        known = process.is_clock_known
        process.is_clock_known = True
        if abs(lead_s) < CLOCKS_S:
            lead_s = 0.0
        if lead_s != process.lead_s and (lead_s > process.lead_s or not known):
            process.set_lead(lead_s)

    def _compare_late(self) -> None:
        """Compare clocks of processes whose tapes were read before the syncer's had their messages."""
        for (learner, incarnation), said in list(self._said.items()):
            process = self._process(self.processes, learner, incarnation, 0.0)
            heard = self._heard.get((learner, incarnation), {})
            for tick in said.keys() & heard.keys():
                self._compare(process, said[tick] - heard.pop(tick))
            if process.is_clock_known:
                del self._said[learner, incarnation]

    def end_tenures(self) -> None:
        """End all tenures but the newest that has begun. Call it when their tapes are read to the end."""
        begun = [tenure for tenure in self.tenures if tenure.first is not None]
        for tenure in begun[:-1]:
            tenure.end()

    def settle(self) -> None:
        """Compute what depends on more than one tape, after new entries were taken."""
        self._compare_late()
        own = [process for processes in self.processes.values() for process in processes]
        processes = [*own, *(process for processes in self.seen.values() for process in processes)]
        tenures = [tenure for tenure in self.tenures if tenure.first is not None]
        ends = [process.last for process in processes if process.is_clock_known or not tenures]
        self.to = max([*ends, *(tenure.last for tenure in tenures)], default=0.0)
        self.trains_since = min((process.began for process in processes if process.began is not None), default=None)
        self.pauses = list(self._find_pauses())
        known = {learner for tenure in tenures for learner in tenure.standings}
        self._learners = sorted(known | set(self.processes) | set(self.seen))
        for learner in self._learners:
            self._leave_open(learner)
        self.ended = self.to
        if self.is_finished:
            self.ended = max((process.log.ends[-1] for process in processes if process.log.ends), default=self.to)
        there = [(process.first, process.until) for process in processes]
        self._sections = union([*there, *((r.first, r.last) for r in tenures if r.first is not None)])

    def _leave_open(self, learner: int) -> None:
        """A learner that is there after its newest entry is in a step, unless the run is paused."""
        processes = self.processes_of(learner)
        for process in processes:
            process.open_until = process.works_until = None
        if processes and self.is_on(learner, processes[-1]):
            process = processes[-1]
            process.open_until = self.to
            paused = self.pauses[-1] if self.pauses and self.pauses[-1][1] >= self.to else None
            process.works_until = self.to if paused is None else paused[0]

    # ---------------------------------------------------------------------------------------------------- the run

    @property
    def tenure(self) -> SyncerTenure | None:
        """The newest syncer process that has begun."""
        return next((tenure for tenure in reversed(self.tenures) if tenure.first is not None), None)

    @property
    def begin(self) -> float:
        """The first entry of a syncer, on the run's clock."""
        return min((tenure.first for tenure in self.tenures if tenure.first is not None), default=0.0)

    @property
    def is_finished(self) -> bool:
        tenure = self.tenure
        return tenure is not None and tenure.stage == "finished"

    def learners(self) -> list[int]:
        return self._learners

    def processes_of(self, learner: int) -> list[LearnerProcess]:
        """The processes of a learner, from its own tapes if they are here, else as the syncer saw them."""
        return self.processes.get(learner) or self.seen.get(learner, [])

    def is_derived(self, learner: int) -> bool:
        """Whether its time is derived from its messages to the syncer."""
        return learner not in self.processes

    def wall_s(self, at: float = float("inf")) -> float:
        """Since the first learner may train, without the time in which no process of the run was there."""
        return self._counted_s((self.trains_since, min(at, self.ended))) if self.trains_since is not None else 0.0

    def _counted_s(self, span: Span) -> float:
        return sum(overlap_s(section, span) for section in self._sections)

    def _find_pauses(self) -> Iterator[Span]:
        """A pause goes on while the syncer is down."""
        for number, tenure in enumerate(self.tenures):
            for begin, end in tenure.pauses:
                if end == tenure.last and tenure.is_paused:
                    later = next((r.first for r in self.tenures[number + 1 :] if r.first is not None), self.to)
                    end = max(end, later)
                yield begin, end

    def is_paused(self, at: float) -> bool:
        return any(begin <= at <= end for begin, end in self.pauses)

    def goodput(self, at: float = float("inf")) -> float | None:
        """Goodput: the share of learners' allocated time that was spent in steps. This is its only definition."""
        whole = in_steps = 0.0
        for learner in self._asked():
            span = self.span_of(learner, at)
            if span is not None:
                allocated_s = self._counted_s(span)
                whole += allocated_s
                in_steps += stepping_s(self.processes_of(learner), span, allocated_s)
        return in_steps / whole if whole > 0 else None

    def uptime(self, at: float = float("inf")) -> float | None:
        """Uptime: the share of the run's time in which at least one learner was in a step."""
        whole_s = self.wall_s(at)
        if self.trains_since is None or whole_s <= 0.0:
            return None
        end = min(at, self.ended)
        processes = (process for learner in self.learners() for process in self.processes_of(learner))
        spells = (spell for process in processes for spell in process.all_spells(end))
        return min(1.0, covered_s(spells, (self.trains_since, end)) / whole_s)

    def _asked(self) -> Iterable[int]:
        return sorted({*self.learners(), *range(1, self.asked_for + 1)})

    def merges(self, begin: float = float("-inf"), end: float = float("inf")) -> Iterator[Merge]:
        """After `begin`, up to `end`; ordered by time within the tenure of each syncer."""
        for tenure in self.tenures:
            yield from tenure.merges.between(begin, end)

    def merges_until(self, at: float) -> int:
        return sum(tenure.merges.until(at) for tenure in self.tenures)

    def newest_merges(self, at: float, count: int) -> list[Merge]:
        """Return the last `count` merges before this moment, newest first."""
        found: list[Merge] = []
        for tenure in reversed(self.tenures):
            if count > 0:
                newest = tenure.merges.newest(at, count)
                count -= sum(each.stands_for for each in newest)
                found += newest
        return found

    # ---------------------------------------------------------------------------------------------------- islands

    def standing(self, learner: int, at: float) -> StandingChange | None:
        """The standing of a learner with the syncer of that moment."""
        for tenure in reversed(self.tenures):
            if tenure.first is None or tenure.first > at:
                continue
            track = tenure.standings.get(learner, [])
            index = bisect_right(track, at, key=lambda each: each.at)
            if index:
                return track[index - 1]
        return None

    def is_on(self, learner: int, process: LearnerProcess) -> bool:
        """Whether its process is still there: between two steps its tape says nothing.

        For the syncer a learner whose link is cut is away; then its own tape goes on. What a syncer knows from before
        its restart says nothing.
        """
        last = self.standing(learner, self.to)
        if last is None or last.incarnation != process.incarnation:
            return False
        if last.standing in ("live", "suspect", "joining"):
            return True
        if self.to - process.last > max(LINGERS_S, 3 * (self.usual_step_s(learner, self.to) or 0.0)):
            return False
        restored = any(
            last is tenure.standings[learner][0] for tenure in self.tenures[1:] if learner in tenure.standings
        )
        return last.standing == "away" and (restored or process.last >= last.at)

    def span_of(self, learner: int, at: float = float("inf")) -> Span | None:
        """The span in which it should have trained, until `at`; None if it had not come and should not have.

        It begins when the first learner may train, or when this one came if it was added later. It ends with the
        run, or when this learner left for good. docs/accounting.md explains it.
        """
        processes, since = self.processes_of(learner), self.trains_since
        if since is None or (not processes and learner > self.asked_for):
            return None
        end = min(at, self.ended)
        if not processes:
            return max(since, self._section(self.ended)[0]), end
        first = processes[0].first
        if learner <= self.asked_for:
            begin = max(since, self._section(first)[0])
        elif first > at:
            return None
        else:
            begin = max(since, first)
            if self.asked_for:  # a job that was resumed with fewer does not ask for it any more
                end = min(end, self._section(max(process.until for process in processes))[1])
        last = self.standing(learner, at)
        if last is not None and last.standing == "left":
            end = min(end, last.at, max((process.last for process in processes if process.first <= at), default=end))
        return begin, max(begin, end)

    def _section(self, at: float) -> Span:
        """The time around this moment in which some process of the run was there."""
        sections = self._sections or [NEVER]
        return next((each for each in sections if at <= each[1]), sections[-1])

    def split(
        self,
        learner: int,
        at: float = float("inf"),
        stops: Iterable[Span] = (),
        waited_s: float = 0.0,
        copied_s: float = 0.0,
    ) -> TimeShares | None:
        """Return where its time went until then."""
        span = self.span_of(learner, at)
        if span is None:
            return None
        pauses = [found for found in (clip(pause, span) for pause in self.pauses) if found is not None]
        processes, counted_s = self.processes_of(learner), self._counted_s(span)
        return shares_of(learner, processes, span, list(stops), pauses, waited_s, copied_s, counted_s)

    def bands(self, learner: int, begin: float, end: float, stops: Iterable[Span] = ()) -> list[Band]:
        """What a learner did when, without gaps: by its own tapes if they are here, else as the syncer saw it.

        `stops`: when its process was stopped by SIGSTOP, which no tape says.
        """
        changes = self._standings(learner)
        states: Iterable[Band] = (Band(*span, STATES.get(change.standing, change.standing)) for change, span in changes)
        if self.processes.get(learner):
            suspicions = [(span, STATES[c.standing]) for c, span in changes if c.standing in ("suspect", "quarantined")]
            covers = sorted([*((span, "alone") for span in self._alone(learner)), *suspicions])
            states = _cover(self._own_bands(learner), [(stop, "stopped") for stop in sorted(stops)])
            states = _cover(states, covers)
        found: list[Band] = []
        for band in _cover(states, [(pause, "paused") for pause in self.pauses]):
            clipped = Band(max(band.begin, begin), min(band.end, end), band.state)
            if clipped.end <= clipped.begin:
                continue
            if found and found[-1].state == clipped.state and clipped.begin - found[-1].end < 1e-9:
                found[-1] = found[-1]._replace(end=clipped.end)
            else:
                found.append(clipped)
        return found

    def state(self, learner: int, at: float) -> Band:
        """What a learner does at this moment, and since when."""
        bands = self.bands(learner, self.begin, max(at, self.begin) + 1e-6)
        return next((band for band in reversed(bands) if band.begin <= at), Band(at, at, "gone"))

    def _standings(self, learner: int) -> list[tuple[StandingChange, Span]]:
        """The standings of a learner, each with the span in which it had it."""
        changes = [each for tenure in self.tenures for each in tenure.standings.get(learner, ())]
        ends = [*(each.at for each in changes[1:]), self.to]
        return [(change, (change.at, end)) for change, end in zip(changes, ends, strict=False)]

    def _alone(self, learner: int) -> list[Span]:
        processes = self.processes[learner]
        alone = [span for process in processes for span in process.all_alone()]
        if processes[-1].alone_since is not None:
            alone[-1] = processes[-1].alone_since, self.to  # still alone after its newest entry
        return alone

    def _own_bands(self, learner: int) -> Iterator[Band]:
        """Joining, training and being away, from its tapes."""
        processes = self.processes[learner]
        at = processes[0].first
        for process in processes:
            if process.first > at:
                yield Band(at, process.first, "gone")
            yield Band(process.first, process.joined, "recovering")
            yield Band(process.joined, process.until, "training")
            at = max(at, process.until)
        if at < self.to:
            last = self.standing(learner, self.to)
            state = last.standing if last is not None and last.standing in ("left", "quarantined") else "gone"
            yield Band(at, self.to, state)

    def longest_gap(self, excused: Mapping[int, Sequence[Span]]) -> Gap | None:
        """The longest gap between steps of any learner, without gaps that touch an excused span of that learner."""
        worst: Gap | None = None
        for learner, processes in self.processes.items():
            times = [end - begin for process in processes for begin, end in process.step_spans()]
            for process in processes:
                for before, after in pairwise(process.log.ends):
                    if worst is not None and after - before <= worst.gap_s:
                        continue
                    if not any(overlap_s((before, after), span) > 0.0 for span in excused.get(learner, ())):
                        worst = Gap(learner, before, after - before, median(times))
        return worst

    def effective_h(self) -> float | None:
        """Steps of a learner between two merges of a fragment, if it is there all the time."""
        processes = [process for each in self.processes.values() for process in each]
        present_s = sum(process.present_s for process in processes)
        merges = self.merges_until(float("inf"))
        if not merges or not present_s or self.tenure is None:
            return None
        steps = sum(process.steps for process in processes) * self.wall_s() / present_s
        return steps * len(self.tenure.core.state.config.fragment_ids()) / merges

    def progress_of(self, learner: int, at: float) -> tuple[int, float]:
        """Return the steps of its newest process and the tokens of all its processes, by then."""
        steps, tokens = 0, 0.0
        for process in self.processes_of(learner):
            if process.first > at:
                break
            steps = process.log.steps_until(at)
            tokens += process.log.tokens_until(at)
        return steps, tokens

    def tokens_until(self, at: float) -> float:
        found = 0.0
        for learner in self._learners:
            for process in self.processes_of(learner):
                if process.first <= at:
                    found += process.log.tokens_until(at)
        return found

    def usual_step_s(self, learner: int, at: float) -> float | None:
        """Return the median of its last steps."""
        for process in reversed(self.processes_of(learner)):
            usual_s = process.log.usual_s(at)
            if usual_s is not None:
                return usual_s
        return None

    def moment_of(self, learner: int, incarnation: int, step: int | None, at: float) -> float:
        """Return when a process wrote a line at `at` of its own clock, which may be wrong and may have jumped.

        `step`: the steps it had taken by then; its tape has their times.
        """
        process = next((each for each in self.processes.get(learner, ()) if each.incarnation == incarnation), None)
        if process is None:
            return at
        at -= process.lead_s
        row = bisect_left(process.log.steps, step) if step is not None else len(process.log)
        if row == len(process.log):  # its tape is not as far
            begin, end = process.last, max(process.until, self.to)
        else:
            begin, end = process.log.begins[row], process.log.ends[row]
        return at if begin - CLOCKS_S <= at <= end + CLOCKS_S else end

    def lead_of(self, learner: int, incarnation: int) -> float:
        """Return by how much the clock of a process is ahead."""
        return next(
            (process.lead_s for process in self.processes.get(learner, ()) if process.incarnation == incarnation), 0.0
        )


def _cover(bands: Iterable[Band], covers: Sequence[tuple[Span, str]]) -> Iterator[Band]:
    """Replace training by the states that lie over it; of two that overlap, the first one counts."""
    for band in bands:
        at = band.begin
        for (begin, end), state in covers if band.state == "training" else ():
            begin, end = max(begin, at), min(end, band.end)
            if end <= begin:
                continue
            if begin > at:
                yield Band(at, begin, band.state)
            yield Band(begin, end, state)
            at = end
        if at < band.end:
            yield Band(at, band.end, band.state)


def _note(times: dict[tuple[int, int], dict[int, float]], process: tuple[int, int], tick: int, at: float) -> None:
    """Keep some of the first ticks of a process, and some of the newest."""
    known = times.get(process)
    if known is None:
        known = times[process] = {}
    known[tick] = at
    if len(known) > 2 * COMPARED:
        del known[next(islice(known, COMPARED, None))]


def asked_for(run: Path) -> int:
    """Return the number of learners that the job on this machine should start; 0 if unknown."""
    try:
        told = json.loads((run / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    learners = told.get("learners") if isinstance(told, dict) else None
    return learners if type(learners) is int else 0


def read_timeline(run: Path, keep: int | None = KEEP, learners: int | None = None) -> RunTimeline:
    """Read all tapes of a run; they may be cut short. `learners`: that the job should start; None: by its config."""
    timeline, tapes = RunTimeline(keep), RunTapes(run)
    timeline.here = set(tapes.learners())
    for actor, reader in tapes.readers.items():  # syncers first
        if actor.learner == SYNCER:
            tenure = timeline.add_tenure(reader.header)
            for entry in reader:
                timeline.take_syncer(tenure, entry)
            timeline.end_tenures()
        else:
            for entry in reader:
                timeline.take_learner(actor.learner, actor.start, entry)
    timeline.asked_for = asked_for(run) if timeline.processes else 0
    timeline.settle()
    if learners is not None:
        timeline.asked_for = learners
    return timeline
