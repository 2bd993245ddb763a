"""Seconds from a fault of one of four ranks to the end of the launcher, and the launcher's exit code.

    python benchmarks/endings.py [--quick] [--json FILE]

Rank 2 is killed, raises an exception, exits with code 3, or hangs; or all ranks stop with code 75, which asks
a batch script to start the job again. mpiexec and torchrun start the ranks. In an allocation of Slurm of four
tasks, `srun` does so as well, with MPI and without. For a rank that hangs, the others wait 5 seconds, which
are part of the result.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import Goal, Run, Spread, mpiexec, print_table, programs
from harness.launching import python_path

RANKS = "4"
FAULTS = ("kill", "raise", "exit", "hang", "stop")
LIMIT = 10.0
"""Goal: seconds from a fault to the end of the launcher, without the wait for a rank that hangs."""
TIMEOUT = 5.0
"""Seconds for which the others wait for a rank that hangs."""
PATIENCE = 120.0
SCRIPT = Path(__file__).parent / "endings" / "rank.py"


def main() -> None:
    parser = argparse.ArgumentParser(description="How jobs end after a fault of one rank.")
    parser.add_argument("--quick", action="store_true", help="two faults, once")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    run = Run()
    faults, times = (FAULTS[:2], 1) if arguments.quick else (FAULTS, 3)
    rows = [
        measured(name, command, fault, times) for name, command in started_by().items() for fault in faults
    ]
    print_table(
        [[row["launcher"], row["fault"], f"{Spread(**row['seconds'])}", row["codes"]] for row in rows],
        ["launcher", "fault of a rank", "seconds to the end", "exit code"],
    )
    goals = [
        Goal(f"{row['launcher']}, {row['fault']}", row["slowest"], LIMIT + (row["fault"] == "hang") * TIMEOUT)
        for row in rows
    ]
    run.conclude(rows, goals, arguments.json)


def started_by() -> Mapping[str, Sequence[str | Path]]:
    """Return the commands that run the script on four ranks, up to the backend, by name."""
    script = [sys.executable, "-P", SCRIPT]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
    found: dict[str, Sequence[str | Path]] = {
        "mpiexec": [mpiexec(), "-n", RANKS, *script, "mpi"],
        "torchrun": [*torchrun, "--no-python", *script, "gloo"],
    }
    if "SLURM_JOB_ID" in os.environ:
        srun = ["srun", "-n", RANKS]
        found["srun, MPI"] = [*srun, "--mpi=pmi2", *script, "mpi"]
        found["srun, without MPI"] = [*srun, "--mpi=none", *script, "gloo"]
    return found


def measured(name: str, command: Sequence[str | Path], fault: str, times: int) -> dict[str, Any]:
    """Return the seconds and exit codes of `times` jobs."""
    ends = [end(command, fault) for _ in range(times)]
    seconds = [each for each, _ in ends]
    return {
        "launcher": name,
        "fault": fault,
        "seconds": asdict(Spread.of(seconds)),
        "slowest": max(seconds),
        "codes": sorted({code for _, code in ends}),
    }


def end(command: Sequence[str | Path], fault: str) -> tuple[float, int]:
    """Run a job; return the seconds from its fault to the end of the launcher, and the launcher's exit code.

    Both moments are the times of files, because they are of different processes.
    """
    of_slurm = command[0] == "srun"  # mpiexec in an allocation would let srun start its ranks
    environment = {k: v for k, v in os.environ.items() if of_slurm or not k.startswith("SLURM_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    with tempfile.TemporaryDirectory() as folder:
        begun, ended = Path(folder) / "fault", Path(folder) / "end"
        job = [*command, fault, begun, str(TIMEOUT)]
        done = programs.run(job, timeout=PATIENCE, check=False, env=environment)
        ended.touch()
        if not begun.exists():
            raise SystemExit(f"{job}: no rank got to its fault\n{done.stdout}{done.stderr}")
        return ended.stat().st_mtime - begun.stat().st_mtime, done.returncode


if __name__ == "__main__":
    main()
