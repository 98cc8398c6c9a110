"""A picture as JSON, in the shapes of docs/dash.md. Figures that nobody knows are null."""

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
"""Of a timeline, drawn one by one."""


class TimelineMark(NamedTuple):
    at: float
    subject: str
    kind: str
    text: str


def view_at(picture: RunHistory, at: float | None = None) -> dict[str, Any]:
    """The run at a moment; None: now."""
    now = at is None or at >= picture.newest_at
    when = picture.newest_at if at is None else min(max(at, picture.started_at), picture.newest_at)
    sample = picture.sample_at(None if now else when)
    live = now and is_live(picture, sample)
    span_s = picture.rate_window_s(when)
    fragments = len(picture.config.fragment_ids()) if picture.config is not None else 1
    recent = picture.newest_merges(when, RECENT_MERGES * fragments)
    islands = [_island(picture, learner, when, sample, span_s, recent) for learner in _known_learners(picture, when)]
    _add_speeds(islands)
    return {
        "at": when,
        "wall0": picture.wall0,
        "from": picture.started_at,
        "to": picture.newest_at,
        "now": now,
        "sample_age_s": when - sample.at if sample is not None else None,
        "live": live,
        "age_s": _age_s(picture) if live else None,
        "loading": picture.loading_progress(),
        "tape_errors": picture.tape_errors,
        "stage": sample.view.stage if sample is not None else "waiting",
        "progress": sample.view.progress if sample is not None else 0.0,
        "paused": picture.is_paused(when),
        "headline": _headline(picture, when, sample, islands, span_s, recent),
        "syncer": _syncer(picture, when, live),
        "islands": islands,
        "fragments": [] if sample is None else _fragments(sample, when),
        "ledger": None if sample is None else sample.ledger._asdict() | {"balanced": sample.is_balanced},
        "alerts": [each._asdict() for each in evaluate_alerts(picture, when, sample, islands, live)],
    }


def is_live(picture: RunHistory, sample: SyncerSample | None) -> bool:
    """Somebody still writes it, as far as one can tell from here."""
    if picture.simulated or picture.files.report is not None:
        return False
    return sample is None or sample.view.stage != "finished"


def _age_s(picture: RunHistory) -> float | None:
    return picture.age_s() if picture.wall0 is not None else None


def _known_learners(picture: RunHistory, at: float) -> list[int]:
    """Learners that had come by then."""
    known = []
    for learner in picture.learners():
        processes = picture.processes_of(learner)
        if picture.member_state(learner, at) is not None or (processes and processes[0].first_entry_at <= at):
            known.append(learner)
    return known


# --------------------------------------------------------------------------------------------------------------------
# Parts


def _headline(
    picture: RunHistory,
    at: float,
    sample: SyncerSample | None,
    islands: list[dict[str, Any]],
    span_s: float,
    recent: list[MergeRow],
) -> dict[str, Any]:
    view = sample.view if sample is not None else None
    done = picture.tokens_until(at)
    per_s = (done - picture.tokens_until(at - span_s)) / span_s if at > picture.started_at else None
    known = [each for each in islands if each["loss"] is not None]
    training = [
        each for each in known if each["state"] in TRAINING_STATES
    ]  # none in a run that is over: what all ended with
    losses = [each["loss"] for each in training or known]
    budget = picture.config.budget_tokens if picture.config is not None else None
    remaining_s = None
    if budget is not None and per_s and view is not None and view.stage == "running":
        remaining_s = max(0.0, budget - view.trained) / per_s
    return {
        "loss": fmean(losses) if losses else None,
        "tokens": int(done),
        "tokens_per_s": per_s,
        "goodput": picture.goodput(at),
        "uptime": picture.uptime(at),
        "derived": any(each["derived"] for each in islands),
        "alive": view.alive if view is not None else None,
        "pulled": _mean(recent, "pulled"),
        "merged": _mean(recent, "merged"),
        "learners": len(islands),
        "bytes_up_per_s": picture.rate("bytes_up", at, span_s),
        "bytes_down_per_s": picture.rate("bytes_down", at, span_s),
        # steps that a contributor had taken since its last merge of the same fragment
        "effective_h": _mean([m for m in recent if m.contributors], "steps"),
        "remaining_s": remaining_s,
        "merges": picture.merges_until(at),
        "rounds_in_flight": view.rounds_in_flight if view is not None else None,
        "quorum": sample.quorum if sample is not None else None,
        "grace_margin": sample.grace_margin if sample is not None else None,
    }


