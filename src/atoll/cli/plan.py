"""`atoll plan`: what islands, links and a budget come to, before money is spent."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from atoll.cli.output import JsonOption, print_json
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from atoll.sim.plan import IslandSpec


# long: the list of options, with what each one means
def run(
    params: Annotated[str, Setting("Parameters of the model: 5e9, 5B, 300M.", "N")],
    sites: Annotated[int | None, Setting("Sites that are alike, one island each.", "D")] = None,
    step_time: Annotated[str | None, Setting("Of one inner step of an island: 1s, 800ms.", "TIME")] = None,
    flops: Annotated[
        str | None,
        Setting("Instead of --step-time: peak of one chip, as 400T; needs --chips and --tokens-per-step.", "FLOP/S"),
    ] = None,
    mfu: Annotated[float | None, Setting("Of --flops, what is used. [default: 0.4]", "SHARE")] = None,
    tokens_per_step: Annotated[str | None, Setting("Of one island: 500k.", "N")] = None,
    tokens: Annotated[str | None, Setting("The budget, of all islands: 1T. For days, bytes and cost.", "N")] = None,
    chips: Annotated[str | None, Setting("Of one island. For goodput.", "N")] = None,
    mtbf: Annotated[
        str | None, Setting("Mean time between failures of one chip: 365d, 5y. For goodput.", "TIME")
    ] = None,
    slice_chips: Annotated[int, Setting("Chips that are out together when one of them fails.", "N")] = 2_048,
    rate: Annotated[str | None, Setting("Of a site's link, each direction: 2gbit, 500mbit.", "RATE")] = None,
    delay: Annotated[str | None, Setting("Of a link, one way, half of what ping shows: 20ms.", "TIME")] = None,
    price: Annotated[str | None, Setting("Of what a site sends: 0.05/GB.", "PRICE")] = None,
    island: Annotated[
        list[str] | None,
        Setting(
            "One island, or `count` of them, where they differ: name, count, chips, step-time, flops, mfu, "
            "tokens-per-step, mtbf, rate, delay, price. The rest is as the options say. Repeatable.",
            "KEY=VALUE,...",
        ),
    ] = None,
    islands: Annotated[
        Path | None, Setting("The same as TOML: a table [[island]] for each, the same keys.", "FILE")
    ] = None,
    every: Annotated[int, Setting("Steps between two rounds of a fragment.", "H")] = 24,
    fragments: Annotated[int, Setting("Fragments of the model.", "P")] = 24,
    tau: Annotated[int, Setting("Steps under which one synchronisation is hidden.", "TAU")] = 2,
    codec: Annotated[
        str,
        Setting("f32, bf16, int8 or int4: of DiLoCo and Streaming DiLoCo, and of the warnings about links.", "NAME"),
    ] = "bf16",
    star: Annotated[
        bool, Setting("One syncer elsewhere, instead of a part of it at each site: other bytes per link.")
    ] = False,
    plot: Annotated[
        Path | None,
        Setting("Draw utilisation against rate into FILE (.png, .svg or .pdf). Needs the extra 'plot'.", "FILE"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a run will need and cost, before it is paid for.

    Prints the rate that each site's link needs for a compute utilisation of 50 to 99 %, for data-parallel training,
    DiLoCo, Streaming DiLoCo and decoupled with each codec. With --rate also what comes of these links, with --chips and
    --mtbf the goodput, with --tokens and --tokens-per-step days and bytes, and with --price the bill. Warns where a
    link cannot carry the plan, and where it leaves what was measured. docs/plan.md explains the model.

    Alike sites:     atoll plan --params 5e9 --step-time 1s --sites 8 --rate 2gbit --delay 20ms

    From FLOP/s:     atoll plan --params 12B --sites 4 --chips 256 --flops 400T --mfu 0.4 --tokens-per-step 1M
    --tokens 1T --rate 5gbit --price 0.05/GB --mtbf 365d

    Unequal sites:   atoll plan --params 1B --step-time 1s --rate 1gbit --island name=north,count=2
    --island name=south,step-time=1.4s,rate=200mbit
    """
    from atoll.cli.plan_show import plan_fields, show_plan
    from atoll.sim.plan import PlanWish, make_plan

    size = read_amount("--params", params)
    shared = {
        "step_time": step_time,
        "flops": flops,
        "mfu": None if mfu is None else str(mfu),
        "tokens_per_step": tokens_per_step,
        "chips": chips,
        "mtbf": mtbf,
        "rate": rate,
        "delay": delay,
        "price": price,
    }
    said = {key: text for key, text in shared.items() if text is not None}
    if slice_chips < 1:
        raise ValueError(f"--slice-chips is {slice_chips}; give at least 1")
    wish = PlanWish(
        params=size,
        islands=read_islands(size, sites, said, island or [], islands),
        tokens=None if tokens is None else read_amount("--tokens", tokens),
        every_steps=every,
        fragments=fragments,
        tau_steps=tau,
        codec=codec,
        star=star,
        slice_chips=slice_chips,
    )
    if plot is not None:
        from atoll.cli.plan_show import draw_plan
        from atoll.cli.simulate_show import check_plot

        check_plot(plot)
        draw_plan(plot, wish)
    made = make_plan(wish)
    if as_json:
        print_json({**plan_fields(made), "plot": None if plot is None else str(plot)})
        return
    show_plan(made)
    if plot is not None:
        print(f"The figure is in {plot}.")


