"""`hpcsgd train` as users start it, and a small dataset file for it."""

from __future__ import annotations

import gzip
import os
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import programs
from hpcsgd.data import convert
from pythons import python

HPCSGD = [sys.executable, "-m", "hpcsgd"]
# Prefixes of variables that the launcher of these tests may have set.
LAUNCHERS = ("PMI_", "PMIX_", "MPI_LOCAL", "OMPI_", "SLURM_", "HYDRA_", "PALS_", "FLUX_", "PBS_")
PERMISSIONS = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
"""Variables that only allow root to start jobs of Open MPI; no launcher sets them."""

JOB = """\
[data]
path = "small.h5"
group_batch_size = 16
[model]
name = "mlp"
arguments = { inputs = 36, hidden = [8] }
[optimizer]
lr = 0.1
[method]
name = "hierarchical"
sync_every = 2
[training]
epochs = 1
log_every = 1
"""


@dataclass(frozen=True)
class Ended:
    """The result of a launch."""

    code: int
    out: str
    err: str

    @property
    def messages(self) -> list[str]:
        """The lines of stderr that hpcsgd itself has written."""
        return [line for line in self.err.splitlines() if line.startswith("hpcsgd: ")]


def make_store(path: Path, train: int = 48, test: int = 20) -> Path:
    """Write a dataset file of images of 6 x 6 pixels, whose ten classes are easy to distinguish."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for prefix, count in (("train", train), ("t10k", test)):
            labels = np.arange(count, dtype=np.uint8) % 10
            images = np.random.default_rng(count).integers(0, 60, (count, 6, 6), dtype=np.uint8)
            images.reshape(count, 36)[np.arange(count), labels * 3] = 255
            (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(_idx(images)))
            (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(_idx(labels)))
        convert("mnist", folder, path)
    return path


def _idx(values: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def launch(folder: Path, *words: str, n: int = 0, **environment: str) -> Ended:
    """Run `hpcsgd` with these words in `folder`, on `n` ranks or, for 0, without a launcher."""
    launcher = [] if n == 0 else [programs.mpiexec(), "-n", str(n)]
    return ended(start(folder, [*launcher, *hpcsgd(*words)], **environment))


def hpcsgd(*words: str) -> list[str]:
    """Return the command for a process that already has torch; `HPCSGD` starts an empty one."""
    return python("-m", "hpcsgd", *words)


def start(folder: Path, command: list[str], **environment: str) -> programs.Running:
    return programs.start(command, cwd=folder, env=unlaunched(**environment))


def unlaunched(**more: str) -> dict[str, str]:
    """Return the environment with `more`, without variables of an outer launcher or batch system."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name in PERMISSIONS or not name.startswith(LAUNCHERS)
    }
    return {**own, "OMP_NUM_THREADS": "1", **more}


def ended(process: programs.Running) -> Ended:
    """Wait for the end of what `start` returned, and return the result."""
    done = programs.finish(process)
    return Ended(done.returncode, done.stdout, done.stderr)