def _mean(merges: list[MergeRow], name: str) -> float | None:
    """Over all merges, of which some stand for several."""
    whole = sum(m.merge_count for m in merges)
    return sum(getattr(m, name) * m.merge_count for m in merges) / whole if whole else None


def _island(
    picture: RunHistory, learner: int, at: float, sample: SyncerSample | None, span_s: float, recent: list[MergeRow]
) -> dict[str, Any]:
    band = picture.current_state(learner, at)
    member = sample.members.get(learner) if sample is not None else None
    step, tokens = picture.progress(learner, at)
    per_s = (tokens - picture.progress(learner, at - span_s)[1]) / span_s
    shares = picture.reported_time_shares(learner, at)
    trains = band.state in TRAINING_STATES
    return {
        "learner": learner,
        "state": band.state,
        "since": band.begin,
        "incarnation": member.incarnation if member is not None else None,
        "step": step,
        "tokens": int(tokens),
        "tokens_per_s": per_s if trains else 0.0,
        "step_s": picture.typical_step_s(learner, at) if trains else None,
        "speed": None,
        "loss": picture.metrics.value("loss", learner, at),
        "link": _link(member.state if member is not None else None, band.state),
        "staleness_s": _staleness_s(learner, at, sample),
        "weight": _weight(learner, recent),
        "derived": picture.is_derived(learner),
        "goodput": shares.goodput if shares is not None else None,
        "time_split": time_split(shares) if shares is not None else None,
        "reason": member.reason if member is not None else None,
        "log_tail": _log_tail(picture, learner, at, band.state),
    }


def _add_speeds(islands: list[dict[str, Any]]) -> None:
    steps = [each["step_s"] for each in islands if each["step_s"]]
    usual = median(steps) if steps else None
    for each in islands:
        if usual and each["step_s"]:
            each["speed"] = usual / each["step_s"]


def time_split(shares: TimeShares) -> dict[str, float]:
    return {
        "stepping": shares.stepping_s,
        "waiting": shares.waiting_s,
        "copying": shares.copying_s + shares.between_s,
        "recovering": shares.joining_s,
        "paused": shares.paused_s + shares.stopped_s,
        "gone": shares.away_s,
    }


def _link(standing: str | None, state: str) -> str | None:
    if state == "alone":
        return "down"
    return None if standing is None else "up" if standing in ("live", "suspect", "joining", "admitting") else "down"


def _staleness_s(learner: int, at: float, sample: SyncerSample | None) -> float | None:
    """Since it was last in a merge: so long nothing of its work has come into the model."""
    merged_at = sample.merged_with.get(learner) if sample is not None else None
    return at - merged_at if merged_at is not None else None


def _weight(learner: int, recent: list[MergeRow]) -> float | None:
    """Its share in the newest merges, those without it counted as nothing."""
    if not recent:
        return None
    mine = whole = 0.0
    for merge in recent:
        whole += merge.merge_count
        for (who, _), weight in zip(merge.contributors, merge.weights, strict=True):
            mine += weight * merge.merge_count if who == learner else 0.0
    return mine / whole


def _log_tail(picture: RunHistory, learner: int, at: float, state: str) -> str | None:
    """Of the newest process of it that died, while it has not come back."""
    if state not in ("gone", "recovering", "quarantined"):
        return None
    died = [fault for fault in picture.files.faults if fault.process == f"learner {learner}" and fault.at <= at]
    if not died:
        return None
    came_back = any(process.first_entry_at > died[-1].at for process in picture.processes_of(learner))
    words = picture.files.log_tail(died[-1].process) if not came_back else None  # the log goes on after it
    return f"{died[-1].cause} at {died[-1].at:.1f} s" + (f": {words}" if words else "")


def _syncer(picture: RunHistory, at: float, live: bool) -> dict[str, Any]:
    bands = [band for band in syncer_bands(picture, live) if band[0] <= at]
    state = bands[-1][2] if bands else "down"
    tenures = [
        tenure for tenure in picture.tenures if tenure.first_entry_at is not None and tenure.first_entry_at <= at
    ]
    epoch = tenures[-1].epoch if tenures else None
    return {"state": state, "epoch": epoch, "since": bands[-1][0] if bands else picture.started_at}


