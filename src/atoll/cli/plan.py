"""`atoll plan`: estimate bandwidth, time, bytes and cost of a run before it is started."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from atoll.cli.options import DataclassOptions
from atoll.cli.output import JsonOption, Result
from atoll.core.settings import Setting, declared_settings, setting

if TYPE_CHECKING:
    from rich.table import Table

    from atoll.sim.plan import BandwidthPlan, IslandSpec, MethodPlan, PlanRequest


@dataclass(frozen=True, slots=True)
class IslandArguments:
    """Settings of one island as text, or the defaults of all islands. None: not given. Fields are keys of --island."""

    name: str | None = None
    count: str | None = None
    step_time: str | None = setting(None, "Duration of one inner step of an island: 1s, 800ms.", "TIME")
    flops: str | None = setting(
        None, "Instead of --step-time: peak of one chip, such as 400T; needs --chips and --tokens-per-step.", "FLOP/S"
    )
    mfu: str | None = setting(None, "Share of --flops that is used.", "SHARE", default_text="0.4")
    tokens_per_step: str | None = setting(None, "Tokens per step of one island: 500k.", "N")
    chips: str | None = setting(None, "Chips of one island. For goodput.", "N")
    mtbf: str | None = setting(None, "Mean time between failures of one chip: 365d, 5y. For goodput.", "TIME")
    rate: str | None = setting(None, "Bandwidth of a site's link in each direction: 2gbit, 500mbit.", "RATE")
    delay: str | None = setting(None, "One-way latency of a link, half of what ping shows: 20ms.", "TIME")
    price: str | None = setting(None, "Price of sent data: 0.05/GB.", "PRICE")


ISLAND_KEYS = tuple(each.name for each in fields(IslandArguments))


def run(
    params: Annotated[str, Setting("Number of parameters of the model: 5e9, 5B, 300M.", "N")],
    sites: Annotated[int | None, Setting("Number of equal sites, one island each.", "D")] = None,
    *,
    shared: Annotated[dict[str, Any], DataclassOptions("atoll.cli.plan:IslandArguments", as_dict=True)],
    tokens: Annotated[str | None, Setting("Token budget of all islands: 1T. For days, bytes and cost.", "N")] = None,
    island: Annotated[
        list[str] | None,
        Setting(
            f"One island, or `count` equal ones, with its own values of {', '.join(ISLAND_KEYS).replace('_', '-')}. "
            "Other values come from the options. Repeatable.",
            "KEY=VALUE,...",
        ),
    ] = None,
    islands: Annotated[
        Path | None, Setting("TOML file in place of --island: tables [[island]] with the same keys.", "FILE")
    ] = None,
    schedule: Annotated[dict[str, Any], DataclassOptions("atoll.sim.plan:PlanRequest", as_dict=True)],
    plot: Annotated[
        Path | None,
        Setting("Plot compute utilization against bandwidth (.png, .svg or .pdf). Needs the extra 'plot'.", "FILE"),
    ] = None,
    as_json: JsonOption = False,
) -> Result:
    """Estimate the bandwidth, time and cost of a run before it is started.

    Prints the bandwidth that each site's link needs for a compute utilization of 50 to 99 %, for data-parallel
    training, DiLoCo, Streaming DiLoCo and decoupled with each codec. --rate adds the result with these links, --chips
    and --mtbf the goodput, --tokens and --tokens-per-step days and bytes, and --price the cost. Warns if a link is too
    slow for the plan, and if the plan is outside of the measured range. docs/plan.md explains the model.

    Equal sites:     atoll plan --params 5e9 --step-time 1s --sites 8 --rate 2gbit --delay 20ms

    From FLOP/s:     atoll plan --params 12B --sites 4 --chips 256 --flops 400T --mfu 0.4 --tokens-per-step 1M
    --tokens 1T --rate 5gbit --price 0.05/GB --mtbf 365d

    Unequal sites:   atoll plan --params 1B --step-time 1s --rate 1gbit --island name=north,count=2
    --island name=south,step-time=1.4s,rate=200mbit
    """
    from atoll.sim.plan import PlanRequest, make_plan

    size = parse_amount("--params", params)
    defaults = {key: text for key, text in shared.items() if text is not None}
    options = PlanRequest(
        params=size,
        islands=read_islands(size, sites, defaults, island or [], islands),
        tokens=None if tokens is None else parse_amount("--tokens", tokens),
        **schedule,
    )
    if plot is not None:
        from atoll.cli.figures import check_plot

        check_plot(plot)
        draw_plan(plot, options)
    result = make_plan(options)

    def text() -> None:
        show_plan(result)
        if plot is not None:
            print(f"The figure is in {plot}.")

    return Result({**plan_fields(result), "plot": None if plot is None else str(plot)}, text)


_EXAMPLE = "name=north,chips=256,step-time=1s,rate=2gbit"


def read_islands(
    params: float, sites: int | None, shared: Mapping[str, str], given: Sequence[str], file: Path | None
) -> tuple[IslandSpec, ...]:
    """Return the islands of a plan.

    Args:
        params: Parameters of the model.
        sites: Number of equal sites, or None.
        shared: Default values of all islands, by key.
        given: Values of the --island options.
        file: TOML file of --islands, or None.
    """
    from atoll.sim.fleet import MAX_LEARNERS

    if given and file is not None:
        raise ValueError("--island and --islands both define the islands; give only one of them")
    tables = _read_islands_file(file) if file is not None else [_parse_island_option(text) for text in given]
    if not tables:
        if sites is None:
            raise ValueError("the number of sites is missing; give --sites 8, or each island with --island")
        if not 2 <= sites <= MAX_LEARNERS:
            raise ValueError(f"--sites is {sites}; give 2 to {MAX_LEARNERS}: one site has nothing to synchronize")
        tables = [{"name": "site", "count": str(sites)}]
    islands = tuple(_make_specs(params, shared, tables))
    if sites is not None and len(islands) != sites:
        raise ValueError(f"--sites is {sites} and {len(islands)} islands are listed; omit --sites")
    if len(islands) < 2:
        raise ValueError(f"{len(islands)} island is listed, and one island has nothing to synchronize; give 2 or more")
    return islands


def _parse_island_option(text: str) -> dict[str, str]:
    table: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not value.strip():
            raise ValueError(f"cannot parse --island {text!r}; write KEY=VALUE with commas, such as {_EXAMPLE}")
        _check_key(key, f"--island {text!r}")
        table[key] = value.strip()
    return table


def _read_islands_file(file: Path) -> list[dict[str, str]]:
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not TOML: {error}") from None
    listed = raw.get("island")
    if set(raw) != {"island"} or not isinstance(listed, list) or not listed:
        raise ValueError(f"{file} has no islands; begin each with a line [[island]], and write nothing else")
    tables = []
    for number, table in enumerate(listed, start=1):
        if not isinstance(table, dict):
            raise ValueError(f"island {number} of {file} is not a table; begin it with a line [[island]]")
        for key, value in table.items():
            _check_key(key, f"island {number} of {file}")
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValueError(
                    f"{key} of island {number} of {file} is {value!r}; give a number, or a string with a unit"
                )
        tables.append({key: str(value) for key, value in table.items()})
    return tables


def _check_key(key: str, source: str) -> None:
    if key not in ISLAND_KEYS:
        raise ValueError(f"{source} has the unknown key {key!r}; the keys are {', '.join(ISLAND_KEYS)}")


def _make_specs(params: float, shared: Mapping[str, str], tables: Iterable[Mapping[str, str]]) -> Iterable[IslandSpec]:
    from atoll.sim.fleet import MAX_LEARNERS

    total = 0
    for table in tables:
        count = parse_count("count of an island", table.get("count", "1"))
        if total + count > MAX_LEARNERS:
            raise ValueError(f"more than {MAX_LEARNERS} islands are listed; give at most {MAX_LEARNERS}")
        own = dict(table)
        # The shared FLOP/s must not contradict the step time of one island, and vice versa.
        rest = {key: value for key, value in shared.items() if not _contradicts(key, own)}
        for number in range(1, count + 1):
            total += 1
            name = own.get("name", "island")
            yield _make_spec(
                params, name if count == 1 and "name" in own else f"{name} {number if count > 1 else total}", rest | own
            )


def _contradicts(key: str, own: Mapping[str, str]) -> bool:
    return (key == "step_time" and "flops" in own) or (key in ("flops", "mfu") and "step_time" in own)


def _make_spec(params: float, name: str, values: Mapping[str, str]) -> IslandSpec:
    from atoll.sim.plan import IslandSpec

    def label(key: str) -> str:
        return f"{key.replace('_', '-')} of {name}"

    chips = parse_count(label("chips"), values["chips"]) if "chips" in values else None
    if chips is None and "mtbf" in values:
        raise ValueError(f"mtbf of {name} is per chip, and the number of chips is missing; give --chips")
    tokens = parse_amount(label("tokens_per_step"), values["tokens_per_step"]) if "tokens_per_step" in values else None
    return IslandSpec(
        name=name,
        step_s=_step_s(params, name, chips, tokens, values),
        tokens_per_step=tokens,
        chips=chips,
        mtbf_s=parse_seconds(label("mtbf"), values["mtbf"]) if "mtbf" in values else None,
        rate_bit_s=parse_rate(label("rate"), values["rate"]) if "rate" in values else None,
        delay_s=parse_seconds(label("delay"), values["delay"], zero=True) if "delay" in values else 0.0,
        price_per_gb=parse_price(label("price"), values["price"]) if "price" in values else None,
    )


def _step_s(params: float, name: str, chips: int | None, tokens: float | None, values: Mapping[str, str]) -> float:
    if "step_time" in values and "flops" in values:
        raise ValueError(
            f"{name} has a step time and FLOP/s, which may contradict each other; give one of --step-time and --flops"
        )
    if "step_time" in values:
        return parse_seconds(f"step-time of {name}", values["step_time"])
    if "flops" not in values:
        raise ValueError(
            f"the step time of {name} is missing; give --step-time 1s,"
            " or --flops 400T --mfu 0.4 with --chips and --tokens-per-step"
        )
    if chips is None or tokens is None:
        raise ValueError(
            f"the step time of {name} does not follow from FLOP/s alone; give --chips and --tokens-per-step"
        )
    mfu = values.get("mfu", "0.4")
    try:
        used = float(mfu)
    except ValueError:
        raise ValueError(f"mfu of {name} is {mfu!r}; give a share such as 0.4") from None
    from atoll.sim.plan import step_time_from_flops

    return step_time_from_flops(params, tokens, chips, parse_flops(f"flops of {name}", values["flops"]), used)


_NUMBER = r"(\d[\d_]*(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)"
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}
_RATES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIMES = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0, "y": 365 * 86_400.0}


def parse_amount(option: str, text: str) -> float:
    """
    >>> parse_amount("--params", "5e9"), parse_amount("--params", "5B"), parse_amount("--tokens", "1.5T")
    (5000000000.0, 5000000000.0, 1500000000000.0)
    """
    found = re.fullmatch(_NUMBER + r"\s*([kmgbtpe]?)", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{option} {text!r} is not a number above 0; give one such as 5e9, 5B or 1.5T")
    return _check_positive(option, text, float(found[1]) * _COUNTS[found[2].lower()])


def parse_count(option: str, text: str) -> int:
    value = parse_amount(option, text)
    if value != int(value):
        raise ValueError(f"{option} {text!r} is not a whole number; give one such as 256 or 4k")
    return int(value)


def parse_flops(option: str, text: str) -> float:
    """
    >>> parse_flops("--flops", "400T"), parse_flops("--flops", "1 PFLOP/s")
    (400000000000000.0, 1000000000000000.0)
    """
    found = re.fullmatch(_NUMBER + r"\s*([gtpe]?)\s*(?:flops?(?:/s)?)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{option} {text!r} is not a number of FLOP/s; give one such as 400T, 1P or 4e14")
    return _check_positive(option, text, float(found[1]) * _COUNTS[found[2].lower()])


def parse_seconds(option: str, text: str, zero: bool = False) -> float:
    """
    >>> parse_seconds("--step-time", "40ms"), parse_seconds("--mtbf", "365d"), parse_seconds("--mtbf", "inf")
    (0.04, 31536000.0, inf)
    """
    if text.strip() == "inf":
        return math.inf
    found = re.fullmatch(_NUMBER + r"\s*(ms|s|min|m|h|d|y)", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{option} {text!r} is not a time; give one with its unit, such as 40ms, 1s, 5m, 2h or 365d")
    value = float(found[1]) * _TIMES[found[2].lower()]
    return value if zero and value == 0.0 else _check_positive(option, text, value)


def parse_rate(option: str, text: str) -> float:
    """Return a bandwidth in bit/s.

    >>> parse_rate("--rate", "2gbit"), parse_rate("--rate", "500 Mbit/s"), parse_rate("--rate", "10MB/s")
    (2000000000.0, 500000000.0, 80000000.0)
    """
    found = re.fullmatch(_NUMBER + r"\s*([kmgt]?)(bit|b|byte)(?:/s|ps)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{option} {text!r} is not a rate; give one with its unit, such as 2gbit, 500mbit or 10MB/s")
    bits = 1.0 if found[3].lower() == "bit" else 8.0
    if found[3] == "b":  # Gb and GB differ by a factor of 8, and are easily confused
        raise ValueError(
            f"{option} {text!r} may be bits or bytes; write {found[1]}{found[2]}bit or {found[1]}{found[2]}B/s"
        )
    return _check_positive(option, text, float(found[1]) * _RATES[found[2].lower()] * bits)


def parse_price(option: str, text: str) -> float:
    """Return a price per GB.

    >>> parse_price("--price", "0.05/GB"), parse_price("--price", "$20/TB"), parse_price("--price", "0")
    (0.05, 0.02, 0.0)
    """
    found = re.fullmatch(r"[$€]?\s*" + _NUMBER + r"\s*(?:/\s*([GT])B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{option} {text!r} is not a price; give one per GB, such as 0.05/GB or 0")
    return float(found[1].replace("_", "")) / (1_000.0 if (found[2] or "").lower() == "t" else 1.0)


def _check_positive(option: str, text: str, value: float) -> float:
    if not 0.0 < value < math.inf:
        raise ValueError(f"{option} is {text}; give a number above 0")
    return value


# --------------------------------------------------------------------------------------------------------------------
# Text and JSON output


def format_rate(rate_bit_s: float | None, unit_bit_s: float) -> str:
    """
    >>> [format_rate(rate, 1e9) for rate in (1982e9, 198.2e9, 0.8484e9, math.inf, None)]
    ['1,982', '198', '0.848', 'none', '']
    """
    if rate_bit_s is None:
        return ""
    if math.isinf(rate_bit_s):
        return "none"
    units = rate_bit_s / unit_bit_s
    return f"{units:.3g}" if units < 999.5 else f"{units:,.0f}"


def show_plan(plan: BandwidthPlan) -> None:
    from atoll.cli.figures import format_amount, make_console

    out = make_console()
    options = plan.request
    steps = sorted({island.step_s for island in options.islands})
    pace = f"{steps[0]:.3g} s" if len(steps) == 1 else f"{steps[0]:.3g} to {steps[-1]:.3g} s"
    out.print(
        f"{format_amount(options.params)} parameters on {len(options.islands)} sites, steps of {pace},"
        f" H = {options.every_steps}, P = {options.fragments}, tau = {options.tau_steps}."
    )
    out.print(_rate_table(plan))
    if any(row.effective_h is not None and row.method.startswith("decoupled") for row in plan.rows) or any(
        row.goodput is not None or row.days is not None for row in plan.rows
    ):
        out.print(_outcome_table(plan))
    for note in plan.notes:
        out.print(note)
    for warning in plan.warnings:
        out.print(f"Warning: {warning}.")


def _rate_table(plan: BandwidthPlan) -> Table:
    from rich.table import Table

    from atoll.sim.bandwidth import UTILISATIONS

    lowest = min(rate for row in plan.rows for rate in row.rates_bit_s.values())
    name, unit_bit_s = ("Gbit/s", 1e9) if lowest >= 1e7 else ("Mbit/s", 1e6)
    table = Table(title=f"{name} that a site's link needs, by compute utilization", title_justify="left", box=None)
    table.add_column("method", no_wrap=True)
    for share in UTILISATIONS:
        table.add_column(f"{100 * share:g} %", justify="right")
    table.add_column(f"keeps H = {plan.request.every_steps}", justify="right")
    for row in plan.rows:
        rates = [row.rates_bit_s[share] for share in UTILISATIONS]
        table.add_row(row.method, *(format_rate(rate, unit_bit_s) for rate in (*rates, row.keeps_h_bit_s)))
    return table


def _outcome_table(plan: BandwidthPlan) -> Table:
    """Return a table of the columns in which at least one method has a value."""
    from rich.table import Table

    from atoll.cli.figures import format_percent

    columns: list[tuple[str, Callable[[MethodPlan], str]]] = [
        ("step s", lambda row: "" if row.step_s is None else f"{row.step_s:.3g}"),
        ("used %", lambda row: "" if row.utilisation is None else format_percent(row.utilisation)),
        ("H", lambda row: "" if row.effective_h is None else f"{row.effective_h:.0f}"),
        ("goodput %", lambda row: "" if row.goodput is None else format_percent(row.goodput)),
        *([] if plan.request.tokens is not None else [("GB/site/day", lambda row: _format_value(row.gb_per_site_day))]),
        ("days", lambda row: _format_value(row.days)),
        ("GB/site", lambda row: _format_value(row.gb_per_site)),
        ("cost", lambda row: _format_value(row.cost)),
    ]
    table = Table(title="With these islands and links", title_justify="left", box=None)
    table.add_column("method", no_wrap=True)
    known = [(title, show) for title, show in columns if any(show(row) for row in plan.rows)]
    for title, _ in known:
        table.add_column(title, justify="right")
    for row in plan.rows:
        table.add_row(row.method, *(show(row) for _, show in known))
    return table


def _format_value(value: float | None) -> str:
    """
    >>> _format_value(1234567.0), _format_value(0.0123), _format_value(12.34), _format_value(0.0)
    ('1,234,567', '0.0123', '12.3', '0')
    """
    return "" if value is None else f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def plan_fields(plan: BandwidthPlan) -> dict[str, object]:
    options = plan.request
    return {
        "params": options.params,
        "sites": len(options.islands),
        "islands": [{key: _finite(value) for key, value in asdict(island).items()} for island in options.islands],
        "settings": {each.name: each.default for each in declared_settings(options)} | {"tokens": options.tokens},
        "rates_gbit_s": {
            row.method: {f"{share:g}": _to_gbit(rate) for share, rate in row.rates_bit_s.items()} for row in plan.rows
        },
        "keeps_h_gbit_s": {
            row.method: _to_gbit(row.keeps_h_bit_s) for row in plan.rows if row.keeps_h_bit_s is not None
        },
        "methods": {row.method: _row_fields(row) for row in plan.rows},
        "published_rates_gbit_s": _published_fields(plan),
        "notes": list(plan.notes),
        "warnings": list(plan.warnings),
    }


def _row_fields(row: MethodPlan) -> dict[str, object]:
    elsewhere = ("method", "rates_bit_s", "keeps_h_bit_s")
    return {name: _finite(value) for name, value in asdict(row).items() if name not in elsewhere}


def _finite(value: object) -> object:
    """Replace infinities, which are not JSON, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _to_gbit(rate_bit_s: float | None) -> float | None:
    return None if rate_bit_s is None or math.isinf(rate_bit_s) else float(f"{rate_bit_s / 1e9:.6g}")


