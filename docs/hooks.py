"""MkDocs hooks: README.md and other pages of the repository become pages of the site, and links work there as they do on disk.

A page links to files relative to its own place in the repository. Files outside docs/ (records, examples) are copied into the
site under `outside/`; this rewrites the links to them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's root, and every file outside docs/ that a page links to."""
    for source, place in PAGES.items():
        files.append(_added(config, place, ROOT / source))
    waiting = [*DOCS.rglob("*.md"), *(ROOT / name for name in PAGES)]
    while waiting:
        page = waiting.pop()
        for target in _linked(page):
            place = _place(target)
            if place.startswith("outside/") and files.get_file_from_path(place) is None:
                files.append(_added(config, place, target))
                waiting += [target] if target.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links so that they lead to where the site has the file."""
    source = Path(page.file.abs_src_path)
    if source.suffix != ".md":
        return markdown
    here = PurePosixPath(page.file.src_uri).parent

    def moved(match: re.Match[str]) -> str:
        target = _resolved(source, match[2])
        return match[0] if target is None else f"{match[1]}{os.path.relpath(_place(target), here)}{match[3]}"

    parts, last = [], 0
    for fence in FENCE.finditer(markdown):  # code stays as it is
        parts += [LINK.sub(moved, markdown[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*parts, LINK.sub(moved, markdown[last:])])


def _linked(page: Path) -> Iterator[Path]:
    for match in LINK.finditer(FENCE.sub("", page.read_text("utf-8"))):
        if (target := _resolved(page, match[2])) is not None:
            yield target


def _resolved(page: Path, link: str) -> Path | None:
    """The file in the repository that a link of a page names; None for web addresses and for files that do not exist."""
    if re.match(r"[a-z]+:", link):
        return None
    target = (page.parent / link).resolve()
    target = target / "index.md" if target.is_dir() else target
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def _place(target: Path) -> str:
    """Where the site has a file of the repository."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    name = target.relative_to(ROOT).as_posix()
    return PAGES.get(name, f"outside/{name}")


def _added(config: Any, place: str, source: Path) -> File:
    return File.generated(config, place, abs_src_path=str(source))
