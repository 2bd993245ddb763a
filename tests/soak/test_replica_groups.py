"""Replica groups, their rings and their coordinator, in orders of events drawn by a seed.

They communicate by a simulated network (see `network`). Groups die, freeze, lose connections or return, and
the coordinator restarts. All code is hpcsgd's own, except for sockets, threads and clocks.
"""

from __future__ import annotations

import itertools
import random
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from elastic.conftest import TOKEN
from hpcsgd.comm import Communicator, PeerLost, threads
from hpcsgd.elastic.coordinator import Coordinator
from hpcsgd.elastic.elastic_average import ElasticAverage
from hpcsgd.elastic.endings import Over
from hpcsgd.elastic.event_log import EventLog
from hpcsgd.elastic.journal import FileJournal
from hpcsgd.elastic.membership import Membership
from hpcsgd.elastic.register import Phase, Register
from soak.conftest import Seeds
from soak.network import Network, Socket, asyncio_of, driven, select_of, socket_of
from soak.sizes import cases
from soak.stage import Actor, Stage, Stuck, staged, threading_of

LAST = 4
"""The number of rounds after which training ends."""
SIZE = 5
HEARTBEAT_TIMEOUT, TIMEOUT = 10.0, 300.0
PORT = 77
SIZES = [(1, 1), (1, 1), (1, 2), (1, 1, 1), (2, 1), (1, 1, 2)]
"""The numbers of ranks of the groups, one tuple per case."""


class Given(NamedTuple):
    """The model that a group contributed to an average, and the number of rounds whose mean it had then."""

    rounds: int
    w: Tensor


@dataclass
class World:
    """The groups and the coordinator on one stage, and what is checked about them."""

    stage: Stage
    network: Network
    ranks: tuple[int, ...]
    folder: Path
    chance: random.Random
    lives: dict[int, int] = field(default_factory=dict)
    """The number of times that each group was started."""
    terms: int = 0
    done: set[int] = field(default_factory=set)
    """Groups that have finished."""
    given: dict[int, list[Given]] = field(default_factory=dict)
    """What each group contributed to its averages, over all restarts."""
    rounds: dict[int, tuple[tuple[int, ...], Tensor]] = field(default_factory=dict)
    """For each round, the groups that counted and the mean."""
    failed: list[BaseException] = field(default_factory=list)
    logs: list[EventLog] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"10.0.0.1:{PORT}"

    def coordinate(self) -> None:
        """Start a coordinator to replace the previous one, which has ended."""
        self.terms += 1
        events = EventLog(self.folder / f"events-{self.terms}.jsonl")
        self.logs.append(events)

        def serve() -> None:
            at = Coordinator(
                len(self.ranks), TOKEN, heartbeat_timeout=HEARTBEAT_TIMEOUT, timeout=TIMEOUT, events=events,
                journal=FileJournal(self.folder / "register.json"),
            )  # fmt: skip
            driven(at.serve("10.0.0.1", PORT))

        self._start(("coordinator", self.terms), serve)

    def live(self, replica_group: int) -> None:
        """Start a group, perhaps not for the first time."""
        life = self.lives[replica_group] = self.lives.get(replica_group, 0) + 1

        def play() -> None:
            try:
                threads.run(
                    self.ranks[replica_group],
                    lambda group: self._rank(replica_group, life, group),
                    timeout=1e6,
                )
                self.done.add(replica_group)
            except Exception as error:  # noqa: BLE001 - `play` raises it
                self.failed.append(error)

        self._start(("replica_group", replica_group, life), play)

    def is_through(self) -> bool:
        return len(self.done) == len(self.ranks) or bool(self.failed)

    def is_over(self) -> bool:
        """Return True if training has ended, so that a late group may find no coordinator."""
        register = FileJournal(self.folder / "register.json").load()
        return register.phase is Phase.FINISHED

    def _start(self, troupe: tuple[object, ...], target: Callable[[], None]) -> None:
        actor = Actor(self.stage, target=target, name=" ".join(map(str, troupe)))
        actor.troupe = troupe
        actor.start()

    def _rank(self, replica_group: int, life: int, group: Communicator) -> None:
        host = f"10.1.{replica_group}.{group.rank}"
        limits = {
            "replica_groups": len(self.ranks),
            "heartbeat_timeout": HEARTBEAT_TIMEOUT,
            "timeout": TIMEOUT,
        }
        try:
            elastic_average = ElasticAverage(replica_group, group, self.address, TOKEN, host, **limits)
        except PeerLost:
            assert self.is_over(), "it looked for a coordinator in vain"
            return
        drawn = torch.Generator().manual_seed(1000 * replica_group + life)
        w = [torch.randn(SIZE, generator=drawn)]
        try:
            while elastic_average.rounds < LAST:
                w[0] += torch.randn(SIZE, generator=drawn)
                if group.rank == 0:
                    self.given.setdefault(replica_group, []).append(
                        Given(elastic_average.rounds, w[0].clone())
                    )
                before = elastic_average.rounds
                elastic_average.mean(w)
                assert elastic_average.rounds > before
                self._note(elastic_average, w[0])
            elastic_average.finish()
        except (Over, PeerLost):
            assert self.is_over(), "others are gone in the middle of training"
        finally:
            elastic_average.close()

    def _note(self, elastic_average: ElasticAverage, w: Tensor) -> None:
        """Check that all ranks have the same mean of a round, and that it is the counted groups' mean.

        Each counted group contributes once, and all have the means of equally many rounds.
        """
        r, mine = elastic_average.rounds, (elastic_average.counted, w.clone())
        counted, agreed = self.rounds.setdefault(r, mine)
        assert counted == mine[0], f"round {r} counted {counted} and {mine[0]}"
        assert torch.equal(agreed, mine[1]), f"two results of round {r}"
        brought = [self.given[replica_group] for replica_group in counted]
        assert any(_is_mean(w, each) for each in itertools.product(*brought)), f"round {r} is no mean"


