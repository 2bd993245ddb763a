"""Keep the replica groups of a run alive: start them, wait until they end, restart those that died.

The coordinator's register shows whether the training is complete (exit code 0) or saved for a later start
(75). Exit codes of groups do not show that, because `srun` returns 0 if a node was lost. A group that ends in
another way has died and is restarted, a limited number of times. If a group dies with exit code 1 before the
first synchronization, the job itself is at fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpcsgd.cluster.launch.starter import Starter
from hpcsgd.elastic import event_log
from hpcsgd.elastic.join_info import JoinInfo
from hpcsgd.elastic.register import Phase, Register
from hpcsgd.errors import MOVED, PEER_LOST, STOPPED, UserError, count_text
from hpcsgd.report.run_folder import replica_group_folder

PAUSE = 1.0
"""Seconds between a group's death and its restart, doubled after each further life without a round."""
GRACE = 30.0
"""Seconds that other groups have to end after the first group has ended."""
LOG = "output.log"
"""The file with each group's output, in its folder."""
QUOTED = 20
"""The number of last lines of `LOG` that are shown if the job is at fault."""


class Coordination(Protocol):
    """What the launcher of replica groups calls on a coordinator."""

    address: str
    """The coordinator's address for replica groups; see `Client`."""
    token: str
    """The secret of the run, by which replica groups identify themselves."""

    async def start(self) -> None:
        """Return once the coordinator can be reached."""
        ...

    async def keep(self) -> None:
        """Keep the coordinator running until `end`."""
        ...

    def note(self, event: str, **fields: Any) -> None:
        """Write an event to the event log."""
        ...

    def register(self) -> Register:
        """Return the register of the groups, as the coordinator saved it last."""
        ...

    async def end(self) -> None: ...


