"""Logs for people, or as JSON lines whose records name what they are about. docs/metrics.md lists the fields.

A record gets its fields from three places: from its process, told to `set_up`; from its learner or syncer, which logs
through a `Named` logger; and from the call itself (`extra=about("fragment", 3, version=7)`).
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

VARIABLE = "ATOLL_LOG_FORMAT"
FORMATS = ("text", "json")

ABOUT = ("run", "epoch", "learner", "incarnation", "fragment", "version", "code")
"""What a record may be about, in this order. `code` is that of the reason behind the sentence (docs/protocol.md)."""

TEXT = "%(asctime)s %(message)s"


def about(kind: str, number: int, **more: object) -> dict[str, Any]:
    """For `extra`: what a record is about. `kind` is learner or fragment; of the run as a whole nothing is added.

    >>> about("fragment", 3, version=7), about("run", 0)
    ({'fragment': 3, 'version': 7}, {})
    """
    return ({kind: number} if kind in ABOUT[1:] else {}) | more


class Named(logging.Logger):
    """Another logger whose records get these fields. Levels, filters and handlers are those of the other one."""

    def __init__(self, base: logging.Logger, **fields: object) -> None:
        super().__init__(base.name)
        self._base = base
        self.fields: dict[str, object] = fields

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the library's name
        return self._base.isEnabledFor(level)

    def getEffectiveLevel(self) -> int:  # noqa: N802
        return self._base.getEffectiveLevel()

    def handle(self, record: logging.LogRecord) -> None:
        for name, value in self.fields.items():
            record.__dict__.setdefault(name, value)
        self._base.handle(record)


class JsonLines(logging.Formatter):
    """One object per line: time, level, logger, message, what it is about, and of an error its traceback."""

    def __init__(self, fields: dict[str, object] | None = None) -> None:
        super().__init__()
        self._fields = fields or {}

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        told |= {name: value for name in ABOUT if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str)


def check_format(log_format: str) -> str:
    if log_format not in FORMATS:
        raise ValueError(f"--log-format is {log_format!r}; give {' or '.join(FORMATS)}")
    return log_format


def set_up(log_format: str, level: int, text: str = TEXT, stream: TextIO | None = None, **fields: object) -> None:
    """Of this process: everything from this level on goes to `stream`, stderr unless another one is given."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    is_json = check_format(log_format) == "json"
    handler.setFormatter(JsonLines(fields) if is_json else logging.Formatter(text))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(is_json)  # they would be lines that are no JSON


def sentence_of(line: str) -> str:
    """What a line of a log says, whichever format it has.

    >>> sentence_of('{"time": "now", "message": "the run is over"}'), sentence_of("12:00 the run is over")
    ('the run is over', '12:00 the run is over')
    """
    if line.startswith("{"):
        try:
            found = json.loads(line)
        except ValueError:
            return line
        if isinstance(found, dict) and isinstance(found.get("message"), str):
            return str(found["message"])
    return line
