import pytest

from hpcsgd.cluster.batch import Allocation
from hpcsgd.cluster.batch.allocation import seconds
from hpcsgd.errors import UserError


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("4:00:00", 14400),
        ("100:00:01", 360001),
        ("2-0", 172800),
        ("1-12:30", 131400),
        ("1-01:02:03", 90123),
    ],
)
def test_times_as_sbatch_reads_them(time: str, expected: int) -> None:
    assert seconds(time) == expected


@pytest.mark.parametrize("time", ["", "4h", "1:2:3:4", "-1", "1.5", "1-", "infinite"])
def test_other_times_are_refused(time: str) -> None:
    with pytest.raises(UserError, match=f"--time {time}: expected"):
        seconds(time)


def test_an_allocation() -> None:
    allocation = Allocation(nodes=4, ranks_per_node=8, gpus_per_node=8, time="0:30:00")
    assert (allocation.ranks, allocation.node_hours) == (32, 2.0)
    assert allocation.options() == {
        "nodes": "4",
        "ntasks-per-node": "8",
        "cpus-per-task": "1",
        "time": "0:30:00",
        "gpus-per-node": "8",
    }


def test_gpus_of_each_rank() -> None:
    options = Allocation(nodes=2, ranks_per_node=4, gpus_per_rank=1).options()
    assert options["gpus-per-task"] == "1"
    assert "gpus-per-node" not in options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": 0}, "--nodes 0: at least 1"),
        ({"ranks_per_node": -1}, "--ranks-per-node -1: at least 1"),
        ({"gpus_per_node": 0}, "--gpus-per-node 0: at least 1"),
        ({"gpus_per_rank": 0}, "--gpus-per-rank 0: at least 1"),
        (
            {"gpus_per_node": 4, "gpus_per_rank": 1},
            "--gpus-per-node 4 and --gpus-per-rank 1: give one",
        ),
        ({"time": "0"}, "--time 0: no time at all"),
    ],
)
def test_an_allocation_of_nothing(given: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Allocation(**given)
