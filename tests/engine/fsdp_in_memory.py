"""A job whose ranks train a model sharded by torch and report how much memory they used.

    mpiexec -n N python fsdp_in_memory.py peaks P WHO...
    mpiexec -n N python fsdp_in_memory.py limited P [DTYPE]   # or: whole P

The peak is the kernel's count of resident bytes (VmHWM) minus the resident bytes before the model was made.
It includes all memory of a rank, also that of gloo and MPI. Large blocks are mapped separately, so that
freed memory goes back to the kernel.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn, optim
from torch.distributed.fsdp import fully_shard

import hpcsgd
from hpcsgd.core.fsdp import local

WIDTH, LAYERS = 1024, 24
BLOCK = 4 * WIDTH**2
WHOLE = LAYERS * BLOCK
"""Bytes of the model; it has LAYERS layers of BLOCK bytes."""
TRAINED = 4 * WHOLE
"""Bytes of the parameters, the gradients and both moments of AdamW."""
STACK = 8 * 2**20
"""Bytes of the communication thread's stack, which is reserved and hardly used."""
EPS = {torch.float32: 1e-2, torch.float64: 1e-8}
"""AdamW's ε.

With the usual value, float32 rounding errors would become steps where gradients are almost zero.
"""
MMAP_THRESHOLD, LARGE = -3, 1 << 16
EVERY = 2
LIBC = ctypes.CDLL(None)
TORCH = "torch"
METHODS: dict[str, Callable[[], hpcsgd.Method]] = {
    "bsp": hpcsgd.bsp,
    "hierarchical": lambda: hpcsgd.hierarchical(EVERY),
    "diloco": lambda: hpcsgd.diloco(EVERY),
    "streaming": lambda: hpcsgd.streaming(hpcsgd.hierarchical(EVERY), 3, 1),
}


def model(topology: hpcsgd.Topology | None, layers: int = LAYERS) -> nn.Module:
    """Return a model of torch's default dtype, with layers of about BLOCK bytes.

    If `topology` is given, the model is sharded over its group and never whole on a rank. The values are
    drawn layer by layer and do not depend on the sharding.
    """
    n = width()
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(n, n, bias=False) for _ in range(layers)))
    if topology is not None:
        for layer in net:
            fully_shard(layer, mesh=topology.mesh()["shard"])
        fully_shard(net, mesh=topology.mesh()["shard"])
    net.to_empty(device="cpu")
    for number, p in enumerate(net.parameters()):
        values = torch.randn(p.shape, generator=torch.Generator().manual_seed(number)) / n**0.5
        with torch.no_grad():
            local(p).copy_(rows(values, topology))
    return net


def width() -> int:
    return int((BLOCK / torch.get_default_dtype().itemsize) ** 0.5)


def rows(whole: Tensor, topology: hpcsgd.Topology | None) -> Tensor:
    return whole if topology is None else whole.chunk(topology.group_size)[topology.shard_index]


def steps(net: nn.Module, optimizer: optim.Optimizer, rank: int) -> Iterator[None]:
    """Train step by step as a usual loop does: gradients are dropped just before the next forward pass."""
    t = 0
    while True:
        x = torch.randn(4, width(), generator=torch.Generator().manual_seed(1000 * t + rank))
        optimizer.zero_grad()
        net(x).square().sum(1).mean().backward()
        optimizer.step()
        t += 1
        yield


def training(
    topology: hpcsgd.Topology, who: str, layers: int = LAYERS, sharded: bool = True
) -> tuple[nn.Module, optim.Optimizer]:
    net = model(topology if sharded else None, layers)
    optimizer: optim.Optimizer = optim.AdamW(net.parameters(), lr=1e-3, eps=EPS[torch.get_default_dtype()])
    if who != TORCH:
        optimizer = hpcsgd.DistributedOptimizer(optimizer, net, topology, METHODS[who]())
    return net, optimizer


def status(name: str) -> int:
    """Return a memory field of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def start_counting() -> int:
    """Return the resident bytes, and reset the kernel's peak so that it counts from here."""
    gc.collect()
    LIBC.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak(topology: hpcsgd.Topology, who: str) -> dict[str, int]:
    """Return the peak bytes of steps without and with a synchronization, and of an evaluation."""
    net, optimizer = training(topology, who, layers=3)  # libraries allocate buffers and load code
    warm = steps(net, optimizer, topology.rank)
    for _ in range(2 * EVERY):
        next(warm)
    del net, optimizer, warm
    before = start_counting()
    net, optimizer = training(topology, who)
    found = {"made": status("VmHWM") - before}
    go_on = steps(net, optimizer, topology.rank)
    for _ in range(EVERY):
        next(go_on)
    for what, count in {"steps": EVERY - 1, "sync": 1}.items():
        start_counting()
        for _ in range(count):
            next(go_on)
        found[what] = status("VmHWM") - before
    if isinstance(optimizer, hpcsgd.DistributedOptimizer):
        start_counting()
        with optimizer.averaged_model(), torch.no_grad():
            net(torch.ones(4, width()))
        found["evaluation"] = status("VmHWM") - before
    return found


def peaks(P: int, names: list[str]) -> None:
    topology = hpcsgd.init(groups=P, timeout_s=60)
    for who in names:
        mine = peak(topology, who)
        everyone = topology.world.gather_objects(mine)
        if topology.rank == 0:
            most = {name: max(each[name] for each in everyone) for name in mine}
            print(json.dumps({"who": who, "peaks": most}), flush=True)


def limited(P: int, sharded: bool) -> None:
    """Train with a third of the memory that the training takes, plus `STACK`.

    Then train again without the limit and without sharding, and compare.
    """
    topology = hpcsgd.init(groups=P, timeout_s=60)
    net, optimizer = training(topology, "hierarchical", layers=3, sharded=sharded)
    next(steps(net, optimizer, topology.rank))
    del net, optimizer
    start_counting()
    unlimited = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + TRAINED // 3 + STACK, unlimited[1]))
    topology.world.barrier()
    net = trained(topology, sharded)
    if topology.rank == 0:
        print("trained within the limit", flush=True)
    resource.setrlimit(resource.RLIMIT_DATA, unlimited)
    reference = trained(topology, sharded=False)
    of_all = [most_apart(net, rows_of(other, topology)) for other in (reference, model(None))]
    everyone = topology.world.gather_objects(of_all)
    if topology.rank == 0:
        differences, moves = zip(*everyone, strict=True)
        print(json.dumps({"difference": max(differences), "move": min(moves)}), flush=True)


def rows_of(whole: nn.Module, topology: hpcsgd.Topology) -> list[Tensor]:
    return [rows(p, topology) for p in whole.parameters()]


def most_apart(net: nn.Module, others: list[Tensor]) -> float:
    pairs = zip(net.parameters(), others, strict=True)
    return max((local(mine) - other).abs().max().item() for mine, other in pairs)


def trained(topology: hpcsgd.Topology, sharded: bool) -> nn.Module:
    net, optimizer = training(topology, "hierarchical", sharded=sharded)
    go_on = steps(net, optimizer, topology.rank)
    for _ in range(EVERY + 1):
        next(go_on)
    return net


if __name__ == "__main__":
    torch.set_num_threads(1)
    LIBC.mallopt(MMAP_THRESHOLD, LARGE)
    what, groups, *words = sys.argv[1:]
    if what == "peaks":
        peaks(int(groups), words)
    else:
        torch.set_default_dtype(getattr(torch, *words) if words else torch.float32)
        limited(int(groups), sharded=what == "limited")
