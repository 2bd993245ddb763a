"""Groups whose hosts go down and come back: what real groups complete, and what the simulation predicts.

Each group is a process in a network namespace of its own. Its host goes down as a machine does: the link is
cut and the process killed, so that the other groups receive no more messages. It is started again after a
while.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import secrets
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from ensemble.faults import enter
from harness import programs
from harness.hosts import shaped_hosts
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.waits import Living
from hpcsgd.elastic import event_log
from hpcsgd.elastic.coordinator import Coordinator
from hpcsgd.elastic.elastic_average import ElasticAverage
from hpcsgd.elastic.endings import Over
from hpcsgd.elastic.journal import FileJournal
from hpcsgd.performance.simulation import simulate
from hpcsgd.performance.simulation.compute import Constant
from hpcsgd.performance.simulation.durations import Durations, Layout
from hpcsgd.performance.simulation.failures import Failures
from hpcsgd.performance.simulation.simulate import Simulation

GROUPS = 4
EVERY = 5
SECONDS = 0.1
"""Seconds of a step, which is a pause."""
ELEMENTS = 250_000
HEARTBEAT_TIMEOUT, TIMEOUT = 1.0, 10.0
RESTART = 2.5
PORT = 7000
SEEDS = 40


def real(rate: str, rounds: int, mtbf: float, seed: int = 1) -> tuple[float, float, int]:
    """Return steps per second and group, seconds of a round, and how often a host went down.

    The rate is that over `rounds` rounds, and the seconds are the median over all rounds.
    """
    with tempfile.TemporaryDirectory() as folder, shaped_hosts(GROUPS, rate, "32kb") as hosts:
        replica_groups = _Groups(hosts, Path(folder), random.Random(seed), mtbf)
        try:
            replica_groups.live(rounds)
        finally:
            replica_groups.end()
        commits = [e for e in event_log.read(Path(folder) / "events.jsonl") if e["event"] == "commit"]
    gaps = sorted(b["unix"] - a["unix"] for a, b in itertools.pairwise(commits))
    seconds = commits[rounds]["unix"] - commits[0]["unix"]
    made = EVERY * sum(len(commit["counted"]) for commit in commits[1 : rounds + 1])
    return made / GROUPS / seconds, gaps[len(gaps) // 2], replica_groups.downs


def simulated(rounds: int, mtbf: float, average_s: float) -> float:
    """Return steps per second and group, the mean over seeds."""
    rates = [
        simulate(
            Simulation(
                layout=Layout(GROUPS, 1, 1),
                compute=Constant(SECONDS),
                durations=Durations(model_average=average_s),
                waits=Living(EVERY),
                steps=rounds * EVERY,
                steps_per_epoch=EVERY,
                failures=Failures(
                    mtbf,
                    checkpoint_seconds=1.0,
                    restart_seconds=RESTART,
                    heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
                ),
                seed=seed,
            )
        ).steps_per_second
        for seed in range(SEEDS)
    ]
    return sum(rates) / len(rates)


class _Groups:
    """The processes, and the failures of their hosts."""

    def __init__(self, hosts: str, folder: Path, chance: random.Random, mtbf: float) -> None:
        self.downs = 0
        self._hosts, self._folder, self._chance, self._mtbf = hosts, folder, chance, mtbf
        self._token = secrets.token_hex(16)
        self._pids: dict[int, int] = {}
        self._plan: list[tuple[float, Callable[[int], None], int]] = []
        self._coordinator = self._fork(0, self._coordinate)

    def live(self, rounds: int) -> None:
        """Run until so many rounds have been committed after the first."""
        for replica_group in range(GROUPS):
            self._up(replica_group)
        register = self._folder / "register.json"
        while not register.exists() or json.loads(register.read_text())["rounds"] <= rounds:
            now = time.monotonic()
            for entry in [entry for entry in self._plan if entry[0] <= now]:
                self._plan.remove(entry)
                entry[1](entry[2])
            time.sleep(0.005)

    def end(self) -> None:
        for pid in (*self._pids.values(), self._coordinator):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _up(self, replica_group: int) -> None:
        self._link(replica_group, "up")
        self._pids[replica_group] = self._fork(replica_group + 1, lambda: self._live(replica_group))
        self._plan.append(
            (time.monotonic() + self._chance.expovariate(1 / self._mtbf), self._down, replica_group)
        )

    def _down(self, replica_group: int) -> None:
        if len(self._pids) == 1:  # one group has to be left, otherwise all restart
            self._plan.append((time.monotonic() + RESTART, self._down, replica_group))
            return
        self.downs += 1
        self._link(replica_group, "down")
        pid = self._pids.pop(replica_group)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self._plan.append((time.monotonic() + RESTART, self._up, replica_group))

    def _link(self, replica_group: int, state: str) -> None:
        programs.run(
            ["ip", "-n", f"{self._hosts}-0", "link", "set", f"port{replica_group + 1}", state], timeout=60
        )

    def _fork(self, host: int, body: Callable[[], None]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            enter(f"{self._hosts}-{host}")
            body()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - this process must not go on as its parent would
            traceback.print_exc()
            os._exit(1)

    def _coordinate(self) -> None:
        with event_log.EventLog(self._folder / "events.jsonl") as told:
            at = Coordinator(
                GROUPS, self._token, heartbeat_timeout=HEARTBEAT_TIMEOUT, timeout=TIMEOUT,
                journal=FileJournal(self._folder / "register.json"), events=told,
            )  # fmt: skip
            asyncio.run(at.serve("10.77.0.254", PORT))

    def _live(self, replica_group: int) -> None:
        threads.run(1, lambda group: self._train(replica_group, group), timeout=1e6)

    def _train(self, replica_group: int, group: Communicator) -> None:
        elastic_average = ElasticAverage(
            replica_group, group, f"10.77.0.254:{PORT}", self._token, f"10.77.0.{replica_group + 1}",
            replica_groups=GROUPS, heartbeat_timeout=HEARTBEAT_TIMEOUT, timeout=TIMEOUT,
        )  # fmt: skip
        w = [torch.zeros(ELEMENTS)]
        try:
            while True:
                elastic_average.mean(w)  # a group that comes back first takes over the others' values
                time.sleep(EVERY * SECONDS)
        except Over:
            pass
        finally:
            elastic_average.close()
