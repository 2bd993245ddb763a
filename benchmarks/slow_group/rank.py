"""One rank of `slow_group.py`: one training after the other; rank 0 writes the rows."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hpcsgd
from bytes_at_quality.training import Text
from slow_group.contestants import GROUPS, Training
from slow_group.training import FULL, QUICK, Group, Setting, read


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--trainings", required=True, help="JSON: a list of the fields of trainings")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    setting = QUICK if given.quick else FULL
    text, topology = read(given.data, setting), hpcsgd.init(groups=GROUPS)
    rows = [
        train(setting, text, Training(**each), topology) | {"quick": given.quick}
        for each in json.loads(given.trainings)
    ]
    if topology.rank == 0:
        given.out.write_text(json.dumps(rows))


def train(setting: Setting, text: Text, training: Training, topology: hpcsgd.Topology) -> dict[str, Any]:
    row = asdict(training) | Group(setting, text, training, topology).train()
    if topology.rank == 0:
        settings, found = dict(training.settings), f"{row['held_out_loss']:.4f} in {row['seconds']:.1f} s"
        print(
            f"{training.who}, {settings}, seed {training.seed}, share {training.share}: {found}", flush=True
        )
    return row


if __name__ == "__main__":
    main()
