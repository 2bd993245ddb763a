"""`ensemble.py --round`: compare one synchronization of groups with an MPI allreduce of the same size.

The goal is for MPI over TCP, because groups use TCP, too: each has its own nodes. In the rows "shared" MPI
uses shared memory, as it does within a node. A contestant's seconds are those of the slowest rank.
"limit" is the number of bytes that all ranks together send, divided by the rate of one connection between two
processes.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from ensemble.coordinators import coordinator
from harness import Goal, Spread, mpiexec, print_table, start

SHAPES = ((2, 1), (4, 1), (2, 2), (4, 2))
"""The number of groups, and the number of ranks in each."""
SMALL, RESNET18 = 4_000_000, 45_000_000
OVER = {
    "TCP": {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"},
    "shared": {},
}
HEAD = "P,K,MPI by,MB,synchronization ms,MPI allreduce ms,our allreduce ms,commit ms,ratio,limit ms"


def rounds(quick: bool) -> tuple[list[dict[str, Any]], list[Goal]]:
    sizes, times, over = ([SMALL], 5, ["TCP"]) if quick else ([SMALL, RESNET18], 15, list(OVER))
    rows: list[dict[str, Any]] = []
    for by in over:
        for P, K in SHAPES[: 3 if quick else None]:
            rows += [{"mpi_by": by, **row} for row in _measure(P, K, by, sizes, times)]
    print("ratio: synchronization over MPI allreduce + commit, median (quartiles) of interleaved rounds")
    print_table(map(_cells, rows), HEAD.split(","))
    return rows, _goals(rows)


def limit(row: dict[str, Any]) -> float:
    """Return the seconds that the ring between groups and the exchange inside groups need at least."""
    P, K = row["P"], row["K"]
    return (2 * (P - 1) + P * (K - 1)) * row["bytes"] / row["flow_bytes_per_s"]


def _measure(P: int, K: int, by: str, sizes: list[int], times: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, coordinator(P, Path(folder) / "run") as invited:
        out = Path(folder) / "rows.json"
        arguments = ["--out", str(out), "--groups", str(P), "--rounds", str(times), *invited]
        arguments += ["--bytes", *map(str, sizes)]
        script = Path(__file__).with_name("rounds_rank.py")
        start([mpiexec(), "-n", str(P * K)], script, arguments, timeout=900, **OVER[by])
        return json.loads(out.read_text())


def _goals(rows: list[dict[str, Any]]) -> list[Goal]:
    found = []
    for row in rows:
        if row["mpi_by"] == "TCP":
            what = f"{row['P']} groups of {row['K']}, {row['bytes'] / 1e6:.0f} MB"
            found.append(
                Goal(f"{what}: synchronization over allreduce + commit", row["ratio"]["median"], 1.5)
            )
    commit = next(row for row in rows if (row["P"], row["K"]) == (4, 1))["seconds"]["commit"]["median"]
    return [*found, Goal("ms of a commit of 4 groups", 1e3 * commit, 5.0)]


def _cells(row: dict[str, Any]) -> list[object]:
    def milliseconds(name: str) -> str:
        at = row["seconds"][name]
        return f"{1e3 * at['median']:.1f} ({1e3 * at['low']:.1f}–{1e3 * at['high']:.1f})"

    cells: list[object] = [row["P"], row["K"], row["mpi_by"], f"{row['bytes'] / 1e6:.0f}"]
    cells += [milliseconds(name) for name in ("sync", "mpi", "ours", "commit")]
    return [*cells, Spread(**row["ratio"]), f"{1e3 * limit(row):.1f}"]
