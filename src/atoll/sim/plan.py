"""Estimates of utilisation, goodput, time, traffic and cost of each method, for given islands, links and a budget.

    >>> islands = tuple(IslandSpec(f"site {i}", step_s=1.0, rate_bit_s=2e9) for i in range(1, 9))
    >>> plan = make_plan(PlanRequest(params=5e9, islands=islands))
    >>> by_name = {row.method: row for row in plan.rows}
    >>> round(by_name["data-parallel"].utilisation, 3), by_name["decoupled-int4"].utilisation
    (0.014, 1.0)

Utilisation comes from `sim.bandwidth` and goodput from the fleet of `sim.goodput`. The two models are independent: link
waits and chip failures do not influence each other. Synchronous methods run at the speed of the slowest island and the
slowest link.
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
"""Floating-point operations: 2 in the forward pass and 4 in the backward pass, without attention."""

FAILURES_PER_ESTIMATE = 2_000
"""Simulated failures per estimate; the goodput is then accurate to some tenths of a percentage point."""

# Largest measured configurations (benchmarks/README.md). A plan beyond them is extrapolated, and warns about it.
MEASURED_PARAMS = 10.7e6
MEASURED_EVERY_STEPS = (8, 48)
MEASURED_LEARNERS = 64


@dataclass(frozen=True, slots=True)
class IslandSpec:
    """Site, with its chips and its link. Results that need a value that is None are omitted."""

    name: str
    step_s: float
    tokens_per_step: float | None = None
    chips: int | None = None
    mtbf_s: float | None = None  # mean time between failures of one chip; infinite: no failures
    rate_bit_s: float | None = None  # rate of the link in each direction
    delay_s: float = 0.0  # one-way delay
    price_per_gb: float | None = None  # price of sent data

    def __post_init__(self) -> None:
        require(0.0 < self.step_s < math.inf, f"the step time of {self.name}", self.step_s, "give seconds above 0")
        has_chips = self.chips is None or self.chips >= 1
        require(has_chips, f"the number of chips of {self.name}", self.chips, "give at least 1")
        name, mtbf_s = f"the mean time between failures of {self.name}", self.mtbf_s
        require(mtbf_s is None or mtbf_s > 0.0, name, mtbf_s, "give a time above 0, or inf")
        require(0.0 <= self.delay_s < math.inf, f"the delay of {self.name}", self.delay_s, "give seconds, 0 or more")
        for what, value, minimum in (
            ("tokens per step", self.tokens_per_step, 1.0),
            ("rate", self.rate_bit_s, 1.0),
            ("price", self.price_per_gb, 0.0),
        ):
            is_valid = value is None or minimum <= value < math.inf
            require(is_valid, f"the {what} of {self.name}", value, f"give {minimum:g} or more")


def step_time_from_flops(params: float, tokens: float, chips: int, flops: float, used: float) -> float:
    """Return the step time: 6 * params * tokens / (chips * flops * used).

    Args:
        tokens: tokens of one step.
        flops: peak FLOP/s of one chip.
        used: share of the peak that training reaches, 0 to 1.
    """
    if not 0.0 < flops < math.inf:
        raise ValueError(f"{flops:g} FLOP/s per chip; give a number above 0, such as 400T")
    if not 0.0 < used <= 1.0:
        raise ValueError(f"{used:g} of a chip's FLOP/s are used; give a share above 0 and at most 1, such as 0.4")
    return FLOPS_PER_PARAM_AND_TOKEN * params * tokens / (chips * flops * used)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Input of a plan. Raises ValueError with a remedy for invalid values."""

    params: float
    islands: tuple[IslandSpec, ...]
    tokens: float | None = None  # training budget
    every_steps: int = same_setting(RunConfig, "every_steps")
    fragments: int = same_setting(RunConfig, "fragments")
    tau_steps: int = same_setting(RunConfig, "overlap_steps")
    codec: str = setting(
        "bf16",
        "Codec of DiLoCo, Streaming DiLoCo and the warnings about links: f32, bf16, int8 or int4.",
        "NAME",
    )
    star: bool = setting(False, "Use one central syncer instead of one shard at each site.")
    slice_chips: int = setting(2_048, "Chips that are lost together when one of them fails.", "N", min=1)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1.0 <= self.params < math.inf:
            raise ValueError(f"{self.params:g} parameters; give a number such as 5e9 or 5B")
        if not 2 <= len(self.islands) <= MAX_LEARNERS:
            raise ValueError(f"a plan for {len(self.islands)} sites is not possible; give 2 to {MAX_LEARNERS}")
        if self.tokens is not None and not 1.0 <= self.tokens < math.inf:
            raise ValueError(f"{self.tokens:g} tokens; give a number such as 1e12 or 1T")
        if self.tokens is not None and any(island.tokens_per_step is None for island in self.islands):
            raise ValueError("a budget of tokens needs the tokens of a step; give --tokens-per-step")
        if self.tokens is None and any(island.price_per_gb is not None for island in self.islands):
            raise ValueError("a price per GB needs the amount of sent data; give --tokens and --tokens-per-step")
        if self.slice_chips < 1:
            raise ValueError(f"--slice-chips is {self.slice_chips}; give at least 1")
        check_schedule(self.every_steps, self.fragments, self.tau_steps)
        codec_bits(self.codec)

    def _workload(self, step_s: float) -> Workload:
        delay_s = max(island.delay_s for island in self.islands)
        return Workload(self.params, len(self.islands), step_s, delay_s)

    @property
    def synchronous_workload(self) -> Workload:
        """Workload of methods that wait for the slowest island, always with an all-reduce."""
        return self._workload(max(island.step_s for island in self.islands))

    @property
    def decoupled_workload(self) -> Workload:
        """Workload of decoupled rounds. H counts steps of the fastest island, and every round pulls every island."""
        return replace(self._workload(min(island.step_s for island in self.islands)), star=self.star)

    @property
    def min_rate_bit_s(self) -> float | None:
        rates = [island.rate_bit_s for island in self.islands if island.rate_bit_s is not None]
        return min(rates) if len(rates) == len(self.islands) else None


