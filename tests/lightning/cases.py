"""`python cases.py FILE NAME …` runs these cases on all ranks and writes their results into FILE."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import behaviour
import numbers_of_training
import saving

CASES: dict[str, Callable[[Path], Any]] = {
    name: case
    for module in (numbers_of_training, behaviour, saving)
    for name, case in vars(module).items()
    if name.startswith("case_")
}


def main(file: Path, names: list[str]) -> None:
    for name in names:
        found = CASES[f"case_{name}"](file.parent / name)
        import hpcsgd

        everyones = hpcsgd.init().world.gather_objects(found)
        if hpcsgd.init().rank == 0:
            with file.open("a") as out:
                print(json.dumps({name: everyones}), file=out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
