"""The contestants: how each is started and restarted, and how many useful samples it has trained on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from goodput.network import CLASSES, INPUTS, PASSES
from goodput.processes import RANK, at_work, rank_of
from goodput.settings import Setting
from goodput.useful import of_groups, of_one_job, of_replicas
from harness import mpiexec, programs
from harness.launching import python_path
from hpcsgd.checkpoint.folder import titles
from hpcsgd.data.convert import convert_npz
from hpcsgd.elastic import event_log
from hpcsgd.report.metrics import read

HERE = Path(__file__).parent
FOREVER = "1000000"
GROUPS, SYNC, DDP, TORCHFT = "elastic groups", "one job", "DDP", "torchft LocalSGD"


class Contestant(Protocol):
    """A contestant, which runs in its own folder."""

    def start(self) -> None: ...

    def keep(self) -> None:
        """Restart the processes that have died. This is called again and again."""
        ...

    def useful(self) -> int:
        """Return the useful samples until now, as `goodput.useful` defines them; 0 before the first step."""
        ...

    def back(self) -> list[float]:
        """Return the times at which processes began to take part, after a restart or at the first start."""
        ...


class Groups:
    """Groups of `hpcsgd launch`, which restarts dead groups itself."""

    def __init__(self, folder: Path, setting: Setting, checkpoint_steps: int) -> None:
        self._folder, self._setting = folder, setting
        write_job(
            folder, setting, f'{{ name = "ensemble_sync", sync_every = {setting.every} }}', checkpoint_steps
        )

    def start(self) -> None:
        shape = ["--groups", str(self._setting.P), "--group-size", str(self._setting.K)]
        start(self._folder, [*hpcsgd("launch"), *shape, "--max-restarts", FOREVER])

    def keep(self) -> None:
        pass

    def useful(self) -> int:
        return of_groups(self._events(), self._setting.batch)

    def back(self) -> list[float]:
        return [e["unix"] for e in self._events() if e["event"] == "generation" and e["newcomers"]]

    def _events(self) -> list[event_log.Event]:
        path = self._folder / "run" / event_log.NAME
        return event_log.read(path) if path.exists() else []


class OneJob:
    """A synchronous job, `mpiexec hpcsgd train`.

    When it has ended, it is restarted at once with `--resume`, as by a batch system without a queue.
    """

    def __init__(self, folder: Path, setting: Setting, checkpoint_steps: int) -> None:
        self._folder, self._setting = folder, setting
        write_job(folder, setting, '{ name = "bsp" }', checkpoint_steps)
        self._process: programs.Program | None = None

    def start(self) -> None:
        words = [mpiexec(), "-n", str(self._setting.ranks), *hpcsgd("train")]
        resume = ["--resume"] if (self._folder / "run").exists() else []
        self._process = start(self._folder, [*words, "--parallel.groups", str(self._setting.P), *resume])

    def keep(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self.start()

    def useful(self) -> int:
        run = self._folder / "run"
        steps = (
            [r["step"] for r in read(run / "metrics.jsonl") if r["kind"] == "step"] if self._has(run) else []
        )
        saved = [int(title.rpartition("-")[2]) for title in titles(run / "checkpoints")]
        told = [("saved", max(saved, default=0)), ("made", max(steps, default=0))]
        return of_one_job([told], at_work=trains(self._folder), batch=self._setting.P * self._setting.batch)

    def back(self) -> list[float]:
        return first_passes(self._folder)

    def _has(self, run: Path) -> bool:
        return (run / "metrics.jsonl").exists()


class TorchElastic:
    """DistributedDataParallel under `torch.distributed.run`, which restarts all ranks if one dies."""

    def __init__(self, folder: Path, setting: Setting, checkpoint_steps: int) -> None:
        self._folder, self._setting, self._every = folder, setting, checkpoint_steps

    def start(self) -> None:
        agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1"]
        shape = ["--nproc-per-node", str(self._setting.ranks), "--max-restarts", FOREVER]
        batch = self._setting.batch // self._setting.K
        words = [
            "--seconds",
            str(self._setting.seconds),
            "--batch",
            str(batch),
            "--save-every",
            str(self._every),
        ]
        start(self._folder, [*agent, *shape, str(HERE / "ddp_rank.py"), *words])

    def keep(self) -> None:
        pass

    def useful(self) -> int:
        lives: list[list[tuple[str, int]]] = []
        for record in told(self._folder / "told.jsonl"):
            if record["what"] == "begins":
                lives.append([])
            lives[-1].append((record["what"], record["t"]))
        samples = self._setting.P * self._setting.batch
        return of_one_job(lives, at_work=trains(self._folder), batch=samples)

    def back(self) -> list[float]:
        return first_passes(self._folder)


class FaultTolerant:
    """torchft's LocalSGD and its lighthouse. Dead replicas are restarted at once."""

    def __init__(self, folder: Path, setting: Setting, checkpoint_steps: int) -> None:
        tried = [sys.executable, "-P", "-c", "import torchft"]
        done = programs.run(tried, timeout=600, check=False)
        if done.returncode != 0:
            raise NotHere(f"{TORCHFT}: this Python cannot import torchft: {done.stderr.splitlines()[-1]}")
        if setting.K > 1:
            raise NotHere(f"{TORCHFT}: replicas of one rank only, groups have {setting.K}")
        self._folder, self._setting = folder, setting
        self._replicas: dict[int, programs.Program] = {}

    def start(self) -> None:
        command = [sys.executable, "-P", HERE / "torchft_lighthouse.py"]
        lighthouse = programs.start(
            command, cwd=self._folder, env=environment(self._folder), stdout=programs.PIPE
        )
        assert lighthouse.stdout is not None
        self._address = lighthouse.stdout.readline().strip()
        for replica in range(self._setting.P):
            self._start(replica)

    def keep(self) -> None:
        for replica, process in self._replicas.items():
            if process.poll() is not None:
                self._start(replica)

    def useful(self) -> int:
        syncs = [
            (record["before"], record["after"])
            for path in self._folder.glob("told-*.jsonl")
            for record in told(path)
        ]
        return of_replicas(syncs, self._setting.batch, self._setting.every)

    def back(self) -> list[float]:
        return first_passes(self._folder)

    def _start(self, replica: int) -> None:
        s = self._setting
        words = ["--lighthouse", self._address, "--seconds", str(s.seconds), "--batch", str(s.batch)]
        script = [sys.executable, "-P", str(HERE / "torchft_rank.py"), "--every", str(s.every)]
        self._replicas[replica] = start(self._folder, [*script, *words], **{RANK: str(replica)})


