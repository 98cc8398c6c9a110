"""The documentation site: it builds, its links exist, and it loads nothing from other hosts."""

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
TROUBLESHOOTING = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
SOURCES = ("benchmarks", "docs", "examples", "site_parts")  # sources of the site, in addition to the pages in the root


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
    """Copy the sources of the site without large files."""
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__", "*.json"))
    shutil.copy(ROOT / "docs/grafana.json", to / "docs")
    for page in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml"):
        shutil.copy(page, to)
    (to / "src").symlink_to(ROOT / "src")
    return to


# One test, because building takes most of the time, and parallel tests would each do it again.
def test_site_is_built_and_loads_nothing_from_other_hosts(tmp_path):
    site = tmp_path / "site"
    done = build(ROOT, site)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert {path.with_suffix(".html").name for path in ROOT.glob("docs/*.md")} <= set(pages)
    assert "files/examples/plain.py.html" in pages
    assert [found for name, text in pages.items() for found in external_resources(name, text)] == []
    diagrams = (ROOT / "docs/protocol.md").read_text(encoding="utf-8").count("```mermaid")
    assert pages["protocol.html"].count('<div class="chart">') == diagrams
    text_only = unescape(re.sub(r"<[^>]*>", "", pages["reference/commands.html"]))
    assert [name for name in COMMANDS if f"atoll {name}" not in text_only] == []


def external_resources(name: str, page: str) -> Iterator[str]:
    """Yield what a browser loads from another host. Links are not included."""
    for tag in re.findall(r"<(?:script|link|img|iframe|source|video|audio)\b[^>]*>", page):
        if re.search(r"(?:src|href)=[\"']?(?:https?:)?//", tag):
            yield f"{name}: {tag}"
    yield from (f"{name}: {found}" for found in re.findall(r"(?:@import|url\()[^;)]*//[^;)]*", page))


def test_external_resource_is_detected():
    assert list(external_resources("x", '<script src="https://example.org/x.js"></script>')) != []
    assert list(external_resources("x", '<link rel="stylesheet" href="//fonts.example.org/a.css">')) != []
    assert list(external_resources("x", '<a href="https://example.org">x</a><img src="dash.png">')) == []


@pytest.mark.long
def test_broken_links_and_lost_pages_stop_the_build(tmp_path):
    root = copied(tmp_path)
    page = root / "docs/plan.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n[x](nowhere.md) [y](wire.md#no-heading) [z](../gone.py)\n")
    (root / "docs/lost.md").write_text("# No page links here\n")
    done = build(root, tmp_path / "site")
    assert done.returncode != 0
    for name in ("nowhere.md", "#no-heading", "gone.py", "lost.md"):
        assert name in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("pie title Pets", "are not supported"),
        ("sequenceDiagram\nparticipant A as learner\nloop every step", "not supported"),
        ("sequenceDiagram\nparticipant A as learner\nA->>B: Hello", "which is not a column"),
    ],
)
def test_unsupported_diagram_is_refused(source, complaint):
    with pytest.raises(ValueError, match=complaint):
        mermaid_svg.render_svg(source)


def test_diagram_has_its_labels_and_stays_in_its_frame():
    drawn = mermaid_svg.render_svg("stateDiagram-v2\n[*] --> UP\nUP --> UP: <held>\nUP --> DOWN: closed\nDOWN --> [*]")
    assert "&lt;held&gt;" in drawn
    width = float(re.findall(r'viewBox="0 0 (\d+) ', drawn)[0])
    assert [x for x in re.findall(r' x1?2?="(-?[\d.]+)"', drawn) if not 0 <= float(x) <= width] == []


def test_reference_has_the_public_api():
    page = reference.render_python_api()
    assert [name for name in atoll.__all__ if name not in page and name != "__version__"] == []
    public = [name for name, value in vars(atoll.Learner).items() if not name.startswith("_") and callable(value)]
    assert [name for name in public if f"### `{name}(...)`" not in page] == []


# --------------------------------------------------------------------------------------------------------------------
# Sentences of docs/troubleshooting.md


def sentences_of_the_code() -> str:
    """Return all strings of the sources, one per line, with a NUL in place of each value."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"\{[^}]*\}|%[sdgr]", "\0", node.value))
    return "\n".join(" ".join(text.split()) for text in found)


def missing_sentences(page: str, code: str) -> list[str]:
    """Return sentences of the page that are not in the code. `...` stands for a value or omitted text."""
    rows = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    return [row for row in rows if not re.search(".*".join(re.escape(part) for part in row.split("...")), code)]


def test_sentences_of_troubleshooting_are_in_the_code():
    code = sentences_of_the_code()
    assert len(re.findall(r"^\| `", TROUBLESHOOTING, re.MULTILINE)) > 40
    assert missing_sentences(TROUBLESHOOTING, code) == []
    assert missing_sentences(TROUBLESHOOTING.replace("the run is paused", "the run has a break"), code) == [
        "the run has a break"
    ]
