"""A search for the places where Python sources start programs, for tests that check how they do it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

STARTS = re.compile(
    r"subprocess\.(run|Popen|call|check_call|check_output|getoutput|getstatusoutput)"
    r"|os\.(system|popen)|asyncio\.create_subprocess_(exec|shell)"
)


def program_starts(path: Path) -> Iterator[tuple[int, str, set[str]]]:
    """Yield the line, the function and the names of the keyword arguments of each call that starts a program.

    An import of such a function by its bare name is yielded, too, without arguments, because its calls cannot
    be recognized.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call() if STARTS.fullmatch(ast.unparse(node.func)):
                yield node.lineno, ast.unparse(node.func), {each.arg for each in node.keywords if each.arg}
            case ast.ImportFrom():
                for each in node.names:
                    if STARTS.fullmatch(f"{node.module}.{each.name}"):
                        yield node.lineno, f"{node.module}.{each.name}", set()
