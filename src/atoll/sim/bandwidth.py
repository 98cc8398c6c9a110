"""Model of the link bandwidth that each training method needs for a given compute utilisation.

Every method exchanges data periodically. A part of each exchange overlaps with training steps:

    transfer = share * parameters * bits * factor / rate + turns * delay
    visible  = max(transfer - hidden * T, tail * sending)             (sending: the first term of transfer)
    step     = max(T + visible / every, bits of one exchange / (rate * every))
    utilisation = T / step                                            (published: T_math / (T_math + T_comm))

T is the time of a step without any exchange. `factor` is what a site sends for each number: 2 (D - 1) / D in an
all-reduce of D sites. The second limit of a step is the link itself: exchanges overlap with steps, but two exchanges
cannot use the same bandwidth. Methods differ in the numbers of `ExchangePattern`. `docs/plan.md` gives the source of
each number and the difference to the published table.

    >>> load = Workload(params=5e9, sites=8, step_s=1.0)
    >>> round(required_rate(data_parallel(8), load, 0.9) / 1e9)
    183
    >>> round(required_rate(decoupled("int4"), load, 0.9) / 1e9, 2)
    0.74
    >>> round(utilisation(data_parallel(8), load, 182.8e9), 3)
    0.9

A learner of Atoll never waits for its link. On a slow link its H grows instead (`effective_period_steps`,
`min_rate_for_period`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.sim.fleet import require

UTILISATIONS = (0.5, 0.75, 0.9, 0.95, 0.99)

CODEC_BITS = {"f32": 32.0, "bf16": 16.0, "int8": 8.0, "int4": 4.0}
"""Bits per number as the published figures count them."""

WIRE_BITS = {"f32": 32.0, "bf16": 16.0, "int8": 8.0 + 32.0 / 256.0, "int4": 4.0 + 16.0 / 64.0}
"""Bits per number as Atoll sends them, including the scale of each int8 or int4 block."""

BACKWARD_SHARE = 2.0 / 3.0
"""Share of a step in the backward pass, which costs two of its three multiplications and hides gradient traffic."""

GRADIENT_MESSAGES = 56
"""Number of messages that carry the gradients of a model, in the order of the backward pass. A message waits for its
part of that pass, so the last one starts when the pass has ended. Fitted to the published table."""

PUBLISHED_PERIOD_STEPS = 100.0
"""Steps in which the published decoupled rows send the whole model once, although their H is 24 (see `decoupled`)."""

PUBLISHED_EVERY_STEPS = 24.0
"""H of the published table."""

BOUNDARY_STEPS = 0.5
"""Average wait of a due exchange for the next step boundary."""


@dataclass(frozen=True, slots=True)
class ExchangePattern:
    """Exchange schedule and message size of one method."""

    bits_per_number: float
    share: float  # share of the model in one exchange
    every_steps: float  # steps from one exchange to the next
    hidden_steps: float  # part of an exchange that overlaps with training, in steps
    sequential_delays: float = 0.0  # one-way delays of an exchange, one after the other
    exposed_share: float = 0.0  # share of an exchange that starts after its step and never overlaps

    def __post_init__(self) -> None:
        require(0.0 < self.bits_per_number < math.inf, "bits", self.bits_per_number, "give bits per number above 0")
        require(0.0 < self.share <= 1.0, "share", self.share, "give a share of the model, above 0 and at most 1")
        require(0.0 < self.every_steps < math.inf, "every_steps", self.every_steps, "give steps above 0")
        require(0.0 <= self.hidden_steps < math.inf, "hidden_steps", self.hidden_steps, "give steps, 0 or more")
        require(0.0 <= self.exposed_share < 1.0, "tail", self.exposed_share, "give a share of the exchange, below 1")
        require(
            0.0 <= self.sequential_delays < math.inf,
            "turns",
            self.sequential_delays,
            "give delays per exchange, 0 or more",
        )

    @property
    def bits_per_step(self) -> float:
        """Mean bits per step and model value."""
        return self.bits_per_number * self.share / self.every_steps


@dataclass(frozen=True, slots=True)
class Workload:
    """Model, sites and links, which are the same for every method."""

    params: float
    sites: int
    step_s: float  # duration of a step without any exchange
    delay_s: float = 0.0  # one-way delay of a link
    star: bool = False  # one central syncer (star topology), instead of an all-reduce or one shard per site

    def __post_init__(self) -> None:
        require(1.0 <= self.params < math.inf, "params", self.params, "give a number of parameters such as 5e9")
        require(self.sites >= 2, "sites", self.sites, "a single site has nothing to exchange; give 2 or more")
        require(0.0 < self.step_s < math.inf, "step_s", self.step_s, "give seconds above 0")
        require(0.0 <= self.delay_s < math.inf, "delay_s", self.delay_s, "give seconds, 0 or more")

    @property
    def traffic_factor(self) -> float:
        """Values that a site sends (and receives) per model value that it exchanges."""
        return 1.0 if self.star else all_reduce_factor(self.sites)


def all_reduce_factor(sites: int) -> float:
    """Return 2 (D - 1) / D for D sites.

    In a ring each site sends D - 1 parts of size 1 / D twice: once to sum them, once to distribute the sums. A syncer
    with one shard at each of D sites has the same factor: a site sends (D - 1) / D of its contribution, and its shard
    sends D - 1 copies of the part that it merged.

    >>> all_reduce_factor(2), all_reduce_factor(8)
    (1.0, 1.75)
    """
    return 2.0 * (sites - 1) / sites


# ------------------------------------------------------------------------------------------------------------ methods


def data_parallel(sites: int) -> ExchangePattern:
    """Return the pattern of data-parallel training: all gradients at every step, overlapped with the backward pass.

    The last gradient message never overlaps.
    """
    last = 1.0 / GRADIENT_MESSAGES
    return ExchangePattern(
        16.0, 1.0, 1.0, BACKWARD_SHARE * (1.0 - last), sequential_delays=ring_delays(sites), exposed_share=last
    )


def diloco(sites: int, codec: str = "bf16", every_steps: int = 24) -> ExchangePattern:
    """Return the pattern of DiLoCo: the whole model every H steps, without any overlap.

    Outer gradients exist only after the last inner step.
    """
    return ExchangePattern(codec_bits(codec), 1.0, float(every_steps), 0.0, sequential_delays=ring_delays(sites))


def streaming(
    sites: int, codec: str = "bf16", every_steps: int = 24, fragments: int = 24, tau_steps: float = 2
) -> ExchangePattern:
    """Return the pattern of Streaming DiLoCo: one fragment every H / P steps, overlapped with tau steps."""
    check_schedule(every_steps, fragments, tau_steps)
    return ExchangePattern(
        codec_bits(codec),
        1.0 / fragments,
        every_steps / fragments,
        float(tau_steps),
        sequential_delays=ring_delays(sites),
    )


def decoupled(codec: str = "bf16", every_steps: int = 24, fragments: int = 24, tau_steps: float = 2) -> ExchangePattern:
    """Return the pattern of Decoupled DiLoCo as the published table counts it.

    An exchange overlaps with tau steps, less half a step until the boundary at which the fragment is copied. The
    published rates carry the model once in about 100 steps, not once in H = 24: at 95 %, 1.9 Gbit/s are 2.0 Gbit per
    step, but a bf16 fragment of 5B / 24 parameters is 3.3 Gbit. `min_rate_for_period` gives the rate that keeps H.
    """
    check_schedule(every_steps, fragments, tau_steps)
    stretch = PUBLISHED_PERIOD_STEPS / PUBLISHED_EVERY_STEPS
    hidden = max(tau_steps - BOUNDARY_STEPS, 0.0)
    return ExchangePattern(
        codec_bits(codec), 1.0 / fragments, stretch * every_steps / fragments, hidden, sequential_delays=2.0
    )


def ring_delays(sites: int) -> float:
    return 2.0 * (sites - 1)


def codec_bits(codec: str) -> float:
    if codec not in CODEC_BITS:
        raise ValueError(f"unknown codec {codec!r}; give one of {', '.join(CODEC_BITS)}")
    return CODEC_BITS[codec]


def check_schedule(every_steps: int, fragments: int, tau_steps: float) -> None:
    if every_steps < 1:
        raise ValueError(f"H is {every_steps}; give at least 1 step between two rounds of a fragment")
    if fragments < 1:
        raise ValueError(f"fragments is {fragments}; give at least 1 fragment")
    if not 1 <= tau_steps < math.inf:
        raise ValueError(f"tau is {tau_steps:g}; give at least 1 step, or use diloco, which does not overlap")


# --------------------------------------------------------------------------------------------------- the model itself


def exchange_bits(exchange: ExchangePattern, load: Workload) -> float:
    """Return the bits that one site sends in one exchange."""
    return exchange.share * load.params * exchange.bits_per_number * load.traffic_factor


def step_time_s(exchange: ExchangePattern, load: Workload, rate_bit_s: float) -> float:
    """Return the mean step time with links of this rate, in bit/s. It is infinite at a rate of 0."""
    if not rate_bit_s > 0.0:
        if rate_bit_s == 0.0:
            return math.inf
        raise ValueError(f"the rate is {rate_bit_s:g} bit/s; give 0 or more")
    sending_s = exchange_bits(exchange, load) / rate_bit_s
    late_s = sending_s + exchange.sequential_delays * load.delay_s - exchange.hidden_steps * load.step_s
    visible_s = max(late_s, exchange.exposed_share * sending_s)
    return max(load.step_s + visible_s / exchange.every_steps, sending_s / exchange.every_steps)


def utilisation(exchange: ExchangePattern, load: Workload, rate_bit_s: float) -> float:
    """Return the share of time spent in steps: T divided by the mean step time with exchanges."""
    return load.step_s / step_time_s(exchange, load, rate_bit_s)


def required_rate(exchange: ExchangePattern, load: Workload, target: float) -> float:
    """Return the lowest rate, in bit/s per site and direction, that reaches a target utilisation.

    This is the inverse of `utilisation`. It is infinite if the delays alone cost too much.
    """
    if not 0.0 < target < 1.0:
        raise ValueError(f"the target utilisation is {target:g}; give a share above 0 and below 1, such as 0.95")
    visible_s = load.step_s * exchange.every_steps * (1.0 - target) / target
    sending_s = visible_s + load.step_s * exchange.hidden_steps - exchange.sequential_delays * load.delay_s
    if sending_s <= 0.0:
        return math.inf
    if exchange.exposed_share:
        sending_s = min(sending_s, visible_s / exchange.exposed_share)
    bits = exchange_bits(exchange, load)
    return max(bits / sending_s, bits * target / (exchange.every_steps * load.step_s))


# ---------------------------------------------------------------------------------------------- what Atoll itself does


def min_rate_for_period(codec: str, load: Workload, every_steps: int) -> float:
    """Return the rate, in bit/s per site and direction, that carries every fragment once in H steps.

    On a slower link the effective H is longer.
    """
    return load.params * wire_bits(codec) * load.traffic_factor / (every_steps * load.step_s)


def effective_period_steps(codec: str, load: Workload, every_steps: int, rate_bit_s: float) -> float:
    """Return the effective H: the steps between two rounds of a fragment over links of this rate.

    The step time does not depend on the link. The number of rounds in flight grows with the latency of a link
    (`core.policy.flight_limit`), so latency makes contributions older but does not reduce the number of rounds.
    """
    if not rate_bit_s >= 0.0:
        raise ValueError(f"the rate is {rate_bit_s:g} bit/s; give 0 or more")
    if rate_bit_s == 0.0:
        return math.inf
    return max(float(every_steps), every_steps * min_rate_for_period(codec, load, every_steps) / rate_bit_s)


def wire_bits(codec: str) -> float:
    codec_bits(codec)  # raises for an unknown codec
    return WIRE_BITS[codec]