def _published_fields(plan: BandwidthPlan) -> dict[str, dict[str, float]] | None:
    """Return the published figures for exactly this plan, or None."""
    cells = published_cells(plan.request)
    return {name: {f"{share:g}": rate for share, rate in row.items()} for name, row in cells.items()} or None


def published_cells(options: PlanRequest) -> dict[str, dict[float, float]]:
    from atoll.sim.published import PUBLISHED_RATE_PARAMS, PUBLISHED_RATE_STEP_S, PUBLISHED_RATES_GBIT_S

    same = options.params == PUBLISHED_RATE_PARAMS and all(
        island.step_s == PUBLISHED_RATE_STEP_S and island.delay_s == 0.0 for island in options.islands
    )
    if not same or (options.every_steps, options.fragments, options.star) != (24, 24, False):
        return {}
    return {name: row for (sites, name), row in PUBLISHED_RATES_GBIT_S.items() if sites == len(options.islands)}


# Okabe and Ito's colors, which people with color blindness can distinguish. Dashes repeat the distinction.
_STYLES: tuple[tuple[str, Any], ...] = (
    ("#000000", (0, (1, 1))),
    ("#D55E00", (0, (4, 1.5))),
    ("#E69F00", (0, (6, 1, 1, 1))),
    ("#56B4E9", "-"),
    ("#009E73", "-"),
    ("#0072B2", "-"),
    ("#CC79A7", "-"),
)
_POINTS = 300


