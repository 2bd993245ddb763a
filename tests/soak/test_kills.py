"""Real jobs of four ranks, one of which is killed at a random moment.

After they are resumed to the end, they must have the same bits as an uninterrupted job, and leave no files
behind.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import programs
from hpcsgd.data import convert
from jobs import JOB, MODEL, PATIENCE, finish
from pythons import python
from soak.conftest import Seeds

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

KILLS = 10
"""The number of cases for each family."""
RANKS = 4
DEFT = '{ name = "sparse", sparsifier = { name = "deft", density = 0.1 } }'
FAMILIES = {
    "bsp": '{ name = "bsp" }',
    "hierarchical": '{ name = "hierarchical", sync_every = 4 }',
    "selsync": '{ name = "selsync", delta = 0.3 }',
    "diloco": '{ name = "diloco", sync_every = 4 }',
    "delayed": '{ name = "delayed", sync_delay = 2, method = { name = "diloco", sync_every = 4 } }',
    "sgp": '{ name = "sgp" }',
    "osgp": '{ name = "osgp", overlap_steps = 1 }',
    "deft": f'{{ name = "hierarchical", sync_every = 4, grad_reduce = {DEFT} }}',
    "adacomm": '{ name = "adacomm", initial_sync_every = 4, adapt_every = 8 }',
}
SCRIPT = """
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hpcsgd

topology = hpcsgd.init(groups=2)
Path(f"pid-{topology.rank}").write_text(str(os.getpid()))
torch.manual_seed(0)
data = TensorDataset(torch.randn(203, 8), torch.randint(0, 3, (203,)))
torch.manual_seed(topology.rank)
loader = hpcsgd.Loader(data, 8, hpcsgd.Sampler(data, topology))
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.diloco(sync_every=3))
given = {"loader": loader, "scheduler": scheduler}
state = hpcsgd.load("checkpoints", optimizer, **given, losses=[])
losses = state["losses"]
for epoch in range(loader.epoch, 6):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if optimizer.t % 5 == 0:
            hpcsgd.save("checkpoints", optimizer, **given, losses=losses)
    scheduler.step()
    hpcsgd.save("checkpoints", optimizer, **given, losses=losses)
assert len(losses) == optimizer.t
with optimizer.averaged_model():
    if topology.rank == 0:
        torch.save({**model.state_dict(), "losses": torch.tensor(losses)}, "model.pt")
"""


class Job:
    """A job that can be started repeatedly in its own folder."""

    def __init__(self, folder: Path, words: Callable[[bool], list[str]], run: Path) -> None:
        self.folder, self._words, self._run = folder, words, run

    def ends(self, chance: random.Random | None, within: float, *, resumed: bool) -> bool:
        """Start the job, and return True if it ended before a rank was killed.

        `chance` selects the rank and the moment, at most `within` seconds after the rank's start; `None`: no
        kill.
        """
        for left in self.folder.glob("pid-*"):
            left.unlink()
        process = programs.start(
            [programs.mpiexec(), "-n", str(RANKS), *python(*self._words(resumed))],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=programs.STDOUT,
        )
        if chance is None:
            finish(process, 0)
            return True
        victim = self.folder / f"pid-{chance.randrange(RANKS)}"
        moment = None
        while process.poll() is None:
            if moment is None and victim.exists() and victim.read_text():
                moment = time.monotonic() + chance.uniform(0, within)
            if moment is not None and time.monotonic() > moment:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(victim.read_text()), signal.SIGKILL)
                break
            time.sleep(0.005)
        process.wait(PATIENCE)
        killed = process.returncode != 0
        finish(process, None if killed else 0)
        return not killed

    @property
    def model(self) -> dict[str, torch.Tensor]:
        return torch.load(self._run / "model.pt")

    def left(self) -> list[str]:
        """Return the files that must not exist after the end."""
        return [p.name for p in self._run.rglob("*") if p.name.startswith(".") or p.suffix == ".part"]

    def checkpoints(self) -> int:
        return len([*(self._run / "checkpoints").iterdir()])


def of_run(folder: Path, family: str) -> Job:
    (folder / "net.py").write_text(MODEL)
    (folder / "job.toml").write_text(JOB)
    train = [
        "-m",
        "hpcsgd",
        "train",
        "job.toml",
        "--run.output_dir",
        "run",
        "--training.checkpoint_every_steps",
        "3",
    ]
    method = ["--method", FAMILIES[family]]
    return Job(folder, lambda resumed: [*train, *method, *["--resume"][:resumed]], folder / "run")


def of_script(folder: Path) -> Job:
    (folder / "script.py").write_text(SCRIPT)
    return Job(folder, lambda _: ["script.py"], folder)


@pytest.mark.parametrize("family", [*FAMILIES, "script"])
def test_jobs_that_are_killed_go_on_to_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, seeds: Seeds, family: str
) -> None:
    pytest.importorskip("sklearn")
    data = tmp_path_factory.mktemp("data") / "digits.h5"
    convert("digits", None, data)

    def new() -> Job:
        folder = tmp_path_factory.mktemp(family)
        shutil.copy(data, folder)
        return of_script(folder) if family == "script" else of_run(folder, family)

    whole = new()
    begun = time.monotonic()
    whole.ends(None, 0, resumed=False)
    seconds, expected = time.monotonic() - begun, whole.model

    def case(seed: int) -> None:
        job, chance, resumed = new(), random.Random(seed), False
        for _ in range(chance.choice([1, 1, 2])):
            if job.ends(chance, seconds, resumed=resumed):
                break
            resumed = True
        else:
            job.ends(None, 0, resumed=True)
        assert job.model.keys() == expected.keys()
        for name, value in job.model.items():
            assert torch.equal(value, expected[name]), name
        assert job.left() == []
        assert job.checkpoints() == 2
        shutil.rmtree(job.folder)

    seeds.each(KILLS, case)
