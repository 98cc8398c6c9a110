"""Terminal view of a run, for `atoll train`, `atoll chaos` and `atoll watch`.

It draws the data of docs/dash.md. The data comes from the tapes (`view.view_at`), or from the status of a job that this
process runs, which has fewer fields. The view omits a missing field and shows an unknown value as a dash.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from atoll.tape.timeline import StateSpan

STATE_STYLES: dict[str, tuple[str, str]] = {
    "training": ("green", "━"),
    "alone": ("yellow", "╌"),
    "suspected": ("yellow", "?"),
    "starting": ("yellow", " "),
    "recovering": ("cyan", "↻"),
    "paused": ("blue", "="),
    "gone": ("red", "·"),
    "left": ("dim", " "),
    "quarantined": ("magenta", "✗"),
}
"""Color and letter of each state. Color-blind readers can read the letter."""

_STATE_LABELS = {"alone": "disconnected", "gone": "lost", "recovering": "joining", "stopped": "stalled"}


def state_label(state: str) -> str:
    """Return the name of a state that readers see.

    >>> state_label("gone"), state_label("training")
    ('lost', 'training')
    """
    return _STATE_LABELS.get(state, state)


PHASE_LETTERS = {"idle": "·", "pulling": "↑", "grace": "…", "merging": "Σ"}
UNAVAILABLE = "×"

BAND_SPAN_S = 120.0
"""Time span of the band of an island."""

MAX_ISLANDS = 64
MAX_LISTED = 8
"""Limit on the islands that a log line lists one by one."""

MAX_NEWS = 3
PLAIN_INTERVAL_S = 5.0

Bands = Callable[[int, float, float], Sequence[StateSpan]]
"""Function that returns the states of a learner between two times."""


class LiveView:
    """View that redraws in place on a terminal.

    On other streams it prints a line every few seconds, and new events at once.
    """

    def __init__(
        self, stream: TextIO | None = None, interval_s: float = PLAIN_INTERVAL_S, transient: bool = True
    ) -> None:
        """Create the view. With `transient` it is erased from the terminal when it is closed."""
        self._stream = stream if stream is not None else sys.stderr
        self._interval_s = interval_s
        self._printed_at = float("-inf")
        self._news = 0  # number of news lines that were printed
        self._live: Live | None = None
        if self._stream.isatty():
            console = Console(file=self._stream, highlight=False)
            self._live = Live(console=console, transient=transient, auto_refresh=False)

    def __enter__(self) -> LiveView:
        self._printed_at = float("-inf")  # the view may have shown another run before
        self._news = 0
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, shown: Mapping[str, Any], bands: Bands | None = None, now: float | None = None) -> None:
        """Show the current data. Calls may be frequent: without a terminal, lines are printed at intervals."""
        if self._live is not None:
            self._live.update(render(shown, self._live.console.width, bands), refresh=True)
            return
        now = time.monotonic() if now is None else now
        if self._printed_at == float("-inf"):
            self.print_line(shown["title"])
        for sentence in shown.get("news", ())[self._news :]:
            self.print_line(sentence)
        self._news = len(shown.get("news", ()))
        if now - self._printed_at >= self._interval_s:
            self._printed_at = now
            self.print_line(format_line(shown))

    def print_line(self, sentence: str) -> None:
        """Print a line to the stream of the view."""
        print(sentence, file=self._stream, flush=True)


# --------------------------------------------------------------------------------------------------------------------
# Log line


def format_line(shown: Mapping[str, Any]) -> str:
    """Return one line for a log."""
    head, islands = shown["headline"], shown["islands"]
    parts = [f"{format_duration(shown['at'])}  {100 * shown['progress']:3.0f} %"]
    if len(islands) > MAX_LISTED or not islands:
        parts.append(_summarize(islands))
    else:
        parts += [f"{each['learner']}: {_brief(each)}" for each in islands]
    if shown["paused"]:
        parts.append("paused")
    if head["tokens_per_s"] is not None:
        parts.append(f"{format_number(head['tokens_per_s'])} tokens/s")
    if head["merges"]:
        parts.append("1 merge" if head["merges"] == 1 else f"{head['merges']:,} merges")
    if head["goodput"] is not None:
        parts.append(f"goodput {format_percent(head['goodput'])}" + (" derived" if head.get("derived") else ""))
    parts += [f"ALERT {each['text']}" for each in shown.get("alerts", ())]
    return " | ".join(parts)


def _summarize(islands: Sequence[Mapping[str, Any]]) -> str:
    states: dict[str, int] = {}
    for each in islands:
        label = state_label(each["state"])
        states[label] = states.get(label, 0) + 1
    training = [each for each in islands if each["state"] == "training"]
    losses = [each["loss"] for each in training if each["loss"] is not None]
    steps = [each["step"] for each in training]
    parts = [f"{count} {state}" for state, count in states.items()] or ["no learner"]
    if losses:
        parts.append(f"loss {sum(losses) / len(losses):.2f}")
    if steps:
        parts.append(f"step {min(steps):,} to {max(steps):,}")
    return ", ".join(parts)


def _brief(island: Mapping[str, Any]) -> str:
    if island["state"] not in ("training", "left"):
        return state_label(island["state"])
    return f"step {island['step']:,}" + (f" loss {island['loss']:.2f}" if island["loss"] is not None else "")


# --------------------------------------------------------------------------------------------------------------------
# Drawing


def render(shown: Mapping[str, Any], width: int, bands: Bands | None = None) -> RenderableType:
    """Return the whole view, at most `width` columns wide."""
    head = shown["headline"]
    parts: list[RenderableType] = [_title(shown), _headline(head)]
    if head["remaining_s"] is not None or shown["progress"]:
        parts.append(_progress(shown["progress"], min(width - 6, 80)))
    parts += [_alert(each) for each in shown.get("alerts", ())]
    parts.append(_islands(shown, bands, max(10, min(60, width - 74))))
    if shown.get("fragments"):
        parts.append(_fragments(shown["fragments"], width))
    if shown.get("ledger") is not None:
        parts.append(_ledger(shown["ledger"]))
    parts += [Text(each, "dim", no_wrap=True, overflow="ellipsis") for each in shown.get("news", ())[-MAX_NEWS:]]
    return Group(*parts)


def _title(shown: Mapping[str, Any]) -> Text:
    text = Text(shown["title"], "bold")
    text.append(f"  {shown['stage']}" + (", paused" if shown["paused"] else ""), "")
    text.append(f"  {format_duration(shown['at'])}", "dim")
    if not shown.get("now", True):
        text.append("  past", "yellow")
        if shown["sample_age_s"] is not None:
            text.append(f"; fragments and ledger from {shown['sample_age_s']:.1f} s earlier", "yellow")
    elif shown.get("loading") is not None:
        text.append(f"  reading tapes: {format_percent(shown['loading'])}", "yellow")
    elif shown.get("live"):
        age_s = shown["age_s"]
        is_old = age_s is not None and age_s > 5.0
        text.append(f"  {format_duration(age_s)} old" if is_old else "  live", "red" if is_old else "green")
    if shown.get("syncer", {}).get("state") == "down" and shown["stage"] != "finished":
        text.append("  syncer down", "red")
    return text


def _headline(head: Mapping[str, Any]) -> Text:
    figures: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
        ("loss", "loss", format_number),
        ("tokens", "tokens", format_number),
        ("tokens_per_s", "tokens/s", format_number),
        ("goodput", "goodput" + (" (derived)" if head.get("derived") else ""), format_percent),
        ("uptime", "uptime", format_percent),
        (
            "alive",
            "alive/pulled/merged",
            lambda alive: "/".join(map(format_number, (alive, head["pulled"], head["merged"]))),
        ),
        ("bytes_up_per_s", "up", format_rate),
        ("bytes_down_per_s", "down", format_rate),
        ("effective_h", "H", format_number),
        ("merges", "merges", format_number),
        ("quorum", "quorum", format_number),
        ("remaining_s", "ends in", format_duration),
    )
    text = Text()
    for key, name, format_value in figures:
        if key in head:
            text.append(f"{name} ", "dim")
            text.append(f"{format_value(head[key])}   ", "bold")
    return text


def _progress(done: float, width: int) -> Text:
    full = round(done * width)
    text = Text("━" * full, "green")
    text.append("╶" * (width - full), "dim")
    text.append(f" {100 * done:.0f} %")
    return text


def _alert(alert: Mapping[str, Any]) -> Text:
    colour = "bold red" if alert["severity"] == "critical" else "bold yellow"
    return Text(f"! {alert['text']}", colour)


def _islands(shown: Mapping[str, Any], bands: Bands | None, width: int) -> Table:
    """Return the table of islands, each with a band `width` columns wide."""
    figures: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
        ("step", "step", "{:,}".format),
        ("tokens_per_s", "tokens/s", format_number),
        ("speed", "speed", format_number),
        ("loss", "loss", format_number),
        ("weight", "weight", format_percent),
        ("goodput", "goodput", format_percent),
    )
    islands = shown["islands"][:MAX_ISLANDS]
    figures = tuple(each for each in figures if islands and each[0] in islands[0])
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("island", "state"):
        table.add_column(name)
    for _, name, _ in figures:
        table.add_column(name, justify="right")
    span_s = min(BAND_SPAN_S, max(1.0, shown["at"] - shown.get("from", 0.0)))
    table.add_column(f"last {format_duration(span_s)}" if bands is not None else "", no_wrap=True, overflow="ellipsis")
    for each in islands:
        begin = shown["at"] - span_s
        state = each["state"]
        table.add_row(
            str(each["learner"]),
            Text(state_label(state), STATE_STYLES[state][0]),
            *(format_value(each[key]) for key, _, format_value in figures),
            each.get("note", "")
            if bands is None
            else _band(bands(each["learner"], begin, shown["at"]), begin, span_s, width),
        )
    return table


def _band(bands: Sequence[StateSpan], begin: float, span_s: float, width: int) -> Text:
    text = Text()
    for index in range(width):
        at = begin + span_s * (index + 0.5) / width
        state = next((band.state for band in bands if band.begin <= at < band.end), None)
        colour, letter = STATE_STYLES[state] if state is not None else ("", " ")
        text.append(letter, colour)
    return text


def _fragments(fragments: list[dict[str, Any]], width: int) -> Text:
    """Return two rows: the phase of each fragment as a letter, and the number of contributions of its last merge."""
    count = max(1, width - 12)
    text = Text("fragments   ", "dim")
    for each in fragments[:count]:
        text.append(*((UNAVAILABLE, "red") if each["unavailable"] else (PHASE_LETTERS.get(each["phase"], "?"), "")))
    unavailable = [each for each in fragments if each["unavailable"]]
    text.append("\nmerged      ", "dim")
    text.append("".join(_digit(len(each["contributors"])) for each in fragments[:count]))
    if unavailable:
        text.append(f"\n{UNAVAILABLE} {len(unavailable)} of {len(fragments)}: {unavailable[0]['reason']}", "red")
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
# Formatting of values


def format_number(value: float | None) -> str:
    """Return a number with three significant digits, or with thousands separators.

    >>> format_number(None), format_number(3.14159), format_number(12345.6), format_number(4)
    ('-', '3.14', '12,346', '4')
    """
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def format_percent(value: float | None) -> str:
    """Return a share as a percentage.

    >>> format_percent(0.98765), format_percent(None)
    ('98.8 %', '-')
    """
    return "-" if value is None else f"{100 * value:.1f} %"


def format_duration(seconds: float | None) -> str:
    """Return a duration as seconds, h:mm:ss or days.

    >>> format_duration(7.2), format_duration(3725), format_duration(200000), format_duration(None)
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


def format_rate(value: float | None) -> str:
    """Return a byte rate with its unit.

    >>> format_rate(1500), format_rate(2.5e6), format_rate(None)
    ('1.5 kB/s', '2.5 MB/s', '-')
    """
    if value is None:
        return "-"
    for unit, factor in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if value >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{value:.0f} B/s"