def _is_mean(w: Tensor, given: tuple[Given, ...]) -> bool:
    together = len({each.rounds for each in given}) == 1
    return together and torch.allclose(w, torch.stack([each.w for each in given]).mean(0), rtol=0, atol=1e-5)


def someone_dies(world: World) -> None:
    """Kill a group and restart it after a while, if any group has not finished."""
    if left := sorted(set(world.lives) - world.done):
        replica_group = world.chance.choice(left)
        world.network.die(("replica_group", replica_group, world.lives[replica_group]))
        world.stage.sleep(world.chance.choice([0, 0, 1, 30]))
        world.live(replica_group)


def someone_freezes(world: World) -> None:
    if left := sorted(set(world.lives) - world.done):
        replica_group = world.chance.choice(left)
        world.stage.freeze(
            ("replica_group", replica_group, world.lives[replica_group]), world.chance.choice([1, 20, 400])
        )


def the_coordinator_dies(world: World) -> None:
    world.network.die(("coordinator", world.terms))
    world.stage.sleep(world.chance.choice([0, 1, 5]))
    world.coordinate()


def the_coordinator_freezes(world: World) -> None:
    world.stage.freeze(("coordinator", world.terms), world.chance.choice([1, 20, 60]))


def a_connection_breaks(world: World) -> None:
    """Break a random open connection."""
    alive: list[Socket] = [each for each in world.network.sockets if not each.outgoing.ended]
    if alive:
        broken = world.chance.choice(alive)
        broken.incoming.ended = broken.outgoing.deaf = True  # for this end
        broken.outgoing.ended = broken.incoming.deaf = True  # for the other end


EVENTS: tuple[Callable[[World], None], ...] = (
    someone_dies, someone_dies, someone_freezes, the_coordinator_dies, the_coordinator_freezes,
    a_connection_breaks, a_connection_breaks,
)  # fmt: skip


