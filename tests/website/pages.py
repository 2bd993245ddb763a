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
"""What a command begins with, unlike output and tables."""


@dataclass(frozen=True)
class Block:
    """`language` is "" where the page does not name one."""

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
    """Commands within sentences, but for those with something to be filled in."""
    for code in INLINE.findall(page.read_text()):
        words = shlex.split(code)
        if not PLACEHOLDER.search(code) and any("." in word or "/" in word for word in words):
            yield words


def commands(block: Block) -> Iterator[list[str]]:
    """The lines of a shell, those that end with a backslash with the next."""
    if block.is_toml or block.language not in ("", "sh", "bash"):
        return
    for line in block.text.replace("\\\n", " ").splitlines():
        if STARTS.match(line.split(" ")[0]):
            try:
                yield shlex.split(line, comments=True)
            except ValueError:  # an apostrophe: a sentence
                continue


def of_hpcsgd(command: list[str]) -> list[str] | None:
    """What its command line is given, by whatever launcher; None where another program is started."""
    launchers = ("hpcsgd", "mpiexec", "srun")
    if command[:1] and command[0] in launchers and "hpcsgd" in command:
        return command[command.index("hpcsgd") + 1 :]
    return None
