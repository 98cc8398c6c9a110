"""A run trained once more from its tapes, on one machine: the same steps on the same samples, to the same bits.

What is the same: the build of torch, the number of threads of a learner, the kind of processor, the text. Everything
else that a step depends on is on the tapes, or follows from it: samples (leases and how many were new), the progress
that the learner had heard at the boundary before, whose inner state it started with, what it adopted and when.
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
"""States of each fragment that are kept for a syncer that is started again: it may have died before the newest."""


class ReplayResult(NamedTuple):
    """`recorded` is the digest that the run has left; None where it has not finished, and nothing is final."""

    steps: int
    tokens: int
    contributions: int
    versions: int  # published values that learners rebuilt, each compared with the syncer's
    digest: str
    recorded: str | None

    @property
    def is_identical(self) -> bool:
        return self.recorded is None or self.digest == self.recorded


class CannotReplayError(ValueError):
    """The tapes lack something that the training depended on."""


def can_replay(run: Path) -> bool:
    """A decoupled run of our own trainer, with a model: loops of other people are not on the tape."""
    if not (run / CONFIG_FILE).is_file():
        return False
    founded = read_run_settings(run)
    return (
        founded is not None and founded.plan is not None and JobSettings.load(run / CONFIG_FILE).method == "decoupled"
    )


def replay_training(
    run: Path, tapes: RunTapes, wrap_entries: Callable[[Iterable[Entry]], Iterator[Entry]] = iter
) -> ReplayResult:
    """Train as the tapes say. Raises `CannotReplayError` where one of them ends before what it has caused."""
    settings = JobSettings.load(run / CONFIG_FILE)
    founded = read_run_settings(run)
    assert founded is not None and founded.plan is not None, "ask can_replay first"
    initial_state = _read_initial_state(run, tapes, len(founded.plan.fragments))
    torch.set_num_threads(settings.threads)
    corpus = Corpus.load(settings.data)
    founder = initial_model(settings, run)
    steps = 0

    def make(actor: Actor) -> ReplayLearner:
        loop = InnerLoop(settings, corpus)
        share = JobSettings.from_json(founded.extra).step_share(loop.config.context)

        def take_step(info: StepInfo) -> float:
            nonlocal steps
            steps += 1
            return loop.step(info.samples, min(1.0, info.known_progress + share), info.lr_scale).loss

        return ReplayLearner(loop.model, loop.optimizer, take_step, settings.batch)

    initial = initial_values(founder, founded.plan)
    if initial_state is not None:
        initial = [kept.state["published"] for kept in initial_state.fragments]
    execution = TapeExecutor(
        founded.config, founded.numerics, founded.plan, initial, make, STORED_STATES, check_digests=True
    )
    if initial_state is not None:
        initial_state.load_into(execution)
    for entry in wrap_entries(tapes.merged_entries(_make_missing_handler(initial_state))):
        if entry.actor.learner == SYNCER and entry.tick == 1:
            execution.start_process(entry.actor, tapes.readers[entry.actor].header.restored)
        execution.apply(entry)
    load_values(founder, founded.plan, execution.published())
    recorded = model_digest(published_model(run, settings)) if is_run_finished(run) else None
    return ReplayResult(
        steps, execution.tokens, execution.contributions, execution.compared_digests, model_digest(founder), recorded
    )


class InitialFragment(NamedTuple):
    """What a restored run began with. `record` None: with version 0, of which there is nothing but the value."""

    record: VersionRecord | None
    state: dict[str, Tensor]  # as the store keeps it


class InitialState(NamedTuple):
    syncer: Actor  # the first
    fragments: list[InitialFragment]
    parts: list[LearnerPart]

    def load_into(self, execution: TapeExecutor) -> None:
        for p, kept in enumerate(self.fragments):
            if kept.record is not None:
                execution.add_stored_version(p, kept.record.round, kept.state)
        for part in self.parts:
            inner = optimizer_state.OptimizerStateCopy(dict(part.note["inner"]), dict(part.optimizer_tensors()), [])
            execution.add_stored_part(part.learner, part.snapshot, optimizer_state.pack_copy(inner))


def _read_initial_state(run: Path, tapes: RunTapes, fragments: int) -> InitialState | None:
    """None: with a new model. Otherwise the run was restored, and has kept what it was restored from."""
    first = min((actor for actor in tapes.readers if actor.learner == SYNCER), default=None)
    if first is None:
        raise CannotReplayError("there is no tape of the syncer")
    restored = tapes.readers[first].header.restored
    versions = restored.versions if restored is not None else {}
    if not (run / INITIAL_FOLDER).is_dir():
        if versions:
            raise CannotReplayError(
                "the first tape of the syncer begins with versions: it is not the first, or the run was restored from"
                f" another one and {INITIAL_FOLDER} is gone"
            )
        return None
    try:
        kept = [_read_stored_fragment(initial_fragment_path(run, p)) for p in range(fragments)]
        there = list_parts(run / INITIAL_FOLDER)
        parts = [
            read_part(part_path(run / INITIAL_FOLDER, i, number)) for i, numbers in there.items() for number in numbers
        ]
    except (OSError, ValueError) as error:
        raise CannotReplayError(f"what the run was restored from cannot be read: {error}") from None
    if any(versions.get(p) != each.record for p, each in enumerate(kept)):
        raise CannotReplayError(f"the first tape of the syncer begins with other versions than {INITIAL_FOLDER} holds")
    return InitialState(first, kept, parts)


def _read_stored_fragment(path: Path) -> InitialFragment:
    note, tensors = read_tensors(path)
    record = format.decode(note) if note else None
    if record is not None and not isinstance(record, VersionRecord):
        raise ValueError(f"{path} holds {type(record).__name__}, no version")
    return InitialFragment(record, dict(tensors))


def _make_missing_handler(initial_state: InitialState | None) -> Callable[[MissingCause], None]:
    """What the first syncer of a restored run found is on no tape of that run, and is kept beside them."""

    def refuse(missing: MissingCause) -> None:
        if initial_state is None or missing.actor != initial_state.syncer or missing.cause_tick is not None:
            raise CannotReplayError(f"the tapes are incomplete: {missing}")

    return refuse