KEYS = ("name", "count", "chips", "step_time", "flops", "mfu", "tokens_per_step", "mtbf", "rate", "delay", "price")
_EXAMPLE = "name=north,chips=256,step-time=1s,rate=2gbit"


def read_islands(
    params: float, sites: int | None, shared: Mapping[str, str], given: Sequence[str], file: Path | None
) -> tuple[IslandSpec, ...]:
    """`shared` has the options that hold for every island that does not say otherwise, by key."""
    from atoll.sim.fleet import MAX_LEARNERS

    if given and file is not None:
        raise ValueError("--island and --islands both list the islands; give one of them")
    tables = _from_file(file) if file is not None else [_from_option(text) for text in given]
    if not tables:
        if sites is None:
            raise ValueError("how many sites are there? give --sites 8, or the islands one by one with --island")
        if not 2 <= sites <= MAX_LEARNERS:
            raise ValueError(f"--sites is {sites}; give 2 to {MAX_LEARNERS}: with one site nothing travels")
        tables = [{"name": "site", "count": str(sites)}]
    islands = tuple(_specs(params, shared, tables))
    if sites is not None and len(islands) != sites:
        raise ValueError(f"--sites is {sites} and {len(islands)} islands are listed; leave --sites out")
    if len(islands) < 2:
        raise ValueError(f"{len(islands)} island is listed, and with one nothing travels; give 2 or more")
    return islands


def _from_option(text: str) -> dict[str, str]:
    table: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not value.strip():
            raise ValueError(f"--island {text!r} is not understood; write KEY=VALUE with commas, as {_EXAMPLE}")
        _check_key(key, f"--island {text!r}")
        table[key] = value.strip()
    return table


def _from_file(file: Path) -> list[dict[str, str]]:
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as wrong:
        raise ValueError(f"{file} is not TOML: {wrong}") from None
    listed = raw.get("island")
    if set(raw) != {"island"} or not isinstance(listed, list) or not listed:
        raise ValueError(f"{file} lists no islands; begin each with a line [[island]], and write nothing else")
    tables = []
    for place, table in enumerate(listed, start=1):
        if not isinstance(table, dict):
            raise ValueError(f"island {place} of {file} is not a table; begin it with a line [[island]]")
        for key, value in table.items():
            _check_key(key, f"island {place} of {file}")
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValueError(
                    f"{key} of island {place} of {file} is {value!r}; give a number, or a text with a unit"
                )
        tables.append({key: str(value) for key, value in table.items()})
    return tables


def _check_key(key: str, place: str) -> None:
    if key not in KEYS:
        raise ValueError(f"{place} has a key {key!r}; there are {', '.join(KEYS)}")


def _specs(params: float, shared: Mapping[str, str], tables: Iterable[Mapping[str, str]]) -> Iterable[IslandSpec]:
    from atoll.sim.fleet import MAX_LEARNERS

    made = 0
    for table in tables:
        count = read_count("count of an island", table.get("count", "1"))
        if made + count > MAX_LEARNERS:
            raise ValueError(f"more than {MAX_LEARNERS} islands are listed; that is the most")
        own = dict(table)
        # An island with a step time of its own has no use for the FLOP/s of all, and the other way round.
        rest = {key: value for key, value in shared.items() if not _contradicts(key, own)}
        for number in range(1, count + 1):
            made += 1
            name = own.get("name", "island")
            yield _spec(
                params, name if count == 1 and "name" in own else f"{name} {number if count > 1 else made}", rest | own
            )


def _contradicts(key: str, own: Mapping[str, str]) -> bool:
    return (key == "step_time" and "flops" in own) or (key in ("flops", "mfu") and "step_time" in own)


def _spec(params: float, name: str, words: Mapping[str, str]) -> IslandSpec:
    from atoll.sim.plan import IslandSpec

    def of(key: str) -> str:
        return f"{key.replace('_', '-')} of {name}"

    chips = read_count(of("chips"), words["chips"]) if "chips" in words else None
    if chips is None and "mtbf" in words:
        raise ValueError(f"mtbf of {name} is of one chip, and nobody says how many there are; give --chips")
    tokens = read_amount(of("tokens_per_step"), words["tokens_per_step"]) if "tokens_per_step" in words else None
    return IslandSpec(
        name=name,
        step_s=_step_s(params, name, chips, tokens, words),
        tokens_per_step=tokens,
        chips=chips,
        mtbf_s=read_seconds(of("mtbf"), words["mtbf"]) if "mtbf" in words else None,
        rate_bit_s=read_rate(of("rate"), words["rate"]) if "rate" in words else None,
        delay_s=read_seconds(of("delay"), words["delay"], zero=True) if "delay" in words else 0.0,
        price_per_gb=read_price(of("price"), words["price"]) if "price" in words else None,
    )


