"""Hooks that mkdocs calls while it builds the site.

The pages are written for readers of the repository, so they link to files outside of `docs`, such as examples. These
files become pages of the site, too. So the site needs no URL of a repository, and a broken link stops the build.
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
"""Folder of the site with the pages of files outside of `docs`."""

LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and the pages of linked files outside of `docs`."""
    files.append(File.generated(config, "reference/python.md", content=reference.render_python_api()))
    files.append(File.generated(config, "reference/commands.md", content=reference.render_commands()))
    waiting = [(path.name, path.read_text(encoding="utf-8")) for path in sorted(ROOT.glob("docs/*.md"))]
    known: set[str] = set()
    while waiting:
        page, text = waiting.pop()
        for target in find_links(page, text):
            path = ROOT / target
            if target in known or not path.is_file():
                continue  # mkdocs reports missing files at the link
            known.add(target)
            content = path.read_text(encoding="utf-8")
            if path.suffix != ".md":
                content = f"# {target}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{content}````\n"
            files.append(File.generated(config, page_path(target), content=content))
            if path.suffix == ".md":
                waiting.append((page_path(target), content))
    return files


def page_path(target: str) -> str:
    """Return the page of a file outside of `docs`."""
    return f"{OUTSIDE_FOLDER}/{target}" if target.endswith(".md") else f"{OUTSIDE_FOLDER}/{target}.md"


def link_base(page: str) -> str:
    """Return the folder in the repository to which the links of this page are relative."""
    if page.startswith(f"{OUTSIDE_FOLDER}/"):
        return posixpath.dirname(page.removeprefix(f"{OUTSIDE_FOLDER}/"))
    return posixpath.join("docs", posixpath.dirname(page))


def find_links(page: str, text: str) -> Iterator[str]:
    """Yield the files outside of `docs` that a page links to, as paths in the repository."""
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
    """Rewrite the links of a page for the site."""
    here = page.file.src_uri

    def rewrite(found: re.Match[str]) -> str:
        opening, target, anchor, closing = found[1], found[2], found[3] or "", found[4]
        outside = _resolve_outside_docs(here, target)
        if outside is not None:
            target = posixpath.relpath(page_path(outside), posixpath.dirname(here) or ".")
        elif here.startswith(f"{OUTSIDE_FOLDER}/") and not re.match(r"[a-z]+:", target):
            full = posixpath.normpath(posixpath.join(link_base(here), target)).removeprefix("docs/")
            target = posixpath.relpath(full, posixpath.dirname(here))
        return f"{opening}{target}{anchor}{closing}"

    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(rewrite, part) for part in parts[::2]]
    return "".join(parts)
