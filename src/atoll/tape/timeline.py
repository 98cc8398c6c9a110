"""All that the tapes of a run say of its time: lives, reigns, and what follows from them at any moment.

Fed entry by entry (`take_learner`, `take_syncer`), then asked after `settle`. `read_books` does it for a directory.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from atoll.core.protocol import LearnerDisconnected, MessageArrived, Report
from atoll.core.types import SYNCER
from atoll.tape.downsampling import KEEP
from atoll.tape.files import RunTapes
from atoll.tape.format import Entry, Header
from atoll.tape.learner_processes import Life
from atoll.tape.merges import Merge
from atoll.tape.steps import Span
from atoll.tape.syncer_tenures import Reign, Standing
from atoll.tape.time_shares import Shares, clip, covered_s, overlap_s, shares_of, stepping_s, union

LINGERS_S = 1.0
"""So long after its last entry a process without a link may still be there."""

CLOCKS_S = 10.0
"""Clocks of two hosts that differ by less are left as they are: messages take some time, too."""

COMPARED = 8
"""Messages of a process whose times are compared: so many of its first, and of its newest."""

MOST_ROWS = 64 * 1024
"""Steps, or several as one, that are kept of a learner with many lives."""

NEVER = (0.0, 0.0)


class Books:
    def __init__(self, keep: int | None = KEEP) -> None:
        """`keep`: newest entries of every log that are not joined; None: all."""
        self.keep = keep
        self.lives: dict[int, list[Life]] = {}  # by learner, in the order of their processes: from their own tapes
        self.here: set[int] = set()  # learners whose tapes are here
        self.seen: dict[int, list[Life]] = {}  # of all others, from the tapes of the syncer
        self.reigns: list[Reign] = []
        self.to = 0.0  # the newest entry, as of the last `settle`
        self.asked_for = 0  # learners 1 to this one were there to begin with, or should have been
        self._heard: dict[tuple[int, int], dict[int, float]] = {}  # by process: ticks of messages, and their arrival
        self._said: dict[tuple[int, int], dict[int, float]] = {}  # the same of tapes that are ahead of the syncer's
        self._sections: list[Span] = []
        self._since: float | None = None
        self._ended = 0.0
        self._pauses: list[Span] = []
        self._learners: list[int] = []

    # ---------------------------------------------------------------------------------------------------- taking

    def new_reign(self, header: Header) -> Reign:
        reign = Reign(header, self.keep)
        self.reigns.append(reign)
        return reign

    def take_syncer(self, reign: Reign, entry: Entry) -> None:
        if reign.is_over:
            return
        if reign.first is None:
            before = next((r for r in reversed(self.reigns) if r.epoch < reign.epoch and r.first is not None), None)
            reign.merged_with = dict(before.merged_with) if before is not None else {}
        reign.take(entry)
        event = entry.event
        if type(event) is MessageArrived:
            envelope = event.envelope
            process = envelope.learner, envelope.incarnation
            _note(self._heard, process, envelope.tick, entry.at)
            if envelope.learner not in self.here:
                body = envelope.body
                member = reign.core.members.get(envelope.learner)
                is_live = member is not None and member.standing.value == "live"
                life = self._life(self.seen, *process, entry.at)
                life.is_clock_known = True
                life.see(entry.at, body if type(body) is Report else None, is_live)
        elif type(event) is LearnerDisconnected and event.learner in self.seen:
            for life in self.seen[event.learner]:
                if life.incarnation == event.incarnation:
                    life.see_gone(entry.at)

    def take_learner(self, learner: int, incarnation: int, entry: Entry) -> None:
        if learner not in self.here:
            self.here.add(learner)
            self.seen.pop(learner, None)
        life = self._life(self.lives, learner, incarnation, entry.at)
        heard = self._heard.get((learner, incarnation))
        if heard and entry.tick in heard:
            self._compare(life, entry.at - heard.pop(entry.tick))
        elif not life.is_clock_known:
            _note(self._said, (learner, incarnation), entry.tick, entry.at)
        life.take(entry)

    def _life(self, lives: dict[int, list[Life]], learner: int, incarnation: int, at: float) -> Life:
        """By number, and not the last one: an old process may write on beside its successor."""
        them = lives.setdefault(learner, [])
        life = next((each for each in reversed(them) if each.incarnation == incarnation), None)
        if life is None:
            life = Life(incarnation, at, at, None, self.keep)
            them.append(life)
            them.sort(key=lambda each: each.incarnation)
            if self.keep is not None and sum(len(each.log) for each in them) > MOST_ROWS:
                for each in them[:-1]:
                    each.log.halve()
        return life

    def _compare(self, life: Life, lead_s: float) -> None:
        """`lead_s`: when a message was sent less when it arrived, each by its own clock. The largest is the best."""
        known = life.is_clock_known
        life.is_clock_known = True
        if abs(lead_s) < CLOCKS_S:
            lead_s = 0.0
        if lead_s != life.lead_s and (lead_s > life.lead_s or not known):
            life.set_lead(lead_s)

    def _compare_late(self) -> None:
        """Processes whose tapes were read before the syncer's had their messages."""
        for (learner, incarnation), said in list(self._said.items()):
            life = self._life(self.lives, learner, incarnation, 0.0)
            heard = self._heard.get((learner, incarnation), {})
            for tick in said.keys() & heard.keys():
                self._compare(life, said[tick] - heard.pop(tick))
            if life.is_clock_known:
                del self._said[learner, incarnation]

    def end_reigns(self) -> None:
        """All but the newest that has begun: to be called when their tapes are read to the end."""
        begun = [reign for reign in self.reigns if reign.first is not None]
        for reign in begun[:-1]:
            reign.end()

    def settle(self) -> None:
        """Once what is new was taken: what depends on more than one tape."""
        self._compare_late()
        own = [life for lives in self.lives.values() for life in lives]
        lives = [*own, *(life for lives in self.seen.values() for life in lives)]
        reigns = [reign for reign in self.reigns if reign.first is not None]
        ends = [life.last for life in lives if life.is_clock_known or not reigns]
        self.to = max([*ends, *(reign.last for reign in reigns)], default=0.0)
        self._since = min((life.began for life in lives if life.began is not None), default=None)
        self._pauses = list(self._find_pauses())
        known = {learner for reign in reigns for learner in reign.standings}
        self._learners = sorted(known | set(self.lives) | set(self.seen))
        for learner in self._learners:
            self._leave_open(learner)
        self._ended = self.to
        if self.is_finished:
            self._ended = max((life.log.ends[-1] for life in lives if life.log.ends), default=self.to)
        there = [(life.first, life.until) for life in lives]
        self._sections = union([*there, *((r.first, r.last) for r in reigns if r.first is not None)])

    def _leave_open(self, learner: int) -> None:
        """Who is there between two entries of its tape is in a step, unless the run is paused."""
        lives = self.lives_of(learner)
        for life in lives:
            life.open_until = life.works_until = None
        if lives and self.is_on(learner, lives[-1]):
            life = lives[-1]
            life.open_until = self.to
            paused = self._pauses[-1] if self._pauses and self._pauses[-1][1] >= self.to else None
            life.works_until = self.to if paused is None else paused[0]

    # ---------------------------------------------------------------------------------------------------- the run

    @property
    def reign(self) -> Reign | None:
        """The newest that has begun."""
        return next((reign for reign in reversed(self.reigns) if reign.first is not None), None)

    @property
    def is_finished(self) -> bool:
        reign = self.reign
        return reign is not None and reign.stage == "finished"

    def learners(self) -> list[int]:
        return self._learners

    def lives_of(self, learner: int) -> list[Life]:
        """From its own tapes where they are here, else as the syncer saw it."""
        return self.lives.get(learner) or self.seen.get(learner, [])

    def is_derived(self, learner: int) -> bool:
        """What is said of its time follows from what it told the syncer."""
        return learner not in self.lives

    def trains_since(self) -> float | None:
        """The first learner may train."""
        return self._since

    def ended(self) -> float:
        """The last step of anybody once the run is over, else the newest entry."""
        return self._ended

    def wall_s(self, at: float = float("inf")) -> float:
        """Since the first learner may train, without the time in which no process of the run was there."""
        return self._counted_s((self._since, min(at, self._ended))) if self._since is not None else 0.0

    def _counted_s(self, span: Span) -> float:
        return sum(overlap_s(section, span) for section in self._sections)

    def pauses(self) -> list[Span]:
        """In which the run stood still because somebody asked for it. While the syncer is away it still does."""
        return self._pauses

    def _find_pauses(self) -> Iterator[Span]:
        for number, reign in enumerate(self.reigns):
            for begin, end in reign.pauses:
                if end == reign.last and reign.is_paused:
                    later = next((r.first for r in self.reigns[number + 1 :] if r.first is not None), self.to)
                    end = max(end, later)
                yield begin, end

    def is_paused(self, at: float) -> bool:
        return any(begin <= at <= end for begin, end in self._pauses)

    def goodput(self, at: float = float("inf")) -> float | None:
        """Share of the islands' time, in which they should have trained, that was spent in steps."""
        whole = in_steps = 0.0
        for learner in self._asked():
            span = self.span_of(learner, at)
            if span is not None:
                allocated_s = self._counted_s(span)
                whole += allocated_s
                in_steps += stepping_s(self.lives_of(learner), span, allocated_s)
        return in_steps / whole if whole > 0 else None

    def uptime(self, at: float = float("inf")) -> float | None:
        """Share of the time in which at least one island was in steps."""
        whole_s = self.wall_s(at)
        if self._since is None or whole_s <= 0.0:
            return None
        end = min(at, self._ended)
        lives = (life for learner in self.learners() for life in self.lives_of(learner))
        return min(1.0, covered_s((s for life in lives for s in life.all_spells(end)), (self._since, end)) / whole_s)

    def _asked(self) -> Iterable[int]:
        return sorted({*self.learners(), *range(1, self.asked_for + 1)})

    def merges(self, begin: float, end: float) -> Iterator[Merge]:
        for reign in self.reigns:
            yield from reign.merges.between(begin, end)

    def merges_until(self, at: float) -> int:
        return sum(reign.merges.until(at) for reign in self.reigns)

    def newest_merges(self, at: float, count: int) -> list[Merge]:
        """The last so many before this moment, newest first."""
        found: list[Merge] = []
        for reign in reversed(self.reigns):
            if count > 0:
                newest = reign.merges.newest(at, count)
                count -= sum(each.stands_for for each in newest)
                found += newest
        return found

    # ---------------------------------------------------------------------------------------------------- islands

    def standing(self, learner: int, at: float) -> Standing | None:
        """In the eyes of the syncer that reigned then."""
        for reign in reversed(self.reigns):
            if reign.first is None or reign.first > at:
                continue
            track = reign.standings.get(learner, [])
            index = bisect_right(track, at, key=lambda each: each.at)
            if index:
                return track[index - 1]
        return None

    def is_on(self, learner: int, life: Life) -> bool:
        """Its process is there as far as anybody knows: between two steps its tape says nothing.

        The syncer knows a learner as away whose link is cut; then its own tape goes on. What a syncer knows from before
        its restart says nothing.
        """
        last = self.standing(learner, self.to)
        if last is None or last.incarnation != life.incarnation:
            return False
        if last.standing in ("live", "suspect", "joining"):
            return True
        if self.to - life.last > max(LINGERS_S, 3 * (self.usual_step_s(learner, self.to) or 0.0)):
            return False
        restored = any(last is reign.standings[learner][0] for reign in self.reigns[1:] if learner in reign.standings)
        return last.standing == "away" and (restored or life.last >= last.at)

    def span_of(self, learner: int, at: float = float("inf")) -> Span | None:
        """In which it should have trained, until then; None where it had not come, and nobody had asked for it.

        From the moment at which anybody may train, or from when it came if it was added later; until the end of the
        run, or until it left for good. docs/accounting.md has it in words.
        """
        lives, since = self.lives_of(learner), self._since
        if since is None or (not lives and learner > self.asked_for):
            return None
        end = min(at, self._ended)
        if not lives:
            return max(since, self._section(self._ended)[0]), end
        first = lives[0].first
        if learner <= self.asked_for:
            begin = max(since, self._section(first)[0])
        elif first > at:
            return None
        else:
            begin = max(since, first)
            if self.asked_for:  # a job that was resumed with fewer does not ask for it any more
                end = min(end, self._section(max(life.until for life in lives))[1])
        last = self.standing(learner, at)
        if last is not None and last.standing == "left":
            end = min(end, last.at, max((life.last for life in lives if life.first <= at), default=end))
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
    ) -> Shares | None:
        """Where its time went until then."""
        span = self.span_of(learner, at)
        if span is None:
            return None
        pauses = [found for found in (clip(pause, span) for pause in self._pauses) if found is not None]
        return shares_of(
            learner,
            self.lives_of(learner),
            span,
            list(stops),
            pauses,
            waited_s,
            copied_s,
            self._counted_s(span),
        )

    def progress_of(self, learner: int, at: float) -> tuple[int, float]:
        """Steps of its newest process, and tokens of all, by then."""
        steps, tokens = 0, 0.0
        for life in self.lives_of(learner):
            if life.first > at:
                break
            steps = life.log.steps_until(at)
            tokens += life.log.tokens_until(at)
        return steps, tokens

    def tokens_until(self, at: float) -> float:
        found = 0.0
        for learner in self._learners:
            for life in self.lives_of(learner):
                if life.first <= at:
                    found += life.log.tokens_until(at)
        return found

    def usual_step_s(self, learner: int, at: float) -> float | None:
        """The median of its last steps."""
        for life in reversed(self.lives_of(learner)):
            usual_s = life.log.usual_s(at)
            if usual_s is not None:
                return usual_s
        return None

    def moment_of(self, learner: int, incarnation: int, step: int | None, at: float) -> float:
        """When a process said something, of which its clock says `at`: that clock may be wrong, and may have jumped.

        `step`: what it had taken by then, of which its tape knows when.
        """
        life = next((each for each in self.lives.get(learner, ()) if each.incarnation == incarnation), None)
        if life is None:
            return at
        at -= life.lead_s
        row = bisect_left(life.log.steps, step) if step is not None else len(life.log)
        if row == len(life.log):  # its tape is not as far
            begin, end = life.last, max(life.until, self.to)
        else:
            begin, end = life.log.begins[row], life.log.ends[row]
        return at if begin - CLOCKS_S <= at <= end + CLOCKS_S else end

    def lead_of(self, learner: int, incarnation: int) -> float:
        """By which the clock of a process is ahead."""
        return next((life.lead_s for life in self.lives.get(learner, ()) if life.incarnation == incarnation), 0.0)


def _note(times: dict[tuple[int, int], dict[int, float]], process: tuple[int, int], tick: int, at: float) -> None:
    """Some of the first ticks of a process, and some of the newest."""
    known = times.get(process)
    if known is None:
        known = times[process] = {}
    known[tick] = at
    if len(known) > 2 * COMPARED:
        del known[next(islice(known, COMPARED, None))]


def asked_for(run: Path) -> int:
    """Learners that the job on this machine was told to start; 0 where nobody said."""
    try:
        told = json.loads((run / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    learners = told.get("learners") if isinstance(told, dict) else None
    return learners if type(learners) is int else 0


def read_books(run: Path, keep: int | None = KEEP) -> Books:
    """From all tapes of a run; they may be cut short."""
    books, tapes = Books(keep), RunTapes(run)
    books.here = set(tapes.learners())
    for actor, reader in tapes.readers.items():  # syncers first
        if actor.learner == SYNCER:
            reign = books.new_reign(reader.header)
            for entry in reader:
                books.take_syncer(reign, entry)
            books.end_reigns()
        else:
            for entry in reader:
                books.take_learner(actor.learner, actor.start, entry)
    books.asked_for = asked_for(run) if books.lives else 0
    books.settle()
    return books