def _step_s(params: float, name: str, chips: int | None, tokens: float | None, words: Mapping[str, str]) -> float:
    if "step_time" in words and "flops" in words:
        raise ValueError(f"{name} has a step time and FLOP/s, which may disagree; give one of --step-time and --flops")
    if "step_time" in words:
        return read_seconds(f"step-time of {name}", words["step_time"])
    if "flops" not in words:
        raise ValueError(
            f"how long does a step of {name} take? give --step-time 1s,"
            " or --flops 400T --mfu 0.4 with --chips and --tokens-per-step"
        )
    if chips is None or tokens is None:
        raise ValueError(f"FLOP/s alone do not say how long a step of {name} takes; give --chips and --tokens-per-step")
    mfu = words.get("mfu", "0.4")
    try:
        used = float(mfu)
    except ValueError:
        raise ValueError(f"mfu of {name} is {mfu!r}; give a share such as 0.4") from None
    from atoll.sim.plan import step_from_flops

    return step_from_flops(params, tokens, chips, read_flops(f"flops of {name}", words["flops"]), used)


_NUMBER = r"(\d[\d_]*(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)"
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}
_RATES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIMES = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0, "y": 365 * 86_400.0}


def read_amount(place: str, text: str) -> float:
    """
    >>> read_amount("--params", "5e9"), read_amount("--params", "5B"), read_amount("--tokens", "1.5T")
    (5000000000.0, 5000000000.0, 1500000000000.0)
    """
    found = re.fullmatch(_NUMBER + r"\s*([kmgbtpe]?)", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{place} {text!r} is not a number above 0; give one such as 5e9, 5B or 1.5T")
    return _above(place, text, float(found[1]) * _COUNTS[found[2].lower()])


def read_count(place: str, text: str) -> int:
    value = read_amount(place, text)
    if value != int(value):
        raise ValueError(f"{place} {text!r} is not a whole number; give one such as 256 or 4k")
    return int(value)


def read_flops(place: str, text: str) -> float:
    """
    >>> read_flops("--flops", "400T"), read_flops("--flops", "1 PFLOP/s")
    (400000000000000.0, 1000000000000000.0)
    """
    found = re.fullmatch(_NUMBER + r"\s*([gtpe]?)\s*(?:flops?(?:/s)?)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{place} {text!r} is not a number of FLOP/s; give one such as 400T, 1P or 4e14")
    return _above(place, text, float(found[1]) * _COUNTS[found[2].lower()])


def read_seconds(place: str, text: str, zero: bool = False) -> float:
    """
    >>> read_seconds("--step-time", "40ms"), read_seconds("--mtbf", "365d"), read_seconds("--mtbf", "inf")
    (0.04, 31536000.0, inf)
    """
    if text.strip() == "inf":
        return math.inf
    found = re.fullmatch(_NUMBER + r"\s*(ms|s|min|m|h|d|y)", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{place} {text!r} is not a time; give one with its unit, such as 40ms, 1s, 5m, 2h or 365d")
    value = float(found[1]) * _TIMES[found[2].lower()]
    return value if zero and value == 0.0 else _above(place, text, value)


def read_rate(place: str, text: str) -> float:
    """Bit/s.

    >>> read_rate("--rate", "2gbit"), read_rate("--rate", "500 Mbit/s"), read_rate("--rate", "10MB/s")
    (2000000000.0, 500000000.0, 80000000.0)
    """
    found = re.fullmatch(_NUMBER + r"\s*([kmgt]?)(bit|b|byte)(?:/s|ps)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{place} {text!r} is not a rate; give one with its unit, such as 2gbit, 500mbit or 10MB/s")
    bits = 1.0 if found[3].lower() == "bit" else 8.0
    if found[3] == "b":  # Gb and GB differ by 8, and are mixed up
        raise ValueError(
            f"{place} {text!r} may be bits or bytes; write {found[1]}{found[2]}bit or {found[1]}{found[2]}B/s"
        )
    return _above(place, text, float(found[1]) * _RATES[found[2].lower()] * bits)


def read_price(place: str, text: str) -> float:
    """Per GB.

    >>> read_price("--price", "0.05/GB"), read_price("--price", "$20/TB"), read_price("--price", "0")
    (0.05, 0.02, 0.0)
    """
    found = re.fullmatch(r"[$€]?\s*" + _NUMBER + r"\s*(?:/\s*([GT])B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{place} {text!r} is not a price; give one per GB, such as 0.05/GB or 0")
    return float(found[1].replace("_", "")) / (1_000.0 if (found[2] or "").lower() == "t" else 1.0)


def _above(place: str, text: str, value: float) -> float:
    if not 0.0 < value < math.inf:
        raise ValueError(f"{place} is {text}; give a number above 0")
    return value
