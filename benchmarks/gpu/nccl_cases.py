"""`python nccl_cases.py CASE KIND` runs one case of groups of NCCL, in a process that may die.

Without a GPU the groups are gloo's.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn, optim

import hpcsgd
from gpu.section import FAR, device_switched_on
from hpcsgd.comm import Communicator, mpi, threads
from hpcsgd.comm.process_group import GroupBackend
from hpcsgd.comm.streams import StreamEvent, accelerator

SHORT = 2.0
"""Seconds after which a group considers an operation lost."""
LONG = 2 * 10**10
"""Number of cycles of a GPU that take longer than that."""


def library() -> str:
    kind = accelerator()
    return "nccl" if kind is not None and kind.type == "cuda" else "gloo"


def place() -> torch.device:
    return torch.device("cuda", 0) if library() == "nccl" else torch.device("cpu")


def keep_busy() -> None:
    """Keep the device busy for longer than `SHORT`."""
    if library() == "nccl":
        torch.cuda._sleep(LONG)
    else:
        torch.ops.far.hold(0, 0, True)


def made(world: Communicator, timeout: float = 60.0) -> GroupBackend:
    group = GroupBackend(world.backend, library(), timeout)
    print(f"made by {group.name}")
    return group


def used(world: Communicator) -> None:
    """Run every operation and check its result."""
    group, device = made(world), place()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = torch.arange(1, 1001, device=device).to(dtype)
        expected = x.clone()
        out = torch.empty_like(x)
        for reduction in ("sum", "mean", "max"):
            group.allreduce(x, reduction)
            assert torch.equal(x, expected), (reduction, dtype)
        for move in (group.alltoall, group.allgather, lambda out, x: group.reduce_scatter(out, x, "sum")):
            out.zero_()
            move(out, x)
            assert torch.equal(out, expected), (move, dtype)
        group.allgatherv(out.zero_(), x, [x.numel()])
        assert torch.equal(out, expected)
        group.bcast(x, 0)
        group.sendrecv({0: x}, {0: out.zero_()})
        assert torch.equal(out, expected)
    group.close()


def aborted(world: Communicator) -> None:
    """End a group before the device has begun what it was asked for; later groups still work."""
    group, x = made(world), torch.ones(1000, device=place())
    if library() == "nccl":
        torch.cuda._sleep(10**9)
    group.allreduce(x, "sum")
    group.close()
    used(world)


def timed_out(world: Communicator) -> None:
    """Let an operation time out, so that the watch ends the job."""
    group = made(world, SHORT)
    if library() == "nccl":
        x = torch.ones(1000, device=place())
        group.allreduce(x, "sum")  # the first operation connects, which would wait for a busy device
        torch.cuda.synchronize()
        keep_busy()
        group.allreduce(x, "sum")
        torch.cuda.synchronize()
    else:
        keep_busy()
        group._watch.add("allreduce over 1 ranks", StreamEvent(torch.device(FAR, 0)).passed)
        torch.accelerator.synchronize()


def sharded(world: Communicator) -> None:
    """Train an FSDP model over a group of one rank, by torch's own groups."""
    del world
    device = place()
    topology = hpcsgd.init()
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    hpcsgd.fully_shard(net, topology)
    optimizer = hpcsgd.DistributedOptimizer(optim.AdamW(net.parameters()), net, topology, hpcsgd.bsp())
    losses = []
    x = torch.randn(32, 64, device=device, generator=torch.Generator(device).manual_seed(0))
    for _ in range(5):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def group_refused(world: Communicator) -> None:
    del world
    hpcsgd.init(groups=1, device_backend={"intra_group": "nccl"})


def mesh_refused(world: Communicator) -> None:
    del world
    hpcsgd.init(groups=1).mesh("cuda")


CASES: Mapping[str, Callable[[Communicator], Any]] = {
    case.__name__: case for case in (used, aborted, timed_out, sharded, group_refused, mesh_refused)
}
OF_MPI = ("timed_out", "sharded", "group_refused", "mesh_refused")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("kind")
    given = parser.parse_args()
    with device_switched_on(given.kind):
        if given.case in OF_MPI:
            CASES[given.case](importlib.import_module(mpi.__name__).world())
        else:
            threads.run(1, CASES[given.case])
    print("done")


if __name__ == "__main__":
    main()
