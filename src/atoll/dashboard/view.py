"""A run as JSON, in the format of docs/dash.md. Unknown values are null."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any, NamedTuple

from atoll.dashboard.alerts import evaluate_alerts
from atoll.dashboard.run_history import LATE_JOIN_S, RECENT_MERGES, STALE_AFTER_S, RunHistory
from atoll.tape.bounded_logs import MergeRow
from atoll.tape.syncer_tenures import SyncerSample
from atoll.tape.time_shares import TimeShares

TRAINING_STATES = ("training", "alone", "suspected")
MAX_ROUNDS = 2000
"""Maximum number of rounds of a timeline. If there are more, neighboring ones are combined."""


class TimelineMark(NamedTuple):
    """Event on the timeline."""

    at: float
    subject: str
    kind: str
    text: str


def view_at(history: RunHistory, at: float | None = None) -> dict[str, Any]:
    """Return the state of the run at a time on its clock. None means now."""
    now = at is None or at >= history.newest_at
    when = history.newest_at if at is None else min(max(at, history.started_at), history.newest_at)
    sample = history.sample_at(None if now else when)
    live = now and is_live(history, sample)
    span_s = history.rate_window_s(when)
    fragments = len(history.config.fragment_ids()) if history.config is not None else 1
    recent = history.newest_merges(when, RECENT_MERGES * fragments)
    islands = [_island(history, learner, when, sample, span_s, recent) for learner in _known_learners(history, when)]
    _add_speeds(islands)
    return {
        "at": when,
        "wall0": history.wall0,
        "from": history.started_at,
        "to": history.newest_at,
        "now": now,
        "sample_age_s": when - sample.at if sample is not None else None,
        "live": live,
        "age_s": _age_s(history) if live else None,
        "loading": history.loading_progress(),
        "tape_errors": history.tape_errors,
        "stage": sample.view.stage if sample is not None else "waiting",
        "progress": sample.view.progress if sample is not None else 0.0,
        "paused": history.is_paused(when),
        "headline": _headline(history, when, sample, islands, span_s, recent),
        "syncer": _syncer(history, when, live),
        "islands": islands,
        "fragments": [] if sample is None else _fragments(sample, when),
        "ledger": None if sample is None else sample.ledger._asdict() | {"balanced": sample.is_balanced},
        "alerts": [each._asdict() for each in evaluate_alerts(history, when, sample, islands, live)],
    }


def is_live(history: RunHistory, sample: SyncerSample | None) -> bool:
    """Return whether the run is probably still being written."""
    if history.simulated or history.files.report is not None:
        return False
    return sample is None or sample.view.stage != "finished"


def _age_s(history: RunHistory) -> float | None:
    return history.age_s() if history.wall0 is not None else None


def _known_learners(history: RunHistory, at: float) -> list[int]:
    """Return the learners that had joined, or had written a tape entry, by that time."""
    known = []
    for learner in history.learners():
        processes = history.processes_of(learner)
        if history.member_state(learner, at) is not None or (processes and processes[0].first_entry_at <= at):
            known.append(learner)
    return known


# --------------------------------------------------------------------------------------------------------------------
# Parts of the view


def _headline(
    history: RunHistory,
    at: float,
    sample: SyncerSample | None,
    islands: list[dict[str, Any]],
    span_s: float,
    recent: list[MergeRow],
) -> dict[str, Any]:
    view = sample.view if sample is not None else None
    done = history.tokens_until(at)
    per_s = (done - history.tokens_until(at - span_s)) / span_s if at > history.started_at else None
    known = [each for each in islands if each["loss"] is not None]
    # After the end of a run no learner trains. The loss of the run is then the mean of the last losses of all learners.
    training = [each for each in known if each["state"] in TRAINING_STATES]
    losses = [each["loss"] for each in training or known]
    budget = history.config.budget_tokens if history.config is not None else None
    remaining_s = None
    if budget is not None and per_s and view is not None and view.stage == "running":
        remaining_s = max(0.0, budget - view.trained) / per_s
    return {
        "loss": fmean(losses) if losses else None,
        "tokens": int(done),
        "tokens_per_s": per_s,
        "goodput": history.goodput(at),
        "uptime": history.uptime(at),
        "derived": any(each["derived"] for each in islands),
        "alive": view.alive if view is not None else None,
        "pulled": _mean(recent, "pulled"),
        "merged": _mean(recent, "merged"),
        "learners": len(islands),
        "bytes_up_per_s": history.rate("bytes_up", at, span_s),
        "bytes_down_per_s": history.rate("bytes_down", at, span_s),
        # mean steps of a contributor since its previous merge of the same fragment
        "effective_h": _mean([m for m in recent if m.contributors], "steps"),
        "remaining_s": remaining_s,
        "merges": history.merges_until(at),
        "rounds_in_flight": view.rounds_in_flight if view is not None else None,
        "quorum": sample.quorum if sample is not None else None,
        "grace_margin": sample.grace_margin if sample is not None else None,
    }


def _mean(merges: list[MergeRow], name: str) -> float | None:
    """Return the mean over all merges. A row can stand for several merges."""
    count = sum(m.merge_count for m in merges)
    return sum(getattr(m, name) * m.merge_count for m in merges) / count if count else None


def _island(
    history: RunHistory, learner: int, at: float, sample: SyncerSample | None, span_s: float, recent: list[MergeRow]
) -> dict[str, Any]:
    band = history.current_state(learner, at)
    member = sample.members.get(learner) if sample is not None else None
    step, tokens = history.progress(learner, at)
    per_s = (tokens - history.progress(learner, at - span_s)[1]) / span_s
    shares = history.reported_time_shares(learner, at)
    trains = band.state in TRAINING_STATES
    return {
        "learner": learner,
        "state": band.state,
        "since": band.begin,
        "incarnation": member.incarnation if member is not None else None,
        "step": step,
        "tokens": int(tokens),
        "tokens_per_s": per_s if trains else 0.0,
        "step_s": history.typical_step_s(learner, at) if trains else None,
        "speed": None,
        "loss": history.metrics.value("loss", learner, at),
        "link": _link(member.state if member is not None else None, band.state),
        "staleness_s": _staleness_s(learner, at, sample),
        "weight": _weight(learner, recent),
        "derived": history.is_derived(learner),
        "goodput": shares.goodput if shares is not None else None,
        "time_split": time_split(shares) if shares is not None else None,
        "reason": member.reason if member is not None else None,
        "log_tail": _log_tail(history, learner, at, band.state),
    }


def _add_speeds(islands: list[dict[str, Any]]) -> None:
    steps = [each["step_s"] for each in islands if each["step_s"]]
    median_s = median(steps) if steps else None
    for each in islands:
        if median_s and each["step_s"]:
            each["speed"] = median_s / each["step_s"]


def time_split(shares: TimeShares) -> dict[str, float]:
    """Return the seconds that a learner spent in each activity."""
    return {
        "stepping": shares.stepping_s,
        "waiting": shares.waiting_s,
        "copying": shares.copying_s + shares.between_s,
        "recovering": shares.joining_s,
        "paused": shares.paused_s + shares.stopped_s,
        "gone": shares.away_s,
    }


def _link(member_state: str | None, state: str) -> str | None:
    if state == "alone":
        return "down"
    if member_state is None:
        return None
    return "up" if member_state in ("live", "suspect", "joining", "admitting") else "down"


def _staleness_s(learner: int, at: float, sample: SyncerSample | None) -> float | None:
    """Return the time since the last merge with a contribution of this learner."""
    merged_at = sample.merged_with.get(learner) if sample is not None else None
    return at - merged_at if merged_at is not None else None


def _weight(learner: int, recent: list[MergeRow]) -> float | None:
    """Return the mean weight of a learner in recent merges; a merge without it counts as weight 0."""
    if not recent:
        return None
    weighted = count = 0.0
    for merge in recent:
        count += merge.merge_count
        for (contributor, _), weight in zip(merge.contributors, merge.weights, strict=True):
            weighted += weight * merge.merge_count if contributor == learner else 0.0
    return weighted / count


def _log_tail(history: RunHistory, learner: int, at: float, state: str) -> str | None:
    """Return the end of the log of the learner's last exited process, while no new process has started."""
    if state not in ("gone", "recovering", "quarantined"):
        return None
    exits = [fault for fault in history.files.faults if fault.process == f"learner {learner}" and fault.at <= at]
    if not exits:
        return None
    is_restarted = any(process.first_entry_at > exits[-1].at for process in history.processes_of(learner))
    tail = None if is_restarted else history.files.log_tail(exits[-1].process)  # a new process appends to the log
    return f"{exits[-1].cause} at {exits[-1].at:.1f} s" + (f": {tail}" if tail else "")


