"""The repository's own files as pages of the site, such as the README, and links that lead out of docs/."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?")
FILES = "repository"
"""Where on the site those files lie that are neither pages nor in docs/."""
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Of files at the top the pages that they are."""


def pages() -> dict[str, str]:
    """Texts with links as the repository has them, from its top."""
    return {uri: (ROOT / path).read_text() for path, uri in PAGES.items()}


def on_site(text: str, folder: str, uri: str) -> str:
    """A text of this folder of the repository as that of the page `uri`: links go to the same things."""
    here = posixpath.dirname(uri) or "."

    def placed(link: re.Match[str]) -> str:
        return posixpath.relpath(place_of(_path(folder, link[1])), here) + (link[2] or "")

    return LINK.sub(placed, text)


def place_of(path: str) -> str:
    """Of a file of the repository, on the site."""
    return PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"{FILES}/{path}")


def linked_files(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Files that these texts, each of a folder, link to and that would not be on the site else."""
    found = {_path(folder, link) for folder, text in texts for link, _ in LINK.findall(text)}
    return sorted(x for x in found if place_of(x).startswith(f"{FILES}/") and (ROOT / x).is_file())


def _path(folder: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(folder, link))
