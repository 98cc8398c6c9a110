"""What mkdocs calls while it builds the site.

The pages are written for readers of the repository, so they link to files beside the folder `docs`, such as examples.
Those files become pages of the site, too: it needs no address of a repository, and a link that leads nowhere stops the
build like any other.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from site_parts import reference

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE_FOLDER = "files"
"""Where pages of files beside the folder `docs` are."""

LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}


def on_files(files: Files, config: Any) -> Files:
    """The generated pages, and those of the files that pages link to."""
    files.append(File.generated(config, "reference/python.md", content=reference.render_python_api()))
    files.append(File.generated(config, "reference/commands.md", content=reference.render_commands()))
    waiting = [(path.name, path.read_text(encoding="utf-8")) for path in sorted(ROOT.glob("docs/*.md"))]
    known: set[str] = set()
    while waiting:
        page, text = waiting.pop()
        for target in find_links(page, text):
            path = ROOT / target
            if target in known or not path.is_file():
                continue  # what is not there is complained of where it is linked
            known.add(target)
            content = path.read_text(encoding="utf-8")
            if path.suffix != ".md":
                content = f"# {target}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{content}````\n"
            files.append(File.generated(config, page_path(target), content=content))
            if path.suffix == ".md":
                waiting.append((page_path(target), content))
    return files


def page_path(target: str) -> str:
    """The page of a file beside the folder `docs`."""
    return f"{OUTSIDE_FOLDER}/{target}" if target.endswith(".md") else f"{OUTSIDE_FOLDER}/{target}.md"


def link_base(page: str) -> str:
    """The folder, below the root of the repository, whose relative links this page has."""
    if page.startswith(f"{OUTSIDE_FOLDER}/"):
        return posixpath.dirname(page.removeprefix(f"{OUTSIDE_FOLDER}/"))
    return posixpath.join("docs", posixpath.dirname(page))


def find_links(page: str, text: str) -> Iterator[str]:
    """Files beside the folder `docs` that a page links to, from the root of the repository."""
    for part in CODE.split(text)[::2]:
        for _, target, _, _ in LINK.findall(part):
            if (found := _resolve_outside_docs(page, target)) is not None:
                yield found


def _resolve_outside_docs(page: str, target: str) -> str | None:
    if re.match(r"[a-z]+:", target):
        return None
    full = posixpath.normpath(posixpath.join(link_base(page), target))
    return None if full.startswith("docs/") else full


def on_page_markdown(markdown: str, page: Any, **more: Any) -> str:
    """Links as they are right within the site."""
    here = page.file.src_uri

    def placed(found: re.Match[str]) -> str:
        opening, target, anchor, closing = found[1], found[2], found[3] or "", found[4]
        outside = _resolve_outside_docs(here, target)
        if outside is not None:
            target = posixpath.relpath(page_path(outside), posixpath.dirname(here) or ".")
        elif here.startswith(f"{OUTSIDE_FOLDER}/") and not re.match(r"[a-z]+:", target):
            full = posixpath.normpath(posixpath.join(link_base(here), target)).removeprefix("docs/")
            target = posixpath.relpath(full, posixpath.dirname(here))
        return f"{opening}{target}{anchor}{closing}"

    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(placed, part) for part in parts[::2]]
    return "".join(parts)
