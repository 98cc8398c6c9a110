"""Decisions of the protocol, as pure functions of numbers. Most return the decision with its reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from atoll.core.reasons import Reason, because
from atoll.core.types import Limits, RunConfig


@dataclass(slots=True, eq=False)
class Estimate:
    """Exponential moving average of a duration and of its deviation (the estimator of TCP's retransmission timer).

    >>> e = Estimate()
    >>> for x in (1.0, 1.0, 1.0):
    ...     e.add(x)
    >>> e.mean
    1.0
    """

    count: int = 0
    mean: float = 0.0
    deviation: float = 0.0

    def add(self, sample: float) -> None:
        if self.count:
            error = sample - self.mean
            self.mean += error / 8
            self.deviation += ((error if error > 0 else -error) - self.deviation) / 4
        else:
            self.mean = sample
            self.deviation = sample / 2
        self.count += 1

    def high(self) -> float:
        """Return an upper estimate, which the duration rarely exceeds."""
        return self.mean + 4 * self.deviation


def retry_timeout(estimate: Estimate, factor: float, limits: Limits) -> float:
    """Return a timeout for a measured duration: `factor` times its high value, within the limits."""
    if estimate.count == 0:
        return limits.initial_wait_s
    return min(max(factor * estimate.high(), limits.min_wait_s), limits.max_wait_s)


def state_timeout_s(config: RunConfig, step_s: float) -> float:
    """Return the timeout of an optimizer state transfer, for the joining learner and for its peer: H steps."""
    limits = config.limits
    if step_s == 0:
        return limits.initial_wait_s
    return min(max(config.every_steps * step_s, limits.min_wait_s), limits.max_wait_s)


def backoff_s(tries: int, spread: int, limits: Limits) -> float:
    """Return a delay that doubles with each attempt, plus a jitter of up to a quarter.

    The spread keeps learners from reconnecting at the same time. It is derived from an id and is not random: cores are
    deterministic.
    """
    base = min(limits.initial_backoff_s * 2.0 ** min(tries, 30), limits.max_backoff_s)
    return base * (1 + (spread * 2654435761 + tries * 40503) % 1024 / 4096)


def find_control_problem(what: str, value: object, limits: Limits) -> str | None:
    """Return the error message for an invalid operator request, or None if it is valid.

    >>> find_control_problem("quorum", 0, Limits())
    'the quorum is a whole number from 1 to 1024, got 0'
    """
    if what in ("pause", "resume"):
        return None if value is None else f"{what} takes no value, got {value!r}"
    if what == "grace":
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1:
            return None
        return f"the grace margin is a number from 0, which turns grace off, to below 1, got {value!r}"
    whole = value if isinstance(value, int) and not isinstance(value, bool) else 0
    if what == "quorum":
        most = limits.max_learners
        return None if 1 <= whole <= most else f"the quorum is a whole number from 1 to {most}, got {value!r}"
    if what == "drain":
        return None if whole >= 1 else f"drain takes the number of a learner, from 1, got {value!r}"
    return f"unknown control {what!r}; give pause, resume, drain, quorum or grace"


class GraceWindow(NamedTuple):
    window_s: float
    reason: Reason
    late_s: float = 0.0  # expected wait for a learner that missed the last merge; 0: the window is not extended


def compute_grace_window(
    config: RunConfig,
    contributions: int,
    step_s: float,
    awaited_s: float,
    missed: Sequence[float],
    quorum: Estimate,
    sync: Estimate,
) -> GraceWindow:
    """Return the grace window of a round that has its quorum (equation 3 of the paper).

    slack = tau * xi_step - (xi_quorum + xi_sync); grace = min(gamma * max(slack, 0), longest step of awaited learners).

    A learner answers a pull at the end of its step, so waiting longer than the longest step does not help. The window
    is 0 until all three averages are measured. `round_steps` replaces tau on slow links.

    `missed` has the expected waits for awaited learners that missed the last merge of this fragment. A learner with a
    slower link than the others would be late every time, and its work would never be merged. So every second merge
    waits for it: up to twice the expected wait, as far as the time until the fragment is due again allows.
    """
    if config.grace_margin == 0:
        return GraceWindow(0.0, Reason("grace-off", (contributions,)))
    if not (step_s and quorum.count and sync.count):
        return GraceWindow(0.0, Reason("grace-unmeasured", (contributions,)))
    lasts_s = quorum.mean + sync.mean
    slack = round_steps(config, lasts_s, step_s) * step_s - lasts_s
    window = min(config.grace_margin * max(slack, 0.0), max(step_s, awaited_s), config.limits.max_wait_s)
    max_window = min(config.grace_margin * (config.every_steps * step_s - lasts_s), config.limits.max_wait_s)
    late_s = max((each for each in missed if each <= max_window), default=0.0)
    if late_s > window:
        window = min(2 * late_s, max_window)
        return GraceWindow(window, Reason("grace-extended", (contributions, config.quorum, window)), late_s)
    if slack <= 0:
        return GraceWindow(0.0, Reason("grace-no-slack", (contributions, slack)))
    return GraceWindow(window, Reason("grace-waiting", (contributions, config.quorum, window, slack)))


def round_steps(config: RunConfig, lasts_s: float, step_s: float) -> int:
    """Return how many steps a round may last: tau, or H if the round takes so long that tau leaves less than one step.

    On a slow link a round lasts longer than tau steps anyway. Without a wait, only the first contribution would be
    merged. The fragment is due again after H steps, so until then waiting delays nothing.

    >>> config = RunConfig(every_steps=24, overlap_steps=2)
    >>> round_steps(config, 1.0, 1.0), round_steps(config, 1.5, 1.0)
    (2, 24)
    """
    tau = config.overlap_steps
    return tau if lasts_s <= max(1, tau - 1) * step_s else max(tau, config.every_steps)


def lower_median(values: list[float]) -> float:
    """Return the lower median, or 0 without values. Outliers of a minority do not move it far.

    >>> lower_median([1.0, 1e8, 1.2])
    1.2
    """
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


def max_rounds_in_flight(config: RunConfig, step_s: float, quorum: Estimate, sync: Estimate) -> int:
    """Return how many rounds may be open at once: tau, or more if a round takes longer than tau steps.

    P / H rounds become due per step. If a round lasts d steps, d * P / H open rounds keep that pace.
    """
    owned = len(config.fragment_ids())
    if config.rounds_in_flight is not None:
        return min(config.rounds_in_flight, owned)
    limit = config.overlap_steps
    if step_s > 0 and quorum.count and sync.count:
        lasts_steps = (quorum.mean + sync.mean) / step_s + 1
        limit = max(limit, math.ceil(lasts_steps * owned / config.every_steps))
    return max(1, min(limit, owned))


CODECS = ("bf16", "int8", "int4")
"""Codecs to choose from, the finest first. Every run begins with the first."""

CODEC_BITS = {"bf16": 16.0, "int8": 8.125, "int4": 4.25}
"""Bits per value, including its share of a scale."""

MIN_MEASURED_BYTES = 4 * 2**20
"""Smallest transfer that measures a link. A shorter one ends before the connection reaches full speed."""

CODEC_RATE_SAMPLES = 3
"""Measurements per choice. The fastest counts: a busy machine slows down some transfers, a slow link all of them."""

MIN_CODEC_TIME_S = 0.25
"""Transfer time of a fragment that is always short enough, even with very short steps."""

CODEC_HEADROOM = 0.7
"""Share of the available time that a finer codec may take. The current codec may take all of it."""


class CodecChoice(NamedTuple):
    codec: str
    reason: Reason | None  # None: unchanged


def choose_contribution_codec(
    config: RunConfig, now: str, rates: Sequence[float], values: int, step_s: float
) -> CodecChoice:
    """Choose the codec of contributions: the finest in which a fragment is transferred before the next one is due.

    The codec stays if fragments are small or if the link is not measured.

    Args:
        now: current codec.
        rates: newest measurements of the link, in bytes per second of all transfers together.
        values: numbers in the largest fragment.

    >>> choose_contribution_codec(RunConfig(fragments=4, every_steps=8), "bf16", (1e6, 1e6, 1e6), 4_000_000, 3.0).codec
    'int8'
    """
    found, takes_s, has_s = _finest(config, now, fragment_transfer_s(rates, values), step_s)
    if found == now:
        return CodecChoice(now, None)
    return CodecChoice(
        found,
        Reason(_codec_change_code("contribution-codec", now, found), (found, now, max(rates) / 1e6, takes_s, has_s)),
    )


def choose_update_codec(config: RunConfig, now: str, downloads_s: Sequence[float], step_s: float) -> CodecChoice:
    """Choose the codec of updates, for the median learner. All learners receive the same codec.

    `downloads_s`: time of each learner to download the largest fragment in the finest codec; 0: unknown.
    """
    found, takes_s, has_s = _finest(config, now, lower_median(list(downloads_s)), step_s)
    if found == now:
        return CodecChoice(now, None)
    return CodecChoice(found, Reason(_codec_change_code("update-codec", now, found), (found, now, takes_s, has_s)))


def fragment_transfer_s(rates: Sequence[float], values: int) -> float:
    """Return the transfer time of a fragment in the finest codec; 0 if it is small or not measured often enough."""
    finest_bytes = values * CODEC_BITS[CODECS[0]] / 8
    return finest_bytes / max(rates) if finest_bytes >= MIN_MEASURED_BYTES and len(rates) >= CODEC_RATE_SAMPLES else 0.0


def _finest(config: RunConfig, now: str, finest_s: float, step_s: float) -> tuple[str, float, float]:
    """Return the codec, the transfer time in the finer of that and the current codec, and the available time.

    A fragment has min(tau, H / P) steps: after H / P steps the next one is due, and the run hides tau steps. If even
    the coarsest codec is too slow, rounds become less frequent.
    """
    if finest_s <= 0 or step_s <= 0:
        return now, 0.0, 0.0
    steps = min(config.overlap_steps, config.every_steps / len(config.fragment_ids()))
    has_s = max(steps * step_s, MIN_CODEC_TIME_S)
    takes_s = {codec: finest_s * bits / CODEC_BITS[CODECS[0]] for codec, bits in CODEC_BITS.items()}
    position = CODECS.index(now)
    if takes_s[now] > has_s:
        return next((c for c in CODECS[position:] if takes_s[c] <= has_s), CODECS[-1]), takes_s[now], has_s
    found = next((c for c in CODECS[:position] if takes_s[c] <= CODEC_HEADROOM * has_s), now)
    return found, takes_s[found], has_s


def _codec_change_code(what: str, now: str, found: str) -> str:
    return f"{what}-{'coarser' if CODECS.index(found) > CODECS.index(now) else 'finer'}"


def budget_progress(config: RunConfig, merges: int, trained: int) -> float:
    """Return the used share of the budget, 0..1; 0 for a run without a budget."""
    shares = [0.0]
    if config.budget_merges is not None:
        shares.append(merges / config.budget_merges)
    if config.budget_tokens is not None:
        shares.append(trained / config.budget_tokens)
    return min(1.0, max(shares))


def budget_reason(config: RunConfig, merges: int, trained: int) -> Reason | None:
    if config.budget_merges is not None and merges >= config.budget_merges:
        return because("finish-budget", f"{merges} merges")
    if config.budget_tokens is not None and trained >= config.budget_tokens:
        return because("finish-budget", f"{trained} tokens")
    return None