def draw_plan(path: Path, options: PlanRequest) -> None:
    """Plot one curve for each method, the published points if there are any, and the slowest link of the plan."""
    from atoll.cli.figures import draw_figure, format_amount
    from atoll.sim.bandwidth import required_rate, utilisation
    from atoll.sim.plan import exchange_patterns

    methods = exchange_patterns(options)
    low = min(required_rate(exchange, load, 0.2) for exchange, load in methods.values())
    required = [required_rate(exchange, load, 0.99) for exchange, load in methods.values()]
    high = 2.0 * max((rate for rate in required if not math.isinf(rate)), default=1e12)
    rates = [low * (high / low) ** (point / (_POINTS - 1)) for point in range(_POINTS)]
    published = published_cells(options)
    with draw_figure(path, figsize=(9.0, 5.2)) as (figure, panel):
        for (name, (exchange, load)), (colour, dashes) in zip(methods.items(), _STYLES, strict=True):
            shares = [100.0 * utilisation(exchange, load, rate) for rate in rates]
            panel.plot(
                [rate / 1e9 for rate in rates], shares, color=colour, linestyle=dashes, linewidth=1.7, label=name
            )
            cells = published.get(name, {})
            panel.plot(list(cells.values()), [100.0 * u for u in cells], "o", ms=9, mfc="none", mec=colour, mew=1.2)
        if published:
            panel.plot([], [], "o", ms=9, mfc="none", mec="#555555", label="published, arXiv 2604.21428")
        if options.min_rate_bit_s is not None:
            panel.axvline(options.min_rate_bit_s / 1e9, color="#555555", linewidth=0.9, label="slowest planned link")
        panel.set_xscale("log")
        panel.set_xlabel("Gbit/s of a site's link, each direction")
        panel.set_ylabel("compute utilization, %")
        panel.set_ylim(0.0, 104.0)
        title = (
            f"{format_amount(options.params)} parameters on {len(options.islands)} sites;"
            " decoupled as counted in the published table"
        )
        panel.set_title(title, fontsize=11, loc="left")
        panel.grid(axis="y", color="#dddddd", linewidth=0.7)
        panel.set_axisbelow(True)
        figure.legend(loc="lower center", ncols=3, frameon=False, fontsize=9)
        figure.tight_layout(rect=(0.0, 0.15, 1.0, 1.0))
