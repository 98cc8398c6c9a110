"""Logs for people, or as JSON lines whose records name what they are about. docs/metrics.md lists the fields.

A record gets its fields from three places: from its process, given to `configure_logging`; from its learner or syncer,
which logs through a `ContextLogger`; and from the call itself (`extra=log_fields("fragment", 3, version=7)`).
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Hashable
from datetime import UTC, datetime
from typing import Any, TextIO

from atoll.core.reasons import Reason

LOG_FORMAT_VARIABLE = "ATOLL_LOG_FORMAT"
LOG_FORMATS = ("text", "json")

LOG_FIELDS = ("run", "epoch", "learner", "incarnation", "fragment", "version", "code")
"""What a record may be about, in this order. `code` is that of the reason behind the sentence (docs/protocol.md)."""

TEXT_FORMAT = "%(asctime)s %(levelname)s %(message)s"


WARNING_REASONS = frozenset(
    {
        *("persist-failed", "admission-failed", "leases-not-durable", "finish-manifest-failed"),
        *(
            "contribution-invalid",
            "contribution-implausible",
            "member-quarantined",
            "member-expired",
            "shard-version-mismatch",
        ),
        *("refused-fingerprint", "refused-run", "refused-incarnation", "refused-lost", "refused-full"),
        *("refused-quarantined", "refused-implausible", "refused-id"),
        *("hello-unanswered", "fragment-damaged", "snapshot-part-failed", "state-rejected"),
    }
)
"""Reasons that an operator should act on. What the run repairs by itself, such as a lost link, is not among them."""

REPEATED_REASONS = frozenset({"round-pull-retried", "syncer-stalled"})
"""Reasons that come again and again until a learner answers, or the machine is less busy."""

DEBUG_REASONS = frozenset({"leases-returned"})
"""Reasons that are logged at level DEBUG. Loops that never call `take` hold leases too, and return all of them."""

SILENCE_REASONS = frozenset({"member-suspected", "member-recovered"})
SHORT_SILENCE_S = 30.0
"""An evaluation or a checkpoint takes as long. Silences up to this are in the log at level DEBUG only."""

REPEAT_INTERVAL_S = 60.0
"""Between two lines of the log about the same warning or retry of a learner, or of any fragment."""

MAX_RATE_LIMIT_KEYS = 256


def log_fields(kind: str, number: int, **more: object) -> dict[str, Any]:
    """For `extra`: what a record is about. `kind` is learner or fragment; of the run as a whole nothing is added.

    >>> log_fields("fragment", 3, version=7), log_fields("run", 0)
    ({'fragment': 3, 'version': 7}, {})
    """
    return ({kind: number} if kind in LOG_FIELDS[1:] else {}) | more


class ContextLogger(logging.Logger):
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


class LogRateLimiter:
    """Decides which of many like records are logged: the first, then one per interval with the number left out."""

    def __init__(self, interval_s: float = REPEAT_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._logged: dict[Hashable, tuple[float, int]] = {}  # time of the last record, number left out since then

    def count_suppressed(self, key: Hashable) -> int | None:
        """Return how many records of this key were left out since the last one; None: this one is left out too."""
        now = time.monotonic()
        at, count = self._logged.get(key, (float("-inf"), 0))
        if now - at < self._interval_s:
            self._logged[key] = at, count + 1
            return None
        if len(self._logged) >= MAX_RATE_LIMIT_KEYS:
            self._logged.clear()
        self._logged[key] = now, 0
        return count


class ReasonLogger:
    """Log the reasons of a core, each at the level that says whether an operator should act on it."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._repeats = LogRateLimiter()

    def write(self, reason: Reason, subject: tuple[str, int], prefix: str = "", **named: int) -> None:
        """`named`: what else the record is about. Repeated records are logged at level DEBUG."""
        level, also = _log_level(reason), ""
        if level == logging.WARNING or reason.code in REPEATED_REASONS:
            left_out = self._repeats.count_suppressed((reason.code, subject if subject[0] == "learner" else None))
            if left_out is None:
                level = logging.DEBUG
            elif left_out:
                also = f" (and {left_out} like it before)"
        self._log.log(level, "%s%s%s", prefix, reason, also, extra=log_fields(*subject) | named | {"code": reason.code})


def _log_level(reason: Reason) -> int:
    if reason.code in WARNING_REASONS:
        return logging.WARNING
    silent_s = reason.args[0] if reason.code in SILENCE_REASONS and reason.args else None
    is_short = isinstance(silent_s, int | float) and silent_s < SHORT_SILENCE_S
    return logging.DEBUG if is_short or reason.code in DEBUG_REASONS else logging.INFO


class JsonFormatter(logging.Formatter):
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
        told |= {name: value for name in LOG_FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str)


def check_log_format(log_format: str) -> str:
    if log_format not in LOG_FORMATS:
        raise ValueError(f"--log-format is {log_format!r}; give {' or '.join(LOG_FORMATS)}")
    return log_format


def configure_logging(
    log_format: str, level: int, text: str = TEXT_FORMAT, stream: TextIO | None = None, **fields: object
) -> None:
    """Of this process: everything from this level on goes to `stream`, stderr unless another one is given."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    is_json = check_log_format(log_format) == "json"
    handler.setFormatter(JsonFormatter(fields) if is_json else logging.Formatter(text))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(is_json)  # they would be lines that are no JSON


def extract_message(line: str) -> str:
    """What a line of a log says, whichever format it has.

    >>> extract_message('{"time": "now", "message": "the run is over"}'), extract_message("12:00 the run is over")
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
