"""`python counted.py FOLDER WORD…` runs `hpcsgd WORD…` and writes into FOLDER what each rank's Python opened.

An audit hook records every file that Python opens, including those of modules, and every library that it
loads as a module. It sees neither checks whether a file exists nor files that libraries themselves open."""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path
from typing import Any

OPENED: list[str] = []


def hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str):
        OPENED.append(arguments[0])
    elif event == "import" and isinstance(arguments[1], str):
        OPENED.append(arguments[1])


def leave(folder: Path) -> None:
    rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
    told = {"opened": list(OPENED), "modules": sorted(sys.modules)}
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    sys.addaudithook(hear)
    atexit.register(leave, Path(sys.argv.pop(1)))
    from hpcsgd.cli import main

    main()
