"""What commands print, as pages show it: made by the commands, and made again by this one.

python website/outputs.py                   # on all pages, some minutes on two cores
python website/outputs.py docs/plan.md      # on these

A comment stands before each block of text that a command has printed, and says how it was made:

    <!-- output of `hpcsgd plan job.toml`; 6 … 2; decimals differ -->

The command is run in a folder with a copy of examples/, the digits, and the README's script as train.py.
Its first 6 and its last 2 lines are shown, or all of them. tests/website/test_outputs.py runs it again
and expects the same text, to the letter. Where "decimals differ", it does not compare numbers with a
point, a comma or three digits; where "numbers differ", no numbers, and not the order of words in a line.
A block that no command can make here says so:

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
    """A block of a page, and how to make it."""

    page: str
    command: str
    shown: str
    ends: tuple[int, int] | None
    """So many lines of the beginning are shown, "…" after them, and so many of the end; None: all."""
    differ: str | None
    """Which numbers another machine may print: a key of `MEASURED`."""

    def shortened(self, printed: str) -> str:
        """What is shown of all that was printed."""
        lines = printed.splitlines()
        if self.ends is not None:
            first, last = self.ends
            lines = [*lines[:first], *(["…"] if first else []), *lines[len(lines) - last :]]
        return "".join(f"{line.rstrip()}\n" for line in lines)

    def comparable(self, text: str) -> str | list[list[str]]:
        """A text without what may differ."""
        if self.differ is None:
            return text
        lines = [MEASURED[self.differ].sub("#", line).split() for line in text.splitlines()]
        return [sorted(line) for line in lines] if self.differ == "numbers" else lines


def outputs(page: Path) -> list[Output]:
    """All that can be made again."""
    blocks = [_output(page.name, block) for block in TEXT.finditer(page.read_text())]
    return [output for output in blocks if output is not None]


def unexplained(text: str) -> list[str]:
    """The first lines of blocks without a comment, or with one that says something else."""
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
    """What the commands find in `folder`."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("*.h5"))
    convert("digits", None, folder / "examples/digits.h5")
    (folder / "train.py").write_text(script())


def script() -> str:
    """The quick start of the README."""
    (found,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    return found


def words(command: str) -> list[str]:
    """With this Python and its hpcsgd, and the mpiexec beside it where there is one."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    python = [sys.executable, "-m", "hpcsgd"]
    programs = {"python": python[:1], "hpcsgd": python} | (
        {"mpiexec": [str(mpiexec)]} if mpiexec.exists() else {}
    )
    return [x for word in shlex.split(command) for x in programs.get(word, [word])]


def made_again(page: Path, run: Callable[[Sequence[str]], str]) -> str:
    """The page's text with what its commands print now."""

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
