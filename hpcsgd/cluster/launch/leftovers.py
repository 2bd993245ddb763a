"""Remove shared memory of killed ranks: `python -m hpcsgd.cluster.launch.leftovers`, on each node.

MPICH names the memory that ranks of a node share after the job and its step, and a restarted job counts its
steps from zero again. Memory that killed ranks have left blocks the same step of the next start: when MPI
starts, the step's ranks wait forever, or find too little memory.
"""

from __future__ import annotations

import os
from pathlib import Path

STEPS = 1000
"""The number of job steps to clear, which is more than a start of a job ever has."""


def clear(job: str, folder: Path = Path("/dev/shm")) -> None:
    """Remove from `folder` the files that steps of the Slurm job with number `job` have left there."""
    ours = {f"mpich_shm_{fnv(f'{job}.{step}')}" for step in range(STEPS)}
    for path in folder.glob("mpich_shm_*"):
        if path.name.rpartition("_")[0] in ours:
            path.unlink(missing_ok=True)


def fnv(text: str) -> str:
    """Return the 32-bit FNV-1a hash by which MPICH names a job step."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return f"{value:x}"


if __name__ == "__main__":
    clear(os.environ["SLURM_JOB_ID"])
