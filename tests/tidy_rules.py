"""The style of this code base as functions: a file goes in, complaints come out.

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

MODULE_LINES = 1_000
FUNCTION_LINES = 80

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

    def within(self, folder: str) -> bool:
        return self.path.is_relative_to(folder)

    def complain(self, line: int, sentence: str) -> str:
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


def modules_are_short(source: Source) -> Iterator[str]:
    """Refuse modules of more than 1,000 lines. A class is never split over modules to get below the limit."""
    if source.is_python and len(source.lines) > MODULE_LINES:
        yield source.complain(1, f"{len(source.lines)} lines, the limit is {MODULE_LINES}: make it two modules")


def functions_are_short(source: Source) -> Iterator[str]:
    """A function beyond 80 lines says why it is long, in a comment `# long: ...` on its `def` line or just above."""
    for node in source.nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
            continue
        length = node.end_lineno - node.lineno + 1
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        header = source.lines[max(first - 2, 0) : node.body[0].lineno]
        if length > FUNCTION_LINES and not any(re.search(r"# long: \w+", line) for line in header):
            yield source.complain(
                node.lineno,
                f"{node.name} has {length} lines, the limit is {FUNCTION_LINES}: split it, or say why `# long: ...`",
            )


def files_have_names(source: Source) -> Iterator[str]:
    """A file named after nothing in particular is asking for a name."""
    if source.path.stem.strip("_") in {"common", "helper", "helpers", "misc", "util", "utils"}:
        yield source.complain(1, "name the file after what is in it")


_LEFTOVER = re.compile(r"\b(?:" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b")


def nothing_is_left_for_later(source: Source) -> Iterator[str]:
    """Do it, or open an issue; a mark in the code is neither."""
    yield from _matches(source, _LEFTOVER, "do it now, or open an issue")


_MACHINE_PATH = re.compile(r"(?<![\w./~-])/(?:work|root|home|Users|mnt)(?:/|\b(?![-.]))")


def no_path_of_one_machine(source: Source) -> Iterator[str]:
    """What is true on one machine only has no place in a file for everybody."""
    yield from _matches(source, _MACHINE_PATH, "an absolute path of one machine")


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


def no_registry_is_named(source: Source) -> Iterator[str]:
    """Where packages come from is the installer's own setting."""
    yield from _matches(source, _REGISTRY, "names a package registry")


def core_imports_only_the_standard_library_and_msgspec(source: Source) -> Iterator[str]:
    """The core runs wherever Python runs. msgspec has no dependencies of its own."""
    if not source.within("src/atoll/core"):
        return
    for line, module in _imports(source):
        ours = module == "atoll.core" or module.startswith("atoll.core.")
        if not ours and module.split(".")[0] not in {*sys.stdlib_module_names, "msgspec"}:
            yield source.complain(line, f"core imports {module}")


_IMPURE_CALLS = {"breakpoint", "eval", "exec", "hash", "id", "input", "open", "print"}


def core_calls_nothing_impure(source: Source) -> Iterator[str]:
    """No files, no terminal, and nothing that differs between two runs of one seed (`hash` of a string, `id`)."""
    if not source.within("src/atoll/core"):
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _IMPURE_CALLS:
            yield source.complain(node.lineno, f"core calls {node.func.id}()")


_FOREIGN_WORDS = {
    "bucket": "fragment",
    "client": "learner",
    "master": "syncer",
    "replica": "learner",
    "server": "syncer",
    "worker": "learner",
}


def core_speaks_one_language(source: Source) -> Iterator[str]:
    """One word, one meaning: the names of the core use the words of the glossary."""
    if not source.within("src/atoll/core"):
        return
    for line, name in _defined_names(source):
        for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name):
            singular = word.lower().removesuffix("s")
            if singular in _FOREIGN_WORDS:
                yield source.complain(line, f"{name}: the word for {singular} here is {_FOREIGN_WORDS[singular]}")


def tests_neither_sleep_nor_mock(source: Source) -> Iterator[str]:
    """A test that waits is slow or flaky, and one that mocks our code tests the mock."""
    if not source.within("tests"):
        return
    for line, module in _imports(source):
        if module.split(".")[:2] == ["unittest", "mock"] or module == "mock":
            yield source.complain(line, "drive the real code instead of a mock")
    for node in source.nodes:
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == "sleep":
                yield source.complain(node.lineno, "time is an argument: no test sleeps")


RULES: tuple[Rule, ...] = (
    modules_are_short,
    functions_are_short,
    files_have_names,
    nothing_is_left_for_later,
    no_path_of_one_machine,
    no_registry_is_named,
    core_imports_only_the_standard_library_and_msgspec,
    core_calls_nothing_impure,
    core_speaks_one_language,
    tests_neither_sleep_nor_mock,
)


def complaints(rule: Rule, sources: Iterable[Source]) -> list[str]:
    return [complaint for source in sources for complaint in rule(source)]


def _matches(source: Source, pattern: re.Pattern[str], sentence: str) -> Iterator[str]:
    for number, line in enumerate(source.lines, 1):
        if found := pattern.search(line):
            yield source.complain(number, f"{found.group()!r}: {sentence}")


def _imports(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names if base in {"unittest", "atoll"} else node.names[:1]:
                yield node.lineno, f"{base}.{alias.name}" if base in {"unittest", "atoll"} else base


def _defined_names(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
