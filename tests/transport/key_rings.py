"""Keys for tests: an authority with a syncer and a few learners, and keys with one defect each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from atoll.transport import keys
from atoll.transport.keys import Authority
from atoll.transport.tls import KeyFiles, find_key_files


class KeyRing:
    """An authority, and islands `one` and `two` for learners 1 and 2."""

    def __init__(self, directory: Path, hosts: tuple[str, ...] = ("head.test",)) -> None:
        self.directory = directory
        self.authority = Authority.init(directory, hosts)
        for name in ("one", "two"):
            self.authority.add(name)

    @property
    def syncer(self) -> KeyFiles:
        return find_key_files(self.directory, for_syncer=True)

    def __getitem__(self, name: str) -> Path:
        return self.directory / name

    def add(self, name: str, learner: int, is_expired: bool = False) -> Path:
        """Add a key. With `is_expired`, it expired yesterday."""
        if is_expired:
            with days_ago(3):
                self.authority.add(name, (learner,), days=2)
        else:
            self.authority.add(name, (learner,))
        return self.directory / name


@contextmanager
def days_ago(days: float) -> Iterator[None]:
    """Create keys as if it were some days ago."""
    real = keys._now
    keys._now = lambda: datetime.now(UTC) - timedelta(days=days)
    try:
        yield
    finally:
        keys._now = real
