"""The islands of a plan, from options or a TOML file. What an island does not say for itself, options say for all."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from atoll.cli.plan_units import read_amount, read_count, read_flops, read_price, read_rate, read_seconds
from atoll.sim.fleet import MAX_LEARNERS
from atoll.sim.plan import IslandSpec, step_from_flops

KEYS = ("name", "count", "chips", "step_time", "flops", "mfu", "tokens_per_step", "mtbf", "rate", "delay", "price")
_EXAMPLE = "name=north,chips=256,step-time=1s,rate=2gbit"


def read_islands(
    params: float, sites: int | None, shared: Mapping[str, str], given: Sequence[str], file: Path | None
) -> tuple[IslandSpec, ...]:
    """`shared` has the options that hold for every island that does not say otherwise, by key."""
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
    return step_from_flops(params, tokens, chips, read_flops(f"flops of {name}", words["flops"]), used)
