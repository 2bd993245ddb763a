"""The order in which contestants run, and the times that count."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from harness import Contestant, Spread, interleaved, on_ranks, ratios
from harness.timing import WARM_UP


class Told:
    """Ranks and a clock in one object, which records their calls and those of contestants."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def contestant(self, name: str, steps: int = 1) -> Contestant:
        def tell(what: str):
            return lambda: self.events.append(f"{name} {what}")

        return Contestant(tell("steps"), steps, settle=tell("settles"), warm=tell("is warm"))

    def meet(self) -> None:
        self.events.append("meet")

    def slowest(self, seconds: float) -> float:
        self.events.append("slowest")
        return 10 * seconds

    def start(self) -> None:
        self.events.append("start")

    def stop(self) -> float:
        self.events.append("stop")
        return 6.0


def test_contestants_take_turns_there_and_back():
    told = Told()
    interleaved({name: told.contestant(name) for name in "ABC"}, rounds=3)
    steps = [event[0] for event in told.events if event.endswith("steps")]
    assert "".join(steps[3 * WARM_UP :]) == "ABC" + "CBA" + "ABC"


def test_only_steps_are_on_the_clock():
    told = Told()
    blocks = interleaved({"A": told.contestant("A", steps=3)}, rounds=1, ranks=told, clock=told)
    warm_up = 3 * ["A steps"] + ["A settles", "A is warm"]
    assert told.events == [*warm_up, "meet", "start", *3 * ["A steps"], "stop", "A settles", "slowest"]
    assert blocks["A"].wall == [10 * 6.0 / 3]


def test_even_a_short_block_is_warmed_up_for():
    told = Told()
    interleaved({"A": told.contestant("A", steps=1)}, rounds=1)
    assert told.events.index("A is warm") == WARM_UP + 1


def test_who_has_been_warmed_up_elsewhere_is_not_again():
    told = Told()
    again = replace(told.contestant("B", steps=5), warm_up=0)
    interleaved({"A": told.contestant("A"), "B": again}, rounds=1)
    assert told.events.count("A steps") == WARM_UP + 1
    assert told.events.count("B steps") == 5


def test_everybody_is_warm_before_anybody_is_timed():
    told = Told()
    interleaved({name: told.contestant(name) for name in "AB"}, rounds=2, clock=told)
    assert told.events.index("B is warm") < told.events.index("start")
    assert told.events.count("A is warm") == 1


class Together:
    """The ranks of a test."""

    def __init__(self, world) -> None:
        self._world = world

    def meet(self) -> None:
        self._world.barrier()

    def slowest(self, seconds: float) -> float:
        return max(self._world.gather_objects(seconds))


class Fixed:
    """A clock that always measures the same time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def start(self) -> None:
        pass

    def stop(self) -> float:
        return self._seconds


def _seconds_of(world) -> list[float]:
    contestant = Contestant(lambda: None, steps=4)
    clock = Fixed(8.0 if world.rank == 1 else 4.0)
    return interleaved({"A": contestant}, rounds=2, ranks=Together(world), clock=clock)["A"].wall


@pytest.mark.parametrize("n", [2, 4])
def test_a_step_takes_as_long_as_on_the_slowest_rank(run, n):
    assert run(n, _seconds_of) == n * [[2.0, 2.0]]


LATE = """
import json, sys, time
from pathlib import Path
from harness import Contestant, interleaved
from harness.mpi import Together
from mpi4py import MPI

rank = MPI.COMM_WORLD.Get_rank()
late = Contestant(lambda: time.sleep(0.1 * rank), steps=2)
wall = interleaved({"late": late}, rounds=2, ranks=Together())["late"].wall
every = MPI.COMM_WORLD.gather([wall, Together().slowest(3.0 + rank)])
if every:
    Path(sys.argv[1]).write_text(json.dumps(every))
"""


def test_the_slowest_of_processes_counts(tmp_path):
    script, out = tmp_path / "late.py", tmp_path / "wall.json"
    script.write_text(LATE)
    on_ranks(2, script, [str(out)], timeout=60)
    (wall, slowest), its = json.loads(out.read_text())
    assert its == [wall, slowest]
    assert min(wall) >= 0.1
    assert slowest == 4.0


def test_ratios_are_of_blocks_of_the_same_round():
    assert ratios([1.0, 20.0, 3.0], [2.0, 10.0, 3.0]) == Spread(1.0, 0.75, 1.5)
