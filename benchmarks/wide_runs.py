"""Real runs on sites far from each other, for the benchmarks of the wide network.

Where there is root and TUN, every learner is in a network namespace behind a link of the emulated wide network
(`benchmarks/wan.py`), and the syncer is in this machine's own namespace behind a link without a rate: `--star` in the
words of `atoll plan`. Elsewhere every learner's link to the syncer is a relay, which is enough for decoupled runs only:
the other methods join learners to each other.

Half of a path's delay is of the link at each of its ends, so that all paths have the same delay: learner to syncer, and
learner to learner. Links are wide while processes start and the model is handed out, and take their shape when every
learner trains, unless a run asks for it from the beginning.

A run is watched by the lines of its metrics and by counts of bytes, and ended from outside when enough was seen.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from atoll.chaos.netns import enter_namespace
from atoll.chaos.relay import Relay, Relays
from atoll.checkpoint.published_model import read_run_settings
from atoll.core.protocol import LogReason, MessageArrived, Persist, Persisted, PublishAck, VersionRecord
from atoll.core.types import SYNCER
from atoll.dashboard.terminal import LiveView
from atoll.launch.supervisor import signal_name
from atoll.reference.baselines import RENDEZVOUS_FILE, train_baseline
from atoll.reference.child_processes import (
    EXIT_OK,
    ChildProcess,
    JobFailedError,
    fork_server_context,
    terminate_all,
    wait_for_any,
)
from atoll.reference.job_settings import JobSettings, Method
from atoll.reference.learner_main import train_learner
from atoll.reference.loop import newest_metrics, read_metrics
from atoll.reference.supervisor import Supervisor
from atoll.store.run_settings import CONFIG_FILE
from atoll.tape.files import RunTapes
from atoll.tensors.settings import Numerics
from benchmarks import wan
from benchmarks.wan import Link, Wan

POLL_INTERVAL_S = 0.25
TRAFFIC_INTERVAL_S = 0.5
EXIT_TIMEOUT_S = 8.0
WARMUP_STEPS = 2  # by everybody, before links take their shape
START_TIMEOUT_S = 180.0
MAX_STEP_RATIO = 1.1
"""Times a step, from one step's end to the next one's, where nothing was waited for in between."""
ENDLESS_TOKENS = 10**12
RESULTS = Path(__file__).resolve().parent / "results"
SUSPICION_CODES = ("member-suspected", "member-timed-out", "member-quarantined", "admission-failed")


class LinkParameters(NamedTuple):
    """Of every learner's link. `delay_s`: of a path, one way."""

    rate_bit_s: float | None
    delay_s: float = 0.0
    loss: float = 0.0

    def __str__(self) -> str:
        rate = "no limit" if self.rate_bit_s is None else f"{self.rate_bit_s / 1e6:.3g} Mbit/s"
        return f"{rate}, {2e3 * self.delay_s:.0f} ms there and back, {self.loss:.1%} lost"


UNSHAPED = LinkParameters(None)


class ByteCounts(NamedTuple):
    """Bytes of one learner's link so far."""

    sent: int
    received: int


class Links(Protocol):
    """How learners reach the syncer and each other."""

    host: str  # where the syncer listens

    def namespace(self, learner: int) -> Path | None: ...

    def device(self) -> str:
        """Of a learner, by which it reaches the others."""

    def address(self, learner: int, syncer: str) -> str:
        """Under which this learner reaches the syncer."""

    def apply(self, wanted: LinkParameters) -> None: ...

    def byte_counts(self) -> list[ByteCounts]:
        """Return the counts by learner, from the first on; empty if the links do not count."""

    def close(self) -> None: ...


class LoopbackLinks:
    """No links: all processes are beside each other."""

    host = "127.0.0.1"

    def namespace(self, learner: int) -> Path | None:
        return None

    def device(self) -> str:
        return "lo"

    def address(self, learner: int, syncer: str) -> str:
        return syncer

    def apply(self, wanted: LinkParameters) -> None:
        pass

    def byte_counts(self) -> list[ByteCounts]:
        return []

    def close(self) -> None:
        pass


