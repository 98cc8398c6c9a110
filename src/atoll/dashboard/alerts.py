"""Rules that say when somebody should look, each with a reason that a person understands."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from atoll.dashboard.run_history import RunHistory
    from atoll.tape.syncer_tenures import SyncerSample

Severity = Literal["warning", "critical"]


class Alert(NamedTuple):
    rule: str
    severity: Severity
    since: float  # on the run's clock
    subject: str
    text: str


@dataclass(frozen=True, slots=True)
class AlertRules:
    """Limits of the rules; 0 switches one off. A file of them is TOML with these names."""

    no_merge_steps: float = 3.0  # times H of the usual step, without a merge of anything
    down_s: float = 120.0  # an island is away for so long
    disconnected_s: float = 120.0  # an island trains without a link for so long
    shard_unavailable_s: float = 60.0  # fragments are away with their shard for so long
    loss_spike: float = 1.3  # an island's loss against its own of before
    stale_s: float = 60.0  # nothing new was written for so long

    @classmethod
    def load(cls, path: Path) -> AlertRules:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        known = {each.name for each in fields(cls)}
        for name, value in raw.items():
            if name not in known:
                raise ValueError(f"{path}: there is no rule {name!r}; there are {', '.join(sorted(known))}")
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(f"{path}: {name} is {value!r}; give a number from 0")
        return cls(**{name: float(value) for name, value in raw.items()})


LOSS_SPIKE_WINDOW_S = 60.0
MIN_NO_MERGE_LIMIT_S = 10.0
QUARANTINE_ALERT_S = 60.0


def evaluate_alerts(
    picture: RunHistory,
    at: float,
    sample: SyncerSample | None,
    islands: list[dict[str, Any]],
    live: bool,
) -> list[Alert]:
    """What is wrong at this moment, worst first."""
    rules = picture.rules
    if sample is None:
        return []
    running = sample.view.stage == "running"
    found: list[Alert] = []
    if running and not picture.is_paused(at):
        found += _check_merges(picture, at, sample, rules)
        found += _check_learners(islands, at, rules)
        found += _check_loss(picture, at, islands, rules)
        found += _check_shards(picture, at, sample, rules)
    found += _check_quarantines(picture, at)
    found += _check_ledger(sample)
    if live and running:
        found += _check_staleness(picture, rules)
    return sorted(found, key=lambda each: (each.severity != "critical", each.since))


def _check_merges(picture: RunHistory, at: float, sample: SyncerSample, rules: AlertRules) -> list[Alert]:
    newest = picture.newest_merges(at, 1)
    since = newest[0].at if newest else picture.training_started_at
    step_s = sample.view.step_s
    if not rules.no_merge_steps or since is None or not step_s or picture.config is None:
        return []
    limit_s = max(MIN_NO_MERGE_LIMIT_S, rules.no_merge_steps * picture.config.every_steps * step_s)
    if at - since <= limit_s:
        return []
    text = f"no merge for {at - since:.0f} s; usually one comes within {limit_s / rules.no_merge_steps:.0f} s"
    return [Alert("no-merge", "critical", since + limit_s, "the run", text)]


def _check_learners(
    islands: list[Mapping[str, Any]] | list[dict[str, Any]], at: float, rules: AlertRules
) -> list[Alert]:
    found = []
    for each in islands:
        who, state, since = f"learner {each['learner']}", each["state"], each["since"]
        lasts_s = at - since
        if state == "gone" and rules.down_s and lasts_s > rules.down_s:
            text = f"{who} is away for {lasts_s:.0f} s; is its machine there?"
            found.append(Alert("learner-down", "warning", since + rules.down_s, who, text))
        if state == "alone" and rules.disconnected_s and lasts_s > rules.disconnected_s:
            text = f"{who} trains without a link for {lasts_s:.0f} s: nothing of it is merged"
            found.append(Alert("learner-disconnected", "warning", since + rules.disconnected_s, who, text))
    return found


def _check_shards(picture: RunHistory, at: float, sample: SyncerSample, rules: AlertRules) -> list[Alert]:
    """One for all that went away at the same moment: they were with the same shard."""
    away = {each.fragment: each for each in sample.fragments if each.away}
    if not away or not rules.shard_unavailable_s:
        return []
    since: dict[int, float] = {}
    for word in (word for tenure in picture.tenures for word in tenure.log_lines):
        if word.code == "shard-lost" and word.at <= at and word.subject[1] in away:
            since[word.subject[1]] = word.at
    found: dict[float, Alert] = {}
    for p, began in since.items():
        if at - began > rules.shard_unavailable_s and began not in found:
            them = ", ".join(str(q) for q in sorted(since) if since[q] == began)
            text = f"no merge of fragments {them} for {at - began:.0f} s: {away[p].reason}"
            found[began] = Alert(
                "shard-unavailable", "critical", began + rules.shard_unavailable_s, f"fragment {p}", text
            )
    return list(found.values())


def _check_quarantines(picture: RunHistory, at: float) -> list[Alert]:
    """For a minute each: one that is started again comes back at once, and should be looked at all the same."""
    newest: dict[str, Alert] = {}
    for word in (word for tenure in picture.tenures for word in tenure.log_lines):
        if word.code == "member-quarantined" and at - QUARANTINE_ALERT_S < word.at <= at:
            who = f"learner {word.subject[1]}"
            newest[who] = Alert("quarantine", "critical", word.at, who, f"{who} was quarantined: {word.sentence}")
    return list(newest.values())


def _check_loss(picture: RunHistory, at: float, islands: list[dict[str, Any]], rules: AlertRules) -> list[Alert]:
    found = []
    for each in islands if rules.loss_spike else ():
        learner, loss = each["learner"], each["loss"]
        before = picture.metrics.value("loss", learner, at - LOSS_SPIKE_WINDOW_S)
        if loss is None and each["state"] in ("training", "alone") and picture.metrics.is_nan("loss", learner, at):
            text = f"the loss of learner {learner} is not a number"
            found.append(Alert("loss-spike", "critical", at, f"learner {learner}", text))
        if loss is None or before is None or loss <= rules.loss_spike * before:
            continue
        text = f"the loss of learner {learner} is {loss:.3g}, a minute ago it was {before:.3g}"
        found.append(Alert("loss-spike", "warning", at, f"learner {learner}", text))
    return found


def _check_ledger(sample: SyncerSample) -> list[Alert]:
    if sample.is_balanced:
        return []
    text = "the ledger is out of balance: trained is not merged + pending + dropped; run atoll check"
    return [Alert("ledger", "critical", sample.at, "the run", text)]


def _check_staleness(picture: RunHistory, rules: AlertRules) -> list[Alert]:
    if picture.wall0 is None or not rules.stale_s:
        return []
    age_s = picture.age_s()
    if age_s <= rules.stale_s:
        return []
    text = f"nothing new for {age_s:.0f} s: the syncer writes no more; was it stopped?"
    return [Alert("stale", "critical", picture.newest_at + rules.stale_s, "syncer", text)]
