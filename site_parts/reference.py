"""Generate reference pages from the code: public classes from their docstrings, commands from their help.

Sources are parsed as text. So building the site needs no torch, and shows annotations as written.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.cli.main import COMMANDS, build_command

SOURCES = Path(__file__).resolve().parent.parent / "src/atoll"
DOCUMENTED_METHODS = ("__init__",)  # methods with underscores; the class docstring covers `with`


def render_python_api() -> str:
    lines = ["# `atoll` for scripts", ""]
    lines += ["Generated from the docstrings. `import atoll` does not load torch; `atoll.Learner` does.", ""]
    lines += _render_class("atoll.Learner", "learner/api.py")
    lines += _render_class("atoll.LearnerStats", "island/stats.py")
    errors = ast.parse((SOURCES / "errors.py").read_text(encoding="utf-8"))
    docstring = ast.get_docstring(errors) or ""
    first, _, tree = docstring.partition("\n\n")
    lines += ["## Errors", "", first, "", "```text", tree, "```", ""]
    lines += ["All errors are also names of `atoll`, such as `atoll.JoinTimeoutError`.", ""]
    return "\n".join(lines)


def _render_class(name: str, place: str) -> Iterator[str]:
    tree = ast.parse((SOURCES / place).read_text(encoding="utf-8"))
    own = name.rpartition(".")[2]
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == own)
    yield from (f"## `{name}`", "", ast.get_docstring(found) or "", "")
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name in DOCUMENTED_METHODS):
            yield from _render_function(own, node)
    fields = [node for node in found.body if isinstance(node, ast.AnnAssign)]
    if fields:
        source = (SOURCES / place).read_text(encoding="utf-8").splitlines()
        yield from ("| field | type | |", "|---|---|---|")
        for each in fields:
            comment = source[each.lineno - 1].partition("# ")[2]
            yield f"| `{ast.unparse(each.target)}` | `{ast.unparse(each.annotation)}` | {_escape_cell(comment)} |"
        yield ""


def _render_function(owner: str, node: ast.FunctionDef) -> Iterator[str]:
    is_property = any(ast.unparse(each) == "property" for each in node.decorator_list)
    result = ast.unparse(node.returns) if node.returns is not None else "None"
    if is_property:
        yield from (f"### `{node.name}`", "", "```python", f"{owner.lower()}.{node.name}: {result}", "```", "")
    else:
        title = owner if node.name == "__init__" else f"{owner.lower()}.{node.name}"
        yield from (f"### `{owner}(...)`" if node.name == "__init__" else f"### `{node.name}(...)`", "")
        yield from ("```python", f"{title}({_format_arguments(node.args)})", "```", "")
    yield from (ast.get_docstring(node) or "", "")


def _format_arguments(arguments: ast.arguments) -> str:
    """Return the arguments without `self`, one per line if there are four or more."""
    plain = ast.arguments(**{name: getattr(arguments, name) for name in arguments._fields})
    plain.args = arguments.args[1:]
    parts = [re.sub(r"(\w: .*?)=", r"\1 = ", part) for part in re.split(r", (?=\w+:|\*)", ast.unparse(plain))]
    return ", ".join(parts) if len(parts) < 4 else "\n    " + ",\n    ".join(parts) + ",\n"


def render_commands() -> str:
    """Return the page of all commands with their options, as in `--help`."""
    lines = ["# The `atoll` command", ""]
    lines += [
        "Generated from the commands; `atoll COMMAND --help` shows the same. Exit codes: 0 success; 1 the command found"
    ]
    lines += ["a problem; 2 invalid request; 130 interrupted; 141 the reader of the output has exited.", ""]
    for name, command in COMMANDS.items():
        lines += [f"## `atoll {name}`", "", inspect.cleandoc(command.run.__doc__ or ""), ""]
        lines += ["```sh", command.example, "```", ""]
        lines += _render_options(name, build_command(name, command))
    return "\n".join(lines)


def _render_options(name: str, command: Any) -> Iterator[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    records = [each.get_help_record(context) for each in command.params]
    rows = [f"| `{_escape_cell(record[0])}` | {_escape_cell(record[1])} |" for record in records if record is not None]
    if rows:
        yield from ("| option | |", "|---|---|", *rows, "")


def _escape_cell(text: str) -> str:
    """Return the text as one line, with characters of Markdown and HTML escaped."""
    plain = " ".join(text.split()).replace("|", "\\|")
    return plain.replace("<", "&lt;").replace("*", "\\*")
