"""Whole runs by `mpiexec -n N python -m hpcsgd train`, in a folder of their own, to be killed and resumed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MPIEXEC = shutil.which(
    "mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
)
PATIENCE = 60.0  # seconds; the machine may be busy

MODEL = r'''
import os
import time
from pathlib import Path

from torch import nn

RANK = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"


class Slow(nn.Module):
    """Gives whoever watches the run time to interrupt it."""

    def forward(self, x):
        if self.training:
            time.sleep(float(os.environ.get("SECONDS_PER_STEP", "0")))
        return x


def build():
    Path(f"pid-{RANK}").write_text(str(os.getpid()))
    convolution = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    return nn.Sequential(Slow(), convolution, nn.Flatten(), nn.Dropout(0.3), nn.Linear(216, 10))


def watched(x, generator):
    """Changes nothing and writes down which samples came by."""
    with open(f"seen-{RANK}", "a") as file:
        file.writelines(row.numpy().tobytes().hex() + "\n" for row in x)
    return x
'''

JOB = """
seed = 3

[job]
groups = 2

[data]
store = "{store}"
batch_size = 64
transform = "crop_and_flip"

[model]
build = "net:build"

[optimizer]
build = "SGD"
lr = 0.05
arguments = {{ momentum = 0.9, weight_decay = 1e-4 }}

[schedule]
warmup_epochs = 1.5
build = "MultiStepLR"
arguments = {{ milestones = [15, 25], gamma = 0.5 }}
per = "step"

[method]
name = "hierarchical"
every = 4

[training]
epochs = 3
log_every = 1
"""


class Runs:
    """A folder with a job file and a model, where runs of the job are started."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.folder = folder
        (folder / "net.py").write_text(MODEL)
        (folder / "job.toml").write_text(JOB.format(store=store))

    def train(
        self, run: str, *options: str, n: int = 4, code: int | None = 0, expect: str = "", **environment: str
    ) -> str:
        """Train to the end in the run folder `run`; what it printed, both streams."""
        process = self.start(run, *options, n=n, **environment)
        return finish(process, code, expect)

    def start(self, run: str, *options: str, n: int = 4, **environment: str) -> subprocess.Popen[str]:
        for old in self.folder.glob("pid-*"):
            old.unlink()
        assert MPIEXEC is not None
        words = [MPIEXEC, "-n", str(n), sys.executable, "-m", "hpcsgd", "train", "job.toml", *options]
        return subprocess.Popen(
            [*words, "--run.folder", run],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def interrupted(
        self, run: str, *options: str, after: int, by: Callable[[list[int]], Any], code: int | None = None
    ) -> str:
        """Start a run slowly; once it has done `after` steps, do something to its ranks, given as process ids."""
        process = self.start(run, *options, SECONDS_PER_STEP="0.05")
        wait_until(lambda: self.step(run) >= after, process)
        by([int((self.folder / f"pid-{rank}").read_text()) for rank in range(4)])
        return finish(process, code)

    def step(self, run: str) -> int:
        """The last step that its metrics tell of."""
        path = self.folder / run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        return json.loads(whole[-1])["step"] if whole else 0

    def model(self, run: str) -> dict[str, Tensor]:
        return torch.load(self.folder / run / "model.pt")

    def records(self, run: str) -> list[dict[str, Any]]:
        """What was measured, without what depends on the time."""
        lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        timed = {"seconds", "samples_per_s", "phase_seconds"}
        records = [{k: v for k, v in json.loads(line).items() if k not in timed} for line in lines]
        for record in records:
            record.get("phase_bytes", {}).pop("stopping", None)  # asked about as often as time allows
        return records

    def checkpoints(self, run: str) -> list[Path]:
        """The newest last."""
        return sorted((self.folder / run / "checkpoints").glob("step-*"))


def finish(process: subprocess.Popen[str], code: int | None, expect: str = "") -> str:
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode != 0 if code is None else process.returncode == code, output
    assert expect in output, output
    return output


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.02)
