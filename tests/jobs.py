"""Whole runs by `mpiexec -n N python -m hpcsgd train`, in separate folders, which tests kill and resume."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import programs
from pythons import python

PATIENCE = 120.0  # seconds; the machine may be busy

MODEL = r'''
import os
import time
from pathlib import Path

from torch import nn

from hpcsgd.data import crop_and_flip

RANK = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
LAST = float(os.environ.get("WAIT_AFTER", "inf"))


class Slow(nn.Module):
    """A layer that slows down steps, and that waits for an interruption after `LAST` training steps."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x):
        if self.training:
            time.sleep(float(os.environ.get("SECONDS_PER_STEP", "0")))
            self.steps += 1
            if self.steps > LAST:
                Path(f"waiting-{RANK}").touch()
            while self.steps > LAST and not Path("interrupted").exists():
                time.sleep(0.02)
        return x


def build():
    Path(f"pid-{RANK}").write_text(str(os.getpid()))
    convolution = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    return nn.Sequential(Slow(), convolution, nn.Flatten(), nn.Dropout(0.3), nn.Linear(216, 10))


def watched(x, generator):
    """`crop_and_flip`, writing down which samples came by."""
    with open(f"seen-{RANK}", "a") as file:
        file.writelines(row.numpy().tobytes().hex() + "\n" for row in x)
    return crop_and_flip(x, generator)
'''

JOB = """
seed = 3

[parallel]
groups = 2

[data]
path = "digits.h5"
group_batch_size = 64
transform = "net:watched"

[model]
name = "net:build"

[optimizer]
name = "SGD"
lr = 0.05
arguments = { momentum = 0.9, weight_decay = 1e-4 }

[lr_schedule]
warmup_epochs = 1.5
name = "MultiStepLR"
arguments = { milestones = [15, 25], gamma = 0.5 }
interval = "step"

[method]
name = "hierarchical"
sync_every = 4

[training]
epochs = 3
log_every = 1
"""


class Runs:
    """A folder with a job file and its model, in which runs of the job start. Tests add `digits.h5`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "net.py").write_text(MODEL)
        (folder / "job.toml").write_text(JOB)

    def train(
        self, run: str, *options: str, n: int = 4, code: int = 0, expect: str = "", **environment: str
    ) -> str:
        """Train with the output folder `run`, require the exit code `code`, and return the output."""
        output = finish(self._start(run, *options, n=n, **environment), code)
        assert expect in output, output
        return output

    def interrupted(
        self,
        run: str,
        *options: str,
        after: int,
        by: Callable[[list[int]], Any],
        code: int | None = None,
        pace: float = 0,
    ) -> str:
        """Start a run, interrupt it in the step after step `after`, and return its output.

        Args:
            run: The output folder.
            *options: Further options of the command.
            after: The number of completed steps, including those of earlier runs in the folder.
            by: The interruption: a function of the process ids of the ranks.
            code: The exit code to require. None requires any other than 0.
            pace: The seconds of a step. Some tests need slow steps, because ranks agree every second whether
                to continue.
        """
        told = self.folder / "interrupted"
        told.unlink(missing_ok=True)
        wait_after = str(after - self.step(run))
        process = self._start(run, *options, n=4, SECONDS_PER_STEP=str(pace), WAIT_AFTER=wait_after)
        wait_until(lambda: len([*self.folder.glob("waiting-*")]) == 4, process)
        by([int((self.folder / f"pid-{rank}").read_text()) for rank in range(4)])
        told.touch()
        return finish(process, code)

    def step(self, run: str) -> int:
        """Return the last step in the metrics of a run, or 0 if there are none."""
        path = self.folder / run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        return json.loads(whole[-1])["step"] if whole else 0

    def seen(self) -> list[str]:
        """Return the samples that the latest run trained on, as hexadecimal numbers."""
        return "".join(path.read_text() for path in self.folder.glob("seen-*")).split()

    def copy(self, run: str, name: str) -> str:
        shutil.copytree(self.folder / run, self.folder / name)
        return name

    def model(self, run: str) -> dict[str, Tensor]:
        return torch.load(self.folder / run / "model.pt")

    def records(self, run: str) -> list[dict[str, Any]]:
        """Return the metrics of a run, without the values that depend on the time."""
        lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        timed = {"seconds", "samples_per_s", "tokens_per_s", "utilization", "phase_seconds"}
        records = [{k: v for k, v in json.loads(line).items() if k not in timed} for line in lines]
        for record in records:
            record.get("phase_bytes", {}).pop("stopping", None)  # how often ranks send these depends on time
        # The record of a step is written once all ranks have made it, maybe after the next synchronization.
        return sorted(records, key=lambda record: (record["step"], record["kind"]))

    def checkpoints(self, run: str) -> list[str]:
        return sorted(path.name for path in (self.folder / run / "checkpoints").iterdir())

    def _start(self, run: str, *options: str, n: int, **environment: str) -> programs.Running:
        for kind in ("pid", "seen", "waiting"):
            for left in self.folder.glob(f"{kind}-*"):
                left.unlink()
        train = python("-m", "hpcsgd", "train", "job.toml", *options, "--run.output_dir", run)
        return programs.start(
            [programs.mpiexec(), "-n", str(n), *train],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stderr=programs.STDOUT,
        )


def finish(process: programs.Running, code: int | None) -> str:
    """Wait for the process to end with exit code `code` and return its output; None is any code but 0."""
    done = programs.finish(process, PATIENCE)
    assert done.returncode != 0 if code is None else done.returncode == code, done.stdout
    return done.stdout


def wait_until(happened: Callable[[], bool], process: programs.Running) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert process.poll() is None, process.communicate()[0]
        if time.monotonic() > deadline:
            process.kill()
            raise TimeoutError("the run does not get there")
        time.sleep(0.02)