class WanLinks(LoopbackLinks):
    """The emulated wide network. `seed` draws its losses."""

    def __init__(self, learners: int, seed: int = 0) -> None:
        self.wan = Wan(learners, seed=seed)
        self.host = self.wan.address(0)

    def namespace(self, learner: int) -> Path | None:
        return self.wan.namespace(learner)

    def device(self) -> str:
        return wan.DEVICE

    def apply(self, wanted: LinkParameters) -> None:
        half_s = wanted.delay_s / 2
        self.wan.set_link(0, Link(delay_s=half_s))
        for site in range(1, self.wan.sites + 1):
            self.wan.set_link(site, Link(wanted.rate_bit_s, wanted.rate_bit_s, half_s, wanted.loss))

    def byte_counts(self) -> list[ByteCounts]:
        return [ByteCounts(each.up.bytes, each.down.bytes) for each in self.wan.traffic()[1:]]

    def close(self) -> None:
        self.wan.close()


class RelayLinks(LoopbackLinks):
    """A relay for each learner: rates and delays, no losses."""

    def __init__(self) -> None:
        self._relays = Relays()
        self._by_learner: dict[int, Relay] = {}
        self._shape = UNSHAPED

    def address(self, learner: int, syncer: str) -> str:
        self._by_learner[learner] = self._relays.open(syncer)
        self.apply(self._shape)
        return self._by_learner[learner].address

    def apply(self, wanted: LinkParameters) -> None:
        self._shape = wanted
        for relay in self._by_learner.values():
            relay.throttle(None if wanted.rate_bit_s is None else wanted.rate_bit_s / 8)
            relay.delay(wanted.delay_s)

    def byte_counts(self) -> list[ByteCounts]:
        counts = [self._by_learner[learner].counts() for learner in sorted(self._by_learner)]
        return [ByteCounts(each.up_bytes, each.down_bytes) for each in counts]

    def close(self) -> None:
        self._relays.close()


@contextlib.contextmanager
def open_links(learners: int, seed: int = 0) -> Iterator[Links]:
    """The best emulation that this machine has; `emulation` says which."""
    links: Links = RelayLinks() if wan.unavailable_reason() is not None else WanLinks(learners, seed)
    try:
        yield links
    finally:
        links.close()


def describe_emulation() -> str:
    why_not = wan.unavailable_reason()
    if why_not is None:
        return (
            "network namespaces with TUN devices and a router in user space, MTU 1500,"
            f" TCP with {wan.congestion_control()}; the syncer in a site of its own without a limit of rate"
        )
    return f"relays in user space, no losses, decoupled only: a wide network cannot be made here ({why_not})"


# --------------------------------------------------------------------------------------------------------------------
# Watching


class StepSample(NamedTuple):
    """One line of a learner's metrics: so many steps were done then."""

    at: float  # seconds of the Unix epoch
    step: int


def read_step_samples(lines: list[dict[str, Any]]) -> list[StepSample]:
    """Of every step where a line is of several that followed each other; where they waited in between, of its last."""
    found: list[StepSample] = []
    for line in lines:
        at, step = line["at"], line["step"]
        count = step - found[-1].step if found else 1
        each_s = (at - found[-1].at) / count if found else 0.0
        if each_s <= MAX_STEP_RATIO * line["step_s"]:
            found += [StepSample(at - back * each_s, step - back) for back in range(count - 1, 0, -1)]
        found.append(StepSample(at, step))
    return found


