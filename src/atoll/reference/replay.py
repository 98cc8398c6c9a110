"""Replay of a run from its tapes on one machine: the same steps on the same samples, to the same bits.

The replay needs the same build of torch, number of threads per learner, CPU model and text. Everything else that a step
depends on follows from the tapes: its samples (leases, and how many samples were new), the progress that the learner
had received by the previous step boundary, the source of its optimizer state, and which versions it adopted when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.checkpoint.model_file import model_digest
from atoll.checkpoint.published_model import is_run_finished, read_run_settings
from atoll.checkpoint.restore import INITIAL_FOLDER, initial_fragment_path
from atoll.core.protocol import VersionRecord
from atoll.core.types import SYNCER
from atoll.reference.data import Corpus
from atoll.reference.job_settings import JobSettings
from atoll.reference.loop import InnerLoop
from atoll.reference.saved_models import initial_model, published_model
from atoll.reference.tape_executor import ReplayLearner, StepInfo, TapeExecutor, initial_values, load_values
from atoll.store.learner_parts import LearnerPart, list_parts, part_path, read_part
from atoll.store.run_settings import CONFIG_FILE
from atoll.store.tensor_file import read_tensors
from atoll.tape import format
from atoll.tape.files import RunTapes
from atoll.tape.format import Actor, Entry
from atoll.tape.ordering import MissingCause
from atoll.tensors import optimizer_state

STORED_STATES = 4
"""States kept per fragment for a restarted syncer. Its predecessor may have died before the newest one was durable."""


class ReplayResult(NamedTuple):
    """Result of a replay."""

    steps: int
    tokens: int
    contributions: int
    versions: int  # published values that learners rebuilt, each compared with that of the syncer
    digest: str  # of the replayed model
    recorded: str | None  # digest of the final model of the run; None if the run has not finished

    @property
    def is_identical(self) -> bool:
        return self.recorded is None or self.digest == self.recorded


class CannotReplayError(ValueError):
    """Raised when the tapes lack something that the training depended on."""


def can_replay(run: Path) -> bool:
    """Return whether this is a decoupled run of the reference trainer with a model. Other loops cannot be replayed."""
    if not (run / CONFIG_FILE).is_file():
        return False
    stored = read_run_settings(run)
    return stored is not None and stored.plan is not None and JobSettings.load(run / CONFIG_FILE).method == "decoupled"


def replay_training(
    run: Path, tapes: RunTapes, wrap_entries: Callable[[Iterable[Entry]], Iterator[Entry]] = iter
) -> ReplayResult:
    """Repeat the training that the tapes record.

    Raise `CannotReplayError` if a tape ends before an event that it caused in another process.

    Args:
        wrap_entries: wrapper of the iterator over all entries, for example to show the progress.
    """
    settings = JobSettings.load(run / CONFIG_FILE)
    stored = read_run_settings(run)
    assert stored is not None and stored.plan is not None, "call can_replay first"
    initial_state = _read_initial_state(run, tapes, len(stored.plan.fragments))
    torch.set_num_threads(settings.threads)
    corpus = Corpus.load(settings.data)
    model = initial_model(settings, run)
    steps = 0

    def make_learner(actor: Actor) -> ReplayLearner:
        loop = InnerLoop(settings, corpus)
        share = JobSettings.from_json(stored.extra).step_share(loop.config.context)

        def take_step(info: StepInfo) -> float:
            nonlocal steps
            steps += 1
            return loop.step(info.samples, min(1.0, info.known_progress + share), info.lr_scale).loss

        return ReplayLearner(loop.model, loop.optimizer, take_step, settings.batch)

    initial = initial_values(model, stored.plan)
    if initial_state is not None:
        initial = [fragment.state["published"] for fragment in initial_state.fragments]
    executor = TapeExecutor(
        stored.config, stored.numerics, stored.plan, initial, make_learner, STORED_STATES, check_digests=True
    )
    if initial_state is not None:
        initial_state.load_into(executor)
    for entry in wrap_entries(tapes.merged_entries(_make_missing_handler(initial_state))):
        if entry.actor.learner == SYNCER and entry.tick == 1:
            executor.start_process(entry.actor, tapes.readers[entry.actor].header.restored)
        executor.apply(entry)
    load_values(model, stored.plan, executor.published())
    recorded = model_digest(published_model(run, settings)) if is_run_finished(run) else None
    return ReplayResult(
        steps, executor.tokens, executor.contributions, executor.compared_digests, model_digest(model), recorded
    )


class InitialFragment(NamedTuple):
    """Initial state of a fragment of a restored run."""

    record: VersionRecord | None  # None: version 0, which has only a value
    state: dict[str, Tensor]  # as in the store


class InitialState(NamedTuple):
    """Snapshot from which a run was restored."""

    syncer: Actor  # the first process of the syncer
    fragments: list[InitialFragment]
    parts: list[LearnerPart]

    def load_into(self, executor: TapeExecutor) -> None:
        for p, fragment in enumerate(self.fragments):
            if fragment.record is not None:
                executor.add_stored_version(p, fragment.record.round, fragment.state)
        for part in self.parts:
            state = optimizer_state.OptimizerStateCopy(dict(part.metadata["inner"]), dict(part.optimizer_tensors()), [])
            executor.add_stored_part(part.learner, part.snapshot, optimizer_state.pack_copy(state))


def _read_initial_state(run: Path, tapes: RunTapes, fragments: int) -> InitialState | None:
    """Return the state from which the run was restored, or None if it began with a new model."""
    first = min((actor for actor in tapes.readers if actor.learner == SYNCER), default=None)
    if first is None:
        raise CannotReplayError(f"{run} has no tape of the syncer")
    restored = tapes.readers[first].header.restored
    versions = restored.versions if restored is not None else {}
    if not (run / INITIAL_FOLDER).is_dir():
        if versions:
            raise CannotReplayError(
                "the first tape of the syncer begins with stored versions: an earlier tape is missing, or the run was"
                f" restored from another one and {INITIAL_FOLDER} is missing"
            )
        return None
    try:
        stored = [_read_stored_fragment(initial_fragment_path(run, p)) for p in range(fragments)]
        parts = [
            read_part(part_path(run / INITIAL_FOLDER, learner, number))
            for learner, numbers in list_parts(run / INITIAL_FOLDER).items()
            for number in numbers
        ]
    except (OSError, ValueError) as error:
        raise CannotReplayError(f"cannot read the state from which the run was restored: {error}") from None
    if any(versions.get(p) != each.record for p, each in enumerate(stored)):
        raise CannotReplayError(f"the versions in {INITIAL_FOLDER} are not those of the first tape of the syncer")
    return InitialState(first, stored, parts)


def _read_stored_fragment(path: Path) -> InitialFragment:
    note, tensors = read_tensors(path)
    record = format.decode(note) if note else None
    if record is not None and not isinstance(record, VersionRecord):
        raise ValueError(f"{path} contains {type(record).__name__} instead of a version")
    return InitialFragment(record, dict(tensors))


def _make_missing_handler(initial_state: InitialState | None) -> Callable[[MissingCause], None]:
    """Return a handler that raises, except for causes that happened before a restored run began.

    What the first syncer of a restored run finds in its store is on no tape of that run.
    """

    def refuse(missing: MissingCause) -> None:
        if initial_state is None or missing.actor != initial_state.syncer or missing.cause_tick is not None:
            raise CannotReplayError(f"the tapes are incomplete: {missing}")

    return refuse
