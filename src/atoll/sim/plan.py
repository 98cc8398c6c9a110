"""The plan before money is spent: what each method makes of these islands, these links and this budget.

    >>> islands = tuple(IslandSpec(f"site {i}", step_s=1.0, rate_bit_s=2e9) for i in range(1, 9))
    >>> plan = make_plan(PlanRequest(params=5e9, islands=islands))
    >>> by_name = {row.method: row for row in plan.rows}
    >>> round(by_name["data-parallel"].utilisation, 3), by_name["decoupled-int4"].utilisation
    (0.014, 1.0)

Utilisation is by `sim.bandwidth`, goodput by the fleet of `sim.goodput`; neither knows the other: a site's link and its
chips fail and wait independently here. Methods that wait go at the pace of the slowest island and the thinnest link.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from atoll.core.settings import same_setting, setting
from atoll.core.types import RunConfig
from atoll.sim.bandwidth import (
    CODEC_BITS,
    UTILISATIONS,
    ExchangePattern,
    Workload,
    check_schedule,
    codec_bits,
    data_parallel,
    decoupled,
    diloco,
    effective_period_steps,
    min_rate_for_period,
    required_rate,
    step_time_s,
    streaming,
    wire_bits,
)
from atoll.sim.fleet import DAY_S, MAX_LEARNERS, FleetConfig, require
from atoll.sim.goodput import BarrierConfig, simulate
from atoll.sim.published import Method

FLOPS_PER_PARAM_AND_TOKEN = 6.0
"""Two of the forward pass and four of the backward pass, without attention."""

FAILURES_PER_ESTIMATE = 2_000
"""Of a simulated fleet: a goodput is then within some tenths of a point."""

# What was measured here (benchmarks/README.md). Beyond it a plan is arithmetic, and says so.
MEASURED_PARAMS = 10.7e6
MEASURED_EVERY_STEPS = (8, 48)
MEASURED_LEARNERS = 64


@dataclass(frozen=True, slots=True)
class IslandSpec:
    """One site: its chips, and its link to the others. None: not said, so what needs it is left out."""

    name: str
    step_s: float
    tokens_per_step: float | None = None
    chips: int | None = None
    mtbf_s: float | None = None  # of one chip; infinite: they never fail
    rate_bit_s: float | None = None  # in each direction
    delay_s: float = 0.0  # one way
    price_per_gb: float | None = None  # of what is sent

    def __post_init__(self) -> None:
        require(0.0 < self.step_s < math.inf, f"the step time of {self.name}", self.step_s, "give seconds above 0")
        has_chips = self.chips is None or self.chips >= 1
        require(has_chips, f"the number of chips of {self.name}", self.chips, "give at least 1")
        what, mtbf_s = f"the mean time between failures of {self.name}", self.mtbf_s
        require(mtbf_s is None or mtbf_s > 0.0, what, mtbf_s, "give a time above 0, or inf")
        require(0.0 <= self.delay_s < math.inf, f"the delay of {self.name}", self.delay_s, "give seconds, 0 or more")
        for what, value, least in (
            ("tokens per step", self.tokens_per_step, 1.0),
            ("rate", self.rate_bit_s, 1.0),
            ("price", self.price_per_gb, 0.0),
        ):
            fine = value is None or least <= value < math.inf
            require(fine, f"the {what} of {self.name}", value, f"give {least:g} or more")


def step_time_from_flops(params: float, tokens: float, chips: int, flops: float, used: float) -> float:
    """Seconds of a step: 6 * parameters * tokens / (chips * FLOP/s of a chip * share of them that is used)."""
    if not 0.0 < flops < math.inf:
        raise ValueError(f"{flops:g} FLOP/s per chip; give a number above 0, such as 400T")
    if not 0.0 < used <= 1.0:
        raise ValueError(f"{used:g} of a chip's FLOP/s are used; give a share above 0 and at most 1, such as 0.4")
    return FLOPS_PER_PARAM_AND_TOKEN * params * tokens / (chips * flops * used)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is to be planned. Raises `ValueError` with the fix where it cannot be."""

    params: float
    islands: tuple[IslandSpec, ...]
    tokens: float | None = None  # to be trained
    every_steps: int = same_setting(RunConfig, "every_steps")
    fragments: int = same_setting(RunConfig, "fragments")
    tau_steps: int = same_setting(RunConfig, "overlap_steps")
    codec: str = setting(
        "bf16",
        "f32, bf16, int8 or int4: of DiLoCo and Streaming DiLoCo, and of the warnings about links.",
        "NAME",
    )
    star: bool = setting(False, "One syncer elsewhere, instead of a part of it at each site: other bytes per link.")
    slice_chips: int = setting(2_048, "Chips that are out together when one of them fails.", "N", min=1)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1.0 <= self.params < math.inf:
            raise ValueError(f"{self.params:g} parameters; give a number such as 5e9 or 5B")
        if not 2 <= len(self.islands) <= MAX_LEARNERS:
            raise ValueError(f"{len(self.islands)} sites exchange nothing; give 2 to {MAX_LEARNERS}")
        if self.tokens is not None and not 1.0 <= self.tokens < math.inf:
            raise ValueError(f"{self.tokens:g} tokens; give a number such as 1e12 or 1T")
        if self.tokens is not None and any(island.tokens_per_step is None for island in self.islands):
            raise ValueError("a budget of tokens says nothing without the tokens of a step; give --tokens-per-step")
        if self.tokens is None and any(island.price_per_gb is not None for island in self.islands):
            raise ValueError("a price needs to know how much is sent; give --tokens and --tokens-per-step")
        if self.slice_chips < 1:
            raise ValueError(f"--slice-chips is {self.slice_chips}; give at least 1")
        check_schedule(self.every_steps, self.fragments, self.tau_steps)
        codec_bits(self.codec)

    def _workload(self, step_s: float) -> Workload:
        delay_s = max(island.delay_s for island in self.islands)
        return Workload(self.params, len(self.islands), step_s, delay_s)

    @property
    def synchronous_workload(self) -> Workload:
        """Of methods that wait for the slowest: always an all-reduce."""
        return self._workload(max(island.step_s for island in self.islands))

    @property
    def decoupled_workload(self) -> Workload:
        """Of decoupled rounds: H is counted in steps of the fastest, and every island is asked in every round."""
        return replace(self._workload(min(island.step_s for island in self.islands)), star=self.star)

    @property
    def min_rate_bit_s(self) -> float | None:
        rates = [island.rate_bit_s for island in self.islands if island.rate_bit_s is not None]
        return min(rates) if len(rates) == len(self.islands) else None


