"""Fill in a template in ``jobs/``: scheduler options and values, which are in one block of the script."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from hpcsgd.errors import UserError

_BLOCK = re.compile(r"(?<=^# --- values -).*?(?=^# -----)", re.DOTALL | re.MULTILINE)
_CONTROL = {"Cc", "Zl", "Zp", "Cs"}  # Unicode: control characters, line and paragraph separators, surrogates


@dataclass(frozen=True, slots=True)
class Directives:
    """The form of scheduler options in a script: each is a line of prefix, dashes, name and value.

    Names of one letter have one dash.
    """

    prefix: str
    dashes: str

    def line(self, name: str, value: str) -> str:
        """Return a line such as ``#SBATCH --nodes=2``, ``#PBS -N name`` or ``#PBS -l walltime=1:00:00``."""
        text = quoted(value) if value else ""
        return f"{self.beginning(name)}{self._between(name)}{text}" if value else self.beginning(name)

    def beginning(self, name: str) -> str:
        require_writable(name)
        return f"{self.prefix} {'-' if len(name) == 1 else self.dashes}{name}"

    def sets(self, name: str) -> re.Pattern[str]:
        """Return a pattern that matches the line of a script that sets the option `name`."""
        return re.compile(rf"^{re.escape(self.beginning(name))}({self._between(name)}.*)?$", re.MULTILINE)

    def _between(self, name: str) -> str:
        return " " if len(name) == 1 else "="


def name_and_value(option: str) -> tuple[str, str]:
    """Return the name and value of an option such as ``--constraint=gpu`` or ``-C gpu``."""
    if option.startswith("-") and not option.startswith("--"):
        return option[1:2], option[2:].strip()
    name, _, value = option.removeprefix("--").partition("=")
    return name, value


def quoted(word: str) -> str:
    """Return `word` with quotes, so that the shell and the scheduler read it unchanged.

    Raises:
        UserError: If no quotes can express `word`, because of a line break, say.
    """
    require_writable(word)
    return shlex.quote(word)


def require_writable(word: str) -> None:
    """Raise `UserError` unless `word` may stand in a script.

    An option of a scheduler ends with its line, even inside quotes, so text after a line break would be
    executed as a command.
    """
    if any(unicodedata.category(letter) in _CONTROL for letter in word):
        raise UserError(
            f"{word!r} has a line break, another control character, or bytes that are not UTF-8, and cannot "
            "stand in a batch script: change the name of the job file, [run] output_dir, or the option "
            "that has it"
        )


SBATCH = Directives("#SBATCH", "--")


def template(name: str) -> str:
    """Return the text of the template in the file ``name``."""
    return (files("hpcsgd") / "jobs" / name).read_text(encoding="utf-8")


def fill(
    text: str,
    options: Mapping[str, str],
    values: Mapping[str, str | Sequence[str]],
    directives: Directives = SBATCH,
) -> str:
    """Return the template `text` with these scheduler options and values in its block.

    Options that the template lacks are added. Every value must have a line in the template. A sequence
    becomes an array of the shell.
    """
    block = _BLOCK.search(text)
    assert block is not None
    filled = block[0]
    for name, value in options.items():
        filled = _with_option(filled, name, value, directives)
    for name, value in values.items():
        filled = _with_value(filled, name, value)
    return text[: block.start()] + filled + text[block.end() :]


def _with_option(block: str, name: str, value: str, directives: Directives) -> str:
    line, there = directives.line(name, value), directives.sets(name)
    if there.search(block):
        return there.sub(lambda _: line, block)
    last = [found.end() for found in re.finditer(rf"^{directives.prefix} .*$", block, re.MULTILINE)][-1]
    return f"{block[:last]}\n{line}{block[last:]}"


def _with_value(block: str, name: str, value: str | Sequence[str]) -> str:
    text = quoted(value) if isinstance(value, str) else f"({' '.join(map(quoted, value))})"
    there = re.compile(rf"^{name}=(?:\([^)]*\)|\S*)(?P<comment> *#.*)?$", re.MULTILINE)
    filled, found = there.subn(lambda old: f"{name}={text}{old['comment'] or ''}", block)
    assert found == 1, name
    return filled
