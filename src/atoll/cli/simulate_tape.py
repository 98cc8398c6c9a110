"""Tapes of a simulated run, in the format of real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from atoll.core.syncer.state import Restored
from atoll.core.types import SYNCER, RunConfig
from atoll.tape.files import SIMULATED_NOTE, TapeWriter, new_header, tape_path
from atoll.tape.format import Actor, Entry


class TapesWritten(NamedTuple):
    """What is in the directory of the run now."""

    directory: str
    tapes: int
    entries: int
    size_bytes: int
    finished: bool  # the run came to its orderly end after the simulated time
    merges: int  # up to that end


class Tapes:
    """One open tape per process that is running."""

    def __init__(self, directory: Path, config: RunConfig, seed: int, note: str = SIMULATED_NOTE) -> None:
        self._directory = directory
        self._config = config
        self._seed = seed
        self._note = note
        self._writers: dict[Actor, TapeWriter] = {}
        self.finished = False
        self.merges = 0

    def start(self, actor: Actor, restored: Restored | None) -> None:
        before = self._writers.get(Actor(actor.learner, actor.start - 1))
        if before is not None and actor.learner != SYNCER:
            before.close()  # an incarnation ends before the next one starts; a syncer that was cut off may live on
        header = new_header(actor, self._config, self._seed, restored, self._note)
        self._writers[actor] = TapeWriter(tape_path(self._directory, actor), header)

    def write(self, entry: Entry) -> None:
        self._writers[entry.actor].write(entry)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def written(self) -> TapesWritten:
        writers = self._writers.values()
        return TapesWritten(
            str(self._directory),
            len(writers),
            sum(writer.tick for writer in writers),
            sum(writer.path.stat().st_size for writer in writers),
            self.finished,
            self.merges,
        )


@contextmanager
def tapes_of(directory: Path | None, config: RunConfig, seed: int) -> Iterator[Tapes | None]:
    """The tapes to write, if any; all of them are closed at the end."""
    if directory is None:
        yield None
        return
    tapes = Tapes(directory, config, seed)
    try:
        yield tapes
    finally:
        tapes.close()


def check_directory(directory: Path) -> None:
    """A tape is never overwritten, so its directory is new or empty."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; give --tape a directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty, and a tape is never overwritten; remove it or choose another")
