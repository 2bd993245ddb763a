"""The OSU micro-benchmarks, if their programs are in PATH: they show what the MPI library can do."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping

from harness import mpiexec, programs

PROGRAMS: Mapping[str, tuple[str, bool]] = {
    "allgather": ("osu_allgather", True),
    "allgatherv": ("osu_allgatherv", True),
    "allreduce": ("osu_allreduce", False),
    "alltoall": ("osu_alltoall", True),
    "bcast": ("osu_bcast", False),
    "reduce_scatter": ("osu_reduce_scatter", False),
}
"""The programs, and whether the size that each reports is that of a rank's part instead of the whole."""
LINE = re.compile(r"^\s*(\d+)\s+([\d.]+)", re.MULTILINE)
TIMEOUT = 120


def seconds(n: int, largest: int) -> dict[str, dict[int, float]]:
    """Return the seconds of each operation by the bytes of the whole, on `n` ranks of this host.

    Only operations whose programs are in PATH are included.
    """
    found: dict[str, dict[int, float]] = {}
    for operation, (program, of_part) in PROGRAMS.items():
        if (path := shutil.which(program)) is not None:
            part = n if of_part else 1
            words = [mpiexec(), "-n", str(n), path, "-m", f"4:{max(largest // part, 4)}"]
            printed = programs.run(words, timeout=TIMEOUT).stdout
            found[operation] = {size * part: told for size, told in parsed(printed).items()}
    return found


def parsed(text: str) -> dict[int, float]:
    """Return seconds by size from the output of such a program, which has bytes and microseconds."""
    return {int(size): 1e-6 * float(told) for size, told in LINE.findall(text)}


def nearest(known: Mapping[int, float], nbytes: int) -> float | None:
    """Return the seconds at the nearest size that is within a tenth of `nbytes`."""
    near = [size for size in known if abs(size - nbytes) <= 0.1 * nbytes]
    return known[min(near, key=lambda size: abs(size - nbytes))] if near else None
