"""The page's files: nothing from elsewhere, nothing that the content policy forbids, all of it in the package."""

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
    "an address elsewhere": r"""(?:https?:)?//[\w.-]+\.\w+""",
    "markup made of text": r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc)\b",
    "text run as a program": r"\beval\(|new Function\(|set(?:Timeout|Interval)\(\s*[\"'`]",
    "a style in the markup": r"\sstyle=[\"']|<style|setAttribute\(\"style\"",
    "a script in the markup": r"<script(?![^>]*\bsrc=)|\son\w+=[\"']|javascript:",
}


def find_violations(name: str, text: str) -> list[str]:
    text = text.replace('xmlns="http://www.w3.org/2000/svg"', "")  # a name, from which nothing is loaded
    return [f"{name}: {what}" for what, pattern in FORBIDDEN.items() if re.search(pattern, text)]


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_a_file_has_nothing_forbidden_and_is_short(path):
    text = path.read_text(encoding="utf-8")
    assert find_violations(path.name, text) == []
    assert len(text.splitlines()) <= MAX_MODULE_LINES


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ('<script src="https://cdn.example.org/x.js"></script>', ["an address elsewhere"]),
        ("node.innerHTML = name;", ["markup made of text"]),
        ('<p style="color: red">', ["a style in the markup"]),
        ("<script>go()</script>", ["a script in the markup"]),
        ('<a onclick="go()">', ["a script in the markup"]),
        ('setTimeout("go()", 3)', ["text run as a program"]),
        ('node.textContent = "1 // 2"; // why', []),
    ],
)
def test_a_planted_mistake_is_found(planted, found):
    assert find_violations("x", planted) == [f"x: {what}" for what in found]


@pytest.mark.parametrize("path", VENDORED, ids=lambda path: path.name)
def test_vendored_files_are_what_the_readme_says(path):
    told = (STATIC / "vendor/README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(path.read_bytes()).hexdigest() in re.findall(rf"`{re.escape(path.name)}`.*`(\w{{64}})`", told)


def reached() -> set[str]:
    """From index.html, by names in its files."""
    seen: set[str] = set()
    wanted = ["index.html"]
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        if name.endswith((".html", ".js")) and not name.startswith("vendor/"):
            text = (STATIC / name).read_text(encoding="utf-8")
            wanted += re.findall(r"(?:src|href)=\"(?!#)([\w./]+)\"", text)
            wanted += [found.removeprefix("./") for found in re.findall(r"from \"(\./[\w.]+)\"", text)]
            wanted += re.findall(r"script\(\"([\w./]+)\"\)", text)
    return seen


def test_every_file_is_reached_from_the_page():
    there = {path.name for path in OURS} | {f"vendor/{path.name}" for path in VENDORED}
    assert there - reached() == {"vendor/uPlot.LICENSE"}
    assert reached() <= there


def test_the_package_has_the_page():
    """As it is installed here, whatever that is made of."""
    assert [name for name in reached() if not (files("atoll.dashboard") / "static" / name).is_file()] == []


def left_out(names: list[str], exclude: list[str]) -> list[str]:
    """Of these files below src/atoll, those that a build leaves out: by our list, or because git does not know them."""
    wheel = [name for name in names if any(fnmatch(name.rsplit("/", 1)[-1], pattern) for pattern in exclude)]
    asked = "\n".join(names)
    ignored = subprocess.run(
        ["git", "check-ignore", "--stdin", "--no-index"],
        cwd=ROOT,
        input=asked,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ignored.returncode in (0, 1), ignored.stderr
    return sorted({*wheel, *ignored.stdout.splitlines()})


def test_a_wheel_has_every_file_that_is_no_setting_of_a_tool():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("git says what a build leaves out, and this is no checkout")
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    wheel = told["wheel"]
    assert wheel["packages"] == ["src/atoll"]
    paths = [path.relative_to(ROOT) for path in (ROOT / "src/atoll").rglob("*") if path.is_file()]
    # Git knows nothing of the version, which every build writes and takes along (tests/test_packaging.py).
    names = [str(path) for path in paths if not {"__pycache__", ".ruff_cache", "_version.py"} & set(path.parts)]
    assert {str(path.relative_to(ROOT)) for path in (*OURS, *VENDORED)} <= set(names)
    assert left_out(names, wheel["exclude"]) == ["src/atoll/core/ruff.toml"]
    assert left_out(["src/atoll/dashboard/static/dist/x.js", "src/atoll/dashboard/static/x.pyc"], []) != [], (
        "it can fail"
    )
    assert left_out(names, ["*.js"]) != left_out(names, wheel["exclude"])
    for source, target in wheel["force-include"].items():
        assert (ROOT / source).is_file()
        assert target == f"atoll/dashboard/{Path(source).name}"


def test_the_manual_lists_the_shortcuts_of_the_page():
    told = (ROOT / "docs/dash.md").read_text(encoding="utf-8")
    source = (STATIC / "dialog.js").read_text(encoding="utf-8")
    shortcuts = re.findall(r"^  \[\"(.+?)\", \"(.+?)\"\],$", source, re.MULTILINE)
    assert len(shortcuts) > 15
    assert [what for keys, what in shortcuts if f"| `{keys}` | {what} |" not in told] == []


def test_the_manual_lists_the_states_of_the_page():
    told = (ROOT / "docs/dash.md").read_text(encoding="utf-8")
    source = (STATIC / "states.js").read_text(encoding="utf-8")
    states = re.findall(r"^  (\w+): \{ letter: \"(\w)\", word: \"(.+?)\", note: \"(.+?)\"", source, re.MULTILINE)
    assert len(states) == 8
    assert [word for _, letter, word, note in states if f"| {letter} | {word} | {note} |" not in told] == []