@dataclass
class ReplicaGroup:
    """The state of one replica group: its ranks, starts (`lives`) and deaths, and its last exit code."""

    number: int
    ranks: int
    lives: int = 0
    deaths: int = 0
    in_vain: int = 0
    """The number of lives, up to the last one, that followed each other without a committed round."""
    code: int | None = None
    spoke: bool = False
    """True if the last output of the group was shown."""
    process: asyncio.subprocess.Process | None = None
    doomed: bool = False
    """True if the group must end, even if its process is still being started."""

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def signal(self, number: int) -> None:
        """Send a signal to mpiexec or srun, which sends it to the group's ranks."""
        if self.running:
            assert self.process is not None
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the group's processes on this node."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Supervisor:
    """Runs the groups in `ranks` ({number: ranks}) of `count`. With `moves_ranks` a restart changes ranks."""

    def __init__(
        self,
        ranks: Mapping[int, int],
        count: int,
        program: Sequence[str],
        folder: Path,
        starter: Starter,
        coordinator: Coordination,
        *,
        restarts: int,
        heartbeat_timeout: float,
        timeout: float,
        moves_ranks: bool = False,
    ) -> None:
        self.replica_groups = [ReplicaGroup(number, K) for number, K in ranks.items()]
        self._count = count
        self._program, self._folder, self._starter = list(program), folder, starter
        self._coordinator, self._restarts = coordinator, restarts
        self._heartbeat_timeout, self._timeout = heartbeat_timeout, timeout
        self._moves_ranks = moves_ranks
        self.fault = False
        """True if a group failed before the first synchronization, so that the job itself is at fault."""
        self._interrupted = False
        self._ending = False
        """True if the run is over or has to stop, so that no group is restarted."""
        self._stopping = False
        """True if all groups were signalled to save and leave, so that none is restarted."""

    async def run(self) -> int:
        """Run until all groups have ended. Return 0 if complete, 75 if saved, otherwise another exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGUSR1, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        await self._coordinator.start()
        serving = asyncio.create_task(self._serve())
        try:
            await asyncio.gather(*(self._keep(group) for group in self.replica_groups))
        finally:
            self._kill_all()
            serving.cancel()
            await self._coordinator.end()
        return self._verdict()

    async def _serve(self) -> None:
        await self._coordinator.keep()
        register = self._coordinator.register()
        if register.phase is Phase.FINISHED:  # a group that is still starting would wait in vain
            self._kill_others(register.replica_groups)

    async def _keep(self, group: ReplicaGroup) -> None:
        while not (self._ending or self._stopping):
            if self._coordinator.register().phase is Phase.FINISHED:  # it finished while this group was away
                return
            group.lives += 1
            before = self._coordinator.register().rounds
            group.code = await self._live(group)
            life = {"replica_group": group.number, "life": str(group.lives)}
            self._coordinator.note("ended", **life, code=group.code)
            register = self._coordinator.register()
            if register.phase is Phase.FINISHED or register.leaving:
                self._end(register.replica_groups)
            self._stopping = self._stopping or group.code == STOPPED
            if self._ending or self._stopping:
                return
            if self._moves_ranks:
                group.ranks = dict(register.units).get(group.number, group.ranks)
            if group.code == MOVED:
                continue
            group.deaths += 1
            self._say(group, f"died with exit code {group.code}")
            if register.rounds == 0 and group.code == 1:
                self.fault = True
                self._say(group, "failed before the first synchronization and would fail again: the run ends")
                self._quote(group)
                self._kill_all()
                return
            if group.deaths > self._restarts:
                self._say(
                    group, f"was started {count_text(group.lives, 'time')}: the others go on without it"
                )
                return
            group.in_vain = 0 if self._has_averaged(group, before) else group.in_vain + 1
            await asyncio.sleep(PAUSE * 2 ** max(group.in_vain - 1, 0))

    async def _live(self, group: ReplicaGroup) -> int:
        """Run one life of a group, and return its exit code."""
        try:
            command = self._starter.command(group.number, group.ranks, self._program)
        except UserError as error:  # may start later, as once Slurm answers again; the others go on
            self._say(group, f"cannot be started: {error}")
            return PEER_LOST
        invited = JoinInfo(
            replica_group=group.number, replica_groups=self._count,
            coordinator=self._coordinator.address, token=self._coordinator.token,
            heartbeat_timeout=self._heartbeat_timeout, timeout=self._timeout,
        )  # fmt: skip
        folder = replica_group_folder(self._folder, group.number)
        folder.mkdir(parents=True, exist_ok=True)
        life = {"replica_group": group.number, "life": str(group.lives)}
        self._coordinator.note("started", **life, ranks=group.ranks)
        with (folder / LOG).open("ab") as output:
            group.process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **invited.to_environment()},
            )  # fmt: skip
            if group.doomed:
                group.kill()
            elif self._stopping:
                group.signal(signal.SIGUSR1)
            assert group.process.stdout is not None
            while some := await group.process.stdout.read(1 << 16):  # a line may have any length
                output.write(some)
                output.flush()
                group.spoke = self._speaks(group)
                if group.spoke:
                    sys.stdout.buffer.write(some)
                    sys.stdout.flush()
        code = await group.process.wait()
        group.kill()  # processes that mpiexec or srun may have left running
        return code if code >= 0 else 128 - code

    def _has_averaged(self, group: ReplicaGroup, rounds: int) -> bool:
        """Return True if the group was a member in a committed round after the first `rounds` rounds."""
        return any(
            event["event"] == "commit" and event["rounds"] > rounds and group.number in event["members"]
            for event in event_log.of_run(self._folder)
        )

    def _speaks(self, group: ReplicaGroup) -> bool:
        """Return True for the first running group. Only its output is shown; others write to files alone."""
        return group is next((other for other in self.replica_groups if other.running), group)

    def _end(self, members: Collection[int]) -> None:
        """End the run after a group has ended: kill groups that are no members now, members after a while."""
        if not self._ending:
            self._ending = True
            self._kill_others(members)
            asyncio.get_running_loop().call_later(self._heartbeat_timeout + GRACE, self._kill_all)

    def _stop(self) -> None:
        """Signal all groups to save and stop. A group that got the signal informs others in a round."""
        self._stopping = True
        for group in self.replica_groups:
            group.signal(signal.SIGUSR1)

    def _interrupt(self) -> None:
        """Kill all groups after Ctrl-C."""
        self._interrupted = True
        self._kill_all()

    def _kill_all(self) -> None:
        self._ending = True
        self._kill_others(())

    def _kill_others(self, members: Collection[int]) -> None:
        for group in self.replica_groups:
            if group.number not in members:
                group.doomed = True
                group.kill()

    def _say(self, group: ReplicaGroup, what: str) -> None:
        print(f"hpcsgd: replica group {group.number} {what}", file=sys.stderr, flush=True)

    def _quote(self, group: ReplicaGroup) -> None:
        """Show the last lines that a group printed, if its output was not shown before."""
        if not group.spoke:
            log = replica_group_folder(self._folder, group.number) / LOG
            lines = log.read_text(errors="replace").splitlines()
            print("\n".join(lines[-QUOTED:]), file=sys.stderr, flush=True)

    def _verdict(self) -> int:
        register = self._coordinator.register()
        if register.phase is Phase.FINISHED:
            return 0
        codes = {group.code for group in self.replica_groups}
        if register.leaving or STOPPED in codes or (self._stopping and codes == {None}):
            return STOPPED
        if self._interrupted:
            return 128 + signal.SIGINT
        return 1 if self.fault else max(group.code or 1 for group in self.replica_groups)
