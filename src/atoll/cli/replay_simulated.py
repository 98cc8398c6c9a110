"""`atoll replay` on the tapes of `atoll simulate`: which model to train on them, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from atoll.cli.job_options import FLAGS, PROTOCOL, SHARED, is_given, make_settings
from atoll.cli.progress import progress

if TYPE_CHECKING:
    from atoll.reference.job_settings import JobSettings
    from atoll.reference.synthetic import Trained
    from atoll.tape.files import RunTapes

WHAT_TO_TRAIN = ("seed", *(name for name in SHARED if name not in PROTOCOL))
"""Parameters of the command that describe a model and its training; the protocol is that of the tapes."""


def settings_for(context: typer.Context, tapes: RunTapes) -> JobSettings | None:
    """What the options ask to train; None where none is given.

    Raises `ValueError` before anything long begins: where the tapes are of a run that has a model of its own, or are
    too coarse for one.
    """
    given = [name for name in WHAT_TO_TRAIN if is_given(context, name)]
    if not given:
        return None
    flag = "--" + FLAGS.get(given[0], given[0]).replace("_", "-")
    if not tapes.is_simulated:
        raise ValueError(
            f"{flag} is for tapes of atoll simulate, and {tapes.run} is none of them: a run is trained again by its own"
            " settings; leave it out"
        )
    if context.params["effects_only"]:
        raise ValueError(f"--effects-only trains nothing, and {flag} says what to train; give one of them")
    wished = {name: context.params[name] for name in WHAT_TO_TRAIN}
    settings = make_settings({**wished, "learners": len(tapes.learners())})
    try:
        from atoll.reference.synthetic import check_simulated, with_fitting_plan
    except ModuleNotFoundError as missing:
        raise ValueError(
            f"training needs {missing.name}, which comes with the extra 'train': pip install 'atoll[train]'"
        ) from None
    if wished["plan"] is None:
        settings = with_fitting_plan(settings, tapes.config.fragments)
    check_simulated(tapes, settings)
    return settings


def train(tapes: RunTapes, settings: JobSettings) -> Trained:
    from atoll.reference.synthetic import train_simulated

    with progress("training", settings.tokens, True) as tell:
        return train_simulated(tapes, settings, tell)


def what_to_add(tapes: RunTapes) -> str:
    """For whoever has not said what to train."""
    return (
        "the tapes are simulated and have no model; to train one under their failures, say which:"
        f" atoll replay {tapes.run} --model 100k --batch 2 --tokens 2M"
    )


def fields(trained: Trained) -> dict[str, Any]:
    learners = {str(learner): one._asdict() for learner, one in trained.learners.items()}
    return {**trained._asdict(), "learners": learners, "contributions_per_merge": trained.contributions_per_merge}


def told(trained: Trained) -> list[str]:
    per_merge = f"{trained.contributions_per_merge:.2f}"
    why = {
        "tokens": f"all {trained.wished_tokens:,} tokens that were wished for are trained",
        "tapes": f"the tapes are over, before the {trained.wished_tokens:,} tokens that were wished for",
    }
    steps = ", ".join(f"learner {learner}: {_steps(one)}" for learner, one in trained.learners.items())
    return [
        f"trained on simulated tapes: {trained.tokens:,} tokens in {trained.steps:,} steps and"
        f" {trained.simulated_s / 60.0:.1f} simulated minutes; {why[trained.ended_by]}",
        f"{trained.merges:,} merges of {trained.contributions:,} contributions, {per_merge} each; steps of {steps}",
        f"held-out loss {trained.loss:.4f}, before {trained.loss_before:.4f}, on {trained.eval_tokens:,} tokens;"
        f" digest {trained.digest}",
    ]


def _steps(one: Any) -> str:
    also = f" in {one.starts} incarnations" if one.starts > 1 else ""
    empty = f" ({one.empty_steps:,} without a sample)" if one.empty_steps else ""
    return f"{one.steps:,}{also}{empty}"
