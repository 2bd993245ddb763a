"""The code blocks of pages, and the commands in them."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^\n((?: {4}.*\n|\n)+)", re.MULTILINE)
INLINE = re.compile(r"`(hpcsgd [^`]*)`")
PLACEHOLDER = re.compile(r"…|\b[A-Z]{3,}\b")
STARTS = re.compile(r"[a-z0-9][\w./-]*$|\./")
"""Matches the first word of a command, but not the beginning of output or of a table."""


@dataclass(frozen=True)
class Block:
    """A code block of a page; `language` is "" if the page names none."""

    page: str
    language: str
    text: str

    @property
    def is_toml(self) -> bool:
        return self.language == "toml" or (not self.language and self.text.startswith("["))


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    fenced = [Block(page.name, language, code) for language, code in FENCED.findall(text)]
    rest = FENCED.sub("", text)
    indented = (textwrap.dedent(code).strip("\n") for code in INDENTED.findall(rest))
    return fenced + [Block(page.name, "", code) for code in indented if code]


def inline(page: Path) -> Iterator[list[str]]:
    """Yield the commands within sentences, except those with placeholders."""
    for code in INLINE.findall(page.read_text()):
        words = shlex.split(code)
        if not PLACEHOLDER.search(code) and any("." in word or "/" in word for word in words):
            yield words


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the lines of a shell block as commands; a line that ends with a backslash continues."""
    if block.is_toml or block.language not in ("", "sh", "bash"):
        return
    for line in block.text.replace("\\\n", " ").splitlines():
        if STARTS.match(line.split(" ")[0]):
            try:
                yield shlex.split(line, comments=True)
            except ValueError:  # an unmatched apostrophe: a sentence, not a command
                continue


def of_hpcsgd(command: list[str]) -> list[str] | None:
    """Return the arguments to `hpcsgd`, without the launcher; None if the command starts another program."""
    launchers = ("hpcsgd", "mpiexec", "srun")
    if command[:1] and command[0] in launchers and "hpcsgd" in command:
        return command[command.index("hpcsgd") + 1 :]
    return None
