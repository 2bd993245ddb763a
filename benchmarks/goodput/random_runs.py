"""Kill groups at random moments, and judge whether each run was right.

Two to four groups train with the training loop of `hpcsgd train`. A group is a process whose one or two ranks
are threads. Up to five times, one, several or all groups are killed and restarted. The seed and the number of
a run determine it, except that the step at which a kill hits a group depends on the machine's speed. See
random_judge.py for what makes a run right.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from goodput.random_judge import judge
from goodput.witness import CLASSES, INPUTS, LIFE
from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.core.topology import form
from hpcsgd.data.convert import convert_npz
from hpcsgd.elastic import event_log
from hpcsgd.elastic.coordinator import Coordinator
from hpcsgd.elastic.elastic_average import ElasticAverage
from hpcsgd.elastic.journal import REGISTER, FileJournal
from hpcsgd.elastic.register import Phase
from hpcsgd.errors import STOPPED
from hpcsgd.train.run import train
from hpcsgd.train.stopping import Reasons

HERE = "127.0.0.1"
SAMPLES, BATCH, EPOCHS, EVERY, RATE = 60, 4, 6, 2, 0.05
SECONDS = 0.01
"""Seconds of a step."""
BACK = 0.1
"""Seconds from the end of a group's process to its restart."""
HEARTBEAT_TIMEOUT, LIMIT = 30.0, 300.0
LIVES = 12
"""The maximum number of starts of a group, which is more than the number of kills."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Kill:
    """A kill of these groups, `at` seconds after the groups began to train."""

    at: float
    replica_groups: tuple[int, ...]


def played(number: int, seed: int, tell: Callable[[str], object]) -> Row:
    """Play and judge the run with this number; return its row."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # slow the first time; forked processes inherit it
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        store = write_store(folder / "small.h5")
        run = Run(random.Random(f"{seed} {number}"), folder, store)
        run.play()
        told = in_a_fork(lambda: judge(folder, store, BATCH, RATE, run.codes, run.late, run.in_time))
    tell(f"run {number}: {run.story()}: {'; '.join(told['wrong']) or 'right'}")
    return {"part": "random run", "run": number, "seed": seed, "kills": run.killed, **told}


def in_a_fork(judged: Callable[[], Row]) -> Row:
    """Return what `judged` returns in a forked process.

    Groups are forked from this process. If it had computed with torch before, torch might fail in them.
    """
    context = get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=lambda: there.send(judged()))
    process.start()
    there.close()
    told = here.recv()
    process.join()
    return told


