"""The site of the documentation: it is built, its links lead somewhere, and it asks nobody else for anything."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

import atoll
from atoll.cli.main import COMMANDS
from site_parts import mermaid_svg, reference

ROOT = Path(__file__).resolve().parent.parent
TROUBLES = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
BESIDE = ("benchmarks", "docs", "examples", "site_parts")  # what the site is made of, with the pages of the root


def build(root: Path, to: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        # Not --quiet: with it warnings are not counted, and --strict finds nothing.
        [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", to],
        cwd=root,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def copied(to: Path) -> Path:
    """The pages without their neighbours of megabytes."""
    for folder in BESIDE:
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__", "*.json"))
    shutil.copy(ROOT / "docs/grafana.json", to / "docs")
    for page in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml"):
        shutil.copy(page, to)
    (to / "src").symlink_to(ROOT / "src")
    return to


# One test, because building takes most of the time, and parallel tests would each do it again.
def test_the_site_is_built_and_needs_nothing_from_elsewhere(tmp_path):
    site = tmp_path / "site"
    done = build(ROOT, site)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert {path.with_suffix(".html").name for path in ROOT.glob("docs/*.md")} <= set(pages)
    assert "files/examples/plain.py.html" in pages
    assert [found for name, text in pages.items() for found in asked_elsewhere(name, text)] == []
    diagrams = (ROOT / "docs/protocol.md").read_text(encoding="utf-8").count("```mermaid")
    assert pages["protocol.html"].count('<div class="chart">') == diagrams
    told = unescape(re.sub(r"<[^>]*>", "", pages["reference/commands.html"]))
    assert [name for name in COMMANDS if f"atoll {name}" not in told] == []


def asked_elsewhere(name: str, page: str) -> Iterator[str]:
    """What a browser would fetch by itself from another host. A link that somebody may click on is none of it."""
    for tag in re.findall(r"<(?:script|link|img|iframe|source|video|audio)\b[^>]*>", page):
        if re.search(r"(?:src|href)=[\"']?(?:https?:)?//", tag):
            yield f"{name}: {tag}"
    yield from (f"{name}: {found}" for found in re.findall(r"(?:@import|url\()[^;)]*//[^;)]*", page))


def test_something_from_elsewhere_is_noticed():
    assert list(asked_elsewhere("x", '<script src="https://example.org/x.js"></script>')) != []
    assert list(asked_elsewhere("x", '<link rel="stylesheet" href="//fonts.example.org/a.css">')) != []
    assert list(asked_elsewhere("x", '<a href="https://example.org">x</a><img src="dash.png">')) == []


@pytest.mark.long
def test_broken_links_and_lost_pages_stop_the_build(tmp_path):
    root = copied(tmp_path)
    page = root / "docs/plan.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n[x](nowhere.md) [y](wire.md#no-heading) [z](../gone.py)\n")
    (root / "docs/lost.md").write_text("# Nobody finds me\n")
    done = build(root, tmp_path / "site")
    assert done.returncode != 0
    for name in ("nowhere.md", "#no-heading", "gone.py", "lost.md"):
        assert name in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("pie title Pets", "cannot be drawn"),
        ("sequenceDiagram\nparticipant A as learner\nloop every step", "not understood"),
        ("sequenceDiagram\nparticipant A as learner\nA->>B: Hello", "which is no column"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused(source, complaint):
    with pytest.raises(ValueError, match=complaint):
        mermaid_svg.render_svg(source)


def test_a_picture_has_its_words_and_nothing_outside_its_frame():
    drawn = mermaid_svg.render_svg("stateDiagram-v2\n[*] --> UP\nUP --> UP: <held>\nUP --> DOWN: closed\nDOWN --> [*]")
    assert "&lt;held&gt;" in drawn
    width = float(re.findall(r'viewBox="0 0 (\d+) ', drawn)[0])
    assert [x for x in re.findall(r' x1?2?="(-?[\d.]+)"', drawn) if not 0 <= float(x) <= width] == []


def test_the_reference_has_all_that_is_public():
    page = reference.render_python_api()
    assert [name for name in atoll.__all__ if name not in page and name != "__version__"] == []
    public = [name for name, value in vars(atoll.Learner).items() if not name.startswith("_") and callable(value)]
    assert [name for name in public if f"### `{name}(...)`" not in page] == []


# --------------------------------------------------------------------------------------------------------------------
# Sentences of docs/troubleshooting.md


def sentences_of_the_code() -> str:
    """All strings of the sources, each on a line; what is filled in later is a sign that no sentence has."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"\{[^}]*\}|%[sdgr]", "\0", node.value))
    return "\n".join(" ".join(text.split()) for text in found)


def unsaid(page: str, said: str) -> list[str]:
    """Sentences of the page that no code says. `...` stands for what is filled in, or left out."""
    rows = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    return [row for row in rows if not re.search(".*".join(re.escape(part) for part in row.split("...")), said)]


def test_every_sentence_of_the_troubles_is_said_by_the_code():
    said = sentences_of_the_code()
    assert len(re.findall(r"^\| `", TROUBLES, re.MULTILINE)) > 40
    assert unsaid(TROUBLES, said) == []
    assert unsaid(TROUBLES.replace("the run is paused", "the run has a break"), said) == ["the run has a break"]