@dataclass(frozen=True, slots=True)
class MethodPlan:
    """Plan for one method. A value is None if its input is missing."""

    method: str
    rates_bit_s: dict[float, float]  # required rate by compute utilisation; infinite if no rate is enough
    keeps_h_bit_s: float | None  # for methods with fragments: mean rate that keeps H
    step_s: float | None
    utilisation: float | None
    effective_h: float | None
    goodput: float | None
    gb_per_site_day: float | None  # traffic of the site that sends the most
    tokens_per_s: float | None
    days: float | None = None  # time for all tokens
    gb_per_site: float | None = None  # traffic of a site for all tokens
    cost: float | None = None  # total cost of all sites for all tokens
    goodput_not_elastic: float | None = None  # goodput of data-parallel training that waits for every repair


@dataclass(frozen=True, slots=True)
class BandwidthPlan:
    request: PlanRequest
    rows: tuple[MethodPlan, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())


def exchange_patterns(request: PlanRequest) -> dict[str, tuple[ExchangePattern, Workload]]:
    """Return the exchange pattern and the workload of every method, as the published figures count them."""
    sites, waiting, free = len(request.islands), request.synchronous_workload, request.decoupled_workload
    h, p, tau = request.every_steps, request.fragments, request.tau_steps
    methods = {
        "data-parallel": (data_parallel(sites), waiting),
        f"diloco-{request.codec}": (diloco(sites, request.codec, h), waiting),
        f"streaming-{request.codec}": (streaming(sites, request.codec, h, p, tau), waiting),
    }
    return methods | {f"decoupled-{codec}": (decoupled(codec, h, p, tau), free) for codec in CODEC_BITS}


def make_plan(request: PlanRequest) -> BandwidthPlan:
    goodput = _goodputs(request)
    rows = tuple(
        _decoupled_row(request, name, exchange, load, goodput)
        if name.startswith("decoupled")
        else _synchronous_row(request, name, exchange, load, goodput)
        for name, (exchange, load) in exchange_patterns(request).items()
    )
    return BandwidthPlan(request, rows, tuple(_warnings(request, rows)), tuple(_notes(request)))


# --------------------------------------------------------------------------------------------------------------- rows


def _synchronous_row(
    request: PlanRequest, name: str, exchange: ExchangePattern, load: Workload, goodput: dict[str, float | None]
) -> MethodPlan:
    rate = request.min_rate_bit_s
    step_s = None if rate is None else step_time_s(exchange, load, rate)
    bits_per_step = load.params * exchange.bits_per_step * load.traffic_factor
    kind = name.partition("-")[0] if name != "data-parallel" else "elastic"
    sent = None if step_s is None else bits_per_step / step_s
    return _with_totals(
        request,
        MethodPlan(
            method=name,
            rates_bit_s={share: required_rate(exchange, load, share) for share in UTILISATIONS},
            keeps_h_bit_s=bits_per_step / load.step_s if kind == "streaming" else None,
            step_s=step_s,
            utilisation=None if step_s is None else load.step_s / step_s,
            effective_h=None if kind == "elastic" else float(request.every_steps),
            goodput=goodput[kind],
            gb_per_site_day=None if sent is None else sent * DAY_S / 8e9,
            tokens_per_s=_tokens_per_s(request, step_s),
            goodput_not_elastic=goodput["data-parallel"] if kind == "elastic" else None,
        ),
        [bits_per_step / load.step_s] * len(request.islands),
        load.step_s,
    )


