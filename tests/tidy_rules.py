"""The style of this code base as functions: a file goes in, violations come out.

A word that a rule looks for is put together from pieces, or the rule would find itself.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

MAX_MODULE_LINES = 1_000
MAX_FUNCTION_LINES = 80

TEXT_SUFFIXES = {".cfg", ".css", ".html", ".js", ".json", ".jsonl", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}
TEXT_NAMES = {".editorconfig", ".gitignore", "LICENSE", "Makefile", "run"}
SKIPPED_FOLDERS = {"__pycache__", "build", "dist", "node_modules", "runs"}
DOT_FOLDERS = {".ci", ".github"}  # the only folders with a dot that hold our text


@dataclass(frozen=True)
class Source:
    """One file: its place below the root of the repository, and its text."""

    path: PurePosixPath
    text: str

    @property
    def is_python(self) -> bool:
        return self.path.suffix == ".py"

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All syntax nodes; none where the file is not Python."""
        return list(ast.walk(ast.parse(self.text))) if self.is_python else []

    def is_within(self, folder: str) -> bool:
        return self.path.is_relative_to(folder)

    def format_violation(self, line: int, sentence: str) -> str:
        return f"{self.path}:{line}: {sentence}"


Rule = Callable[[Source], Iterator[str]]


def read_sources(root: Path) -> list[Source]:
    """Every text file that belongs to the repository, in a fixed order."""

    def ours(folder: Path) -> bool:
        hidden = folder.name.startswith(".") and folder.name not in DOT_FOLDERS
        return not hidden and folder.name not in SKIPPED_FOLDERS and not folder.name.endswith(".egg-info")

    def walk(folder: Path) -> Iterator[Path]:
        for entry in sorted(folder.iterdir()):
            if entry.is_dir() and ours(entry):
                yield from walk(entry)
            elif entry.is_file() and (entry.suffix in TEXT_SUFFIXES or entry.name in TEXT_NAMES):
                yield entry

    return [
        Source(PurePosixPath(path.relative_to(root).as_posix()), path.read_text(encoding="utf-8"))
        for path in walk(root)
    ]


def check_module_length(source: Source) -> Iterator[str]:
    """Refuse modules of more than 1,000 lines. A class is never split over modules to get below the limit."""
    if source.is_python and len(source.lines) > MAX_MODULE_LINES:
        yield source.format_violation(
            1, f"{len(source.lines)} lines, the limit is {MAX_MODULE_LINES}: make it two modules"
        )


def check_function_length(source: Source) -> Iterator[str]:
    """A function beyond 80 lines says why it is long, in a comment `# long: ...` on its `def` line or just above."""
    for node in source.nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
            continue
        length = node.end_lineno - node.lineno + 1
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        header = source.lines[max(first - 2, 0) : node.body[0].lineno]
        if length > MAX_FUNCTION_LINES and not any(re.search(r"# long: \w+", line) for line in header):
            yield source.format_violation(
                node.lineno,
                f"{node.name} has {length} lines, the limit is {MAX_FUNCTION_LINES}: split it, or say why"
                " `# long: ...`",
            )


def check_file_name(source: Source) -> Iterator[str]:
    """A file named after nothing in particular is asking for a name."""
    if source.path.stem.strip("_") in {"common", "helper", "helpers", "misc", "util", "utils"}:
        yield source.format_violation(1, "name the file after what is in it")


