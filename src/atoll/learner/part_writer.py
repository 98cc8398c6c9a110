"""Writer and reader of a learner's parts of snapshots, for its background thread.

There is one object per incarnation. Files are written and read in threads of the loop's default pool, so that neither
encoding nor messages wait for a disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from atoll.core.protocol import (
    NO_RUN_DIRECTORY,
    LearnerEvent,
    SavedStateFound,
    SaveSnapshot,
    SnapshotPart,
    SnapshotSaved,
    SnapshotSaveFailed,
)
from atoll.core.types import Incarnation, LearnerId, RunConfig
from atoll.errors import AtollError
from atoll.island.boundary import SavedState, StepBoundary, summarize_error
from atoll.store.learner_parts import PartCopy, write_part

PREVIOUS_PART_BUSY = "the part before it is still being written"


@dataclass(eq=False)
class PartWriter:
    """Writer of the parts of one incarnation.

    With `_run_directory` None no part is written. Snapshots then lack this learner's optimizer state.
    """

    _run_directory: Path | None
    _config: RunConfig
    _learner: LearnerId
    _incarnation: Incarnation
    _handle_event: Callable[[LearnerEvent], None]
    _log: logging.Logger
    _pending: tuple[SnapshotPart, Future[PartCopy]] | None = None  # part that is not durable yet
    _saved: SavedState | None = None
    _search: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        if self._run_directory is None:
            self._log.info("no run_directory: snapshots will not contain the optimizer state of this learner")

    # ---------------------------------------------------------------- in the training thread, with the learner's lock

    def begin_part(self, part: SnapshotPart) -> Future[PartCopy] | None:
        """Return the future for the copy of this part. Return None if the part cannot be written.

        A part cannot be written without a run directory, or while another part is being written, because two parts need
        twice the memory.
        """
        if self._run_directory is None or self._pending is not None:
            return None
        self._pending = (part, Future())
        return self._pending[1]

    def pop_saved_state(self) -> SavedState | None:
        """Return the state that was found, and release it here."""
        saved, self._saved = self._saved, None
        return saved

    # ------------------------------------------------------------------------------------------------ in the loop

    async def save(self, effect: SaveSnapshot) -> None:
        """Write the part. The core receives exactly one event with the result."""
        due = self._pending
        if due is None or due[0].snapshot != effect.snapshot:
            self._handle_event(
                SnapshotSaveFailed(
                    effect.snapshot, NO_RUN_DIRECTORY if self._run_directory is None else PREVIOUS_PART_BUSY
                )
            )
            return
        part, copied = due
        assert self._run_directory is not None
        try:
            part_copy = await asyncio.wrap_future(copied)
            owner = self._run_directory, self._config, self._learner, self._incarnation
            await asyncio.to_thread(write_part, *owner, part, part_copy)
        except AtollError:  # the island is broken
            raise
        except Exception as error:
            self._pending = None
            self._handle_event(SnapshotSaveFailed(effect.snapshot, summarize_error(error)))
        else:
            self._pending = None
            self._handle_event(SnapshotSaved(effect.snapshot))

    def find_saved_state(self, boundary: StepBoundary) -> asyncio.Task[None]:
        """Search for optimizer state on disk, once. The core receives the result before the task ends."""
        if self._search is None:
            self._search = asyncio.get_running_loop().create_task(self._find(boundary))
        return self._search

    async def _find(self, boundary: StepBoundary) -> None:
        if self._run_directory is None:
            return
        self._saved = await asyncio.to_thread(
            boundary.find_saved_state, self._run_directory, self._config, self._learner, self._log.warning
        )
        if self._saved is not None:
            self._handle_event(SavedStateFound(self._saved.part.learner, self._saved.part.snapshot))

    async def close(self) -> None:
        """Stop the search. A file that is being written is finished by its thread, without an event."""
        if self._search is not None:
            self._search.cancel()
            await asyncio.gather(self._search, return_exceptions=True)
