"""The page's picture in a terminal: headline, islands with their bands, fragments, books, alerts."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from atoll.dashboard.picture import RunPicture

STATES: dict[str, tuple[str, str, str]] = {
    "training": ("training", "green", "━"),
    "alone": ("alone", "yellow", "╌"),
    "suspected": ("suspected", "yellow", "?"),
    "recovering": ("recovering", "cyan", "↻"),
    "paused": ("paused", "blue", "="),
    "gone": ("gone", "red", "·"),
    "left": ("left", "dim", " "),
    "quarantined": ("quarantined", "magenta", "✗"),
}
"""Word, colour and letter of each: whoever does not see the colour reads the letter."""

PHASES = {"idle": "·", "pulling": "↑", "grace": "…", "merging": "Σ"}
AWAY = "×"

BAND_S = 120.0
"""So much of the past is in an island's band."""

MOST_ISLANDS = 64


def rendered(picture: RunPicture, shown: dict[str, Any], width: int) -> RenderableType:
    """All of it, at most so many columns wide."""
    parts: list[RenderableType] = [_title(picture, shown), _headline(shown["headline"])]
    if shown["headline"]["remaining_s"] is not None or shown["progress"]:
        parts.append(_progress(shown["progress"], min(width, 80)))
    parts += [_alert(each) for each in shown["alerts"]]
    parts.append(_islands(picture, shown, max(10, min(60, width - 74))))
    if shown["fragments"]:
        parts.append(_fragments(shown["fragments"], width))
    if shown["ledger"] is not None:
        parts.append(_ledger(shown["ledger"]))
    return Group(*parts)


def plain(shown: dict[str, Any]) -> str:
    """One line, for a log."""
    head = shown["headline"]
    states: dict[str, int] = {}
    for each in shown["islands"]:
        states[each["state"]] = states.get(each["state"], 0) + 1
    parts = [
        f"{shown['at']:.0f} s",
        f"{100 * shown['progress']:.0f} %",
        ", ".join(f"{count} {STATES[state][0]}" for state, count in states.items()) or "nobody",
        f"loss {figure(head['loss'])}",
        f"{figure(head['tokens_per_s'])} tokens/s",
        f"goodput {share(head['goodput'])}" + (" derived" if head["derived"] else ""),
        f"{head['merges']:,} merges of {figure(head['merged'])}",
    ]
    parts += [f"ALERT {each['text']}" for each in shown["alerts"]]
    return " | ".join(parts)


def _title(picture: RunPicture, shown: dict[str, Any]) -> Text:
    text = Text(picture.run.resolve().name, "bold")
    text.append(f"  {shown['stage']}" + (", paused" if shown["paused"] else ""), "")
    text.append(f"  {clock(shown['at'])}", "dim")
    if not shown["now"]:
        text.append("  as it was then", "yellow")
        if shown["sample_age_s"] is not None:
            text.append(f"; fragments and books as {shown['sample_age_s']:.1f} s before", "yellow")
    elif shown["loading"] is not None:
        text.append(f"  still reading: {share(shown['loading'])}", "yellow")
    elif shown["live"]:
        age_s = shown["age_s"]
        old = age_s is not None and age_s > 5.0
        text.append(f"  {clock(age_s)} old" if old else "  live", "red" if old else "green")
    syncer = shown["syncer"]
    if syncer["state"] == "down" and shown["stage"] != "finished":
        text.append("  the syncer is away", "red")
    return text


def _headline(head: dict[str, Any]) -> Text:
    figures = (
        ("loss", figure(head["loss"])),
        ("tokens", f"{head['tokens']:,}"),
        ("tokens/s", figure(head["tokens_per_s"])),
        ("goodput" + (" (derived)" if head["derived"] else ""), share(head["goodput"])),
        ("uptime", share(head["uptime"])),
        ("alive/asked/merged", "/".join(figure(head[name]) for name in ("alive", "asked", "merged"))),
        ("up", bytes_per_s(head["bytes_up_per_s"])),
        ("down", bytes_per_s(head["bytes_down_per_s"])),
        ("H", figure(head["effective_h"])),
        ("ends in", clock(head["remaining_s"])),
    )
    text = Text()
    for name, value in figures:
        text.append(f"{name} ", "dim")
        text.append(f"{value}   ", "bold")
    return text


