"""`atoll story`: what happened to one learner, to one fragment or to the run, in plain sentences."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.output import JsonOption, complain, print_json

if TYPE_CHECKING:
    from atoll.tape.files import RunTapes
    from atoll.tape.story import StoryLine, Subject

EXAMPLE = "atoll story runs/first --learner 3"

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run, with its folder of tapes.")]


def run(
    run: RunArgument,
    learner: Annotated[int | None, typer.Option("--learner", metavar="ID", help="Tell of this learner.")] = None,
    fragment: Annotated[int | None, typer.Option("--fragment", metavar="P", help="Tell of this fragment.")] = None,
    whole: Annotated[bool, typer.Option("--run", help="Tell of the run: who came and went, and its end.")] = False,
    since: Annotated[
        float | None, typer.Option("--since", metavar="SECONDS", help="From this time on, in seconds.")
    ] = None,
    until: Annotated[
        float | None, typer.Option("--until", metavar="SECONDS", help="Up to this time, in seconds.")
    ] = None,
    last: Annotated[
        int | None, typer.Option("--last", metavar="LINES", min=1, help="Only the last so many lines.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what happened in a run, in plain sentences.

    Of one learner, of one fragment or of the run as a whole, from its tapes.
    """
    from atoll.tape.files import RunTapes
    from atoll.tape.story import story

    subject = _subject(learner, fragment, whole)
    tapes = RunTapes(run)
    _check_known(tapes, subject)
    told: Iterator[StoryLine] = (
        line
        for line in story(tapes.merged(), subject, tapes.config)
        if (since is None or line.at >= since) and (until is None or line.at <= until)
    )
    lines = told if last is None else iter(deque(told, maxlen=last))
    if as_json:
        print_json({"subject": list(subject), "lines": [as_fields(line) for line in lines]})
        return
    silent = True
    for line in lines:
        silent = False
        print(indented(line))
    if silent:
        complain("nothing was said in that time")


def indented(line: StoryLine) -> str:
    """A line with its time in a column."""
    time, _, sentence = str(line).partition("  ")
    return f"{time:>14}  {sentence}"


def as_fields(line: StoryLine) -> dict[str, object]:
    return {
        "at": line.at,
        "actor": str(line.actor),
        "tick": line.tick,
        "subject": list(line.subject),
        "sentence": line.sentence,
    }


def _subject(learner: int | None, fragment: int | None, whole: bool) -> Subject:
    if (learner is not None) + (fragment is not None) + whole != 1:
        raise ValueError("say whose story: --learner 3, --fragment 7 or --run, one of them")
    if learner is not None:
        return ("learner", learner)
    if fragment is not None:
        return ("fragment", fragment)
    return ("run", 0)


def _check_known(tapes: RunTapes, subject: Subject) -> None:
    kind, number = subject
    fragments = tapes.config.fragment_ids()
    if kind == "fragment" and number not in fragments:
        raise ValueError(f"no fragment {number} in this run: it has {_listed(fragments)}")
    if kind == "learner" and number not in tapes.learners() and not _was_heard(tapes, number):
        raise ValueError(f"no learner {number} in this run: it has {_listed(tapes.learners())}")


def _was_heard(tapes: RunTapes, learner: int) -> bool:
    """A learner whose tape was lost still has a story on the syncer's."""
    from atoll.core.protocol import MessageArrived

    return any(
        type(entry.event) is MessageArrived and entry.event.envelope.learner == learner
        for actor, reader in tapes.readers.items()
        if actor.learner == 0
        for entry in reader
    )


def _listed(numbers: list[int] | tuple[int, ...]) -> str:
    """
    >>> _listed([1, 2, 3, 4]), _listed([1, 3])
    ('1 to 4', '1 and 3')
    """
    if not numbers:
        return "none"
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    *front, end = map(str, numbers)
    return f"{', '.join(front)} and {end}" if front else end
