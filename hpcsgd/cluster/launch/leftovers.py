"""Forget killed ranks: `python -m hpcsgd.cluster.launch.leftovers`, on each node of a job that came back.

MPICH names the memory that the ranks of a node share after job and job step, and a job that comes back counts
its steps from zero again. What killed ranks left there holds up the same step of the next start: its ranks
wait for ever, or find too little room, as MPI starts.
"""

from __future__ import annotations

import os
from pathlib import Path

STEPS = 1000
"""Of a start: no group is started more often."""


def clear(job: str, folder: Path = Path("/dev/shm")) -> None:
    """Remove from `folder` what steps of this job left there."""
    ours = {f"mpich_shm_{fnv(f'{job}.{step}')}" for step in range(STEPS)}
    for path in folder.glob("mpich_shm_*"):
        if path.name.rpartition("_")[0] in ours:
            path.unlink(missing_ok=True)


def fnv(text: str) -> str:
    """The hash FNV-1a of 32 bits, in which MPICH writes the name of a job step."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return f"{value:x}"


if __name__ == "__main__":
    clear(os.environ["SLURM_JOB_ID"])