def syncer_bands(picture: RunHistory, live: bool) -> list[list[Any]]:
    """Up from the first to the last entry of each of its processes."""
    bands: list[list[Any]] = []
    for number, tenure in enumerate(picture.tenures):
        if tenure.first_entry_at is None:
            continue
        if bands and tenure.first_entry_at > bands[-1][1]:
            bands.append([bands[-1][1], tenure.first_entry_at, "down"])
        end = tenure.last_entry_at
        newest = number == len(picture.tenures) - 1
        age_s = _age_s(picture) if live and newest else None
        if newest and (not live or age_s is None or age_s < STALE_AFTER_S):
            end = max(end, picture.newest_at)
        bands.append([tenure.first_entry_at, end, "up"])
        if newest and end < picture.newest_at:
            bands.append([end, picture.newest_at, "down"])
    return bands


def _fragments(sample: SyncerSample, at: float) -> list[dict[str, Any]]:
    return [
        {
            "fragment": each.fragment,
            "version": each.version,
            "phase": each.phase,
            "unavailable": each.away,
            "age_s": at - sample.merged_at[each.fragment] if each.fragment in sample.merged_at else None,
            "contributors": list(each.last_contributors),
            "pulled": each.asked,
            "contributions": each.contributions,
            "waiting_for": list(each.waiting_for),
            "reason": each.reason,
        }
        for each in sample.fragments
    ]


# --------------------------------------------------------------------------------------------------------------------
# The timeline


def timeline(picture: RunHistory, begin: float | None, end: float | None, width: int) -> dict[str, Any]:
    begin = picture.started_at if begin is None else max(begin, picture.started_at)
    end = picture.newest_at if end is None else min(end, picture.newest_at)
    live = is_live(picture, picture.sample_at(None))
    return {
        "from": begin,
        "to": end,
        "islands": [
            {"learner": learner, "bands": [list(band) for band in picture.state_spans(learner, begin, end)]}
            for learner in picture.learners()
        ],
        "syncer": [
            [max(b, begin), min(e, end), state] for b, e, state in syncer_bands(picture, live) if e > begin and b < end
        ],
        "marks": [mark._asdict() for mark in timeline_marks(picture) if begin <= mark.at <= end],
        "rounds": rounds(picture, begin, end, min(max(width, 50), MAX_ROUNDS)),
    }


def rounds(picture: RunHistory, begin: float, end: float, width: int) -> list[dict[str, Any]]:
    """Merges in this span; where there are more than `width`, neighbours are joined."""
    found = sorted(picture.merges(begin, end), key=lambda merge: merge.at)
    if len(found) <= width:
        return [_round([merge]) for merge in found]
    span = (end - begin) / width or 1.0
    joined: dict[int, list[MergeRow]] = {}
    for merge in found:
        joined.setdefault(int((merge.at - begin) / span), []).append(merge)
    return [_round(each) for each in joined.values()]


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


def timeline_marks(picture: RunHistory) -> list[TimelineMark]:
    """Faults and returns, from what the supervisor wrote and from the tapes."""
    found = [
        TimelineMark(fault.at, fault.process, "killed" if fault.cause.startswith("SIG") else "failed", fault.cause)
        for fault in picture.files.faults
    ]
    for learner in picture.learners():
        who = f"learner {learner}"
        for number, process in enumerate(picture.processes_of(learner)):
            if number:
                found.append(
                    TimelineMark(process.first_entry_at, who, "restarted", f"incarnation {process.incarnation} begins")
                )
            elif picture.tenures and process.first_entry_at > picture.started_at + LATE_JOIN_S:
                found.append(TimelineMark(process.first_entry_at, who, "joined", "a new learner"))
        before = ""
        for change in (each for tenure in picture.tenures for each in tenure.member_states.get(learner, ())):
            if change.state != before:  # a new syncer begins by knowing what the old one knew
                kind = {"suspect": "suspected", "quarantined": "quarantined", "left": "left"}.get(change.state)
                if kind is not None:
                    found.append(TimelineMark(change.at, who, kind, change.sentence or kind))
            before = change.state
    for word in (word for tenure in picture.tenures for word in tenure.controls):
        who = "syncer" if word.subject[0] == "run" else f"{word.subject[0]} {word.subject[1]}"
        found.append(TimelineMark(word.at, who, "control", word.sentence))
    for tenure in picture.tenures[1:]:
        if tenure.first_entry_at is not None:
            found.append(
                TimelineMark(tenure.first_entry_at, "syncer", "syncer-restarted", f"epoch {tenure.epoch} begins")
            )
    return sorted(found)


def config_view(picture: RunHistory) -> dict[str, Any]:
    config, told = picture.config, picture.files.config
    if told is None and config is not None:
        told = {"run": config.run_id, "fragments": config.fragments, "every_steps": config.every_steps}
    return {"config": told, "report": picture.files.report}
