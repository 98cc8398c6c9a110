"""What people write for sizes, times, rates and prices, and what is wrong with it where it is not understood."""

from __future__ import annotations

import math
import re

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
