"""Compare the time of training steps over gloo and over MPI, with the same ranks in turn, on one host.

python benchmarks/backends.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
from pathlib import Path

from harness import Goal, Run, Spread, mpiexec, print_table, start

RANKS = 4
RATIO = 1.5
"""Goal: seconds of a step over gloo divided by those over MPI."""
HEAD = ["model", "groups", "MPI ms/step", "gloo ms/step", "gloo over MPI (quartiles)"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of training steps over gloo and over MPI.")
    parser.add_argument("--quick", action="store_true", help="check within seconds that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    run = Run()
    rounds, steps = (3, 2) if arguments.quick else (16, 8)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        words = ["--out", str(out), "--rounds", str(rounds), "--steps", str(steps)]
        launcher, script = [mpiexec(), "-n", str(RANKS)], Path(__file__).parent / "backends" / "rank.py"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        start(launcher, script, words, 1800, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        rows = json.loads(out.read_text())
    print_table(
        [
            [
                row["model"], row["groups"], f"{1e3 * row['mpi']:.2f}", f"{1e3 * row['gloo']:.2f}",
                str(Spread(**row["ratio"])),
            ]
            for row in rows
        ],
        HEAD,
    )  # fmt: skip
    goals = [Goal(f"{row['model']}, {row['groups']}", row["ratio"]["median"], RATIO) for row in rows]
    run.conclude(rows, goals, arguments.json)


if __name__ == "__main__":
    main()
