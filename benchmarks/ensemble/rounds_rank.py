"""One rank of `rounds.py`: time a synchronization, a commit and an allreduce in turn.

All ranks are one MPI job, so that contestants can take turns. Each group is a communicator in it. Groups
exchange data only through rings and the coordinator, as separate jobs would.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from ensemble.flow import flow
from harness import Contestant, Spread, interleaved, ratios
from harness.mpi import Together
from hpcsgd.comm import Communicator, mpi
from hpcsgd.elastic.elastic_average import ElasticAverage
from hpcsgd.elastic.join_info import JoinInfo
from hpcsgd.train.process import keep_freed_memory

COMMITS = 5
"""The number of commits per round; there are several because a commit is short."""


def commits(elastic_average: ElasticAverage, rounds: int) -> list[float]:
    """Return the seconds of synchronizations with almost nothing to send.

    Each consists of the arrival, a ring of one number, the vote and the register's commit.
    """
    one = torch.zeros(1)
    commit = Contestant(lambda: elastic_average.mean([one]))
    return interleaved({"commit": commit}, rounds=COMMITS * rounds, ranks=Together())["commit"].wall


def contestants(
    x: torch.Tensor, elastic_average: ElasticAverage, world: Communicator
) -> dict[str, Contestant]:
    """Return the contestants. Those next to each other here also run one after the other."""
    return {
        "sync": Contestant(lambda: elastic_average.mean([x])),
        "mpi": Contestant(lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x.numpy())),
        "ours": Contestant(lambda: world.allreduce(x).wait()),
    }


def measure(
    sizes: Sequence[int], rounds: int, elastic_average: ElasticAverage, world: Communicator
) -> list[dict[str, Any]]:
    """Return one row for each of `sizes`, the number of float32 elements in the vector."""
    commit = Spread.of(commits(elastic_average, rounds))
    rows = []
    for numbers in sizes:
        rate = flow(4 * numbers)
        entries = contestants(torch.zeros(numbers), elastic_average, world)
        blocks = interleaved(entries, rounds=rounds, ranks=Together())
        seconds = {name: asdict(Spread.of(times.wall)) for name, times in blocks.items()}
        against = [a + commit.median for a in blocks["mpi"].wall]
        row: dict[str, Any] = {"P": elastic_average.count, "K": world.size // elastic_average.count}
        row |= {"bytes": 4 * numbers, "rounds": rounds, "seconds": {**seconds, "commit": asdict(commit)}}
        row |= {"ratio": asdict(ratios(blocks["sync"].wall, against)), "flow_bytes_per_s": rate}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--token", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--bytes", type=int, nargs="+", required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    world = mpi.world()
    K = world.size // given.groups
    invited = JoinInfo(
        world.rank // K,
        given.groups,
        given.coordinator,
        given.token,
        heartbeat_timeout=10.0,
        timeout=300.0,
    )
    elastic_average = invited.accept(world.split(world.rank // K, world.rank))
    rows = measure([size // 4 for size in given.bytes], given.rounds, elastic_average, world)
    elastic_average.finish()
    elastic_average.close()
    if world.rank == 0:
        given.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
