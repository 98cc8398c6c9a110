"""What a learner's background does with parts of snapshots: writes them, and looks for one to start from.

One object per incarnation. Files are written and read in threads of the loop's own pool, so that neither the encoding
of a contribution nor a message waits for a disk.
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
    MomentsFound,
    SaveSnapshot,
    SnapshotPart,
    SnapshotSaved,
    SnapshotSaveFailed,
)
from atoll.core.types import Incarnation, LearnerId, RunConfig
from atoll.errors import AtollError
from atoll.island.boundary import Saved, StepBoundary, cause_of
from atoll.store.learner_parts import TakenPart, write_part

BUSY = "the part before it is still being written"


@dataclass(eq=False)
class PartKeeper:
    """`run` None: no part is kept. Snapshots then hold this learner's counters and not its inner state."""

    _run: Path | None
    _config: RunConfig
    _learner: LearnerId
    _incarnation: Incarnation
    _tell: Callable[[LearnerEvent], None]
    _log: logging.Logger
    _due: tuple[SnapshotPart, Future[TakenPart]] | None = None  # copied or to be copied, and not yet durable
    _saved: Saved | None = None
    _seeking: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        if self._run is None:
            self._log.info("no run_directory: snapshots will not hold the inner state of this learner")

    # ---------------------------------------------------------------- in the training thread, with the learner's lock

    def expect(self, part: SnapshotPart) -> Future[TakenPart] | None:
        """Where the copy of this part goes. None: it is not wanted, because there is no place for it or one is still
        being written; two at once would hold twice the memory."""
        if self._run is None or self._due is not None:
            return None
        self._due = (part, Future())
        return self._due[1]

    def take_saved(self) -> Saved | None:
        """What was found. Its memory is not held for longer."""
        saved, self._saved = self._saved, None
        return saved

    # ------------------------------------------------------------------------------------------------ in the loop

    async def save(self, effect: SaveSnapshot) -> None:
        """Answered by exactly one event."""
        due = self._due
        if due is None or due[0].snapshot != effect.snapshot:
            self._tell(SnapshotSaveFailed(effect.snapshot, NO_RUN_DIRECTORY if self._run is None else BUSY))
            return
        part, copied = due
        assert self._run is not None
        try:
            taken = await asyncio.wrap_future(copied)
            place = self._run, self._config, self._learner, self._incarnation
            await asyncio.to_thread(write_part, *place, part, taken)
        except AtollError:  # the island is broken
            raise
        except Exception as error:
            self._due = None
            self._tell(SnapshotSaveFailed(effect.snapshot, cause_of(error)))
        else:
            self._due = None
            self._tell(SnapshotSaved(effect.snapshot))

    def seek(self, boundary: StepBoundary) -> asyncio.Task[None]:
        """Look for inner state on disk, once. The core hears of it before the task ends."""
        if self._seeking is None:
            self._seeking = asyncio.get_running_loop().create_task(self._find(boundary))
        return self._seeking

    async def _find(self, boundary: StepBoundary) -> None:
        if self._run is None:
            return
        self._saved = await asyncio.to_thread(
            boundary.find_saved, self._run, self._config, self._learner, self._log.warning
        )
        if self._saved is not None:
            self._tell(MomentsFound(self._saved.part.learner, self._saved.part.snapshot))

    async def close(self) -> None:
        """Nobody is told of anything any more. A file that is being written is finished by its thread."""
        if self._seeking is not None:
            self._seeking.cancel()
            await asyncio.gather(self._seeking, return_exceptions=True)
