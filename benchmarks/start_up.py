"""The start of four ranks from a packed and from an unpacked environment: opened files and seconds.

    python benchmarks/start_up.py [--quick] [--cold] [--environment FOLDER] [--ranks N] [--json FILE]

Each start runs `mpiexec -n 4 hpcsgd train` for one step on a few digits, from beginning to end. FOLDER is a
virtual environment with hpcsgd, by default the one that runs this benchmark. It represents an environment on
a shared file system. strace counts a rank's system calls on files below FOLDER, on files of the interpreter
that it was made from, and on the pack. On a shared file system each of these calls is a message to a server,
which all ranks of all nodes ask at once. Here the local disk answers, so the seconds show only whether
anything is lost.

"packed, first" unpacks the environment on the node; "packed" finds it there. With --cold the kernel's caches
are dropped before each start, for all users of this machine; this needs root.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Goal, Run, Spread, WallClock, mpiexec, print_table, programs
from hpcsgd.cluster.environment import ask, pack
from hpcsgd.data import convert

JOB = """
[data]
path = "digits.h5"
group_batch_size = 64
[model]
name = "mlp"
arguments = { inputs = 64, classes = 10 }
[optimizer]
lr = 0.1
[method]
name = "hierarchical"
sync_every = 2
[training]
steps = 1
"""
OPENS_FROM_A_PACK = 30
"""Goal for the opened files of a rank, in the mean."""
CACHES = Path("/proc/sys/vm/drop_caches")
TIMEOUT = 900.0


@dataclass(frozen=True)
class Starts:
    """Starts of `ranks` ranks, in a folder with the job."""

    folder: Path
    ranks: int
    shared: tuple[str, ...]
    """Paths that represent the shared file system."""

    def seconds(self, python: Path) -> float:
        clock = WallClock()
        self._start([python])
        return clock.stop()

    def asked(self, python: Path) -> tuple[float, float]:
        """Return the opens and other calls of a rank, in the mean."""
        traces = self.folder / "traces"
        traces.mkdir()
        trace = f'exec strace -f -qq -e trace=%file -o {traces}/"$PMI_RANK" "$@"'
        self._start(["sh", "-c", trace, "sh", python])
        opens = others = 0
        for path in traces.iterdir():
            for line in path.read_text(errors="replace").splitlines():
                found = re.search(r"(\w+)\([^\"]*\"([^\"]*)\"", line)
                if found is not None and found[2].startswith(self.shared):
                    opens, others = opens + ("open" in found[1]), others + ("open" not in found[1])
        shutil.rmtree(traces)
        return opens / self.ranks, others / self.ranks

    def _start(self, command: list[Path | str]) -> None:
        program = [
            *command,
            "-m",
            "hpcsgd",
            "train",
            "job.toml",
            "--parallel.groups",
            "1",
            "--run.output_dir",
            "run",
        ]
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [mpiexec(), "-n", str(self.ranks), *program]
        programs.run(command, cwd=self.folder, env=own | {"OMP_NUM_THREADS": "1"}, timeout=TIMEOUT)
        shutil.rmtree(self.folder / "run")


def drop_caches() -> None:
    os.sync()
    try:
        CACHES.write_text("3\n")
    except OSError as error:
        raise SystemExit(f"--cold: {error}") from error


def measured(environment: Path, ranks: int, rounds: int, cold: bool) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="start-up-") as name:
        folder = Path(name)
        convert("digits", None, folder / "digits.h5")
        (folder / "job.toml").write_text(JOB)
        found = ask(environment)
        clock = WallClock()
        packed = pack(found, folder / "env.pack", str(folder))
        yield {
            "who": "packing",
            "seconds": [clock.stop()],
            "bytes": packed.bytes,
            "files": packed.files,
        }
        shared = {environment, environment.resolve(), found.base, *found.sources, packed.file}
        starts = Starts(folder, ranks, tuple(map(str, shared)))
        there = folder / f"hpcsgd-{os.getuid()}"
        pythons = {
            "unpacked": environment / "bin" / "python",
            "packed, first": packed.file,
            "packed": packed.file,
        }
        seconds: dict[str, list[float]] = {who: [] for who in pythons}
        for _ in range(rounds):
            for who, python in pythons.items():
                if who == "packed, first":
                    shutil.rmtree(there, ignore_errors=True)
                if cold:
                    drop_caches()
                seconds[who].append(starts.seconds(python))
        for who, python in pythons.items():
            asked: tuple[float, float] | None = None
            if shutil.which("strace") is not None:
                if who == "packed, first":
                    shutil.rmtree(there, ignore_errors=True)
                asked = starts.asked(python)
            opens, others = asked or (None, None)
            yield {"who": who, "seconds": seconds[who], "opens": opens, "others": others}


def cells(row: dict[str, Any]) -> list[object]:
    spread = Spread.of(row["seconds"])
    counts = ["" if row.get(name) is None else f"{row[name]:,.0f}" for name in ("opens", "others", "files")]
    return [row["who"], f"{spread.median:.1f} ({spread.low:.1f}–{spread.high:.1f})", *counts]


def goals(rows: dict[str, dict[str, Any]]) -> list[Goal]:
    if rows["packed"]["opens"] is None:
        print("no strace: opens were not counted")
        return []
    return [
        Goal(f"opens of a rank, {who}", rows[who]["opens"], OPENS_FROM_A_PACK)
        for who in ("packed, first", "packed")
    ]


HEAD = ["start", "s (quartiles)", "opens of a rank", "other calls", "files"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Starts from a packed and from an unpacked environment.")
    parser.add_argument("--quick", action="store_true", help="make only one start of each")
    parser.add_argument("--cold", action="store_true", help="drop the kernel's caches before each start")
    parser.add_argument("--environment", type=Path, default=Path(sys.prefix))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    run = Run()
    rounds = 1 if arguments.quick else 5
    rows = list(measured(arguments.environment.absolute(), arguments.ranks, rounds, arguments.cold))
    print_table(map(cells, rows), HEAD)
    setting = {"ranks": arguments.ranks, "cold": arguments.cold}
    run.conclude(rows, goals({row["who"]: row for row in rows}), arguments.json, setting)


if __name__ == "__main__":
    main()