@dataclass(frozen=True, slots=True)
class MethodPlan:
    """One method. None: something that it depends on was not said."""

    method: str
    rates_bit_s: dict[float, float]  # by compute utilisation; infinite where delays alone forbid it
    keeps_h_bit_s: float | None  # of fragment-wise methods: mean rate on a link while every fragment has its H steps
    step_s: float | None
    utilisation: float | None
    effective_h: float | None
    goodput: float | None
    gb_per_site_day: float | None  # of the site that sends most
    tokens_per_s: float | None
    days: float | None = None  # to train all tokens
    gb_per_site: float | None = None  # for all tokens
    cost: float | None = None  # of all sites, for all tokens
    goodput_not_elastic: float | None = None  # of data-parallel training that waits for every repair


@dataclass(frozen=True, slots=True)
class BandwidthPlan:
    request: PlanRequest
    rows: tuple[MethodPlan, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())


def exchange_patterns(wish: PlanRequest) -> dict[str, tuple[ExchangePattern, Workload]]:
    """Every method of a plan, with what it puts on a link as published figures count it."""
    sites, waiting, free = len(wish.islands), wish.synchronous_workload, wish.decoupled_workload
    h, p, tau = wish.every_steps, wish.fragments, wish.tau_steps
    methods = {
        "data-parallel": (data_parallel(sites), waiting),
        f"diloco-{wish.codec}": (diloco(sites, wish.codec, h), waiting),
        f"streaming-{wish.codec}": (streaming(sites, wish.codec, h, p, tau), waiting),
    }
    return methods | {f"decoupled-{codec}": (decoupled(codec, h, p, tau), free) for codec in CODEC_BITS}


def make_plan(wish: PlanRequest) -> BandwidthPlan:
    goodput = _goodputs(wish)
    rows = tuple(
        _decoupled_row(wish, name, exchange, load, goodput)
        if name.startswith("decoupled")
        else _synchronous_row(wish, name, exchange, load, goodput)
        for name, (exchange, load) in exchange_patterns(wish).items()
    )
    return BandwidthPlan(wish, rows, tuple(_warnings(wish, rows)), tuple(_notes(wish)))


# --------------------------------------------------------------------------------------------------------------- rows


def _synchronous_row(
    wish: PlanRequest, name: str, exchange: ExchangePattern, load: Workload, goodput: dict[str, float | None]
) -> MethodPlan:
    rate = wish.min_rate_bit_s
    step_s = None if rate is None else step_time_s(exchange, load, rate)
    bits_per_step = load.params * exchange.bits_per_step * load.traffic_factor
    kind = name.partition("-")[0] if name != "data-parallel" else "elastic"
    sent = None if step_s is None else bits_per_step / step_s
    return _with_totals(
        wish,
        MethodPlan(
            method=name,
            rates_bit_s={share: required_rate(exchange, load, share) for share in UTILISATIONS},
            keeps_h_bit_s=bits_per_step / load.step_s if kind == "streaming" else None,
            step_s=step_s,
            utilisation=None if step_s is None else load.step_s / step_s,
            effective_h=None if kind == "elastic" else float(wish.every_steps),
            goodput=goodput[kind],
            gb_per_site_day=None if sent is None else sent * DAY_S / 8e9,
            tokens_per_s=_tokens_per_s(wish, step_s),
            goodput_not_elastic=goodput["data-parallel"] if kind == "elastic" else None,
        ),
        [bits_per_step / load.step_s] * len(wish.islands),
        load.step_s,
    )


