"""Alert rules: conditions of a run that need the attention of an operator, each with a readable reason."""

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
    """Limits of the alert rules. 0 disables a rule. A rules file is TOML with these names."""

    no_merge_steps: float = 3.0  # limit on the time without a merge, in multiples of H times the step time
    down_s: float = 120.0  # limit on the time that a learner is lost
    disconnected_s: float = 120.0  # limit on the time that a learner trains without a connection to the syncer
    shard_unavailable_s: float = 60.0  # limit on the time that the shard of a fragment is unavailable
    loss_spike: float = 1.3  # limit on a learner's loss, as a multiple of its loss one minute earlier
    stale_s: float = 60.0  # limit on the time without a new tape entry

    @classmethod
    def load(cls, path: Path) -> AlertRules:
        """Read rules from a TOML file. Raise ValueError for an unknown rule or an invalid limit."""
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        known = {each.name for each in fields(cls)}
        for name, value in raw.items():
            if name not in known:
                raise ValueError(f"{path}: unknown rule {name!r}; use one of {', '.join(sorted(known))}")
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(f"{path}: {name} is {value!r}; use a number that is at least 0")
        return cls(**{name: float(value) for name, value in raw.items()})


LOSS_SPIKE_WINDOW_S = 60.0
MIN_NO_MERGE_LIMIT_S = 10.0
QUARANTINE_ALERT_S = 60.0
"""Duration of a quarantine alert. A restarted learner returns at once, but its quarantine still needs attention."""


def evaluate_alerts(
    history: RunHistory,
    at: float,
    sample: SyncerSample | None,
    islands: list[dict[str, Any]],
    live: bool,
) -> list[Alert]:
    """Return the alerts that are active at time `at`: critical ones first, then by start time.

    Args:
        at: seconds on the run's clock.
        sample: the syncer's state at that time, or None if there is none yet; then there are no alerts.
        islands: the islands of `view_at` at that time.
        live: whether the run is still being written; only then a stale tape raises an alert.
    """
    rules = history.rules
    if sample is None:
        return []
    running = sample.view.stage == "running"
    found: list[Alert] = []
    if running and not history.is_paused(at):
        found += _check_merges(history, at, sample, rules)
        found += _check_learners(islands, at, rules)
        found += _check_loss(history, at, islands, rules)
        found += _check_shards(history, at, sample, rules)
    found += _check_quarantines(history, at)
    found += _check_ledger(sample)
    if live and running:
        found += _check_staleness(history, rules)
    return sorted(found, key=lambda each: (each.severity != "critical", each.since))


def _check_merges(history: RunHistory, at: float, sample: SyncerSample, rules: AlertRules) -> list[Alert]:
    newest = history.newest_merges(at, 1)
    since = newest[0].at if newest else history.training_started_at
    step_s = sample.view.step_s
    if not rules.no_merge_steps or since is None or not step_s or history.config is None:
        return []
    limit_s = max(MIN_NO_MERGE_LIMIT_S, rules.no_merge_steps * history.config.every_steps * step_s)
    if at - since <= limit_s:
        return []
    text = f"no merge for {at - since:.0f} s; expected one within {limit_s / rules.no_merge_steps:.0f} s"
    return [Alert("no-merge", "critical", since + limit_s, "the run", text)]


def _check_learners(
    islands: list[Mapping[str, Any]] | list[dict[str, Any]], at: float, rules: AlertRules
) -> list[Alert]:
    found = []
    for each in islands:
        subject, state, since = f"learner {each['learner']}", each["state"], each["since"]
        duration_s = at - since
        if state == "gone" and rules.down_s and duration_s > rules.down_s:
            text = f"{subject} is lost for {duration_s:.0f} s; check its host and its log"
            found.append(Alert("learner-down", "warning", since + rules.down_s, subject, text))
        if state == "alone" and rules.disconnected_s and duration_s > rules.disconnected_s:
            text = f"{subject} trains without a connection for {duration_s:.0f} s; none of its work is merged"
            found.append(Alert("learner-disconnected", "warning", since + rules.disconnected_s, subject, text))
    return found


def _check_shards(history: RunHistory, at: float, sample: SyncerSample, rules: AlertRules) -> list[Alert]:
    """Return one alert for all fragments that became unavailable at the same time: they belong to the same shard."""
    unavailable = {each.fragment: each for each in sample.fragments if each.unavailable}
    if not unavailable or not rules.shard_unavailable_s:
        return []
    since: dict[int, float] = {}
    for line in (line for tenure in history.tenures for line in tenure.log_lines):
        if line.code == "shard-lost" and line.at <= at and line.subject[1] in unavailable:
            since[line.subject[1]] = line.at
    found: dict[float, Alert] = {}
    for p, start in since.items():
        if at - start > rules.shard_unavailable_s and start not in found:
            fragments = ", ".join(str(q) for q in sorted(since) if since[q] == start)
            text = f"no merge of fragments {fragments} for {at - start:.0f} s: {unavailable[p].reason}"
            found[start] = Alert(
                "shard-unavailable", "critical", start + rules.shard_unavailable_s, f"fragment {p}", text
            )
    return list(found.values())


def _check_quarantines(history: RunHistory, at: float) -> list[Alert]:
    newest: dict[str, Alert] = {}
    for line in (line for tenure in history.tenures for line in tenure.log_lines):
        if line.code == "member-quarantined" and at - QUARANTINE_ALERT_S < line.at <= at:
            subject = f"learner {line.subject[1]}"
            text = f"{subject} was quarantined: {line.sentence}"
            newest[subject] = Alert("quarantine", "critical", line.at, subject, text)
    return list(newest.values())


def _check_loss(history: RunHistory, at: float, islands: list[dict[str, Any]], rules: AlertRules) -> list[Alert]:
    found = []
    for each in islands if rules.loss_spike else ():
        learner, loss = each["learner"], each["loss"]
        before = history.metrics.value("loss", learner, at - LOSS_SPIKE_WINDOW_S)
        if loss is None and each["state"] in ("training", "alone") and history.metrics.is_nan("loss", learner, at):
            text = f"the loss of learner {learner} is not a number"
            found.append(Alert("loss-spike", "critical", at, f"learner {learner}", text))
        if loss is None or before is None or loss <= rules.loss_spike * before:
            continue
        text = f"the loss of learner {learner} is {loss:.3g}; one minute earlier it was {before:.3g}"
        found.append(Alert("loss-spike", "warning", at, f"learner {learner}", text))
    return found


def _check_ledger(sample: SyncerSample) -> list[Alert]:
    if sample.is_balanced:
        return []
    text = "the ledger is out of balance: trained is not merged + pending + dropped; run `atoll check`"
    return [Alert("ledger", "critical", sample.at, "the run", text)]


def _check_staleness(history: RunHistory, rules: AlertRules) -> list[Alert]:
    if history.wall0 is None or not rules.stale_s:
        return []
    age_s = history.age_s()
    if age_s <= rules.stale_s:
        return []
    text = f"no new tape entry for {age_s:.0f} s; check whether the syncer is still running"
    return [Alert("stale", "critical", history.newest_at + rules.stale_s, "syncer", text)]
