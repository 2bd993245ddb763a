"""One rank of `rounds.py`: seconds of a meeting, of a commit and of an allreduce, in turn.

All ranks are one MPI job, so that contestants can take turns; each island is a communicator in it, and all
that islands say to each other goes through rings and the coordinator, as between jobs of their own.
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
from hpcsgd.comm import Transport, mpi
from hpcsgd.elastic.invitation import Invitation
from hpcsgd.elastic.meetings import Meetings
from hpcsgd.train.process import keep_freed_memory

COMMITS = 5
"""As many commits as rounds, times this: they are short."""


def commits(meetings: Meetings, rounds: int) -> list[float]:
    """Seconds of meetings with nothing to send: arrive, a ring of one number, vote, the register."""
    one = torch.zeros(1)
    commit = Contestant(lambda: meetings.mean([one]))
    return interleaved({"commit": commit}, rounds=COMMITS * rounds, ranks=Together())["commit"].wall


def contestants(x: torch.Tensor, meetings: Meetings, world: Transport) -> dict[str, Contestant]:
    """Neighbours run next to each other in time."""
    return {
        "meeting": Contestant(lambda: meetings.mean([x])),
        "mpi": Contestant(lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x.numpy())),
        "ours": Contestant(lambda: world.allreduce(x).wait()),
    }


def measure(sizes: Sequence[int], rounds: int, meetings: Meetings, world: Transport) -> list[dict[str, Any]]:
    """A row for each number of float32 in the vector."""
    commit = Spread.of(commits(meetings, rounds))
    rows = []
    for numbers in sizes:
        rate = flow(4 * numbers)
        entries = contestants(torch.zeros(numbers), meetings, world)
        blocks = interleaved(entries, rounds=rounds, ranks=Together())
        seconds = {name: asdict(Spread.of(times.wall)) for name, times in blocks.items()}
        against = [a + commit.median for a in blocks["mpi"].wall]
        row: dict[str, Any] = {"P": meetings.count, "K": world.size // meetings.count}
        row |= {"bytes": 4 * numbers, "rounds": rounds, "seconds": {**seconds, "commit": asdict(commit)}}
        row |= {"ratio": asdict(ratios(blocks["meeting"].wall, against)), "flow_bytes_per_s": rate}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--islands", type=int, required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--token", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--bytes", type=int, nargs="+", required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    world = mpi.world()
    K = world.size // given.islands
    invited = Invitation(
        world.rank // K, given.islands, given.coordinator, given.token, silence=10.0, timeout=300.0
    )
    meetings = invited.accept(world.split(world.rank // K, world.rank))
    rows = measure([size // 4 for size in given.bytes], given.rounds, meetings, world)
    meetings.finish()
    meetings.close()
    if world.rank == 0:
        given.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
