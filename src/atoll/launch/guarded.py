"""A command behind a guard, seen from the process that wants it to run."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GUARD = Path(__file__).with_name("process_guard.py")


class GuardedCommand:
    """Runs from here on. It ends with this process, however that ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], directory: Path, log: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._guard.wait()  # the guard itself is the child of nobody
        self._lock = threading.Lock()
        self._say(
            {
                "command": list(command),
                "environment": dict(environment),
                "directory": str(directory),
                "log": str(directory / log),
            }
        )

    def wait(self) -> int:
        """The exit code; below 0 it is the signal that ended it. OSError with a sentence where it could not begin."""
        try:
            assert self._guard.stdout is not None
            for line in self._guard.stdout:
                told = json.loads(line)
                if "wrong" in told:
                    raise OSError(told["wrong"])
                if "code" in told:
                    return int(told["code"])
            raise OSError("its guard was killed")
        finally:
            with self._lock:
                self._guard.communicate()  # closes the pipes

    def stop(self, notice_s: float) -> None:
        """SIGTERM now, to nobody twice; SIGKILL to what is left when the notice is over."""
        self._say({"stop_s": notice_s})

    def _say(self, words: Mapping[str, Any]) -> None:
        assert self._guard.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError):  # `wait` tells what has happened
            if not self._guard.stdin.closed:
                self._guard.stdin.write(json.dumps(words).encode() + b"\n")
                self._guard.stdin.flush()


__all__ = ["GuardedCommand"]
