"""Compare docs/security.md with the code, and check that each comparison can fail."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.syncer import process
from atoll.transport import auth, listener, tls
from benchmarks.hostile import ATTACKS

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs/security.md").read_text(encoding="utf-8")

CODES = ["token", "no-key", "expired", "revoked", "identity", "role", "authority", "tls-version", "handshake"]
CODES += ["plain-text", "tls-to-plain", "unfinished"]
"""Codes of rejections before a request is read."""

Check = Callable[[str], Iterator[str]]


def every_code_is_documented(text: str) -> Iterator[str]:
    documented = re.findall(r"^\| `([\w-]+)` \| ", text.partition("## What is refused")[2], re.MULTILINE)
    if documented != CODES:
        yield f"the table has {documented}, the code {CODES}"


def limits_match_code(text: str) -> Iterator[str]:
    mib = process.MAX_RECEIVING_BYTES // 2**20
    for row in (
        f"said nothing yet, at once | {listener.MAX_PENDING}; one more",
        f"who they are, at once | {listener.MAX_PENDING}; the same",
        f"for a handshake | {listener.HANDSHAKE_TIMEOUT_S:g} s |",
        f"is let in | {listener.AUTHENTICATION_TIMEOUT_S:g} s |",
        f"being received | {mib} MiB,",
    ):
        if row not in text:
            yield f"the table of limits lacks {row!r}"


def names_and_files_match_code(text: str) -> Iterator[str]:
    names = (f"{auth.LEARNER_URI_PREFIX}{auth.ANY_LEARNER}", auth.OPERATOR_URI, auth.SYNCER_URI)
    for word in (
        *names,
        tls.CERTIFICATE_FILE,
        tls.KEY_FILE,
        tls.AUTHORITY_FILE,
        tls.REVOKED_FILE,
        *auth.OPERATOR_PATHS,
    ):
        if f"`{word}`" not in text:
            yield f"{word} is not documented"


def every_attack_has_a_row_with_existing_tests(text: str) -> Iterator[str]:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| (`test_[^|]+) \|$", text.partition("## Hostile peers")[2], re.MULTILINE)
    if [name for name, _ in rows] != list(ATTACKS):
        yield f"the table has {[name for name, _ in rows]}, the code {list(ATTACKS)}"
    for name, tests in rows:
        for file, test in re.findall(r"`(\w+\.py)::(\w+)`", tests):
            paths = (ROOT / "tests").glob(f"*/{file}")
            if not any(f"def {test}(" in path.read_text(encoding="utf-8") for path in paths):
                yield f"{name}: there is no {file}::{test}"
        if "`test_hostile_peers.py::" not in tests:
            yield f"{name} has no test with the default limits"


CHECKS: dict[Check, tuple[str, str]] = {
    every_code_is_documented: ("| `no-key` |", "| `keyless` |"),
    limits_match_code: ("| 256; one more", "| 512; one more"),
    names_and_files_match_code: ("`/v1/finish`", "`/v1/end`"),
    every_attack_has_a_row_with_existing_tests: ("::test_random_bytes_are_refused`", "::test_of_nothing`"),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_page_matches_code(check):
    assert list(check(TEXT)) == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check_finds_planted_error(check):
    word, other = CHECKS[check]
    assert word in TEXT
    assert list(check(TEXT.replace(word, other))) != []


def test_every_rejection_code_is_listed():
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/atoll").rglob("*.py"))
    used = set(re.findall(r'Rejection\(\s*"([\w-]+)"', source)) | {auth.IdentityMismatchError.code}
    assert used == set(CODES)
