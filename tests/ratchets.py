"""Rules about the whole package that are not yet kept everywhere: each has a limit that may only fall.

A rule takes all sources of the package and yields one complaint per violation. `LIMITS` says how many are left. When a
change removes some, lower the limit in the same change; the test fails otherwise, so that they cannot come back.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from tests.tidy_rules import Source

Ratchet = Callable[[Sequence[Source]], Iterator[str]]

MAX_INHERITANCE = 2
"""A class and one base class of ours."""


def check_unique_class_names(sources: Sequence[Source]) -> Iterator[str]:
    """Refuse a class name that is defined in several modules: readers search for it."""
    modules: dict[str, list[Source]] = defaultdict(list)
    for source in sources:
        for name in sorted({node.name for node in source.nodes if isinstance(node, ast.ClassDef)}):
            modules[name].append(source)
    for name, defined in sorted(modules.items()):
        if len(defined) > 1:
            yield defined[0].format_violation(
                1, f"class {name} is also in {', '.join(str(s.path) for s in defined[1:])}"
            )


_PUBLIC_WITH_UNDERSCORE = {"_asdict", "_exit", "_fields", "_make", "_replace"}
"""Methods of named tuples, and `os._exit`: documented, and spelled so to stay apart from field names."""


def check_private_attributes(sources: Sequence[Source]) -> Iterator[str]:
    """Refuse access to a private attribute of anything but `self`, `cls`, `super()` and a class of the same module."""
    for source in sources:
        classes = {node.name for node in source.nodes if isinstance(node, ast.ClassDef)}
        for node in source.nodes:
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            owner = node.value
            is_own = isinstance(owner, ast.Name) and owner.id in {"self", "cls", *classes}
            is_super = isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "super"
            if not is_own and not is_super and node.attr not in _PUBLIC_WITH_UNDERSCORE:
                yield source.format_violation(node.lineno, f"{ast.unparse(node)}: give it a public method")


def check_inheritance_depth(sources: Sequence[Source]) -> Iterator[str]:
    """Refuse chains of our own classes: an object has its parts, it does not inherit them."""
    classes = {
        node.name: (source, node) for source in sources for node in source.nodes if isinstance(node, ast.ClassDef)
    }

    def depth(name: str, below: tuple[str, ...] = ()) -> int:
        node = classes[name][1]
        bases = {base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in node.bases}
        ours = (bases & classes.keys()) - {name, *below}
        return 1 + max((depth(base, (*below, name)) for base in sorted(ours)), default=0)

    for name, (source, node) in sorted(classes.items()):
        if depth(name) > MAX_INHERITANCE:
            yield source.format_violation(
                node.lineno, f"class {name} has {depth(name) - 1} levels of our classes above it"
            )


def check_package_docstrings(sources: Sequence[Source]) -> Iterator[str]:
    """Every package has a docstring: what it does, and what it must not know."""
    for source in sources:
        if source.path.name == "__init__.py" and ast.get_docstring(ast.parse(source.text)) is None:
            yield source.format_violation(1, "no docstring: say what the package does and what it must not know")


_CLAUSE_STARTS = frozenset(
    ("as", "at", "by", "for", "from", "how", "in", "it", "of", "one", "so", "they", "those", "to")
) | frozenset(("what", "when", "where", "whether", "which", "while", "who", "whose", "with", "without"))


def check_docstring_starts(sources: Sequence[Source]) -> Iterator[str]:
    """A docstring begins with a verb or a noun, so that it can be understood without the code next to it."""
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = (ast.get_docstring(node) or "").split()
                if words and words[0].lower().strip("`.,:") in _CLAUSE_STARTS:
                    yield source.format_violation(
                        node.lineno, f"{node.name}: begin with a verb or a noun, not {words[0]!r}"
                    )


LIMITS: dict[Ratchet, int] = {
    check_docstring_starts: 0,
    check_unique_class_names: 0,
    check_private_attributes: 8,
    check_inheritance_depth: 2,
    check_package_docstrings: 0,
}