_LEFTOVER = re.compile(r"\b(?:" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b")


def check_leftover_marks(source: Source) -> Iterator[str]:
    """Do it, or open an issue; a mark in the code is neither."""
    yield from _find_matches(source, _LEFTOVER, "do it now, or open an issue")


_MACHINE_PATH = re.compile(r"(?<![\w./~-])/(?:work|root|home|Users|mnt)(?:/|\b(?![-.]))")


def check_machine_paths(source: Source) -> Iterator[str]:
    """What is true on one machine only has no place in a file for everybody."""
    yield from _find_matches(source, _MACHINE_PATH, "an absolute path of one machine")


_REGISTRY = re.compile(
    "|".join(
        [
            "https?://(?:[\\w.-]*\\.)?py" + "pi",
            "py" + "pi\\.(?:org|python)",
            "python" + "hosted\\.org",
            "registry\\.(?:npm|yarn|docker)" + "\\w*",
            "(?:extra-)?index" + "-url",
            "find" + "-links",
            "arti" + "factory",
        ]
    ),
    re.IGNORECASE,
)


def check_registry_names(source: Source) -> Iterator[str]:
    """Where packages come from is the installer's own setting."""
    yield from _find_matches(source, _REGISTRY, "names a package registry")


def check_core_imports(source: Source) -> Iterator[str]:
    """The core runs wherever Python runs. msgspec has no dependencies of its own."""
    if not source.is_within("src/atoll/core"):
        return
    for line, module in _iter_imports(source):
        ours = module == "atoll.core" or module.startswith("atoll.core.")
        if not ours and module.split(".")[0] not in {*sys.stdlib_module_names, "msgspec"}:
            yield source.format_violation(line, f"core imports {module}")


_IMPURE_CALLS = {"breakpoint", "eval", "exec", "hash", "id", "input", "open", "print"}


def check_core_purity(source: Source) -> Iterator[str]:
    """No files, no terminal, and nothing that differs between two runs of one seed (`hash` of a string, `id`)."""
    if not source.is_within("src/atoll/core"):
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _IMPURE_CALLS:
            yield source.format_violation(node.lineno, f"core calls {node.func.id}()")


_FOREIGN_WORDS = {
    "bucket": "fragment",
    "client": "learner",
    "master": "syncer",
    "replica": "learner",
    "server": "syncer",
    "worker": "learner",
}


def check_core_vocabulary(source: Source) -> Iterator[str]:
    """One word, one meaning: the names of the core use the words of the glossary."""
    if not source.is_within("src/atoll/core"):
        return
    for line, name in _iter_defined_names(source):
        for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name):
            singular = word.lower().removesuffix("s")
            if singular in _FOREIGN_WORDS:
                yield source.format_violation(
                    line, f"{name}: the word for {singular} here is {_FOREIGN_WORDS[singular]}"
                )


def check_sleep_and_mock(source: Source) -> Iterator[str]:
    """A test that waits is slow or flaky, and one that mocks our code tests the mock."""
    if not source.is_within("tests"):
        return
    for line, module in _iter_imports(source):
        if module.split(".")[:2] == ["unittest", "mock"] or module == "mock":
            yield source.format_violation(line, "drive the real code instead of a mock")
    for node in source.nodes:
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == "sleep":
                yield source.format_violation(node.lineno, "time is an argument: no test sleeps")


_IDIOM = {
    "to" + "ld": "sent, received, reported or handled",
    "hea" + "rd": "received",
    "who" + "ever": "name the learner, process or user",
    "no" + "body": "no learner, no process or none",
    "some" + "body": "name the learner, process or user",
    "wi" + "sh": "request or option",
    "wi" + "shes": "requests or options",
    "str" + "uck": "hit, injected or observed",
    "stran" + "ger": "unauthenticated client",
    "as wro" + "ng": "as error",
    "LOO" + "K_S": "a name that says which interval",
    "MO" + "ST_": "MAX_",
    "LEA" + "ST_": "MIN_",
}
_IDIOM_PATTERN = re.compile(r"\b(?:" + "|".join(word if word.endswith("_") else rf"{word}\b" for word in _IDIOM) + ")")
_IDIOM_PAGES = {"CONTRIBUTING.md", "docs/architecture.md"}


def check_idiom(source: Source) -> Iterator[str]:
    """Code speaks the language of the field. These words said something else in the past, often several things."""
    if source.path.suffix not in {".py", ".js", ".css", ".html"} and str(source.path) not in _IDIOM_PAGES:
        return
    for number, line in enumerate(source.lines, 1):
        for word in _IDIOM_PATTERN.findall(line):
            yield source.format_violation(number, f"{word!r}: write {_IDIOM[word]}")


RULES: tuple[Rule, ...] = (
    check_idiom,
    check_module_length,
    check_function_length,
    check_file_name,
    check_leftover_marks,
    check_machine_paths,
    check_registry_names,
    check_core_imports,
    check_core_purity,
    check_core_vocabulary,
    check_sleep_and_mock,
)


def find_violations(rule: Rule, sources: Iterable[Source]) -> list[str]:
    return [complaint for source in sources for complaint in rule(source)]


def _find_matches(source: Source, pattern: re.Pattern[str], sentence: str) -> Iterator[str]:
    for number, line in enumerate(source.lines, 1):
        if found := pattern.search(line):
            yield source.format_violation(number, f"{found.group()!r}: {sentence}")


def _iter_imports(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names if base in {"unittest", "atoll"} else node.names[:1]:
                yield node.lineno, f"{base}.{alias.name}" if base in {"unittest", "atoll"} else base


def _iter_defined_names(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