def clock(stage: Stage) -> types.SimpleNamespace:
    now = lambda: stage.now  # noqa: E731
    return types.SimpleNamespace(monotonic=now, perf_counter=now, sleep=stage.sleep)


@contextmanager
def on_network(seed: int) -> Iterator[tuple[Stage, Network]]:
    made: list[Network] = []

    def network(stage: Stage) -> Network:
        if not made:
            made.append(Network(stage))
        return made[0]

    replaced: list[tuple[str, Callable[[Stage], object]]] = [
        *(
            (f"hpcsgd.elastic.{name}.time", clock)
            for name in ("client", "handshake", "elastic_average", "ring", "watch")
        ),
        *((f"hpcsgd.elastic.{name}.threading", threading_of) for name in ("client", "ring")),
        *((f"hpcsgd.elastic.{name}.socket", lambda s: socket_of(network(s))) for name in ("client", "ring")),
        ("hpcsgd.elastic.ring.select", select_of),
        ("hpcsgd.elastic.coordinator.asyncio", lambda s: asyncio_of(network(s))),
    ]
    with staged(f"groups {seed}", *replaced, often=0.0) as stage:
        yield stage, made[0]


def play(seed: int, folder: Path) -> World:
    """Run groups until the last round, with random failures on the way."""
    chance = random.Random(f"events {seed}")
    with ExitStack() as left, on_network(seed) as (stage, network):
        world = World(stage, network, chance.choice(SIZES), folder, chance)
        left.callback(lambda: [log.close() for log in world.logs])
        world.coordinate()
        for replica_group in range(len(world.ranks)):
            world.live(replica_group)
        for _ in range(chance.choice([0, 1, 2, 3, 4])):
            soon = len(stage.order) + chance.randrange(1500)
            stage.wait(lambda soon=soon: len(stage.order) >= soon or world.is_through())
            chance.choice(EVENTS)(world)
        stage.wait(world.is_through)
        if world.failed:
            raise world.failed[0]
    assert max(world.rounds) == LAST
    return world


@pytest.mark.slow
@cases(some=20, every=1000)
def test_groups_in_any_order(seeds: Seeds, cases: int, tmp_path: Path) -> None:
    def case(seed: int) -> None:
        folder = tmp_path / str(seed)
        folder.mkdir()
        play(seed, folder)

    seeds.each(cases, case)


def test_the_same_number_gives_the_same_order(tmp_path: Path) -> None:
    orders = []
    for place, seed in enumerate([3, 3, 4]):
        folder = tmp_path / str(place)
        folder.mkdir()
        orders.append(play(seed, folder).stage.order)
    assert orders[0] == orders[1] != orders[2]


def found(folder: Path) -> bool:
    """Return True if any of 60 orders of events shows a mistake."""
    for seed in range(60):
        (mine := folder / str(seed)).mkdir()
        try:
            play(seed, mine)
        except (AssertionError, Stuck):
            return True
    return False


def test_rounds_that_not_all_have_voted_for_are_found(tmp_path: Path) -> None:
    vote = Membership.vote

    def hasty(membership: Membership, replica_group: int, rank: int, *rest: Any) -> None:
        now = membership.register
        for other in now.replica_groups:
            for each in range({m.replica_group: m.ranks for m in now.members}[other]):
                vote(membership, other, each, *rest)

    with mock.patch.object(Membership, "vote", hasty):
        assert found(tmp_path)


def test_a_coordinator_that_forgets_is_found(tmp_path: Path) -> None:
    with mock.patch.object(FileJournal, "load", return_value=Register()):
        assert found(tmp_path)


@pytest.mark.slow
def test_who_counts_though_it_comes_from_further_back_is_found(tmp_path: Path) -> None:
    everybody = property(lambda register: register.replica_groups)
    with mock.patch.object(Register, "counting", everybody):
        assert found(tmp_path)
