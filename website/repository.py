"""The repository's own files as pages of the site, such as the README, and the links that leave docs/."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?")
FILES = "repository"
"""The folder of the site for files that are neither in `PAGES` nor in docs/."""
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""The page of the site for each of these files at the repository's top."""


def pages() -> dict[str, str]:
    """Return the texts of these pages by path. Their links are still relative to the repository's top."""
    return {uri: (ROOT / path).read_text() for path, uri in PAGES.items()}


def on_site(text: str, folder: str, uri: str) -> str:
    """Return a text of the repository's `folder` as text of the page `uri`, with its links converted."""
    here = posixpath.dirname(uri) or "."

    def placed(link: re.Match[str]) -> str:
        return posixpath.relpath(place_of(_path(folder, link[1])), here) + (link[2] or "")

    return LINK.sub(placed, text)


def place_of(path: str) -> str:
    """Return the path on the site of a file of the repository."""
    return PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"{FILES}/{path}")


def linked_files(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Return the linked files that would not be on the site otherwise.

    `texts` are pairs of a folder and a text, whose links are relative to the folder.
    """
    found = {_path(folder, link) for folder, text in texts for link, _ in LINK.findall(text)}
    return sorted(x for x in found if place_of(x).startswith(f"{FILES}/") and (ROOT / x).is_file())


def _path(folder: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(folder, link))
