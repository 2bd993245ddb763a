"""Figures in docs/torchrun.md about the ends of jobs."""

from __future__ import annotations

from website.measured.results import row, rows, table

FAULTS = {
    "is killed": "kill",
    "raises an exception": "raise",
    "calls `sys.exit(3)`": "exit",
    "hangs; the others wait 5 s": "hang",
    "stops with 75, as all others do": "stop",
}
SOON = 10
LAUNCHERS = ("mpiexec", "torchrun", "srun, MPI", "srun, without MPI")


def endings() -> str:
    return table(
        [words, *(ending(launcher, fault) for launcher in LAUNCHERS)] for words, fault in FAULTS.items()
    )


def soon() -> str:
    """Return the limit that no end after a failure exceeds."""
    failed = [each for each in rows("endings") if each["fault"] in ("kill", "raise", "exit")]
    assert max(each["slowest"] for each in failed) < SOON
    return f"If one rank fails, is killed or exits, all end within {SOON} s"


def ending(launcher: str, fault: str) -> str:
    """Return the median of the seconds to the end of the launcher, and its exit codes."""
    found = row("endings", launcher=launcher, fault=fault)
    return f"{found['seconds']['median']:.1f} s, {' or '.join(map(str, found['codes']))}"
