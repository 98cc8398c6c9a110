"""A tape that is written while a process does something more important: a full disk must not stop it."""

from __future__ import annotations

import logging
from pathlib import Path

from atoll.tape.files import TapeWriter, tape_path
from atoll.tape.format import Entry, Header

MOST_WAITING_BYTES = 64 * 1024 * 1024
"""Of lines that a full disk refused. Beyond it the tape ends: training is worth more than its record."""


class TapeKeeper:
    """Every entry is handed to the system before its messages are sent, so a tape holds the cause of everything that
    others have seen, also when the process is killed the next moment."""

    def __init__(self, run: Path | None, header: Header, log: logging.Logger) -> None:
        self._log = log
        self._writer = TapeWriter(tape_path(run, header.actor), header, flush_bytes=0) if run is not None else None
        self._complained = False

    def write(self, entry: Entry) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(entry)
        except OSError as wrong:
            self._refused(wrong)
        else:
            if self._complained:
                self._log.warning("the tape is written again: nothing of it was lost")
                self._complained = False

    def _refused(self, wrong: OSError) -> None:
        """The writer keeps the line and goes on in the middle of it once there is space."""
        if not self._complained:
            self._log.warning("the tape cannot be written (%s); the run goes on, and so does the tape later", wrong)
            self._complained = True
        assert self._writer is not None
        if self._writer.waiting_bytes > MOST_WAITING_BYTES:
            self._log.error("the tape ends here: %d bytes wait for space on the disk", self._writer.waiting_bytes)
            self._close()

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as wrong:
                self._log.warning("the end of the tape is lost: %s", wrong)

    def close(self) -> None:
        self._close()
