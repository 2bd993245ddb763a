"""Schedules fit together, and take as long as was simulated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpcsgd.core import graphs
from hpcsgd.errors import UserError
from hpcsgd.simulation import Durations, Lasting, Layout, Measured, Message, Simulation, simulate
from hpcsgd.simulation.course import Rule
from hpcsgd.simulation.goal import write
from hpcsgd.simulation.rules import (
    AdPsgd,
    AsyncSgd,
    Ensemble,
    Hierarchical,
    Push,
    Ssp,
    bsp,
    d_psgd,
    osgp,
    sgp,
)
from simulation import schedules

RULES = [
    bsp(), Hierarchical(3), Ssp(0), Ssp(2), AsyncSgd(), sgp(), sgp(2), osgp(1), osgp(2), d_psgd(),
    Push(graphs.BipartiteExponential()),
]  # fmt: skip
MICRO = 1e-6
NANOSECONDS = np.random.default_rng(1).integers(20_000, 200_000, 500) * 1e-9


def job(rule: Rule, P: int, K: int, link: float = 60 * MICRO, latency: float = 7 * MICRO) -> Simulation:
    """Whole nanoseconds everywhere, also in the rounds of collectives and in the shares of a link."""
    return Simulation(
        layout=Layout(P, K, K),
        compute=Measured(NANOSECONDS.tolist()),
        stragglers=Lasting(2.0, ranks=[1]),
        durations=Durations(
            exchange=60 * MICRO, update=3 * MICRO, meeting=120 * MICRO, gather=36 * MICRO,
            message=Message(latency, link),
        ),
        rule=rule,
        steps=7,
    )  # fmt: skip


@pytest.mark.parametrize("link", [60 * MICRO, 420 * MICRO])
@pytest.mark.parametrize(("P", "K"), [(1, 2), (3, 2), (6, 1)])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_longest_way_is_the_simulated_time(
    rule: Rule, P: int, K: int, link: float, tmp_path: Path
) -> None:
    simulation = job(rule, P, K, link)
    write(simulation, tmp_path / "job.goal")
    schedule = schedules.read((tmp_path / "job.goal").read_text())
    assert schedule.ranks == P * K
    seconds = schedule.critical_path(alpha=7000, beta=1.0) * 1e-9
    assert seconds == pytest.approx(simulate(simulation).seconds, rel=1e-9)


@pytest.mark.parametrize("rule", [AdPsgd(), Ensemble(3)], ids=str)
def test_where_chance_decides_there_is_none(rule: Rule, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="follows from chance"):
        write(job(rule, 2, 2), tmp_path / "job.goal")
    assert not (tmp_path / "job.goal").exists()


def test_a_collective_shorter_than_its_messages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^5 ranks meet for 6e-05 s, in 3 rounds of messages of at least 0\.001 s"
    ):
        write(job(bsp(), 2, 5, latency=1e-3), tmp_path / "job.goal")


def test_a_shared_link_is_refused(tmp_path: Path) -> None:
    shared = Simulation(
        layout=Layout(4, 1, 2), compute=Measured([1.0]), durations=Durations(message=Message(0, 1)),
        rule=sgp(), steps=2,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"ranks_per_host = 1$"):
        write(shared, tmp_path / "job.goal")


GOOD = """num_ranks 2
rank 0 {
l1: calc 5
l2: send 3b to 1 tag 0
l2 requires l1
}
rank 1 {
l1: recv 3b from 0 tag 0
}
"""


def test_the_reader_adds_up() -> None:
    assert schedules.read(GOOD).critical_path(alpha=10, beta=2) == 5 + 10 + 6


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("recv 3b", "recv 4b"),
        ("from 0 tag 0", "from 0 tag 1"),
        ("l2 requires l1", "l2 requires l1\nl1 requires l2"),
        ("l2 requires l1", "l2 requires l3"),
        ("l2: send", "l1: send"),
        ("to 1 tag 0", "to 2 tag 0"),
        ("num_ranks 2", "num_ranks 3"),
        ("calc 5", "calc 5.5"),
    ],
)
def test_the_reader_is_strict(right: str, wrong: str) -> None:
    with pytest.raises((AssertionError, StopIteration)):
        schedules.read(GOOD.replace(right, wrong)).critical_path(1, 1)