class Run:
    """One run of some groups with some kills."""

    def __init__(self, chance: random.Random, folder: Path, store: Path) -> None:
        self._folder, self._token = folder, secrets.token_hex(16)
        self._ranks = [chance.choice([1, 2]) for _ in range(chance.randint(2, 4))]
        everybody = range(len(self._ranks))
        self._plan = sorted(
            (
                Kill(
                    chance.uniform(0, 1.5),
                    tuple(chance.sample(everybody, chance.choice([1, 1, 2, len(everybody)]))),
                )
                for _ in range(chance.randint(1, 5))
            ),
            key=lambda kill: kill.at,
        )
        self._pids: dict[int, int] = {}
        self._lives = [0] * len(self._ranks)
        self._back: dict[int, float] = {}
        self.codes: dict[int, list[int]] = {replica_group: [] for replica_group in everybody}
        """The exit codes of all processes of each group, in order."""
        self.late: set[int] = set()
        """Groups that were not members when the others had finished."""
        self.killed = 0
        self.in_time = True
        (folder / "job.toml").write_text(f"""
seed = {chance.randrange(1000)}
data = {{ path = "{store}", group_batch_size = {BATCH} }}
model = {{ name = "goodput.witness:Net", arguments = {{ seconds = {SECONDS} }} }}
optimizer = {{ lr = {RATE} }}
lr_schedule = {{ scaling = "none" }}
method = {{ name = "goodput.witness:watched", sync_every = {EVERY} }}
run = {{ output_dir = "{folder / "run"}" }}
[training]
epochs = {EPOCHS}
eval_every_epochs = {EPOCHS}
checkpoint_every_steps = {2 * EVERY}
""")

    def story(self) -> str:
        shape = "+".join(map(str, self._ranks))
        return f"groups of {shape}, " + ", ".join(
            f"{kill.replica_groups} at {kill.at:.2f} s" for kill in self._plan
        )

    def play(self) -> None:
        coordinator = self._fork("coordinator", self._coordinate)
        address = self._folder / "address"
        while not address.exists():
            time.sleep(0.005)
        self._address = address.read_text()
        for replica_group in range(len(self._ranks)):
            self._start(replica_group)
        self._go_on()
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.kill(coordinator, signal.SIGKILL)
        os.waitpid(coordinator, 0)

    def _go_on(self) -> None:
        """Kill and restart groups until all have ended by themselves or the time is up."""
        deadline, began, plan = time.monotonic() + LIMIT, None, list(self._plan)
        while self._pids or self._back:
            now = time.monotonic()
            if now > deadline:
                self.in_time = False
                return
            if began is None and (self._folder / REGISTER).exists():
                began = now
            while plan and began is not None and now - began > plan[0].at:
                self._kill(plan.pop(0).replica_groups)
            self._reap(now)
            for replica_group in [replica_group for replica_group, at in self._back.items() if now > at]:
                del self._back[replica_group]
                self._start(replica_group)
            time.sleep(0.005)

    def _kill(self, replica_groups: tuple[int, ...]) -> None:
        for replica_group in replica_groups:
            if replica_group in self._pids:
                os.kill(self._pids[replica_group], signal.SIGKILL)
                self.killed += 1

    def _reap(self, now: float) -> None:
        for replica_group, pid in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[replica_group]
                self.codes[replica_group].append(os.waitstatus_to_exitcode(status))
                if self.codes[replica_group][-1] != 0 and len(self.codes[replica_group]) < LIVES:
                    self._back[replica_group] = now + BACK
                self._end_with_the_training()

    def _end_with_the_training(self) -> None:
        """Once the training is finished, restart no group and kill those that are not members.

        `hpcsgd launch` does the same.
        """
        register = FileJournal(self._folder / REGISTER).load()
        if register.phase is Phase.FINISHED:
            absent = self._pids.keys() - set(register.replica_groups)
            self.late |= absent | self._back.keys()
            self._back.clear()
            for replica_group in absent:
                os.kill(self._pids[replica_group], signal.SIGKILL)

    def _start(self, replica_group: int) -> None:
        self._lives[replica_group] += 1
        life = str(self._lives[replica_group])
        self._pids[replica_group] = self._fork(
            f"{replica_group}-{life}", lambda: self._live(replica_group, life)
        )

    def _fork(self, name: str, body: Callable[[], int]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            os.chdir(self._folder)
            log = os.open(f"log-{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os._exit(body())
        except BaseException:  # noqa: BLE001 - this process must not go on as its parent would
            traceback.print_exc()
            os._exit(1)

    def _coordinate(self) -> int:
        async def serve() -> None:
            at = Coordinator(
                len(self._ranks), self._token, heartbeat_timeout=HEARTBEAT_TIMEOUT, timeout=LIMIT,
                journal=FileJournal(Path(REGISTER)), events=told,
            )  # fmt: skip
            serving = asyncio.create_task(at.serve(HERE))
            while not at.address:
                await asyncio.sleep(0.002)
            Path("address.new").write_text(at.address)
            Path("address.new").rename("address")
            await serving

        with event_log.EventLog(Path(event_log.NAME)) as told:
            asyncio.run(serve())
        return 0

    def _live(self, replica_group: int, life: str) -> int:
        """Run the ranks of a group; return the exit code."""
        os.environ[LIFE] = life
        reasons = Reasons(None, 60.0, asks_scheduler=False)
        ended = threads.run(
            self._ranks[replica_group], lambda group: self._rank(replica_group, group, reasons), timeout=LIMIT
        )
        return STOPPED if any(reason is not None for reason in ended) else 0

    def _rank(self, replica_group: int, group: Communicator, reasons: Reasons) -> str | None:
        elastic_average = ElasticAverage(
            replica_group, group, self._address, self._token, HERE,
            replica_groups=len(self._ranks), heartbeat_timeout=HEARTBEAT_TIMEOUT, timeout=LIMIT,
        )  # fmt: skip
        topology = replace(form(group), replica_groups=elastic_average)
        return train(
            load(Path("job.toml")),
            topology,
            "job.toml",
            reasons,
            resume=True,
            elastic_average=elastic_average,
        )


def write_store(path: Path) -> Path:
    """Write a dataset file in which the first input of a sample is its number; return its path."""
    chance = np.random.default_rng(1)
    x = chance.random((SAMPLES, INPUTS), np.float32)
    x[:, 0] = np.arange(SAMPLES)
    np.savez(path.with_name("train.npz"), x=x, y=np.arange(SAMPLES) % CLASSES)
    np.savez(path.with_name("test.npz"), x=x[:CLASSES], y=np.arange(CLASSES))
    convert_npz([path.with_name("train.npz"), path.with_name("test.npz")], path)
    return path
