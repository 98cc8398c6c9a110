"""Run generated from a seed, in the JSON formats of the dashboard's HTTP API, for tests of the page.

Tests with real runs cover the dashboard as a whole. This one has what they cannot easily produce: 64 islands and 2,000
rounds, hostile names, a tape that does not grow. No value is computed from a tape.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

Json = dict[str, Any]

UP = ("training", "alone", "suspected")
WALL0 = 1_794_798_021.4
STEP_TOKENS = 128
PHASES = ("idle", "idle", "pulling", "grace", "merging")


@dataclass
class Island:
    """States of one learner over time, and its step time."""

    learner: int
    step_s: float
    bands: list[tuple[float, str]] = field(default_factory=list)  # start and state of each band
    starts: list[float] = field(default_factory=list)

    def state(self, at: float) -> tuple[str, float]:
        index = max(bisect_right(self.bands, at, key=lambda band: band[0]) - 1, 0)
        since, state = self.bands[index]
        return state, since

    def pieces(self, until: float) -> Iterator[tuple[float, float, str]]:
        ends = [*(since for since, _ in self.bands[1:]), math.inf]
        for (since, state), end in zip(self.bands, ends, strict=True):
            if since < until:
                yield since, min(end, until), state

    def spent(self, at: float, *states: str) -> float:
        return sum(end - since for since, end, state in self.pieces(at) if state in states)


@dataclass
class FakeRun:
    """Run from 0 to `horizon`. The page sees it up to `now`."""

    name: str = "first"
    learners: int = 4
    horizon: float = 240.0
    now: float = 120.0
    rounds: int = 480
    fragments: int = 8
    unavailable: tuple[int, ...] = ()  # fragments whose shard cannot be reached
    seed: int = 1
    simulated: bool = False
    live: bool = True
    controls: bool = False
    loading: float | None = None
    age_s: float | None = 0.4
    paused: bool = False
    quorum: int = 1
    grace_margin: float = 0.9
    alerts: list[Json] = field(default_factory=list)
    log_tail: str = "SIGKILL: step 151 loss 2.71\nstep 152 loss 2.69\n(end of its log)"
    balanced: bool = True
    tape_errors: list[str] = field(default_factory=list)
    derived: bool = False  # whether time splits are derived from the syncer's tape
    unknown: bool = False  # whether every value that may be unknown is unknown
    done: list[Json] = field(default_factory=list)  # confirmed control requests

    def __post_init__(self) -> None:
        draw = Random(self.seed)
        self.marks: list[Json] = []
        self.islands = [self._island(number, Random(draw.getrandbits(32))) for number in range(1, self.learners + 1)]
        self.syncer_down = (self.horizon * 0.62, self.horizon * 0.64)
        self._mark(self.syncer_down[1], "syncer", "syncer-restarted", "the syncer is back with epoch 2")
        self.marks.sort(key=lambda mark: mark["at"])
        self.merges = [self._merge(number, Random(draw.getrandbits(32))) for number in range(self.rounds)]

    def _mark(self, at: float, who: str, kind: str, text: str) -> None:
        self.marks.append({"at": round(at, 3), "subject": who, "kind": kind, "text": text})

    def _island(self, number: int, draw: Random) -> Island:
        island = Island(number, draw.uniform(0.18, 0.24) * (1.6 if number % 7 == 5 else 1.0))
        who, at = f"learner {number}", draw.uniform(0.2, 1.5)
        island.bands = [(0.0, "recovering"), (at, "training")]
        island.starts = [0.0]
        self._mark(at, who, "joined", "trains; optimizer state: the run is new")
        kills = draw.randrange(3) if self.learners > 8 else (1 if number == 3 else 0)
        at = self.horizon * (0.28 if self.learners <= 8 else draw.uniform(0.05, 0.3))
        for _ in range(kills):
            self._mark(at, who, "killed", "killed by SIGKILL")
            back = at + self.horizon * draw.uniform(0.03, 0.12)
            self._mark(back, who, "restarted", "process restarted")
            joined_at = back + self.horizon * draw.uniform(0.01, 0.03)
            island.bands += [(at, "gone"), (back, "recovering"), (joined_at, "training")]
            island.starts.append(back)
            at = joined_at + self.horizon * draw.uniform(0.1, 0.3)
        rare = number % 16 if self.learners > 8 else {2: 5, 4: 11}.get(number)
        after = max(at, self.horizon * 0.42)
        if rare == 5 and after < self.horizon * 0.9:
            self._mark(after, who, "suspected", "no message for 3.2 s, the limit is 3 s")
            island.bands += [(after, "suspected"), (after + self.horizon * 0.015, "training")]
        elif rare == 11 and after < self.horizon * 0.9:
            self._mark(after, who, "cut", "connection closed: no answer to a ping")
            island.bands += [(after, "alone"), (after + self.horizon * 0.06, "training")]
        elif rare == 15 and after < self.horizon * 0.9:
            self._mark(after, who, "quarantined", "quarantined after 3 invalid messages")
            island.bands.append((after, "quarantined"))
        elif rare == 9 and after < self.horizon * 0.9:
            self._mark(after, who, "left", "left: its host is needed elsewhere")
            island.bands.append((after, "left"))
        island.bands.sort()
        return island

    def _merge(self, number: int, draw: Random) -> Json:
        at = 2.0 + (self.horizon - 2.0) * number / self.rounds
        alive = sum(island.state(at)[0] in UP for island in self.islands)
        pulled = sum(island.state(at)[0] == "training" for island in self.islands)
        merged = max(pulled - (draw.random() < 0.15) - (draw.random() < 0.05), min(pulled, 1))
        return {
            "at": round(at, 3),
            "fragment": number % self.fragments,
            "contributions": merged,
            "pulled": pulled,
            "alive": alive,
            "count": 1,
        }

    # ----------------------------------------------------------------------------------------------------------------
    # Responses of /api/run/N

    def loss(self, at: float, number: int = 0) -> float:
        return round(1.9 + 3.6 * math.exp(-at / (0.3 * self.horizon)) + 0.05 * math.sin(at * 1.7 + number * 2.4), 4)

    def tokens(self, island: Island, at: float) -> int:
        return int(island.spent(at, *UP) / island.step_s) * STEP_TOKENS

    def status(self, at: float | None) -> Json:
        when = self.now if at is None else min(max(at, 0.0), self.now)
        islands = [self._card(island, when) for island in self.islands]
        merged = [merge for merge in self.merges if merge["at"] <= when]
        recent = merged[-20:]
        trained = sum(card["tokens"] for card in islands)
        dropped = int(trained * 0.011)
        pending = int(trained * 0.04)
        per_s = sum(card["tokens_per_s"] or 0.0 for card in islands)
        total_s = max(self.learners, 1) * max(when, 1e-9)
        headline: Json = {
            "loss": self.loss(when),
            "tokens": trained,
            "tokens_per_s": per_s,
            "goodput": sum(island.spent(when, *UP) for island in self.islands) / total_s * 0.995,
            "uptime": 1.0,
            "derived": self.derived,
            "alive": sum(card["state"] in UP for card in islands),
            "pulled": recent[-1]["pulled"] if recent else 0,
            "merged": sum(merge["contributions"] for merge in recent) / max(len(recent), 1),
            "learners": self.learners,
            "bytes_up_per_s": per_s * 86.0,
            "bytes_down_per_s": per_s * 99.0,
            "effective_h": 24.2,
            "remaining_s": max(self.horizon - when, 0.0),
            "merges": len(merged),
            "rounds_in_flight": 2,
            "quorum": self.quorum,
            "grace_margin": self.grace_margin,
        }
        if self.unknown:
            headline = dict.fromkeys(headline)
        down, up = self.syncer_down
        return {
            "at": when,
            "wall0": None if self.simulated else WALL0,
            "from": 0.0,
            "to": self.now,
            "now": at is None,
            "sample_age_s": 0.0 if at is None else 3.0,
            "live": self.live,
            "age_s": self.age_s if self.live else None,
            "loading": self.loading,
            "tape_errors": self.tape_errors,
            "stage": "running" if self.live else "finished",
            "progress": None if self.unknown else when / self.horizon,
            "paused": self.paused,
            "headline": headline,
            "syncer": {
                "state": "down" if down <= when < up else "up",
                "epoch": 2 if when >= up else 1,
                "since": up if when >= up else (down if when >= down else 0.0),
            },
            "islands": islands,
            "fragments": [self._fragment(number, when, merged) for number in range(self.fragments)],
            "ledger": {
                "trained": trained,
                "merged": trained - pending - dropped,
                "pending": pending,
                "dropped": {"learner-lost": dropped - dropped // 4, "contribution-late": dropped // 4},
                "balanced": self.balanced,
            },
            "alerts": self.alerts + self._lost_alerts(when),
        }

    def _lost_alerts(self, at: float) -> list[Json]:
        if self.learners > 8:
            return []
        return [
            {
                "rule": "learner-down",
                "severity": "warning",
                "since": since,
                "subject": f"learner {island.learner}",
                "text": f"learner {island.learner} is lost for {at - since:.0f} s; the others continue training",
            }
            for island in self.islands
            for state, since in [island.state(at)]
            if state == "gone" and at - since >= 2.0
        ]

    def _card(self, island: Island, at: float) -> Json:
        state, since = island.state(at)
        up = state in UP
        steps = int(island.spent(at, *UP) / island.step_s)
        gone = island.spent(at, "gone", "left", "quarantined")
        recovering = island.spent(at, "recovering")
        stepping = island.spent(at, *UP)
        known: Json = {
            "step": steps,
            "tokens": steps * STEP_TOKENS,
            "tokens_per_s": STEP_TOKENS / island.step_s if up else 0.0,
            "step_s": island.step_s,
            "speed": 0.21 / island.step_s if up else None,
            "loss": self.loss(at, island.learner) if up else None,
            "staleness_s": round(1.0 + (at * 7 + island.learner) % 3, 1) if up else None,
            "weight": round(1 / self.learners, 4) if state == "training" else 0.0,
            "derived": self.derived,
            "goodput": stepping / at if at else None,
        }
        return {
            "learner": island.learner,
            "state": "paused" if self.paused and up else state,
            "since": since,
            "incarnation": sum(start <= at for start in island.starts) or 1,
            **known,
            "link": {"training": "up", "suspected": "silent", "recovering": "up"}.get(state, "down"),
            "time_split": {
                "stepping": stepping * 0.995,
                "copying": stepping * 0.005,
                "waiting": 0.0,
                "recovering": recovering,
                "paused": 0.0,
                "gone": gone,
            },
            "reason": {
                "gone": "connection closed: its process ended",
                "recovering": "incarnation 2 is downloading fragments and optimizer state",
                "suspected": "no message for 3.2 s, the limit is 3 s",
                "alone": "trains without a connection; its work waits for the next round",
                "quarantined": "quarantined after 3 invalid messages, the last: invalid values",
                "left": "left: its host is needed elsewhere",
            }.get(state),
            "log_tail": self.log_tail if state == "gone" else None,
        }

    def _fragment(self, number: int, at: float, merged: list[Json]) -> Json:
        mine = [merge for merge in merged if merge["fragment"] == number]
        last = mine[-1] if mine else None
        phase = PHASES[(number + int(at)) % len(PHASES)]
        training = [island.learner for island in self.islands if island.state(at)[0] == "training"]
        waits = phase in ("pulling", "grace")
        return {
            "fragment": number,
            "version": len(mine),
            "phase": phase,
            "unavailable": number in self.unavailable,
            "age_s": round(at - last["at"], 2) if last else None,
            "contributors": training[: last["contributions"]] if last else [],
            "pulled": len(training) if waits else 0,
            "contributions": max(len(training) - 1, 0) if waits else 0,
            "waiting_for": training[-1:] if waits else [],
            "reason": "its shard is unavailable: connection reset by peer"
            if number in self.unavailable
            else {
                "idle": "2 of 4 learners have taken 24 steps since the last round",
                "pulling": f"{max(len(training) - 1, 0)} of {self.quorum} contributions for the quorum; 1 pulls",
                "grace": f"quorum {self.quorum} of {len(training)}; waiting 0.8 s more, slack 1.6 s",
                "merging": f"merging {len(training)} contributions",
            }[phase],
        }

    def timeline(self, since: float, until: float, width: int) -> Json:
        end = min(until, self.now)
        rounds = [merge for merge in self.merges if since <= merge["at"] <= end]
        down, up = self.syncer_down
        syncer = [(0.0, down, "up"), (down, up, "down"), (up, math.inf, "up")]
        return {
            "from": since,
            "to": end,
            "islands": [
                {
                    "learner": island.learner,
                    "bands": [[max(a, since), min(b, end), state] for a, b, state in island.pieces(end) if b > since],
                }
                for island in self.islands
            ],
            "syncer": [[max(a, since), min(b, end), state] for a, b, state in syncer if a < end and b > since],
            "marks": [mark for mark in self.marks if since <= mark["at"] <= end],
            "rounds": list(combine_rounds(rounds, width)),
        }

    def names(self) -> list[Json]:
        both = ["time", "tokens"]
        series: list[Json] = [
            {"name": "loss.published", "group": "loss", "label": "published model", "unit": "nats", "x": both}
        ]
        for island in self.islands:
            who = f"learner {island.learner}"
            series.append(
                {"name": f"loss.learner.{island.learner}", "group": "loss", "label": who, "unit": "nats", "x": both}
            )
            series.append(
                {
                    "name": f"throughput.learner.{island.learner}",
                    "group": "throughput",
                    "label": who,
                    "unit": "tokens/s",
                    "x": ["time"],
                }
            )
        plain = [
            ("goodput.run", "goodput", "the run", ""),
            ("bytes.up", "bytes", "up", "bytes/s"),
            ("bytes.down", "bytes", "down", "bytes/s"),
            ("merges.contributions", "merges", "contributions", "learners"),
            ("merges.pulled", "merges", "pulled", "learners"),
            ("merges.alive", "merges", "alive", "learners"),
            ("norms.delta", "norms", "delta", ""),
            ("cosine.mean", "cosine", "mean of pairs", ""),
            ("momentum.norm", "momentum", "outer momentum", ""),
            ("quantisation.up", "quantisation", "up", ""),
            ("grace.used", "grace", "used", "s"),
            ("grace.slack", "grace", "slack", "s"),
        ]
        series += [
            {"name": name, "group": group, "label": label, "unit": unit, "x": ["time"]}
            for name, group, label, unit in plain
        ]
        return series

    def values(self, name: str, x: str, since: float, until: float, points: int) -> Json:
        end = min(until, self.now)
        count = max(min(points, 200), 2)
        number = int(name.rsplit(".", 1)[-1]) if name.rsplit(".", 1)[-1].isdigit() else 0
        island = self.islands[number - 1] if number else None
        xs: list[float] = []
        ys: list[float | None] = []
        for index in range(count):
            at = since + (end - since) * (index + 0.13 * (number % 5)) / count
            is_lost = island is not None and island.state(at)[0] not in UP
            xs.append(round(at if x == "time" else self.tokens(island or self.islands[0], at), 3))
            ys.append(None if is_lost else self._value(name, at, number))
        if x == "tokens":  # a lost learner trains no tokens; x must increase
            indices = [0, *(i for i, (a, b) in enumerate(pairwise(xs), 1) if b > a)]
            xs, ys = [xs[i] for i in indices], [ys[i] for i in indices]
        return {"name": name, "x": xs, "y": ys}

    def _value(self, name: str, at: float, number: int) -> float:
        wave = math.sin(at * 0.9 + len(name))
        group, _, which = name.partition(".")
        if group == "loss":
            return self.loss(at, number)
        if group == "throughput":
            return STEP_TOKENS / self.islands[number - 1].step_s * (1 + 0.02 * wave)
        if group == "merges":
            merge = self.merges[min(int(at / self.horizon * self.rounds), self.rounds - 1)]
            return float(merge[which])
        level = {"goodput": 0.98, "bytes": 2.1e5, "norms": 0.4, "cosine": 0.31, "momentum": 1.1, "grace": 0.8}
        return round(level.get(group, 0.01) * (1 + 0.05 * wave), 6)

    def story(self, learner: int | None, fragment: int | None, until: float, limit: int) -> Json:
        lines = [
            {"at": mark["at"], "subject": mark["subject"], "text": f"{mark['kind']}: {mark['text']}"}
            for mark in self.marks
        ]
        if learner is not None:
            lines = [line for line in lines if line["subject"] == f"learner {learner}"]
        if fragment is not None:
            lines = [
                {
                    "at": merge["at"],
                    "subject": f"fragment {fragment}",
                    "text": f"version {version} published with {merge['contributions']} contributions",
                }
                for version, merge in enumerate((merge for merge in self.merges if merge["fragment"] == fragment), 1)
            ]
        lines = [line for line in lines if line["at"] <= min(until, self.now)]
        return {"lines": lines[-limit:], "has_more": len(lines) > limit}


def combine_rounds(rounds: list[Json], width: int) -> Iterator[Json]:
    """Yield the rounds; if there are more than pixels, yield means of neighboring ones."""
    size = max(math.ceil(len(rounds) / max(width, 1)), 1)
    for first in range(0, len(rounds), size):
        some = rounds[first : first + size]
        if len(some) == 1:
            yield some[0]
            continue
        mean = {
            key: sum(merge[key] for merge in some) / len(some) for key in ("at", "contributions", "pulled", "alive")
        }
        yield {**mean, "fragment": None, "count": len(some)}
