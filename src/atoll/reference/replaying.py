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
from atoll.checkpoint.published import is_finished, run_settings
from atoll.checkpoint.restore import BEGINNING, kept_fragment
from atoll.core.protocol import VersionRecord
from atoll.core.types import SYNCER
from atoll.reference.data import Text
from atoll.reference.executor import Execution, StepInfo, Trainee, initial_values, load_values
from atoll.reference.job_settings import JobSettings
from atoll.reference.loop import InnerLoop
from atoll.reference.saved_models import first_model, published_model
from atoll.store.learner_parts import Part, list_parts, part_path, read_part
from atoll.store.run_settings import CONFIG
from atoll.store.tensor_file import read_tensors
from atoll.tape import format
from atoll.tape.files import RunTapes
from atoll.tape.format import Actor, Entry
from atoll.tape.ordering import Missing
from atoll.tensors import optimizer_state

HISTORY = 4
"""States of each fragment that are kept for a syncer that is started again: it may have died before the newest."""


class Replayed(NamedTuple):
    """`recorded` is the digest that the run has left; None where it has not finished, and nothing is final."""

    steps: int
    tokens: int
    contributions: int
    versions: int  # published values that learners rebuilt, each compared with the syncer's
    digest: str
    recorded: str | None

    @property
    def is_same(self) -> bool:
        return self.recorded is None or self.digest == self.recorded


class CannotReplay(ValueError):  # noqa: N818 - the answer to a wish that these tapes cannot grant
    """The tapes lack something that the training depended on."""


def can_replay(run: Path) -> bool:
    """A decoupled run of our own trainer, with a model: loops of other people are not on the tape."""
    if not (run / CONFIG).is_file():
        return False
    founded = run_settings(run)
    return founded is not None and founded.plan is not None and JobSettings.load(run / CONFIG).method == "decoupled"


def replay_training(
    run: Path, tapes: RunTapes, watched: Callable[[Iterable[Entry]], Iterator[Entry]] = iter
) -> Replayed:
    """Train as the tapes say. Raises `CannotReplay` where one of them ends before what it has caused."""
    settings = JobSettings.load(run / CONFIG)
    founded = run_settings(run)
    assert founded is not None and founded.plan is not None, "ask can_replay first"
    beginning = _beginning(run, tapes, len(founded.plan.fragments))
    torch.set_num_threads(settings.threads)
    corpus = Text.load(settings.data)
    founder = first_model(settings, run)
    steps = 0

    def make(actor: Actor) -> Trainee:
        loop = InnerLoop(settings, corpus)
        share = JobSettings.from_json(founded.extra).share_of_a_step(loop.config.context)

        def take_step(info: StepInfo) -> float:
            nonlocal steps
            steps += 1
            return loop.step(info.samples, min(1.0, info.heard + share), info.lr_scale).loss

        return Trainee(loop.model, loop.optimizer, take_step, settings.batch)

    initial = initial_values(founder, founded.plan)
    if beginning is not None:
        initial = [kept.state["published"] for kept in beginning.fragments]
    execution = Execution(founded.config, founded.numerics, founded.plan, initial, make, HISTORY, check_digests=True)
    if beginning is not None:
        beginning.give(execution)
    for entry in watched(tapes.merged(_refuse_all_but(beginning))):
        if entry.actor.learner == SYNCER and entry.tick == 1:
            execution.started(entry.actor, tapes.readers[entry.actor].header.restored)
        execution.apply(entry)
    load_values(founder, founded.plan, execution.published())
    recorded = model_digest(published_model(run, settings)) if is_finished(run) else None
    return Replayed(
        steps, execution.tokens, execution.contributions, execution.compared, model_digest(founder), recorded
    )


class KeptFragment(NamedTuple):
    """What a restored run began with. `record` None: with version 0, of which there is nothing but the value."""

    record: VersionRecord | None
    state: dict[str, Tensor]  # as the store keeps it


class Beginning(NamedTuple):
    syncer: Actor  # the first
    fragments: list[KeptFragment]
    parts: list[Part]

    def give(self, execution: Execution) -> None:
        for p, kept in enumerate(self.fragments):
            if kept.record is not None:
                execution.found(p, kept.record.round, kept.state)
        for part in self.parts:
            inner = optimizer_state.Taken(dict(part.note["inner"]), dict(part.inner_tensors()), [])
            execution.found_part(part.learner, part.snapshot, optimizer_state.pack_taken(inner))


def _beginning(run: Path, tapes: RunTapes, fragments: int) -> Beginning | None:
    """None: with a new model. Otherwise the run was restored, and has kept what it was restored from."""
    first = min((actor for actor in tapes.readers if actor.learner == SYNCER), default=None)
    if first is None:
        raise CannotReplay("there is no tape of the syncer")
    restored = tapes.readers[first].header.restored
    versions = restored.versions if restored is not None else {}
    if not (run / BEGINNING).is_dir():
        if versions:
            raise CannotReplay(
                "the first tape of the syncer begins with versions: it is not the first, or the run was restored from"
                f" another one and {BEGINNING} is gone"
            )
        return None
    try:
        kept = [_kept(kept_fragment(run, p)) for p in range(fragments)]
        there = list_parts(run / BEGINNING)
        parts = [read_part(part_path(run / BEGINNING, i, number)) for i, numbers in there.items() for number in numbers]
    except (OSError, ValueError) as error:
        raise CannotReplay(f"what the run was restored from cannot be read: {error}") from None
    if any(versions.get(p) != each.record for p, each in enumerate(kept)):
        raise CannotReplay(f"the first tape of the syncer begins with other versions than {BEGINNING} holds")
    return Beginning(first, kept, parts)


def _kept(path: Path) -> KeptFragment:
    note, tensors = read_tensors(path)
    record = format.decode(note) if note else None
    if record is not None and not isinstance(record, VersionRecord):
        raise ValueError(f"{path} holds {type(record).__name__}, no version")
    return KeptFragment(record, dict(tensors))


def _refuse_all_but(beginning: Beginning | None) -> Callable[[Missing], None]:
    """What the first syncer of a restored run found is on no tape of that run, and is kept beside them."""

    def refuse(missing: Missing) -> None:
        if beginning is None or missing.actor != beginning.syncer or missing.cause_tick is not None:
            raise CannotReplay(f"the tapes are incomplete: {missing}")

    return refuse