class NotHere(Exception):
    """A contestant cannot take part; the text says why."""


CONTESTANTS = {GROUPS: Groups, SYNC: OneJob, DDP: TorchElastic, TORCHFT: FaultTolerant}


def write_job(folder: Path, setting: Setting, method: str, checkpoint_steps: int) -> None:
    chance = np.random.default_rng(1)
    x = chance.random((setting.samples, INPUTS), np.float32)
    np.savez(folder / "train.npz", x=x, y=np.arange(setting.samples) % CLASSES)
    np.savez(folder / "test.npz", x=x[:CLASSES], y=np.arange(CLASSES))
    convert_npz([folder / "train.npz", folder / "test.npz"], folder / "small.h5")
    (folder / "job.toml").write_text(f"""
data = {{ path = "small.h5", group_batch_size = {setting.batch} }}
model = {{ name = "goodput.network:Net", arguments = {{ seconds = {setting.seconds} }} }}
optimizer = {{ lr = 0.01 }}
lr_schedule = {{ scaling = "none" }}
method = {method}
run = {{ output_dir = "run" }}
[training]
epochs = {FOREVER}
eval_every_epochs = {FOREVER}
checkpoint_every_steps = {checkpoint_steps}
log_every = 1
""")


def hpcsgd(command: str) -> list[str]:
    return [sys.executable, "-m", "hpcsgd", command, "job.toml"]


def start(folder: Path, words: Sequence[str], **more: str) -> programs.Program:
    with (folder / "printed").open("a") as printed:
        return programs.start(
            words, cwd=folder, env=environment(folder, **more),
            stdout=printed, stderr=printed, start_new_session=True,
        )  # fmt: skip


def environment(folder: Path, **more: str) -> dict[str, str]:
    passes = folder / "passes"
    passes.mkdir(exist_ok=True)
    quiet = {"RUST_LOG": "error", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    paths = {"PYTHONPATH": python_path(), PASSES: str(passes)}
    return {**os.environ, **quiet, "OMP_NUM_THREADS": "1", **paths, **more}


def told(path: Path) -> Iterable[Mapping[str, Any]]:
    """Return the records of a file of JSON lines, without an incomplete last line."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def first_passes(folder: Path) -> list[float]:
    """Return the time at which each process began its first step."""
    passes = [path.read_text().splitlines() for path in (folder / "passes").iterdir()]
    return [float(lines[0]) for lines in passes if lines]


def trains(folder: Path) -> bool:
    """Return True if rank 0 is alive and has begun a step."""
    here = [pid for pid, env in at_work(folder).items() if rank_of(env, 1) == 0]
    return any((folder / "passes" / str(pid)).exists() for pid in here)