def _syncer(history: RunHistory, at: float, live: bool) -> dict[str, Any]:
    bands = [band for band in syncer_bands(history, live) if band[0] <= at]
    state = bands[-1][2] if bands else "down"
    tenures = [
        tenure for tenure in history.tenures if tenure.first_entry_at is not None and tenure.first_entry_at <= at
    ]
    epoch = tenures[-1].epoch if tenures else None
    return {"state": state, "epoch": epoch, "since": bands[-1][0] if bands else history.started_at}


def syncer_bands(history: RunHistory, live: bool) -> list[list[Any]]:
    """Return spans of the syncer as [begin, end, state]. It is up from the first to the last entry of each process."""
    bands: list[list[Any]] = []
    for number, tenure in enumerate(history.tenures):
        if tenure.first_entry_at is None:
            continue
        if bands and tenure.first_entry_at > bands[-1][1]:
            bands.append([bands[-1][1], tenure.first_entry_at, "down"])
        end = tenure.last_entry_at
        is_newest = number == len(history.tenures) - 1
        age_s = _age_s(history) if live and is_newest else None
        if is_newest and (not live or age_s is None or age_s < STALE_AFTER_S):
            end = max(end, history.newest_at)
        bands.append([tenure.first_entry_at, end, "up"])
        if is_newest and end < history.newest_at:
            bands.append([end, history.newest_at, "down"])
    return bands