@dataclass(slots=True)
class ObservedRun:
    """What a run has shown. Times are seconds of the Unix epoch."""

    run: Path
    learners: int
    shaped_at: float = 0.0
    ended_at: float = math.inf
    counts: list[tuple[float, list[ByteCounts]]] = field(default_factory=list)

    def step_samples(self, learner: int) -> list[StepSample]:
        """Since the links have their shape."""
        found = read_step_samples([line for line in read_metrics(self.run, learner) if "step" in line])
        return [mark for mark in found if self.shaped_at <= mark.at <= self.ended_at]

    def span(self, skip: int, whole: int = 1) -> dict[int, tuple[StepSample, StepSample]]:
        """By learner: its steps since the links have their shape, without the first `skip`; a multiple of `whole`.

        However they lie, `whole` steps in a row have one exchange in them where there is one every `whole` steps.
        """
        found = {}
        for learner in range(1, self.learners + 1):
            marks = self.step_samples(learner)
            if not marks:
                raise RuntimeError(f"learner {learner} took no step once its link was as it should be")
            pairs = [
                (first, last)
                for first, last in itertools.combinations(marks, 2)
                if first.step >= marks[0].step + skip and (last.step - first.step) % whole == 0
            ]
            if not pairs:
                raise RuntimeError(f"learner {learner} took too few steps to measure: {len(marks)} lines")
            found[learner] = max(pairs, key=lambda pair: pair[1].step - pair[0].step)
        return found

    def step_s(self, skip: int, whole: int = 1) -> float:
        """Mean time of a step, over all learners."""
        spans = self.span(skip, whole).values()
        return statistics.fmean((last.at - first.at) / (last.step - first.step) for first, last in spans)

    def steps(self, skip: int, whole: int = 1) -> float:
        return statistics.fmean(last.step - first.step for first, last in self.span(skip, whole).values())

    def work_s(self) -> float:
        """Of a step, without the wait for its pace or for others: the median of the quicker half of all lines."""
        lines: list[float] = [
            line["work_s"] for n in range(1, self.learners + 1) for line in read_metrics(self.run, n)[1:-1]
        ]
        return statistics.median(sorted(lines)[: max(1, len(lines) // 2)])

    def bytes_per_s(self, skip: int, whole: int = 1) -> ByteCounts | None:
        """Of one learner's link on average, over the same time as its steps."""
        if not self.counts or not self.counts[0][1]:
            return None
        sent, received = [], []
        for learner, (first, last) in self.span(skip, whole).items():
            begin, end = (self._bytes_at(mark.at, learner) for mark in (first, last))
            sent.append((end.sent - begin.sent) / (last.at - first.at))
            received.append((end.received - begin.received) / (last.at - first.at))
        return ByteCounts(round(statistics.fmean(sent)), round(statistics.fmean(received)))

    def _bytes_at(self, at: float, learner: int) -> ByteCounts:
        times = [time_ for time_, _ in self.counts]
        place = min(max(bisect_left(times, at), 1), len(times) - 1)
        (t0, before), (t1, after) = self.counts[place - 1], self.counts[place]
        share = min(max((at - t0) / max(t1 - t0, 1e-9), 0.0), 1.0)
        one, two = before[learner - 1], after[learner - 1]
        return ByteCounts(
            round(one.sent + share * (two.sent - one.sent)),
            round(one.received + share * (two.received - one.received)),
        )


class RunWatch:
    """Looks at a run again and again: when to shape its links, and when enough was seen."""

    def __init__(
        self,
        name: str,
        seen: ObservedRun,
        links: Links,
        plan: list[tuple[LinkParameters, int]],
        limit_s: float,
        from_the_start: bool = False,
    ) -> None:
        """`plan`: shapes one after the other, each for so many steps of everybody."""
        self.name = name
        self.seen = seen
        self.shaped: list[tuple[float, LinkParameters]] = []
        self._links = links
        self._plan = list(plan)
        self._started_at = time.monotonic()
        self._limit_s = limit_s
        self._until: int | None = None  # steps that every learner must have taken
        self._counted = 0.0
        self._logged_at = 0.0
        links.apply(plan[0][0] if from_the_start else UNSHAPED)

    def is_enough(self) -> bool:
        now = time.monotonic()
        steps = self._min_steps()
        self._sample_traffic(now)
        self._log_progress(now, steps)
        if now - self._started_at > self._limit_s + (START_TIMEOUT_S if self._until is None else 0.0):
            if self._until is None:
                raise JobFailedError(f"{self.name}: not all learners train after {now - self._started_at:.0f} s")
            return self._finish_part()
        if steps < (WARMUP_STEPS if self._until is None else self._until):
            return False
        if self._until is None:
            self._started_at = now
        if not self._plan:
            return self._finish_part()
        wanted, count = self._plan.pop(0)
        self._links.apply(wanted)
        at = time.time()
        self.seen.shaped_at = self.seen.shaped_at or at
        self.shaped.append((at, wanted))
        self._until = steps + count
        log_progress(f"  {self.name}: {wanted}, for {count} steps")
        return False

    def observations(self) -> list[tuple[LinkParameters, ObservedRun]]:
        """What was seen under each shape."""
        ends = [at for at, _ in self.shaped[1:]] + [self.seen.ended_at]
        return [
            (shape, replace(self.seen, shaped_at=at, ended_at=end))
            for (at, shape), end in zip(self.shaped, ends, strict=True)
        ]

    def _finish_part(self) -> bool:
        self._sample_traffic(math.inf)
        self.seen.ended_at = time.time()
        return True

    def _min_steps(self) -> int:
        lines = [newest_metrics(self.seen.run, n) for n in range(1, self.seen.learners + 1)]
        return min(line.get("step", 0) if line is not None else 0 for line in lines)

    def _sample_traffic(self, now: float) -> None:
        if now - self._counted >= TRAFFIC_INTERVAL_S:
            self._counted = now
            self.seen.counts.append((time.time(), self._links.byte_counts()))

    def _log_progress(self, now: float, steps: int) -> None:
        if now - self._logged_at >= 15.0:
            self._logged_at = now
            log_progress(
                f"  {self.name}: {steps} steps" + (f" of {self._until}" if self._until is not None else ", starting")
            )


def log_progress(sentence: str) -> None:
    """Progress is for people; figures go to standard output."""
    print(sentence, file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------------------------
# Running


class _MeasurementDone(Exception):  # noqa: N818 - the end that was planned
    pass


class _WanSupervisor(Supervisor):
    def __init__(self, settings: JobSettings, run: Path, links: Links, watch: RunWatch | None) -> None:
        self._links = links
        self._watch = watch
        view = LiveView(io.StringIO())
        super().__init__(settings, run, view, "", links.host)

    def _learner_child(self, learner: int) -> ChildProcess:
        address = self._links.address(learner, self.address)
        args = (self._links.namespace(learner), self.settings, learner, address, self._token, self.run)
        return ChildProcess(f"learner {learner}", self.run, run_site_learner, args)

    def _inject_due(self) -> None:
        if self._watch is not None and self._watch.is_enough():
            raise _MeasurementDone


def run_site_learner(
    namespace: Path | None, settings: JobSettings, learner: int, syncer: str, token: str, run: Path
) -> None:
    """In the child."""
    if namespace is not None:
        enter_namespace(namespace)
    train_learner(settings, learner, f"http://{syncer}", token, run)  # nothing of it leaves this machine


def run_site_baseline(namespace: Path | None, device: str, settings: JobSettings, learner: int, run: Path) -> None:
    """In the child."""
    if namespace is not None:
        enter_namespace(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = device
    train_baseline(settings, learner, run)


def run_job(settings: JobSettings, run: Path, links: Links, watch: RunWatch | None) -> None:
    """Until the watch has seen enough; without one to the end of the budget."""
    run.mkdir(parents=True)
    settings.save(run / CONFIG_FILE)
    if settings.method == "decoupled":
        with contextlib.suppress(_MeasurementDone):
            _WanSupervisor(settings, run, links, watch).train()
        return
    numbers = range(1, settings.learners + 1)
    children = [
        ChildProcess(f"learner {n}", run, run_site_baseline, (links.namespace(n), links.device(), settings, n, run))
        for n in numbers
    ]
    context = fork_server_context()
    try:
        for child in children:
            child.start(context)
        running = list(children)
        while running and not (watch is not None and watch.is_enough()):
            wait_for_any(running, POLL_INTERVAL_S)
            for child in list(running):
                code = child.poll_exit_code()
                if code is not None:
                    running.remove(child)
                    if code != EXIT_OK:
                        raise JobFailedError(f"{child.name} ended with {signal_name(code)}: {child.last_log_line()}")
    finally:
        terminate_all(children, EXIT_TIMEOUT_S)
        (run / RENDEZVOUS_FILE).unlink(missing_ok=True)


def run_observed(
    name: str,
    settings: JobSettings,
    run: Path,
    links: Links,
    plan: list[tuple[LinkParameters, int]],
    limit_s: float,
    from_the_start: bool = False,
) -> RunWatch:
    """A run that is ended when the plan is over, or after `limit_s` seconds in which all train."""
    watch = RunWatch(name, ObservedRun(run, settings.learners), links, plan, limit_s, from_the_start)
    run_job(settings, run, links, watch)
    return watch


# --------------------------------------------------------------------------------------------------------------------
# What the tapes say


class Suspicion(NamedTuple):
    at: float  # seconds of the Unix epoch
    learner: int
    sentence: str


class RoundStats(NamedTuple):
    """Of a decoupled run between two moments."""

    merges: int
    contributions: int
    longest_pause_s: float  # without a merge
    delivered: dict[int, int]  # published versions that arrived, by learner
    suspicions: list[Suspicion]  # of learners that were there all the time

    def effective_h(self, steps: float, fragments: int) -> float:
        """Steps between two merges of a fragment."""
        return steps * fragments / max(self.merges, 1)

    def effective_h_of_each(self, steps: float, fragments: int, learners: int) -> float:
        """Steps between two merges of a fragment that a learner is in: more, where some come too late."""
        return steps * fragments * learners / max(self.contributions, 1)


def read_rounds(run: Path, begin: float, end: float) -> RoundStats:
    """`begin` and `end`: seconds of the Unix epoch."""
    kept = read_run_settings(run)
    assert kept is not None
    begin, end = begin - kept.founded_at, end - kept.founded_at
    delivered: dict[int, int] = {}
    suspicions: list[Suspicion] = []
    merges: list[tuple[float, int]] = []  # when a version became durable, and how many contributions it has
    for actor, reader in RunTapes(run).readers.items():
        if actor.learner != SYNCER:
            continue
        waiting: dict[int, VersionRecord] = {}
        for entry in reader:
            event = entry.event
            if type(event) is Persisted and event.key.kind == "version":
                merges.append((entry.at, len(waiting.pop(event.key.number).contributions)))
            elif type(event) is MessageArrived and type(event.envelope.body) is PublishAck and begin <= entry.at <= end:
                delivered[event.envelope.learner] = delivered.get(event.envelope.learner, 0) + 1
            for effect in entry.effects:
                if type(effect) is Persist and type(effect.record) is VersionRecord:
                    waiting[effect.record.fragment] = effect.record
                elif type(effect) is LogReason and effect.reason.code in SUSPICION_CODES and begin <= entry.at <= end:
                    at = entry.at + kept.founded_at
                    suspicions.append(Suspicion(at, effect.subject[1], str(effect.reason)))
    merges = [merge for merge in sorted(merges) if begin <= merge[0] <= end]
    moments = [begin, *(at for at, _ in merges), end]
    return RoundStats(
        merges=len(merges),
        contributions=sum(count for _, count in merges),
        longest_pause_s=max(after - before for before, after in itertools.pairwise(moments)),
        delivered=dict(sorted(delivered.items())),
        suspicions=suspicions,
    )


def fragment_count(run: Path) -> int:
    return len(RunTapes(run).config.fragment_ids())


def paced_job(method: Method, **wanted: Any) -> JobSettings:
    """A job without an end whose steps are paced and small, so that two cores carry all islands."""
    codec = wanted.pop("codec", "int4")
    values: dict[str, Any] = {"batch": 1, "tokens": ENDLESS_TOKENS, "inner": "adamw", "lr": 1e-3, "evaluations": 0}
    return JobSettings(method=method, numerics=Numerics(up=codec, down=codec), **{**values, **wanted})


def append_results(path: Path, lines: list[dict[str, Any]], where: dict[str, Any]) -> None:
    """Append figures to a file of results, each line with when, where and by which command."""
    given = [word for before, word in itertools.pairwise(["", *sys.argv[1:]]) if "--results" not in (before, word)]
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *given])
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps({**where, "command": command, "emulation": describe_emulation(), **line}) + "\n")
