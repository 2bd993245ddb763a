"""The summary of a machine whose numbers are known."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hpcsgd.cost.collectives import messages
from hpcsgd.cost.compute import Compute
from hpcsgd.cost.link_classes import LinkClass, load
from hpcsgd.cost.links import Points
from hpcsgd.cost.machine import About, Machine
from hpcsgd.performance.measuring.messages import Series, links, sizes
from hpcsgd.performance.measuring.picture import draw
from hpcsgd.performance.measuring.summary_text import answers, table

WAY = LinkClass(4)
BETA = 1e-10
ALPHAS = {"alltoall": 2e-5, "reduce_scatter": 1e-5}


def series(operation: str, way: LinkClass = WAY, scatter: float = 0.1, alone: bool = False) -> Series:
    """Return exact times; without the communication thread they are half as long."""
    n = tuple(sizes(64_000_000))
    alpha = ALPHAS.get(operation, 1e-5)
    seconds = [float(messages(operation, way.ranks)) * alpha + load(operation, x, way) * BETA for x in n]
    points = Points(
        operation=operation, ranks=way.ranks, hosts=way.hosts, at_once=way.at_once, bytes=n,
        seconds=tuple(seconds), bare_seconds=tuple(each / 2 for each in seconds),
    )  # fmt: skip
    return Series(points, (scatter,) * len(n), alone)


def machine_of(measured: list[Series], mean: float = 1e-9) -> Machine:
    return Machine(
        machine=About(hosts=1, ranks_per_host=4),
        compute=Compute(numel=1_000_000, mean_seconds_per_element=mean),
        link=tuple(links(measured)),
        points=tuple(each.points for each in measured),
    )


def test_sizes() -> None:
    assert sizes(128) == [8, 32, 128]
    assert sizes(1000) == [8, 32, 128, 512, 1000]


@pytest.mark.slow
def test_what_a_calm_machine_wants() -> None:
    measured = [series("alltoall"), series("reduce_scatter")]
    sendrecv, bucket, comm_thread = answers(machine_of(measured), measured)
    # 1 MB: 3 messages, and 3 MB through memory; the mean of a quarter of a million elements is added
    assert sendrecv == (
        "4 ranks inside a host: ReduceScatter, 1.85 times as fast, for buckets of 1 MB "
        "(alltoall and mean 0.61 ms, reduce_scatter 0.33 ms)"
    )
    # 60 µs of latency are a tenth of the time of 1.8 MB
    assert (
        bucket == "4 ranks inside a host: bucket_cap_mb = 2 or more reaches 90% of the speed of the largest"
    )
    assert comm_thread.startswith("the communication thread adds 23 µs to a small message")


def test_what_is_alike_is_left_to_the_user() -> None:
    measured = [series("alltoall"), series("reduce_scatter")]
    sendrecv, *_ = answers(machine_of(measured, mean=1e-12), measured)
    assert sendrecv.startswith("4 ranks inside a host: AllToAll or ReduceScatter for buckets of 1 MB (")


def test_scatter_and_lines_that_miss_are_warned_of() -> None:
    measured = [series("alltoall"), series("allreduce", scatter=0.8)]
    machine = machine_of(measured)
    missed = tuple(dataclasses.replace(link, relative_error=1.5) for link in machine.link)
    machine = dataclasses.replace(machine, link=missed, compute=None)
    *_, scatter, errors = answers(machine, measured)
    assert scatter.startswith("WARNING  repeats of 1 of 2 series differ by more than 50%, allreduce, 4 ranks")
    assert "more than a factor: allreduce inside 2.5, alltoall inside 2.5; " in errors


def test_a_line_a_link() -> None:
    head, *rows = table(machine_of([series("alltoall"), series("bcast")])).splitlines()
    assert head.split()[:3] == ["operation", "way", "ranks"]
    assert rows[0].split() == ["alltoall", "inside", "4", "60.0", "30.0", "20.0", "3.32", "6.65", "-", "0%"]


def test_a_pair_alone_counts_where_there_is_nothing_else() -> None:
    pair = series("sendrecv", LinkClass(2), alone=True)
    ring = series("sendrecv", LinkClass(4))
    (link,) = links([pair, ring])
    assert link.ranks == (4,)
    (link,) = links([pair])
    assert link.ranks == (2,)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [[WAY], [WAY, LinkClass(2, 1, 2), LinkClass(8, 4, 2)]])
def test_a_picture(tmp_path: Path, ways: list[LinkClass]) -> None:
    machine = machine_of([series(name, way) for way in ways for name in ("alltoall", "bcast")])
    draw(machine, tmp_path / "m.png")
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