def _fragments(sample: SyncerSample, at: float) -> list[dict[str, Any]]:
    return [
        {
            "fragment": each.fragment,
            "version": each.version,
            "phase": each.phase,
            "unavailable": each.unavailable,
            "age_s": at - sample.merged_at[each.fragment] if each.fragment in sample.merged_at else None,
            "contributors": list(each.last_contributors),
            "pulled": each.pulled,
            "contributions": each.contributions,
            "waiting_for": list(each.waiting_for),
            "reason": each.reason,
        }
        for each in sample.fragments
    ]


# --------------------------------------------------------------------------------------------------------------------
# Timeline


def timeline(history: RunHistory, begin: float | None, end: float | None, width: int) -> dict[str, Any]:
    """Return the timeline between two times; None means the start or the end of the run.

    `width` limits the number of rounds, as in `rounds`.
    """
    begin = history.started_at if begin is None else max(begin, history.started_at)
    end = history.newest_at if end is None else min(end, history.newest_at)
    live = is_live(history, history.sample_at(None))
    return {
        "from": begin,
        "to": end,
        "islands": [
            {"learner": learner, "bands": [list(band) for band in history.state_spans(learner, begin, end)]}
            for learner in history.learners()
        ],
        "syncer": [
            [max(b, begin), min(e, end), state] for b, e, state in syncer_bands(history, live) if e > begin and b < end
        ],
        "marks": [mark._asdict() for mark in timeline_marks(history) if begin <= mark.at <= end],
        "rounds": rounds(history, begin, end, min(max(width, 50), MAX_ROUNDS)),
    }


def rounds(history: RunHistory, begin: float, end: float, width: int) -> list[dict[str, Any]]:
    """Return the merges between two times. If there are more than `width`, neighboring ones are combined."""
    found = sorted(history.merges(begin, end), key=lambda merge: merge.at)
    if len(found) <= width:
        return [_round([merge]) for merge in found]
    span = (end - begin) / width or 1.0
    combined: dict[int, list[MergeRow]] = {}
    for merge in found:
        combined.setdefault(int((merge.at - begin) / span), []).append(merge)
    return [_round(each) for each in combined.values()]


def _round(merges: list[MergeRow]) -> dict[str, Any]:
    count = sum(m.merge_count for m in merges)
    return {
        "at": fmean(m.at for m in merges),
        "fragment": merges[0].fragment if count == 1 else None,
        "contributions": _mean(merges, "merged"),
        "pulled": _mean(merges, "pulled"),
        "alive": _mean(merges, "alive"),
        "count": count,
    }


def timeline_marks(history: RunHistory) -> list[TimelineMark]:
    """Return faults, restarts, joins and operator requests, from faults.jsonl and the tapes."""
    found = [
        TimelineMark(fault.at, fault.process, "killed" if fault.cause.startswith("SIG") else "failed", fault.cause)
        for fault in history.files.faults
    ]
    for learner in history.learners():
        subject = f"learner {learner}"
        for number, process in enumerate(history.processes_of(learner)):
            if number:
                found.append(
                    TimelineMark(
                        process.first_entry_at, subject, "restarted", f"incarnation {process.incarnation} starts"
                    )
                )
            elif history.tenures and process.first_entry_at > history.started_at + LATE_JOIN_S:
                found.append(TimelineMark(process.first_entry_at, subject, "joined", "new learner"))
        previous = ""
        for change in (each for tenure in history.tenures for each in tenure.member_states.get(learner, ())):
            if change.state != previous:  # a restarted syncer repeats the states that it has loaded
                kind = {"suspect": "suspected", "quarantined": "quarantined", "left": "left"}.get(change.state)
                if kind is not None:
                    found.append(TimelineMark(change.at, subject, kind, change.sentence or kind))
            previous = change.state
    for line in (line for tenure in history.tenures for line in tenure.controls):
        subject = "syncer" if line.subject[0] == "run" else f"{line.subject[0]} {line.subject[1]}"
        found.append(TimelineMark(line.at, subject, "control", line.sentence))
    for tenure in history.tenures[1:]:
        if tenure.first_entry_at is not None:
            found.append(
                TimelineMark(tenure.first_entry_at, "syncer", "syncer-restarted", f"epoch {tenure.epoch} starts")
            )
    return sorted(found)


def config_view(history: RunHistory) -> dict[str, Any]:
    """Return the configuration of the run, and its report once it exists."""
    config, stored = history.config, history.files.config
    if stored is None and config is not None:
        stored = {"run": config.run_id, "fragments": config.fragments, "every_steps": config.every_steps}
    return {"config": stored, "report": history.files.report}
