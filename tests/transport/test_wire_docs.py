"""Compare docs/wire.md with the code, and check that each comparison can fail."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from atoll.core.protocol import LearnerBody, SyncerBody
from atoll.syncer import fragment_endpoints, http_api
from atoll.syncer.status import LEARNER_METRICS
from atoll.tensors.codecs import CODECS
from atoll.transport import wire
from atoll.transport.websocket import MAX_QUEUED_MESSAGES
from tests.transport.test_vectors import FILES

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs/wire.md").read_text(encoding="utf-8")

Check = Callable[[str], Iterator[str]]


def section(text: str, heading: str) -> str:
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return found[1] if found else ""


def coded(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def served() -> set[str]:
    """Return the methods and paths that the syncer routes."""
    source = Path(http_api.__file__).read_text(encoding="utf-8")
    routes = re.findall(r'router\.add_(\w+)\("([^"]+)"', source)
    return {f"{method.upper()} {re.sub(r':[^}]+', '', path)}" for method, path in routes}


def documented_paths(text: str) -> set[str]:
    return {name.split("?")[0] for name in coded(text) if re.match(r"(GET|PUT|POST|DELETE) /", name)}


def every_path_is_documented_and_served(text: str) -> Iterator[str]:
    first_cells = set(re.findall(r"^\| `([A-Z]+ /[^`]+)`", section(text, "Paths"), re.MULTILINE))
    for path in sorted(served() - first_cells):
        yield f"the table of paths lacks {path}"
    for path in sorted(documented_paths(text) - served()):
        yield f"{path} is not served"


def every_body_is_documented(text: str) -> Iterator[str]:
    table = section(text, "Control messages")
    for body in (*get_args(LearnerBody), *get_args(SyncerBody)):
        if body.__name__ not in coded(table):
            yield f"the table of messages lacks {body.__name__}"


def every_kind_is_documented(text: str) -> Iterator[str]:
    for kind in wire.FrameKind:
        if f"| {kind.value} | `{kind.name}` |" not in section(text, "Frames"):
            yield f"the table of kinds lacks {kind.name}"


def every_codec_is_documented(text: str) -> Iterator[str]:
    for codec in CODECS:
        if f"| `{codec.name}` | {codec.wire_id} |" not in section(text, "Codecs"):
            yield f"the table of codecs lacks {codec.name}"


def every_error_is_documented(text: str) -> Iterator[str]:
    documented = re.findall(r"^\| `(\w+)` \|", section(text, "Errors"), re.MULTILINE)
    if documented != list(get_args(wire.WireErrorCode)):
        yield f"the table of errors has {documented}, the code {get_args(wire.WireErrorCode)}"


def limits_match_code(text: str) -> Iterator[str]:
    mib = 2**20
    wanted = {
        "a control message": f"{wire.MAX_MESSAGE_BYTES // mib} MiB",
        "a header": f"{wire.MAX_HEADER_BYTES // mib} MiB",
        "a payload": f"{wire.MAX_PAYLOAD_BYTES // 2**40} TiB,",
        "a whole number": f"{(wire.MAX_INTEGER - wire.MIN_INTEGER).bit_length()} bits",
        "text with figures": f"{http_api.MAX_METRICS_BYTES} characters",
        "a plan": f"{http_api.MAX_PLAN_BYTES // mib} MiB",
        "inner state": f"{wire.STATE_BYTES_PER_PARAMETER} bytes per parameter",
        "silence in the middle of a body": f"{fragment_endpoints.STALL_TIMEOUT_S:g} s",
        "time without a request for one of them": f"{fragment_endpoints.UPLOAD_IDLE_TIMEOUT_S:g} s",
        "messages that wait for a learner that does not read": f"{MAX_QUEUED_MESSAGES},",
    }
    for what, limit in wanted.items():
        if f"| {what} | {limit}" not in section(text, "Limits"):
            yield f"the limit of {what} is {limit}"


def every_vector_file_is_documented(text: str) -> Iterator[str]:
    documented = set(re.findall(r"^\| `(\w+\.json)` \|", section(text, "Golden vectors"), re.MULTILINE))
    if documented != set(FILES):
        yield f"the files are {sorted(FILES)}, the page has {sorted(documented)}"


def learner_metrics_are_documented(text: str) -> Iterator[str]:
    for name in LEARNER_METRICS:
        if name not in coded(section(text, "Control messages")):
            yield f"the metric {name} is not documented"


def example_matches_encoding(text: str) -> Iterator[str]:
    if "\n    ATLL\\x04" not in text:
        yield "no example"
        return
    example = re.findall(r"^    ATLL\\x04(.*)$", text, re.MULTILINE)[0]
    envelope = wire.decode_message(b"ATLL\x04" + example.encode(), "learner")
    if wire.encode_message(envelope)[5:].decode() != example:
        yield "the example differs from the encoding"


CHECKS: dict[Check, tuple[str, str]] = {  # each with a replacement that must make it fail
    every_path_is_documented_and_served: ("| `POST /v1/join`", "| `POST /v1/enter`"),
    every_body_is_documented: ("`RefuseContribution`, `Published`", "`Published`"),
    every_kind_is_documented: ("| 3 | `OPTIMIZER_STATE`", "| 5 | `OPTIMIZER_STATE`"),
    every_codec_is_documented: ("| `int8` | 2 |", "| `int8` | 4 |"),
    every_error_is_documented: ("| `digest` | the", "| `checksum` | the"),
    limits_match_code: ("| a header | 1 MiB", "| a header | 2 MiB"),
    every_vector_file_is_documented: ("| `codecs.json`", "| `numbers.json`"),
    learner_metrics_are_documented: ("`tokens_per_s`", "`tokens`"),
    example_matches_encoding: ('902,0,["Ping",8]]', '902,0, ["Ping",8]]'),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_page_matches_code(check):
    assert list(check(TEXT)) == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check_finds_planted_error(check):
    word, other = CHECKS[check]
    assert word in TEXT
    assert list(check(TEXT.replace(word, other))) != []