def _decoupled_row(
    request: PlanRequest, name: str, exchange: ExchangePattern, load: Workload, goodput: dict[str, float | None]
) -> MethodPlan:
    codec = name.partition("-")[2]
    keeps = min_rate_for_period(codec, load, request.every_steps)
    min_rate = request.min_rate_bit_s
    sent = [min(keeps, math.inf if island.rate_bit_s is None else island.rate_bit_s) for island in request.islands]
    tokens = [island.tokens_per_step for island in request.islands]
    return _with_totals(
        request,
        MethodPlan(
            method=name,
            rates_bit_s={share: required_rate(exchange, load, share) for share in UTILISATIONS},
            keeps_h_bit_s=keeps,
            step_s=load.step_s,
            utilisation=1.0,  # decoupled learners never wait for their link
            effective_h=None
            if min_rate is None
            else effective_period_steps(codec, load, request.every_steps, min_rate),
            goodput=goodput["decoupled"],
            gb_per_site_day=None if min_rate is None else max(sent) * DAY_S / 8e9,
            tokens_per_s=None
            if None in tokens
            else sum((island.tokens_per_step or 0.0) / island.step_s for island in request.islands),
        ),
        sent,
        None,
    )


def _tokens_per_s(request: PlanRequest, step_s: float | None) -> float | None:
    """Return the tokens per second of all islands if they step together."""
    tokens = [island.tokens_per_step for island in request.islands]
    if step_s is None or None in tokens:
        return None
    return sum(each or 0.0 for each in tokens) / step_s


def _with_totals(
    request: PlanRequest, row: MethodPlan, sent_bit_s: list[float], together_s: float | None
) -> MethodPlan:
    """Return the row with time, traffic and cost of the whole budget. Failed chips lengthen a run and send nothing.

    Args:
        sent_bit_s: rate of each site while a step takes `together_s`. Slow links make steps longer, but the bytes per
            step stay the same.
        together_s: step time if all islands step together; None if each island steps at its own speed.
    """
    if request.tokens is None:
        return row
    tokens_per_s = row.tokens_per_s if together_s is None else _tokens_per_s(request, together_s)
    assert tokens_per_s is not None, "a request with a budget has the tokens of every step"
    gb = [each * request.tokens / tokens_per_s / 8e9 for each in sent_bit_s]
    prices = [island.price_per_gb for island in request.islands]
    cost = None if None in prices else sum(size * (price or 0.0) for size, price in zip(gb, prices, strict=True))
    days = None
    if row.tokens_per_s is not None:
        days = request.tokens / row.tokens_per_s / (1.0 if row.goodput is None else row.goodput) / DAY_S
    return replace(row, days=days, gb_per_site=max(gb), cost=cost)


# ------------------------------------------------------------------------------------------------------------ goodput


def _goodputs(request: PlanRequest) -> dict[str, float | None]:
    """Return the goodput of each method from the fleet simulator, without the cost of exchanges."""
    kinds: tuple[Method, ...] = ("data-parallel", "elastic", "diloco", "streaming", "decoupled")
    if any(island.chips is None or island.mtbf_s is None for island in request.islands):
        return dict.fromkeys(kinds)
    known = [(island, island.chips or 0, island.mtbf_s or math.inf) for island in request.islands]
    total = sum(chips for _, chips, _ in known)
    failures_per_s = sum(chips / mtbf_s for _, chips, mtbf_s in known)
    if failures_per_s == 0.0:
        return dict.fromkeys(kinds, 1.0)
    slowest_s = request.synchronous_workload.step_s
    fleet = FleetConfig(mtbi_s=total / failures_per_s, slice_chips=request.slice_chips, step_time_s=slowest_s)
    days = FAILURES_PER_ESTIMATE / failures_per_s / DAY_S
    barrier = BarrierConfig(
        request.every_steps, min(request.fragments, request.every_steps), max(1, request.tau_steps), exchange_s=0.0
    )
    shares: dict[str, float | None] = {}
    for kind in kinds[:-1]:
        learners = len(request.islands) if kind in ("diloco", "streaming") else 1
        gates = barrier if learners > 1 else None
        shares[kind] = simulate(fleet, kind, learners, total, days, request.seed, barrier=gates).goodput
    # Decoupled islands are independent, so each is simulated alone with its own chips.
    useful = 0.0
    for index, (island, chips, mtbf_s) in enumerate(known):
        if math.isinf(mtbf_s):
            useful += chips
            continue
        own = replace(fleet, mtbi_s=mtbf_s, step_time_s=island.step_s)
        own_days = FAILURES_PER_ESTIMATE / len(known) * mtbf_s / chips / DAY_S
        useful += chips * simulate(own, "decoupled", 1, chips, own_days, request.seed + index).goodput
    shares["decoupled"] = useful / total
    return shares


