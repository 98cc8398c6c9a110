"""A run as it goes: one line per island on a terminal, one line every few seconds where there is none.

Everything shown comes from the status that the syncer gives (for a baseline the job makes one in the same shape), and
from what the job knows of its own processes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PLAIN_EVERY_S = 5.0
DRAWN_PER_S = 4.0
MOST_LISTED = 8
"""Islands that a plain line names one by one."""

_STANDINGS = {
    "live": ("training", "green"),
    "joining": ("joining", "yellow"),
    "admitting": ("joining", "yellow"),
    "suspect": ("silent", "yellow"),
    "away": ("away", "red"),
    "quarantined": ("quarantined", "red"),
    "left": ("done", "dim"),
    "lost": ("lost", "red"),
}


@dataclass(slots=True)
class Watched:
    """What the job adds to the status: its own processes, its clock, and the last thing that happened."""

    title: str
    learners: int
    elapsed_s: float = 0.0
    goodput: float | None = None
    down: dict[int, str] = field(default_factory=dict)  # learners whose process is not there, and why
    news: list[str] = field(default_factory=list)  # sentences, newest last


class GoodputMeter:
    """Goodput so far: learners that train, over learners that there should be, since the first of them trained."""

    def __init__(self, learners: int) -> None:
        self._learners = learners
        self._since: float | None = None
        self._last = 0.0
        self._trained_s = 0.0
        self._training = 0

    def look(self, now: float, training: int) -> float | None:
        """`training` learners train now; those that were told last time did so until now."""
        if self._since is None:
            if not training:
                return None
            self._since = self._last = now
        self._trained_s += self._training * (now - self._last)
        self._last, self._training = now, min(training, self._learners)
        allotted_s = self._learners * (now - self._since)
        return self._trained_s / allotted_s if allotted_s > 0 else None


def training_count(status: Mapping[str, Any]) -> int:
    return sum(1 for each in status.get("learners", ()) if each.get("standing") in ("live", "suspect"))


class LiveView:
    """Shows statuses as they come. Where stderr is no terminal it prints a plain line now and then.

    `show` may be called as often as one likes; what is too early to be seen is left out.
    """

    def __init__(self, stream: TextIO | None = None, every_s: float = PLAIN_EVERY_S) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._every_s = every_s
        self._printed_at = float("-inf")
        self._told = 0  # news that were printed
        self._live: Live | None = None
        if self._stream.isatty():
            console = Console(file=self._stream, highlight=False)
            self._live = Live(console=console, refresh_per_second=DRAWN_PER_S, transient=True, auto_refresh=False)

    def __enter__(self) -> LiveView:
        self._printed_at = float("-inf")  # it may have shown another run before
        self._told = 0
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, wrong: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: Mapping[str, Any], watched: Watched, now: float | None = None) -> None:
        if self._live is not None:
            self._live.update(picture(status, watched), refresh=True)
            return
        now = time.monotonic() if now is None else now
        if self._printed_at == float("-inf"):
            self.say(watched.title)
        for sentence in watched.news[self._told :]:
            self.say(sentence)
        self._told = len(watched.news)
        if now - self._printed_at >= self._every_s:
            self._printed_at = now
            self.say(plain_line(status, watched))

    def say(self, sentence: str) -> None:
        """One line, that stays."""
        print(sentence, file=self._stream, flush=True)


# --------------------------------------------------------------------------------------------------------------------
# As text


def plain_line(status: Mapping[str, Any], watched: Watched) -> str:
    """One line for logs and pipes."""
    parts = [f"{clock(watched.elapsed_s)}  {100.0 * status.get('progress', 0.0):3.0f} %"]
    count = _count(status, watched)
    if count > MOST_LISTED:
        parts.append(_summed(status, watched, count))
    else:
        for learner in range(1, count + 1):
            parts.append(f"{learner}: {_brief(_of(status, learner), watched.down.get(learner))}")
    if status.get("paused"):
        parts.append("paused")
    if status.get("merges"):
        parts.append("1 merge" if status["merges"] == 1 else f"{status['merges']:,} merges")
    if watched.goodput is not None:
        parts.append(f"goodput {100.0 * watched.goodput:.0f} %")
    return " | ".join(parts)


def _summed(status: Mapping[str, Any], watched: Watched, count: int) -> str:
    words: dict[str, int] = {}
    losses, steps = [], []
    for learner in range(1, count + 1):
        told = _of(status, learner)
        word = _word(told, watched.down.get(learner))
        words[word] = words.get(word, 0) + 1
        if told is not None and word == "training":
            steps.append(told.get("step", 0))
            if told.get("loss") is not None:
                losses.append(told["loss"])
    parts = [f"{many} {word}" for word, many in words.items()]
    if losses:
        parts.append(f"loss {sum(losses) / len(losses):.2f}")
    if steps:
        parts.append(f"step {min(steps):,} to {max(steps):,}")
    return ", ".join(parts)


def _word(told: Mapping[str, Any] | None, down: str | None) -> str:
    if down is not None:
        return "down"
    return _STANDINGS.get(told.get("standing", "") if told is not None else "", ("starting", ""))[0]


def _brief(told: Mapping[str, Any] | None, down: str | None) -> str:
    word = _word(told, down)
    if told is None or word not in ("training", "done"):
        return word
    loss = told.get("loss")
    return f"step {told.get('step', 0):,}" + (f" loss {loss:.2f}" if loss is not None else "")


def clock(seconds: float) -> str:
    """
    >>> clock(75.4), clock(3661)
    ('1:15', '1:01:01')
    """
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def _of(status: Mapping[str, Any], learner: int) -> Mapping[str, Any] | None:
    found: Sequence[Mapping[str, Any]] = status.get("learners", ())
    return next((each for each in found if each.get("learner") == learner), None)


def _count(status: Mapping[str, Any], watched: Watched) -> int:
    """Learners beyond the planned ones may have come by themselves."""
    found: Sequence[Mapping[str, Any]] = status.get("learners", ())
    return max([watched.learners, *(int(each.get("learner", 0)) for each in found)])


# --------------------------------------------------------------------------------------------------------------------
# As a picture


def picture(status: Mapping[str, Any], watched: Watched) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("island", justify="right")
    table.add_column("alive", min_width=8)
    table.add_column("step", justify="right")
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("loss", justify="right", no_wrap=True)
    table.add_column("link")
    table.add_column("", overflow="ellipsis", no_wrap=True, ratio=1)
    for learner in range(1, _count(status, watched) + 1):
        table.add_row(*_row(learner, _of(status, learner), watched.down.get(learner)))
    parts: list[RenderableType] = [Text(watched.title, style="bold", no_wrap=True, overflow="ellipsis"), table]
    parts.append(Text(_syncer_line(status, watched), no_wrap=True, overflow="ellipsis"))
    parts.append(_bar(status, watched))
    parts += [Text(sentence, style="dim", no_wrap=True, overflow="ellipsis") for sentence in watched.news[-3:]]
    return Group(*parts)


def _row(learner: int, told: Mapping[str, Any] | None, down: str | None) -> list[str | Text]:
    if down is not None:
        step = f"{told['step']:,}" if told is not None and "step" in told else ""
        return [str(learner), Text("down", style="red"), step, "", "", "down", Text(down, style="red")]
    if told is None:
        return [str(learner), Text("starting", style="yellow"), "", "", "", "", ""]
    word, style = _STANDINGS.get(told.get("standing", ""), (str(told.get("standing", "")), ""))
    loss, rate = told.get("loss"), told.get("tokens_per_s")
    starts = told.get("incarnation", 1)
    return [
        str(learner),
        Text(word, style=style),
        f"{told.get('step', 0):,}",
        "" if rate is None else f"{rate:,.0f}",
        "" if loss is None else f"{loss:.3f}",
        str(told.get("link", "")),
        Text("" if starts == 1 else f"start {starts}", style="dim"),
    ]


def _syncer_line(status: Mapping[str, Any], watched: Watched) -> str:
    parts = []
    if "merges" in status:
        mean = status.get("contributions_per_merge")
        parts.append(f"merges {status['merges']:,}" + (f", of {mean:.1f} islands each" if mean else ""))
    if "alive" in status:
        parts.append(f"alive {status['alive']}, asked {status.get('asked', 0)}, merged {status.get('merged', 0)}")
    if status.get("paused"):
        parts.append("PAUSED")
    if "quorum" in status:
        parts.append(f"quorum {status['quorum']}")
    if watched.goodput is not None:
        parts.append(f"goodput {100.0 * watched.goodput:.1f} %")
    return " · ".join(parts) or str(status.get("stage", "starting"))


def _bar(status: Mapping[str, Any], watched: Watched) -> RenderableType:
    progress = min(1.0, status.get("progress", 0.0))
    left = ""
    if progress > 0.02:
        left = f", about {clock(watched.elapsed_s * (1.0 - progress) / progress)} to go"
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_row(
        ProgressBar(total=1.0, completed=progress, width=40),
        f"{100.0 * progress:.0f} %",
        f"{clock(watched.elapsed_s)}{left}",
    )
    return table
