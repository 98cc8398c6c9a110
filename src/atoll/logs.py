"""Logs as text or as JSON lines. Records name their learner, fragment and version; docs/metrics.md lists the fields.

A record gets its fields from three places: from its process, by `configure_logging`; from its learner or syncer, which
logs through a `ContextLogger`; and from the call itself, by `extra=log_fields("fragment", 3, version=7)`.
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
"""Context fields of a record, in this order. `code` is the reason code of the message (docs/protocol.md)."""

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
"""Reasons that need an operator. Faults that the run repairs without help, such as a lost link, are not included."""

REPEATED_REASONS = frozenset({"round-pull-retried", "syncer-stalled"})
"""Reasons that repeat until a learner answers, or until the machine is less busy."""

DEBUG_REASONS = frozenset({"leases-returned"})
"""Reasons that are logged at level DEBUG. Loops that never call `take` get leases too, and return all of them."""

SILENCE_REASONS = frozenset({"member-suspected", "member-recovered"})
SHORT_SILENCE_S = 30.0
"""Shorter silences are logged at level DEBUG, because an evaluation or a checkpoint takes as long."""

REPEAT_INTERVAL_S = 60.0
"""Minimum interval between two records of the same warning or retry of a learner, or of all fragments."""

MAX_RATE_LIMIT_KEYS = 256


def log_fields(kind: str, number: int, **more: object) -> dict[str, Any]:
    """Return the context fields of a record, for `extra`.

    Args:
        kind: "learner" or "fragment". Any other kind, such as "run", adds no field.
        number: The learner or the fragment.
        more: Further fields, such as `version`.

    >>> log_fields("fragment", 3, version=7), log_fields("run", 0)
    ({'fragment': 3, 'version': 7}, {})
    """
    return ({kind: number} if kind in LOG_FIELDS[1:] else {}) | more


class ContextLogger(logging.Logger):
    """Logger that adds fixed fields to every record. It uses the levels, filters and handlers of its base logger."""

    def __init__(self, base: logging.Logger, **fields: object) -> None:
        super().__init__(base.name)
        self._base = base
        self.fields: dict[str, object] = fields

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - name given by the standard library
        return self._base.isEnabledFor(level)

    def getEffectiveLevel(self) -> int:  # noqa: N802
        return self._base.getEffectiveLevel()

    def handle(self, record: logging.LogRecord) -> None:
        for name, value in self.fields.items():
            record.__dict__.setdefault(name, value)
        self._base.handle(record)


class LogRateLimiter:
    """Limit how often similar records are logged: the first one, then one per interval with the suppressed count."""

    def __init__(self, interval_s: float = REPEAT_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._logged: dict[Hashable, tuple[float, int]] = {}  # time of the last record, number suppressed since then

    def count_suppressed(self, key: Hashable) -> int | None:
        """Return how many records of this key were suppressed since the last one. None: suppress this one too."""
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
    """Log the reasons of a core. The level says whether an operator should act."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._repeats = LogRateLimiter()

    def write(self, reason: Reason, subject: tuple[str, int], prefix: str = "", **named: int) -> None:
        """Log one reason. Repeated warnings and retries are logged at level DEBUG.

        Args:
            reason: The reason with its code.
            subject: Kind and number of what the reason is about, such as `("learner", 3)`.
            prefix: Text before the reason's sentence.
            named: Further context fields of the record, such as `version`.
        """
        level, suffix = _log_level(reason), ""
        if level == logging.WARNING or reason.code in REPEATED_REASONS:
            suppressed = self._repeats.count_suppressed((reason.code, subject if subject[0] == "learner" else None))
            if suppressed is None:
                level = logging.DEBUG
            elif suppressed:
                suffix = f" ({suppressed} similar records suppressed)"
        extra = log_fields(*subject) | named | {"code": reason.code}
        self._log.log(level, "%s%s%s", prefix, reason, suffix, extra=extra)


def _log_level(reason: Reason) -> int:
    if reason.code in WARNING_REASONS:
        return logging.WARNING
    silent_s = reason.args[0] if reason.code in SILENCE_REASONS and reason.args else None
    is_short = isinstance(silent_s, int | float) and silent_s < SHORT_SILENCE_S
    return logging.DEBUG if is_short or reason.code in DEBUG_REASONS else logging.INFO


class JsonFormatter(logging.Formatter):
    """Format a record as one JSON object per line: time, level, logger, message, context fields and traceback."""

    def __init__(self, fields: dict[str, object] | None = None) -> None:
        super().__init__()
        self._fields = fields or {}

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        fields |= {name: value for name in LOG_FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


def check_log_format(log_format: str) -> str:
    if log_format not in LOG_FORMATS:
        raise ValueError(f"--log-format is {log_format!r}; give {' or '.join(LOG_FORMATS)}")
    return log_format


def configure_logging(
    log_format: str, level: int, text: str = TEXT_FORMAT, stream: TextIO | None = None, **fields: object
) -> None:
    """Set up the root logger of this process.

    Args:
        log_format: "text" or "json".
        level: Lowest level that is logged.
        text: Format of text records.
        stream: Destination, by default stderr.
        fields: Fields of every JSON record, such as `process`.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    is_json = check_log_format(log_format) == "json"
    handler.setFormatter(JsonFormatter(fields) if is_json else logging.Formatter(text))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(is_json)  # otherwise they would be lines that are not JSON


def extract_message(line: str) -> str:
    """Return the message of a log line of either format. A text line is returned as it is.

    >>> extract_message('{"time": "now", "message": "the run is over"}'), extract_message("12:00 the run is over")
    ('the run is over', '12:00 the run is over')
    """
    if line.startswith("{"):
        try:
            record = json.loads(line)
        except ValueError:
            return line
        if isinstance(record, dict) and isinstance(record.get("message"), str):
            return str(record["message"])
    return line
