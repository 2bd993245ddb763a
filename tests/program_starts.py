"""Where Python sources start programs, for tests of how they do."""

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
    """Lines, functions and the names of what these are given, which is nothing where they are imported by
    their bare names: nobody sees then what is called."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call() if STARTS.fullmatch(ast.unparse(node.func)):
                yield node.lineno, ast.unparse(node.func), {each.arg for each in node.keywords if each.arg}
            case ast.ImportFrom():
                for each in node.names:
                    if STARTS.fullmatch(f"{node.module}.{each.name}"):
                        yield node.lineno, f"{node.module}.{each.name}", set()
