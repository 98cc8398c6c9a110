"""A simulated run in a table and a few sentences, for people."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from atoll.commands.simulate_run import Outcome, how_sentence, is_one_job, seeds_sentence
from atoll.commands.simulate_wish import Wish
from atoll.sim.estimates import Figure

ONE_SEED = "one seed"
LEAST_WIDTH = 80
"""Tables are laid out for this; a pipe has no width of its own."""


def console() -> Console:
    made = Console(highlight=False, soft_wrap=False)
    return made if made.width >= LEAST_WIDTH or made.is_terminal else Console(highlight=False, width=LEAST_WIDTH)


def interval_text(figure: Figure, show: Callable[[float], str]) -> str:
    if figure.low is None or figure.high is None:
        return ONE_SEED
    low, high = show(figure.low), show(figure.high)
    return f"{low} to {high}" if low != high else low


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
            return f"{count / size:.3g} {name}"
    return f"{count:,.0f}"


def steps(count: float) -> str:
    return f"{count:.2f}"


def show_outcome(outcome: Outcome) -> None:
    wish = outcome.wish
    out = console()
    out.print(_title(outcome))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, justify in (("", "left"), ("mean", "right"), ("95 % interval", "right"), ("", "left")):
        table.add_column(heading, justify=justify, no_wrap=heading != "")  # type: ignore[arg-type]

    def row(name: str, figure: Figure, show: Callable[[float], str], unit: str, what: str) -> None:
        table.add_row(name, show(figure.mean) + unit, interval_text(figure, show), what)

    row("goodput", outcome.goodput, percent, " %", "of chip time went into steps that counted")
    row("uptime", outcome.uptime, percent, " %", "of the time somebody stepped")
    row("failures", outcome.failures, amount, "", "interruptions by a chip")
    row("tokens trained", outcome.tokens_trained, amount, "", f"in {_span(outcome.goodput_days * 24.0)}")
    detail, ledger = outcome.detail, outcome.ledger
    if detail is not None and ledger is not None:
        table.add_row("", "", "", "")
        table.add_row(f"protocol, {'' if detail.whole else 'first '}{_span(detail.hours)}", "", "", "")
        whole = ledger.trained.mean or 1.0
        row("tokens trained", ledger.trained, amount, "", "by steps that were reported")
        row("  merged", ledger.merged.times(1.0 / whole), percent, " %", "")
        row("  pending", ledger.pending.times(1.0 / whole), percent, " %", "")
        why = ", ".join(ledger.dropped_by_reason)
        row("  dropped", ledger.dropped.times(1.0 / whole), percent, " %", why)
    for name, figure, unit, what in (
        ("contributions per merge", outcome.contributions_per_merge, "", _learners(wish, outcome.learners)),
        ("staleness", outcome.staleness_steps, " steps", "from copy to adoption"),
        ("effective H", outcome.effective_h, " steps", f"between two merges, H = {wish.protocol.every_steps}"),
    ):
        if figure is not None:
            row(name, figure, steps, unit, what)
    out.print(table)
    out.print()
    for sentence in _sentences(outcome):
        out.print(sentence)


def _title(outcome: Outcome) -> str:
    wish = outcome.wish
    who = "one job" if is_one_job(wish) else f"{outcome.learners} learners"
    if wish.extras:
        who += f" and {sum(extra.count for extra in wish.extras)} that come and go"
    return f"{wish.method}: {who} on {wish.chips:,} chips for {_span(wish.days * 24.0)}, {seeds_sentence(wish)}"


def _span(hours: float) -> str:
    """
    >>> _span(720.0), _span(36.0), _span(0.5)
    ('30 days', '36 hours', '30 minutes')
    """
    if hours >= 48.0:
        return f"{hours / 24.0:.3g} days"
    return f"{hours:.3g} hours" if hours >= 1.0 else f"{hours * 60.0:.3g} minutes"


def _learners(wish: Wish, learners: int) -> str:
    return f"of {learners} learners" + (" and the extra ones" if wish.extras else "")


def _sentences(outcome: Outcome) -> list[str]:
    wish = outcome.wish
    said = [how_sentence(outcome)]
    detail = outcome.detail
    if detail is not None and not detail.full:
        said[-1] += " --full simulates all of it."
    if outcome.core_goodput is not None and outcome.fleet_goodput is not None:
        ours, theirs = 100.0 * outcome.core_goodput.mean, 100.0 * outcome.fleet_goodput.mean
        said.append(f"For these hours the cores say {ours:.2f} % goodput and the fleet model {theirs:.2f} %.")
    if outcome.suspected is not None and outcome.suspected.mean > 0.0:
        said.append(f"The syncer took a silent learner for lost {outcome.suspected.mean:.3g} times, and heard it again.")
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
