"""Fills the block of values of a template in ``jobs/``, which without that is a script like any other."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files

_BLOCK = re.compile(r"(?<=^# --- values -).*?(?=^# -----)", re.DOTALL | re.MULTILINE)


def template(name: str) -> str:
    """The text of the template ``name``."""
    return (files("hpcsgd") / "jobs" / f"{name}.sbatch").read_text(encoding="utf-8")


def fill(text: str, options: Mapping[str, str], values: Mapping[str, str | Sequence[str]]) -> str:
    """The script with these options of sbatch and these values (an array, where it is one) in its block.

    An option that the template does not have is added to it; every value has to be there.
    """
    block = _BLOCK.search(text)
    assert block is not None
    filled = block[0]
    for name, value in options.items():
        filled = _with_option(filled, name, value)
    for name, value in values.items():
        filled = _with_value(filled, name, value)
    return text[: block.start()] + filled + text[block.end() :]


def _with_option(block: str, name: str, value: str) -> str:
    line = f"#SBATCH --{name}={shlex.quote(value)}" if value else f"#SBATCH --{name}"
    there = re.compile(rf"^#SBATCH --{re.escape(name)}(=.*)?$", re.MULTILINE)
    if there.search(block):
        return there.sub(lambda _: line, block)
    last = [found.end() for found in re.finditer(r"^#SBATCH .*$", block, re.MULTILINE)][-1]
    return f"{block[:last]}\n{line}{block[last:]}"


def _with_value(block: str, name: str, value: str | Sequence[str]) -> str:
    text = shlex.quote(value) if isinstance(value, str) else f"({shlex.join(value)})"
    there = re.compile(rf"^{name}=(?:\([^)]*\)|\S*)(?P<comment> *#.*)?$", re.MULTILINE)
    filled, found = there.subn(lambda old: f"{name}={text}{old['comment'] or ''}", block)
    assert found == 1, name
    return filled
