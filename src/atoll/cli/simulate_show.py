"""A simulated run in a table and a few sentences, for people."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from atoll.cli.simulate_run import Outcome, how_sentence, is_one_job, seeds_sentence
from atoll.cli.simulate_wish import Wish
from atoll.sim.decoupled import span
from atoll.sim.goodput import Figure

LEAST_WIDTH = 80
"""Tables are laid out for this; a pipe has no width of its own."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would exit with code 1, which says that something was found wrong."""
        raise BrokenPipeError


def console() -> Console:
    made = _Console(highlight=False, soft_wrap=False)
    return made if made.width >= LEAST_WIDTH or made.is_terminal else _Console(highlight=False, width=LEAST_WIDTH)


def interval_text(figure: Figure, show: Callable[[float], str]) -> str:
    """Both ends, with the unit of `amount` said once."""
    if figure.low is None or figure.high is None:
        return "one seed"
    low, high = show(figure.low), show(figure.high)
    if low == high:
        return low
    unit = high.partition(" ")[2]
    return f"{low.removesuffix(unit).rstrip() if unit else low} to {high}"


def percent(share: float) -> str:
    """
    >>> percent(0.98765), percent(0.99995), percent(0.0)
    ('98.8', '99.995', '0.0')
    """
    near = min(abs(1.0 - share), abs(share))
    places = 1 if near >= 0.005 or near == 0.0 else 2 if near >= 0.0005 else 3
    return f"{100.0 * share:.{places}f}"


def amount(count: float) -> str:
    """
    >>> amount(2_930_000_000_000), amount(1_234), amount(12.4)
    ('2.93 trillion', '1,234', '12')
    """
    for size, name in ((1e15, "quadrillion"), (1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            places = 2 if count < 10 * size else 1 if count < 100 * size else 0
            return f"{count / size:.{places}f} {name}"
    return f"{count:,.0f}"


def steps(count: float) -> str:
    return f"{count:.2f}"


Row = tuple[str, Figure | None, Callable[[float], str], str]


def show_outcome(outcome: Outcome) -> None:
    wish, detail, ledger = outcome.wish, outcome.detail, outcome.ledger
    out = console()
    out.print(_title(outcome))
    out.print()
    rows: list[Row] = [
        ("goodput: chip time in steps that counted", outcome.goodput, percent, " %"),
        ("uptime: time in which somebody steps", outcome.uptime, percent, " %"),
        ("failures of chips", outcome.failures, amount, ""),
        ("tokens trained", outcome.tokens_trained, amount, ""),
    ]
    if detail is not None and ledger is not None:
        if not detail.whole:
            out.print(_table(f"all {span(outcome.goodput_days * 24.0)}", rows, wish.count > 1))
            out.print()
            rows = [("tokens trained", ledger.trained, amount, "")]
        lost = ", ".join(ledger.dropped_by_reason)
        rows += [
            ("  merged", ledger.merged_share, percent, " %"),
            ("  pending", ledger.pending_share, percent, " %"),
            (f"  dropped{f' ({lost})' if lost else ''}", ledger.dropped_share, percent, " %"),
        ]
    rows += [
        (f"contributions per merge, of {_learners(wish, outcome)}", outcome.contributions_per_merge, steps, ""),
        ("staleness: steps from copy to adoption", outcome.staleness_steps, steps, ""),
        (f"effective H: steps per merge (H = {wish.protocol.every_steps})", outcome.effective_h, steps, ""),
    ]
    title = "" if detail is None or detail.whole else f"the protocol, first {span(detail.hours)}"
    out.print(_table(title, rows, wish.count > 1))
    out.print()
    for sentence in _sentences(outcome):
        out.print(sentence)


def _table(title: str, rows: list[Row], intervals: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=intervals or title != "")
    table.add_column(title, width=41)
    table.add_column("mean" if intervals else "", justify="right", width=13, no_wrap=True)
    if intervals:
        table.add_column("95 % interval", justify="right", width=22, no_wrap=True)
    for name, figure, show, unit in rows:
        if figure is not None:
            table.add_row(name, show(figure.mean) + unit, *([interval_text(figure, show)] if intervals else []))
    return table


def _title(outcome: Outcome) -> str:
    wish = outcome.wish
    who = "one job" if is_one_job(wish) else f"{outcome.learners} learners"
    if wish.extras:
        who += f" and {sum(extra.count for extra in wish.extras)} that come and go"
    return f"{wish.method}: {who} on {wish.chips:,} chips for {span(wish.days * 24.0)}, {seeds_sentence(wish)}"


def _learners(wish: Wish, outcome: Outcome) -> str:
    return " + ".join(str(count) for count in (outcome.learners, *(extra.count for extra in wish.extras)))


def _sentences(outcome: Outcome) -> list[str]:
    wish = outcome.wish
    said = [how_sentence(outcome)]
    detail = outcome.detail
    if detail is not None and not detail.full:
        said[-1] += " --full simulates all of it."
    if outcome.core_goodput is not None and outcome.fleet_goodput is not None:
        ours, theirs = 100.0 * outcome.core_goodput.mean, 100.0 * outcome.fleet_goodput.mean
        said.append(f"For that time the cores say {ours:.2f} % goodput and the fleet model {theirs:.2f} %.")
    if outcome.suspected is not None and outcome.suspected.mean > 0.0:
        times = f"{outcome.suspected.mean:.3g} times" + (" per seed" if wish.count > 1 else "")
        said.append(f"The syncer suspected a silent learner {times}.")
    published = outcome.published("goodput")
    if published is not None:
        uptime = outcome.published("uptime")
        also = "" if uptime is None else f", uptime {100.0 * uptime:.0f} %"
        said.append(f"Published for this case: goodput {100.0 * published:.0f} %{also}.")
    tapes = outcome.tapes
    if tapes is not None:
        size = f"{tapes.size_bytes / 1e6:.1f} MB"
        said.append(f"{tapes.tapes} tapes with {tapes.entries:,} entries ({size}) are in {tapes.directory}.")
        if tapes.finished:
            said.append(f"After that time the run was finished in order, with {tapes.merges:,} merges in all.")
        if wish.protocol.lockstep:
            said.append("In lockstep learners wait for each other, which atoll check reports as a violation.")
    return said