def _decoupled_row(
    wish: PlanRequest, name: str, exchange: ExchangePattern, load: Workload, goodput: dict[str, float | None]
) -> MethodPlan:
    codec = name.partition("-")[2]
    keeps = min_rate_for_period(codec, load, wish.every_steps)
    thinnest = wish.min_rate_bit_s
    sent = [min(keeps, math.inf if island.rate_bit_s is None else island.rate_bit_s) for island in wish.islands]
    tokens = [island.tokens_per_step for island in wish.islands]
    return _with_totals(
        wish,
        MethodPlan(
            method=name,
            rates_bit_s={share: required_rate(exchange, load, share) for share in UTILISATIONS},
            keeps_h_bit_s=keeps,
            step_s=load.step_s,
            utilisation=1.0,  # a learner never waits for its link
            effective_h=None if thinnest is None else effective_period_steps(codec, load, wish.every_steps, thinnest),
            goodput=goodput["decoupled"],
            gb_per_site_day=None if thinnest is None else max(sent) * DAY_S / 8e9,
            tokens_per_s=None
            if None in tokens
            else sum((island.tokens_per_step or 0.0) / island.step_s for island in wish.islands),
        ),
        sent,
        None,
    )


def _tokens_per_s(wish: PlanRequest, step_s: float | None) -> float | None:
    """Of methods in which all islands step together."""
    tokens = [island.tokens_per_step for island in wish.islands]
    if step_s is None or None in tokens:
        return None
    return sum(each or 0.0 for each in tokens) / step_s


def _with_totals(wish: PlanRequest, row: MethodPlan, sent_bit_s: list[float], together_s: float | None) -> MethodPlan:
    """With what the whole budget takes: chips that fail lengthen a run and send nothing meanwhile.

    `sent_bit_s` is what sites send while steps take `together_s`, for methods that step together: thin links make those
    slower, and the bytes stay. None: islands step on whatever happens, each at its own pace.
    """
    if wish.tokens is None:
        return row
    tokens_per_s = row.tokens_per_s if together_s is None else _tokens_per_s(wish, together_s)
    assert tokens_per_s is not None, "a wish with a budget knows the tokens of every step"
    gb = [each * wish.tokens / tokens_per_s / 8e9 for each in sent_bit_s]
    prices = [island.price_per_gb for island in wish.islands]
    cost = None if None in prices else sum(size * (price or 0.0) for size, price in zip(gb, prices, strict=True))
    days = None
    if row.tokens_per_s is not None:
        days = wish.tokens / row.tokens_per_s / (1.0 if row.goodput is None else row.goodput) / DAY_S
    return replace(row, days=days, gb_per_site=max(gb), cost=cost)


# ------------------------------------------------------------------------------------------------------------ goodput


def _goodputs(wish: PlanRequest) -> dict[str, float | None]:
    """By the fleet simulator, chips alone: exchanges cost nothing here, they are in the utilisation."""
    kinds: tuple[Method, ...] = ("data-parallel", "elastic", "diloco", "streaming", "decoupled")
    if any(island.chips is None or island.mtbf_s is None for island in wish.islands):
        return dict.fromkeys(kinds)
    known = [(island, island.chips or 0, island.mtbf_s or math.inf) for island in wish.islands]
    total = sum(chips for _, chips, _ in known)
    failures_per_s = sum(chips / mtbf_s for _, chips, mtbf_s in known)
    if failures_per_s == 0.0:
        return dict.fromkeys(kinds, 1.0)
    slowest_s = wish.synchronous_workload.step_s
    fleet = FleetConfig(mtbi_s=total / failures_per_s, slice_chips=wish.slice_chips, step_time_s=slowest_s)
    days = FAILURES_PER_ESTIMATE / failures_per_s / DAY_S
    barrier = BarrierConfig(
        wish.every_steps, min(wish.fragments, wish.every_steps), max(1, wish.tau_steps), exchange_s=0.0
    )
    shares: dict[str, float | None] = {}
    for kind in kinds[:-1]:
        learners = len(wish.islands) if kind in ("diloco", "streaming") else 1
        gates = barrier if learners > 1 else None
        shares[kind] = simulate(fleet, kind, learners, total, days, wish.seed, barrier=gates).goodput
    # Decoupled islands do not touch each other, so each is simulated alone, with its own chips.
    useful = 0.0
    for place, (island, chips, mtbf_s) in enumerate(known):
        if math.isinf(mtbf_s):
            useful += chips
            continue
        own = replace(fleet, mtbi_s=mtbf_s, step_time_s=island.step_s)
        own_days = FAILURES_PER_ESTIMATE / len(known) * mtbf_s / chips / DAY_S
        useful += chips * simulate(own, "decoupled", 1, chips, own_days, wish.seed + place).goodput
    shares["decoupled"] = useful / total
    return shares