# ----------------------------------------------------------------------------------------------------------- warnings


def _warnings(request: PlanRequest, rows: tuple[MethodPlan, ...]) -> Iterator[str]:
    if request.params > MEASURED_PARAMS:
        yield (
            f"{request.params / 1e6:,.0f} M parameters: the loss was measured for models of up to"
            f" {MEASURED_PARAMS / 1e6:g} M (benchmarks/README.md); with a larger model it may be different"
        )
    low, high = MEASURED_EVERY_STEPS
    if not low <= request.every_steps <= high:
        yield f"H = {request.every_steps}: the loss was measured with H from {low} to {high} (benchmarks/README.md)"
    if len(request.islands) > MEASURED_LEARNERS:
        yield f"{len(request.islands)} sites: one syncer was measured with up to {MEASURED_LEARNERS} learners"
    if request.fragments > request.every_steps:
        yield (
            f"P = {request.fragments} fragments in H = {request.every_steps} steps need several rounds per step,"
            " which was not measured"
        )
    yield from _link_warnings(request, rows)


def _link_warnings(request: PlanRequest, rows: tuple[MethodPlan, ...]) -> Iterator[str]:
    planned = next(row for row in rows if row.method == f"decoupled-{request.codec}")
    keeps = planned.keeps_h_bit_s or 0.0
    load, h = request.decoupled_workload, request.every_steps
    for island in request.islands:
        if island.rate_bit_s is None or island.rate_bit_s >= keeps:
            continue
        longer = effective_period_steps(request.codec, load, h, island.rate_bit_s)
        fix = f"give it {keeps / 1e9:.3g} Gbit/s or a longer H"
        if wire_bits(request.codec) > wire_bits("int4"):
            fix += ", or use --codec int4"
        beyond = ", longer than was measured" if longer > MEASURED_EVERY_STEPS[1] else ""
        yield (
            f"the link of {island.name} is too slow: at {island.rate_bit_s / 1e9:.3g} Gbit/s and {request.codec}"
            f" a fragment has a round every {longer:.0f} steps, not {h}{beyond}; {fix}"
        )
        break  # one warning is enough for all links
    fragment_s = load.params / request.fragments * wire_bits(request.codec) * load.traffic_factor
    for island in request.islands:
        round_s = 4.0 * island.delay_s + (2.0 * fragment_s / island.rate_bit_s if island.rate_bit_s else 0.0)
        if round_s > request.tau_steps * load.step_s:
            yield (
                f"a round over the link of {island.name} takes {round_s:.3g} s, longer than tau = {request.tau_steps}"
                f" steps of {load.step_s:.3g} s: more rounds are in flight, and adopted versions are older"
            )
            break
    data = rows[0]
    if data.utilisation is not None and data.utilisation < 0.5:
        yield (
            f"data-parallel over these links spends {100 * data.utilisation:.2g} % of its time in steps:"
            f" {1 / data.utilisation:.3g} times slower per step than decoupled"
        )
    if request.star:
        yield (
            f"central syncer: its link carries {len(request.islands)} models in and out per {h} steps,"
            f" {len(request.islands) * keeps / 1e9:.3g} Gbit/s each way"
        )


def _notes(request: PlanRequest) -> Iterator[str]:
    exchange, load = exchange_patterns(request)["decoupled-bf16"]
    h = request.every_steps
    at_95 = effective_period_steps("bf16", load, h, required_rate(exchange, load, 0.95))
    yield (
        "Rates are per site and direction. Decoupled rates count utilisation as the published table does. A learner"
        f" of Atoll never waits for its link: below the rate that keeps H = {h} its fragments have fewer rounds,"
        f" one every {at_95:.0f} steps at the rate for 95 %."
    )
    if all(island.chips is not None and island.mtbf_s is not None for island in request.islands):
        yield (
            f"Goodput is simulated: slices of {request.slice_chips:,} chips, repairs and reconfigurations as fitted to"
            " the published table (benchmarks/README.md). Data-parallel is elastic."
        )