def _progress(done: float, width: int) -> Text:
    full = round(done * width)
    text = Text("━" * full, "green")
    text.append("╶" * (width - full), "dim")
    return text


def _alert(alert: dict[str, Any]) -> Text:
    colour = "bold red" if alert["severity"] == "critical" else "bold yellow"
    return Text(f"! {alert['text']}", colour)


def _islands(picture: RunPicture, shown: dict[str, Any], band: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("island", "state"):
        table.add_column(name)
    for name in ("step", "tokens/s", "speed", "loss", "weight", "goodput"):
        table.add_column(name, justify="right")
    span_s = min(BAND_S, max(1.0, shown["at"] - shown["from"]))
    table.add_column(f"last {clock(span_s)}")
    for each in shown["islands"][:MOST_ISLANDS]:
        word, colour, _ = STATES[each["state"]]
        table.add_row(
            str(each["learner"]),
            Text(word, colour),
            f"{each['step']:,}",
            figure(each["tokens_per_s"]),
            figure(each["speed"]),
            figure(each["loss"]),
            share(each["weight"]),
            share(each["goodput"]),
            _band(picture, each["learner"], shown["at"], span_s, band),
        )
    return table


def _band(picture: RunPicture, learner: int, at: float, span_s: float, width: int) -> Text:
    begin = at - span_s
    text = Text()
    bands = picture.bands(learner, begin, at)
    for index in range(width):
        moment = begin + span_s * (index + 0.5) / width
        state = next((band.state for band in bands if band.begin <= moment < band.end), None)
        letter, colour = (" ", "") if state is None else (STATES[state][2], STATES[state][1])
        text.append(letter, colour)
    return text


def _fragments(fragments: list[dict[str, Any]], width: int) -> Text:
    """A letter each: what it does; below, how many contributions its last merge had."""
    count = max(1, width - 12)
    text = Text("fragments   ", "dim")
    for each in fragments[:count]:
        text.append(*((AWAY, "red") if each["away"] else (PHASES.get(each["phase"], "?"), "")))
    away = [each for each in fragments if each["away"]]
    text.append("\nmerged      ", "dim")
    text.append("".join(_digit(len(each["contributors"])) for each in fragments[:count]))
    if away:
        text.append(f"\n{AWAY} {len(away)} of {len(fragments)}: {away[0]['reason']}", "red")
    return text


def _digit(count: int) -> str:
    return str(count) if count < 10 else "+"


def _ledger(ledger: dict[str, Any]) -> Text:
    dropped = sum(ledger["dropped"].values())
    text = Text("tokens      ", "dim")
    text.append(f"{ledger['trained']:,} trained = {ledger['merged']:,} merged + {ledger['pending']:,} pending")
    text.append(f" + {dropped:,} dropped")
    if not ledger["balanced"]:
        text.append("  OUT OF BALANCE", "bold red")
    return text


# --------------------------------------------------------------------------------------------------------------------
# Figures for people


def figure(value: float | None) -> str:
    """
    >>> figure(None), figure(3.14159), figure(12345.6), figure(4)
    ('-', '3.14', '12,346', '4')
    """
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def share(value: float | None) -> str:
    """
    >>> share(0.98765), share(None)
    ('98.8 %', '-')
    """
    return "-" if value is None else f"{100 * value:.1f} %"


def clock(seconds: float | None) -> str:
    """
    >>> clock(7.2), clock(3725), clock(200000), clock(None)
    ('7 s', '1:02:05', '2 d 7:33:20', '-')
    """
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, last = divmod(rest, 60)
    text = f"{hours}:{minutes:02}:{last:02}" if hours or days else f"{minutes}:{last:02}"
    return f"{days} d {text}" if days else text


def bytes_per_s(value: float | None) -> str:
    """
    >>> bytes_per_s(1500), bytes_per_s(2.5e6), bytes_per_s(None)
    ('1.5 kB/s', '2.5 MB/s', '-')
    """
    if value is None:
        return "-"
    for unit, factor in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if value >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{value:.0f} B/s"