# ----------------------------------------------------------------------------------------------------------- warnings


def _warnings(wish: PlanRequest, rows: tuple[MethodPlan, ...]) -> Iterator[str]:
    if wish.params > MEASURED_PARAMS:
        yield (
            f"{wish.params / 1e6:,.0f} M parameters: models trained here had up to {MEASURED_PARAMS / 1e6:g} M"
            " (benchmarks/README.md); what a larger one loses to fewer exchanges was not measured here"
        )
    low, high = MEASURED_EVERY_STEPS
    if not low <= wish.every_steps <= high:
        yield f"H = {wish.every_steps}: loss was measured here with H from {low} to {high} (benchmarks/README.md)"
    if len(wish.islands) > MEASURED_LEARNERS:
        yield f"{len(wish.islands)} sites: one syncer was measured here with up to {MEASURED_LEARNERS} learners"
    if wish.fragments > wish.every_steps:
        yield (
            f"P = {wish.fragments} fragments in H = {wish.every_steps} steps are several rounds per step, which was not"
            " measured here"
        )
    yield from _link_warnings(wish, rows)


def _link_warnings(wish: PlanRequest, rows: tuple[MethodPlan, ...]) -> Iterator[str]:
    planned = next(row for row in rows if row.method == f"decoupled-{wish.codec}")
    keeps = planned.keeps_h_bit_s or 0.0
    load, h = wish.decoupled_workload, wish.every_steps
    for island in wish.islands:
        if island.rate_bit_s is None or island.rate_bit_s >= keeps:
            continue
        longer = effective_period_steps(wish.codec, load, h, island.rate_bit_s)
        fix = f"give it {keeps / 1e9:.3g} Gbit/s or a longer H"
        if wire_bits(wish.codec) > wire_bits("int4"):
            fix += ", or take --codec int4"
        beyond = ", more than was measured here" if longer > MEASURED_EVERY_STEPS[1] else ""
        yield (
            f"the link of {island.name} cannot carry the plan: at {island.rate_bit_s / 1e9:.3g} Gbit/s and {wish.codec}"
            f" a fragment comes round every {longer:.0f} steps, not {h}{beyond}; {fix}"
        )
        break  # one is enough: the others would say the same
    fragment_s = load.params / wish.fragments * wire_bits(wish.codec) * load.traffic_factor
    for island in wish.islands:
        round_s = 4.0 * island.delay_s + (2.0 * fragment_s / island.rate_bit_s if island.rate_bit_s else 0.0)
        if round_s > wish.tau_steps * load.step_s:
            yield (
                f"a round over the link of {island.name} takes {round_s:.3g} s, longer than tau = {wish.tau_steps}"
                f" steps of {load.step_s:.3g} s: more rounds will be in flight, and what is adopted is older"
            )
            break
    data = rows[0]
    if data.utilisation is not None and data.utilisation < 0.5:
        yield (
            f"data-parallel over these links spends {100 * data.utilisation:.2g} % of its time in steps:"
            f" {1 / data.utilisation:.3g} times slower per step than decoupled"
        )
    if wish.star:
        yield (
            f"one syncer for all: its own link carries {len(wish.islands)} models in and out per {h} steps,"
            f" {len(wish.islands) * keeps / 1e9:.3g} Gbit/s each way"
        )


def _notes(wish: PlanRequest) -> Iterator[str]:
    exchange, load = exchange_patterns(wish)["decoupled-bf16"]
    h = wish.every_steps
    at_95 = effective_period_steps("bf16", load, h, required_rate(exchange, load, 0.95))
    yield (
        "Rates are per site and direction. Those of decoupled count utilisation as the published table does. A learner"
        f" of Atoll never waits for its link: below the rate that keeps H = {h} its fragments come round less often,"
        f" every {at_95:.0f} steps at the rate for 95 %."
    )
    if all(island.chips is not None and island.mtbf_s is not None for island in wish.islands):
        yield (
            f"Goodput is simulated: slices of {wish.slice_chips:,} chips, repairs and reconfigurations as fitted to the"
            " published table (benchmarks/README.md). Data-parallel is elastic."
        )
