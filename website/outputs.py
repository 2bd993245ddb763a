"""Run the commands whose output the pages show, and write the new output into the pages.

python website/outputs.py                   # all pages; takes some minutes on two cores
python website/outputs.py docs/plan.md      # only these pages

A comment before each block of text that a command has printed says how the block was made:

    <!-- output of `hpcsgd plan job.toml`; 6 … 2; decimals differ -->

The command runs in a folder with a copy of examples/, the digits, and the README's script as train.py. The
page shows the first 6 and the last 2 lines of the output; without "6 … 2" it shows all lines.
tests/website/test_outputs.py runs the command again and expects exactly the same text. With "decimals differ"
it ignores numbers that have a point, a comma, a colon or at least three digits. With "numbers differ" it
ignores all numbers and the order of words in a line. The comment of a block that no command can make here is:

    <!-- not made again: why -->
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcsgd.data import convert
from repository import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TEXT = re.compile(r"(?:<!--(?P<comment>(?:(?!-->).)*)-->\n+)?^```text\n(?P<text>.*?)^```$", re.M | re.S)
MADE = re.compile(r"output of `([^`]+)`(?:; (\d+) … (\d+))?(?:; (decimals|numbers) differ)?")
NOT_MADE = re.compile(r"not made again: .+", re.S)
MEASURED = {
    "decimals": re.compile(r"\d+(?:[.,:]\d+)+(?:e[+-]?\d+)?|\d{3,}"),
    "numbers": re.compile(r"\d+(?:[.,:]\d+)*(?:e[+-]?\d+)?"),
}


@dataclass(frozen=True)
class Output:
    """A block of a page, and the command that makes it."""

    page: str
    command: str
    shown: str
    ends: tuple[int, int] | None
    """The numbers of lines shown from the beginning and from the end, with "…" between; None shows all."""
    differ: str | None
    """Which numbers may differ between machines: a key of `MEASURED`, or None."""

    def shortened(self, printed: str) -> str:
        """Return the lines of the output `printed` that the page shows."""
        lines = printed.splitlines()
        if self.ends is not None:
            first, last = self.ends
            lines = [*lines[:first], *(["…"] if first else []), *lines[len(lines) - last :]]
        return "".join(f"{line.rstrip()}\n" for line in lines)

    def comparable(self, text: str) -> str | list[list[str]]:
        """Return a text without what may differ between machines."""
        if self.differ is None:
            return text
        lines = [MEASURED[self.differ].sub("#", line).split() for line in text.splitlines()]
        return [sorted(line) for line in lines] if self.differ == "numbers" else lines


def outputs(page: Path) -> list[Output]:
    """Return all blocks of a page that a command can make again."""
    blocks = [_output(page.name, block) for block in TEXT.finditer(page.read_text())]
    return [output for output in blocks if output is not None]


def unexplained(text: str) -> list[str]:
    """Return the first lines of blocks that have no comment, or a comment of another form."""
    blocks = [(block["text"], " ".join((block["comment"] or "").split())) for block in TEXT.finditer(text)]
    return [
        shown.splitlines()[0]
        for shown, comment in blocks
        if not MADE.fullmatch(comment) and not NOT_MADE.fullmatch(comment)
    ]


def _output(page: str, block: re.Match[str]) -> Output | None:
    comment = " ".join((block["comment"] or "").replace("\\\n", " ").split())
    made = MADE.fullmatch(comment)
    if made is None:
        return None
    command, first, last, differ = made.groups()
    ends = (int(first), int(last)) if first else None
    return Output(page, command, block["text"], ends, differ)


def prepare(folder: Path) -> None:
    """Put into `folder` the files that the commands need."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("*.h5"))
    convert("digits", None, folder / "examples/digits.h5")
    (folder / "train.py").write_text(script())


def script() -> str:
    """Return the quick-start script of the README."""
    (found,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    return found


def words(command: str) -> list[str]:
    """Return the words of a command, run by this Python, its hpcsgd, and the mpiexec next to it, if any."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    python = [sys.executable, "-m", "hpcsgd"]
    programs = {"python": python[:1], "hpcsgd": python} | (
        {"mpiexec": [str(mpiexec)]} if mpiexec.exists() else {}
    )
    return [x for word in shlex.split(command) for x in programs.get(word, [word])]


def made_again(page: Path, run: Callable[[Sequence[str]], str]) -> str:
    """Return the page's text with the output that its commands print now."""

    def new(block: re.Match[str]) -> str:
        output = _output(page.name, block)
        if output is None:
            return block[0]
        start, end = (at - block.start() for at in block.span("text"))
        return block[0][:start] + output.shortened(run(words(output.command))) + block[0][end:]

    return TEXT.sub(new, page.read_text())


def main(given: Sequence[str]) -> None:
    for page in [Path(name) for name in given] or PAGES:
        if not outputs(page):
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            prepare(folder)

            def run(command: Sequence[str], folder: Path = folder) -> str:
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(
                    command,
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                return done.stdout

            page.write_text(made_again(page, run))
        print(page, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
