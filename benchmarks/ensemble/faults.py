"""Kill, freeze or disconnect groups at random moments, and check what the surviving groups do.

Every group is a process in its own network namespace, and its ranks are threads. The coordinator is a process
on the switch between the namespaces. Each rank writes one frame with its parameters before each
synchronization and one after it. The run is checked from these frames.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import json
import os
import random
import secrets
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ensemble.faults_judge import Frames, Outcome, judge
from harness import programs
from hpcsgd.comm import Communicator, threads
from hpcsgd.elastic import event_log
from hpcsgd.elastic.coordinator import Coordinator
from hpcsgd.elastic.elastic_average import ElasticAverage
from hpcsgd.elastic.endings import Over
from hpcsgd.elastic.journal import FileJournal
from hpcsgd.elastic.register import Phase, Register

GROUPS = 4
ROUNDS = 40
SIZES = (1021, 7)
TRAINING = 0.02
"""Mean seconds between two synchronizations."""
HEARTBEAT_TIMEOUT, TIMEOUT = 1.0, 4.0
PORT = 7000
LIMIT = 60.0
"""Seconds after which a run counts as hanging."""
KINDS = ("kill", "freeze", "pause", "cut", "pair", "all but one")


@dataclass(frozen=True)
class Fault:
    """A fault of this `kind` of `replica_group`.

    It happens `at` seconds after the coordinator first wrote its register, and is undone `lasts` seconds
    later.
    """

    kind: str
    replica_group: int
    at: float
    lasts: float


def soak(runs: int, seed: int, hosts: str, folder: Path, tell: Callable[[str], None]) -> list[Outcome]:
    """Play `runs` random runs on the hosts with that name prefix, each with its own random generator."""
    outcomes = []
    for number in range(runs):
        chance = random.Random(f"{seed} {number}")
        here = folder / str(number)
        here.mkdir(parents=True)
        run = Run(chance, hosts, here)
        outcomes.append(run.play())
        tell(f"run {number + 1}: {run.story()}: {'; '.join(outcomes[-1].wrong) or 'right'}")
    return outcomes


class Run:
    """One run of four groups with some faults."""

    def __init__(self, chance: random.Random, hosts: str, folder: Path) -> None:
        self._chance, self._hosts, self._folder = chance, hosts, folder
        self._token = secrets.token_hex(16)
        self._ranks = [chance.choice([1, 2]) for _ in range(GROUPS)]
        self._pids: dict[int, int] = {}
        self._lives = [0] * GROUPS
        self._faults = self._choose()
        self._happened: list[tuple[str, float]] = []

    def story(self) -> str:
        return ", ".join(
            f"{f.kind} {f.replica_group} at {f.at:.2f} s for {f.lasts:.1f} s" for f in self._faults
        )

    def play(self) -> Outcome:
        self._coordinator = self._fork(0, self._coordinate)
        for replica_group in range(GROUPS):
            self._start(replica_group)
        try:
            in_time = self._go_on()
        finally:
            self._clean()
        return judge(self._folder, self._happened, [] if in_time else [f"not over after {LIMIT:g} s"])

    def _choose(self) -> list[Fault]:
        faults = []
        for _ in range(self._chance.randint(1, 3)):
            kind = self._chance.choice(KINDS)
            lasts = {"pause": 0.3 * HEARTBEAT_TIMEOUT, "kill": 0.5}.get(
                kind, HEARTBEAT_TIMEOUT + self._chance.uniform(0.5, 1.5)
            )
            at = self._chance.uniform(0, 1.5 * ROUNDS * TRAINING)
            faults.append(Fault(kind, self._chance.randrange(GROUPS), at, lasts))
        return faults

    def _go_on(self) -> bool:
        """Make the faults happen; return True if all groups finished in time."""
        deadline = time.monotonic() + LIMIT
        while not (self._folder / "register.json").exists():
            time.sleep(0.01)
        begun = time.monotonic()
        plan = [(f.at, self._happen, f) for f in self._faults]
        plan += [(f.at + f.lasts, self._undo, f) for f in self._faults]
        plan.sort(key=lambda entry: entry[0])
        while self._pids and time.monotonic() < deadline:
            while plan and time.monotonic() - begun > plan[0][0]:
                _, act, fault = plan.pop(0)
                act(fault)
            if not plan and self._all_are_back():
                (self._folder / "enough").touch()
            self._reap()
            time.sleep(0.005)
        return not self._pids

    def _all_are_back(self) -> bool:
        now = Register.from_json(json.loads((self._folder / "register.json").read_text()))
        return now.phase is Phase.RUN and len(now.replica_groups) == GROUPS

    def _happen(self, fault: Fault) -> None:
        self._happened.append((fault.kind, time.time()))
        match fault.kind:
            case "kill":
                self._signal(fault.replica_group, signal.SIGKILL)
            case "freeze" | "pause":
                self._signal(fault.replica_group, signal.SIGSTOP)
            case "cut":
                self._network("link", "set", f"port{fault.replica_group + 1}", "down")
            case "pair":
                self._routes("add", fault.replica_group)
            case "all but one":
                for replica_group in range(GROUPS):
                    if replica_group != fault.replica_group:
                        self._signal(replica_group, signal.SIGKILL)

    def _undo(self, fault: Fault) -> None:
        match fault.kind:
            case "freeze" | "pause":
                self._signal(fault.replica_group, signal.SIGCONT)
            case "cut":
                self._network("link", "set", f"port{fault.replica_group + 1}", "up")
            case "pair":
                self._routes("del", fault.replica_group)
            case "kill" | "all but one":
                for replica_group in range(GROUPS):
                    if replica_group not in self._pids and (fault.kind == "kill") == (
                        replica_group == fault.replica_group
                    ):
                        self._start(replica_group)

    def _routes(self, what: str, replica_group: int) -> None:
        """Disconnect this group and its right neighbor from each other, or undo it.

        Both still reach all other groups and the coordinator.
        """
        one, other = replica_group + 1, (replica_group + 1) % GROUPS + 1
        for here, there in ((one, other), (other, one)):
            words = ["ip", "-n", f"{self._hosts}-{here}", "route", what, "blackhole", f"10.77.0.{there}/32"]
            programs.run(words, timeout=LIMIT, check=False)

    def _network(self, *words: str) -> None:
        programs.run(["ip", "-n", f"{self._hosts}-0", *words], timeout=LIMIT)

    def _signal(self, replica_group: int, number: int) -> None:
        """Send a signal to a group, but never kill the last group that is alive."""
        self._reap()
        if replica_group in self._pids and (number != signal.SIGKILL or len(self._pids) > 1):
            os.kill(self._pids[replica_group], number)
            if number == signal.SIGKILL:
                os.waitpid(self._pids.pop(replica_group), 0)

    def _start(self, replica_group: int) -> None:
        self._lives[replica_group] += 1
        life = self._lives[replica_group]
        self._pids[replica_group] = self._fork(replica_group + 1, lambda: self._live(replica_group, life))

    def _fork(self, host: int, body: Callable[[], None]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            enter(f"{self._hosts}-{host}")
            log = os.open(self._folder / f"log-{host}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            faulthandler.register(signal.SIGUSR2)
            body()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - this process must not go on as its parent would
            traceback.print_exc()
            os._exit(1)

    def _reap(self) -> None:
        for replica_group, pid in list(self._pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._pids[replica_group]

    def _clean(self) -> None:
        """End all processes, and note any process or listening port that the groups left behind."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGUSR2)  # faulthandler prints where it hangs
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        until = time.monotonic() + 5
        while not os.waitpid(self._coordinator, os.WNOHANG)[0]:
            if time.monotonic() > until:
                os.kill(self._coordinator, signal.SIGKILL)
                (self._folder / "left").write_text("the coordinator did not end with the groups\n")
            time.sleep(0.01)
        for host in range(GROUPS + 1):
            words = ["ip", "netns", "exec", f"{self._hosts}-{host}", "cat", "/proc/net/tcp"]
            listening = programs.run(words, timeout=LIMIT).stdout
            if any(line.split()[3] == "0A" for line in listening.splitlines()[1:]):
                (self._folder / "left").write_text(f"somebody listens on host {host}\n")

    def _coordinate(self) -> None:
        with event_log.EventLog(self._folder / "events.jsonl") as told:
            at = Coordinator(
                GROUPS, self._token, heartbeat_timeout=HEARTBEAT_TIMEOUT, timeout=TIMEOUT,
                journal=FileJournal(self._folder / "register.json"), events=told,
            )  # fmt: skip
            asyncio.run(at.serve("10.77.0.254", PORT))

    def _live(self, replica_group: int, life: int) -> None:
        threads.run(self._ranks[replica_group], lambda group: self._rank(replica_group, life, group))

    def _rank(self, replica_group: int, life: int, group: Communicator) -> None:
        chance = random.Random(f"{replica_group} {life}")
        elastic_average = ElasticAverage(
            replica_group, group, f"10.77.0.254:{PORT}", self._token, f"10.77.0.{replica_group + 1}",
            replica_groups=GROUPS, heartbeat_timeout=HEARTBEAT_TIMEOUT, timeout=TIMEOUT,
        )  # fmt: skip
        steps = torch.Generator().manual_seed(1000 * replica_group + life)
        w = [torch.zeros(size) for size in SIZES]
        with Frames(self._folder / f"frames-{replica_group}-{life}-{group.rank}") as frames:
            try:
                enough = self._folder / "enough"
                while (
                    elastic_average.rounds < ROUNDS
                    or min(elastic_average.counted) != replica_group
                    or not enough.exists()
                ):
                    time.sleep(chance.uniform(0, 2 * TRAINING))
                    for x in w:
                        x.add_(torch.randn(x.shape, generator=steps))
                    frames.write(replica_group, 0, (), w)
                    elastic_average.mean(w)
                    frames.write(replica_group, elastic_average.rounds, elastic_average.counted, w)
                elastic_average.finish()
            except Over:
                pass
            finally:
                elastic_average.close()


def enter(namespace: str) -> None:
    """Move this process into the network namespace of that name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
