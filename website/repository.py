"""The repository's own pages as pages of the site: parts of the README, and links that lead out of docs/."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?")
FILES = "repository"
"""Where on the site those files lie that are neither pages nor in docs/."""
WHOLE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PARTS = {
    "methods/index.md": "Methods",
    "overview.md": "Start",
    "performance.md": "Speed",
    "promises.md": "What to rely on",
}
"""Of the README; what is before its first part, and its last one, are the first page."""
OF_PARTS = {f"#{part.lower().replace(' ', '-')}": uri for uri, part in PARTS.items()}
"""As they are linked to."""
TITLES = {"overview.md": "What there is", "performance.md": "Performance"}


def pages() -> dict[str, str]:
    """Texts with links as the repository has them, from its top."""
    found = parts((ROOT / "README.md").read_text())
    made = {uri: f"# {TITLES.get(uri, part)}\n{found.pop(part)}" for uri, part in PARTS.items()}
    first = found.pop("")
    made["index.md"] = first + "".join(f"## {part}\n{text}" for part, text in found.items())
    return made | {uri: (ROOT / path).read_text() for path, uri in WHOLE.items()}


def parts(text: str) -> dict[str, str]:
    """What stands below each heading of the second level; "": before the first."""
    before, *others = re.split(r"^## ", text, flags=re.MULTILINE)
    return {"": before} | {x.split("\n", 1)[0]: x.split("\n", 1)[1] for x in others}


def on_site(text: str, folder: str, uri: str) -> str:
    """A text of this folder of the repository as that of the page `uri`: links go to the same things."""
    here = posixpath.dirname(uri) or "."

    def placed(link: re.Match[str]) -> str:
        path, anchor = _path(folder, link[1]), link[2] or ""
        if path == "README.md" and anchor in OF_PARTS:
            return posixpath.relpath(OF_PARTS[anchor], here)
        return posixpath.relpath(place_of(path), here) + anchor

    return LINK.sub(placed, text)


def place_of(path: str) -> str:
    """Of a file of the repository, on the site."""
    places = {"README.md": "index.md", **WHOLE}
    return places.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"{FILES}/{path}")


def linked_files(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Files that these texts, each of a folder, link to and that would not be on the site else."""
    found = {_path(folder, link) for folder, text in texts for link, _ in LINK.findall(text)}
    return sorted(x for x in found if place_of(x).startswith(f"{FILES}/") and (ROOT / x).is_file())


def _path(folder: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(folder, link))
