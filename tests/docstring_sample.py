"""Print randomly drawn docstrings, to check whether a reader who does not know the code understands them.

python tests/docstring_sample.py --seed 1 --count 40
"""

from __future__ import annotations

import argparse
import ast
import random
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = (ast.Module, ast.ClassDef, ast.FunctionDef)


def docstrings() -> list[tuple[str, str]]:
    """Return the name and text of every docstring of the package, in the order of files and lines."""
    found: list[tuple[str, str]] = []
    for path in sorted(ROOT.glob("hpcsgd/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, KINDS) and (text := ast.get_docstring(node)):
                name = "" if isinstance(node, ast.Module) else f":{node.lineno} {node.name}"
                found.append((f"{path.relative_to(ROOT)}{name}", text))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    given = parser.parse_args()
    for name, text in random.Random(given.seed).sample(docstrings(), given.count):
        print(f"{name}\n\n{text}\n\n{'-' * 40}\n")


if __name__ == "__main__":
    main()
