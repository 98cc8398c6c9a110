"""Files of the page: no external resources, nothing that the content policy forbids, all of them in the package."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path

import pytest

from tests.tidy_rules import MAX_MODULE_LINES

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "src/atoll/dashboard/static"
OURS = sorted(path for path in STATIC.iterdir() if path.suffix in {".css", ".html", ".js", ".svg"})
VENDORED = sorted(path for path in (STATIC / "vendor").iterdir() if path.name != "README.md")

FORBIDDEN = {
    "external address": r"""(?:https?:)?//[\w.-]+\.\w+""",
    "markup from text": r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc)\b",
    "code from text": r"\beval\(|new Function\(|set(?:Timeout|Interval)\(\s*[\"'`]",
    "inline style": r"\sstyle=[\"']|<style|setAttribute\(\"style\"",
    "inline script": r"<script(?![^>]*\bsrc=)|\son\w+=[\"']|javascript:",
}


def find_violations(name: str, text: str) -> list[str]:
    text = text.replace('xmlns="http://www.w3.org/2000/svg"', "")  # a namespace, which is not loaded
    return [f"{name}: {what}" for what, pattern in FORBIDDEN.items() if re.search(pattern, text)]


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_file_has_no_forbidden_content_and_is_short(path):
    text = path.read_text(encoding="utf-8")
    assert find_violations(path.name, text) == []
    assert len(text.splitlines()) <= MAX_MODULE_LINES


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ('<script src="https://cdn.example.org/x.js"></script>', ["external address"]),
        ("node.innerHTML = name;", ["markup from text"]),
        ('<p style="color: red">', ["inline style"]),
        ("<script>go()</script>", ["inline script"]),
        ('<a onclick="go()">', ["inline script"]),
        ('setTimeout("go()", 3)', ["code from text"]),
        ('node.textContent = "1 // 2"; // why', []),
    ],
)
def test_planted_violation_is_found(planted, found):
    assert find_violations("x", planted) == [f"x: {what}" for what in found]


@pytest.mark.parametrize("path", VENDORED, ids=lambda path: path.name)
def test_vendored_files_match_readme(path):
    text = (STATIC / "vendor/README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(path.read_bytes()).hexdigest() in re.findall(rf"`{re.escape(path.name)}`.*`(\w{{64}})`", text)


def find_reachable() -> set[str]:
    """Return the files that are reachable from index.html by references in the files."""
    seen: set[str] = set()
    pending = ["index.html"]
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if name.endswith((".html", ".js")) and not name.startswith("vendor/"):
            text = (STATIC / name).read_text(encoding="utf-8")
            pending += re.findall(r"(?:src|href)=\"(?!#)([\w./]+)\"", text)
            pending += [found.removeprefix("./") for found in re.findall(r"from \"(\./[\w.]+)\"", text)]
            pending += re.findall(r"script\(\"([\w./]+)\"\)", text)
    return seen


def test_every_file_is_reachable_from_page():
    packaged = {path.name for path in OURS} | {f"vendor/{path.name}" for path in VENDORED}
    assert packaged - find_reachable() == {"vendor/uPlot.LICENSE"}
    assert find_reachable() <= packaged


def test_installed_package_has_page():
    """Check the package as it is installed here."""
    assert [name for name in find_reachable() if not (files("atoll.dashboard") / "static" / name).is_file()] == []


def find_left_out(names: list[str], exclude: list[str]) -> list[str]:
    """Return the files that a build leaves out: by our list, or because git ignores them."""
    wheel = [name for name in names if any(fnmatch(name.rsplit("/", 1)[-1], pattern) for pattern in exclude)]
    ignored = subprocess.run(
        ["git", "check-ignore", "--stdin", "--no-index"],
        cwd=ROOT,
        input="\n".join(names),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ignored.returncode in (0, 1), ignored.stderr
    return sorted({*wheel, *ignored.stdout.splitlines()})


def test_wheel_has_every_file_except_tool_settings():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout: git decides what a build leaves out")
    text = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    wheel = text["wheel"]
    assert wheel["packages"] == ["src/atoll"]
    paths = [path.relative_to(ROOT) for path in (ROOT / "src/atoll").rglob("*") if path.is_file()]
    # Git ignores the version file, which every build writes and includes (tests/test_packaging.py).
    names = [str(path) for path in paths if not {"__pycache__", ".ruff_cache", "_version.py"} & set(path.parts)]
    assert {str(path.relative_to(ROOT)) for path in (*OURS, *VENDORED)} <= set(names)
    assert find_left_out(names, wheel["exclude"]) == ["src/atoll/core/ruff.toml"]
    assert find_left_out(["src/atoll/dashboard/static/dist/x.js", "src/atoll/dashboard/static/x.pyc"], []) != [], (
        "the check must be able to fail"
    )
    assert find_left_out(names, ["*.js"]) != find_left_out(names, wheel["exclude"])
    for source, target in wheel["force-include"].items():
        assert (ROOT / source).is_file()
        assert target == f"atoll/dashboard/{Path(source).name}"


def test_docs_list_keyboard_shortcuts():
    text = (ROOT / "docs/dash.md").read_text(encoding="utf-8")
    source = (STATIC / "dialog.js").read_text(encoding="utf-8")
    shortcuts = re.findall(r"^  \[\"(.+?)\", \"(.+?)\"\],$", source, re.MULTILINE)
    assert len(shortcuts) > 15
    assert [what for keys, what in shortcuts if f"| `{keys}` | {what} |" not in text] == []


def test_docs_list_states():
    text = (ROOT / "docs/dash.md").read_text(encoding="utf-8")
    source = (STATIC / "states.js").read_text(encoding="utf-8")
    states = re.findall(r"^  (\w+): \{ letter: \"(\w)\", word: \"(.+?)\", note: \"(.+?)\"", source, re.MULTILINE)
    assert len(states) == 8
    assert [word for _, letter, word, note in states if f"| {letter} | {word} | {note} |" not in text] == []
