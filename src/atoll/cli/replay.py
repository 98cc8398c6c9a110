"""`atoll replay`: derive every effect again from the tapes, and train the model again to the same bits.

Tapes of a simulated run have no model to compare with, but a model can be trained on them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.check import RunArgument
from atoll.cli.output import ExitCode, JsonOption, Result, progress_bar, reading_progress, retraining_progress
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from atoll.reference.job_settings import JobSettings
    from atoll.reference.replay import ReplayResult
    from atoll.reference.simulated_training import SimulatedTrainingResult
    from atoll.tape.files import RunTapes
    from atoll.tape.replay import ReplayMismatchError


# long: the options with their help
def run(
    ctx: typer.Context,
    run: RunArgument,
    effects_only: Annotated[bool, Setting("Compare the effects only; do not train again.")] = False,
    *,
    job: options.TrainedModelOptions,
    as_json: JsonOption = False,
) -> Result:
    """Derive every effect of a run again from its tapes, and train its model again to the same bits.

    First the core of each process handles its recorded events, and must produce the recorded effects. Then the training
    of a run of atoll train is repeated from tapes and data on this machine, one learner after the other, with all
    faults and merges. It ends with the digest of the run, given the same build of torch and the same type of processor.
    It takes as long as all learners trained in total. Stops at the first difference, with exit code 1.

    Tapes of atoll simulate have no model. With options for a model, a real model is trained under the failures of the
    simulated chips: --model 100k --batch 2 --tokens 2M. The batch is that of a learner with all its slices. Training
    ends after these tokens, or at the end of the tapes. The options for a model are for simulated tapes only.
    """
    from atoll.tape.files import RunTapes
    from atoll.tape.replay import ReplayMismatchError, replay

    tapes = RunTapes(run)
    requested = _requested_settings(ctx, job, tapes)
    entries = 0
    mismatch: ReplayMismatchError | None = None
    with reading_progress("replaying", tapes) as watched:
        for reader in tapes.readers.values():
            try:
                entries += replay(reader.header, watched(reader))
            except ReplayMismatchError as error:
                entries += error.tick
                mismatch = error
                break
    gaps = tapes.describe_gaps()
    if not as_json:
        if mismatch is None:
            rest = ", up to the end of the tapes" if gaps else ""
            print(f"{len(tapes.readers)} tapes, {entries:,} entries: every effect is as recorded{rest}", flush=True)
        else:
            _print_difference(mismatch)
        for gap in gaps:
            print(f"incomplete: {gap}", flush=True)
    trained: ReplayResult | None = None
    simulated: SimulatedTrainingResult | None = None
    cause = ""
    if mismatch is None and requested is not None:
        simulated = _train_simulated(tapes, requested)
    elif mismatch is None and not effects_only:
        trained, cause = _train(run)
    training: dict[str, Any] | None = None
    lines: list[str] = [f"training cannot be replayed: {cause}"] if cause else []
    if simulated is not None:
        training, lines = _simulated_fields(simulated), _simulated_lines(simulated)
    elif trained is not None:
        training, lines = {**trained._asdict(), "same": trained.is_identical}, [_training_line(trained)]
    fields = {
        "tapes": len(tapes.readers),
        "entries": entries,
        "difference": mismatch and _difference_fields(mismatch),
        "complete": not gaps,
        "incomplete": gaps,
        "training": training,
        "not_trained": cause or None,
    }
    failed = mismatch is not None or (trained is not None and not trained.is_identical)
    return Result(fields, lines, ExitCode.FAILED if failed else ExitCode.OK)


def _train(run: Path) -> tuple[ReplayResult | None, str]:
    """Train again. Return the result or the cause why it is impossible; neither for runs of other trainers."""
    from atoll.tape.files import RunTapes

    tapes = RunTapes(run)  # a new reader, from the beginning
    if tapes.is_simulated:
        return None, _simulated_advice(tapes)
    try:
        from atoll.reference.replay import CannotReplayError, can_replay, replay_training
    except ModuleNotFoundError:  # installed without the extra 'train'
        return None, ""
    if not can_replay(run):
        return None, ""
    with retraining_progress(tapes) as watched:
        try:
            return replay_training(run, tapes, watched), ""
        except CannotReplayError as error:
            return None, str(error)


def _training_line(trained: ReplayResult) -> str:
    done = f"trained again: {trained.steps:,} steps, {trained.tokens:,} tokens, {trained.contributions:,} contributions"
    if trained.recorded is None:
        return f"{done}; digest {trained.digest}. The run has not finished, so it has no digest for comparison"
    if trained.is_identical:
        return f"{done}; the model is bit-identical, digest {trained.digest}"
    return f"{done}; the model differs: digest {trained.digest}, digest of the run {trained.recorded}"


def _difference_fields(difference: ReplayMismatchError) -> dict[str, object]:
    import json

    from atoll.tape.format import canonical

    derived = difference.derived
    return {
        "actor": str(difference.actor),
        "tick": difference.tick,
        "at": difference.at,
        "event": json.loads(canonical(difference.event)),
        "recorded": json.loads(canonical(difference.recorded)),
        "derived": None if derived is None else json.loads(canonical(derived)),
        "raised": difference.raised or None,
        "first": difference.first_difference(),
    }


def _print_difference(difference: ReplayMismatchError) -> None:
    from atoll.tape.format import canonical

    print(f"{difference.actor}, tick {difference.tick} at {difference.at:.3f} s: the replay produces other effects")
    print(f"  event     {canonical(difference.event)}")
    first = difference.first_difference()
    for label, effects in (("recorded", difference.recorded), ("derived", difference.derived)):
        if effects is None:
            print(f"  {label:<9} raised {difference.raised}")
            continue
        print(f"  {label:<9} {len(effects)} effects")
        for index, effect in enumerate(effects):
            print(f"  {'>' if index == first else ' '} {index + 1:>3}     {canonical(effect)}")


def _requested_settings(ctx: typer.Context, job: dict[str, Any], tapes: RunTapes) -> JobSettings | None:
    """Return the settings of the model to train on simulated tapes, or None if no option for it is given.

    Raise `ValueError` if the tapes are not simulated, or are too coarse for a model.
    """
    given = [name for name in job if options.is_given(ctx, name)]
    if not given:
        return None
    flag = options.option_flag(ctx, given[0])
    if not tapes.is_simulated:
        raise ValueError(
            f"{flag} is for tapes of atoll simulate, and {tapes.run} is a real run, which is trained again with its own"
            " settings; omit it"
        )
    if ctx.params["effects_only"]:
        raise ValueError(f"--effects-only trains nothing, so {flag} has no effect; omit one of them")
    settings = options.make_job({**job, "learners": len(tapes.learners())})
    try:
        from atoll.reference.simulated_training import check_simulated, fit_plan
    except ModuleNotFoundError as missing:
        raise ValueError(f"training needs {missing.name} of the extra 'train': pip install 'atoll[train]'") from None
    if job["plan"] is None:
        settings = fit_plan(settings, tapes.config.fragments)
    check_simulated(tapes, settings)
    return settings


def _train_simulated(tapes: RunTapes, settings: JobSettings) -> SimulatedTrainingResult:
    from atoll.reference.simulated_training import train_simulated

    with progress_bar("training", settings.tokens, True) as report:
        return train_simulated(tapes, settings, report)


def _simulated_advice(tapes: RunTapes) -> str:
    return (
        "the tapes are simulated and have no model; to train one under their failures, give its settings:"
        f" atoll replay {tapes.run} --model 100k --batch 2 --tokens 2M"
    )


def _simulated_fields(trained: SimulatedTrainingResult) -> dict[str, Any]:
    learners = {str(learner): totals._asdict() for learner, totals in trained.learners.items()}
    return {**trained._asdict(), "learners": learners, "contributions_per_merge": trained.contributions_per_merge}


def _simulated_lines(trained: SimulatedTrainingResult) -> list[str]:
    per_merge = f"{trained.contributions_per_merge:.2f}"
    outcomes = {
        "tokens": f"all {trained.target_tokens:,} requested tokens are trained",
        "tapes": f"the tapes ended before the {trained.target_tokens:,} requested tokens",
    }
    steps = ", ".join(f"learner {learner}: {_step_text(totals)}" for learner, totals in trained.learners.items())
    return [
        f"trained on simulated tapes: {trained.tokens:,} tokens in {trained.steps:,} steps and"
        f" {trained.simulated_s / 60.0:.1f} simulated minutes; {outcomes[trained.ended_by]}",
        f"{trained.merges:,} merges of {trained.contributions:,} contributions, {per_merge} each; steps of {steps}",
        f"held-out loss {trained.loss:.4f}, before {trained.loss_before:.4f}, on {trained.eval_tokens:,} tokens;"
        f" digest {trained.digest}",
    ]


def _step_text(totals: Any) -> str:
    starts = f" in {totals.starts} incarnations" if totals.starts > 1 else ""
    empty = f" ({totals.empty_steps:,} without a sample)" if totals.empty_steps else ""
    return f"{totals.steps:,}{starts}{empty}"
