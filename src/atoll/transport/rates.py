"""Rates of links as people write them."""

from __future__ import annotations

import math
import re

_RATE = re.compile(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmgt]?)(bit|bit/s|b/s)", re.IGNORECASE)
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def rate_of(text: str) -> float:
    """Bytes per second.

    >>> rate_of("2gbit")
    250000000.0
    >>> rate_of("10 MB/s")
    10000000.0
    """
    found = _RATE.fullmatch(text.strip()) if isinstance(text, str) else None
    rate = float(found[1]) * _PREFIX[found[2].lower()] if found else 0.0
    if found is None or not 0 < rate < math.inf:
        raise ValueError(f"a rate is a number with a unit, as 2gbit, 500mbit or 10MB/s; got {text!r}")
    return rate if found[3].lower() == "b/s" else rate / 8
