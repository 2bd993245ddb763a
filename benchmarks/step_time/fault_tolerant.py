"""Steps of torchft's LocalSGD and DiLoCo, if it is installed. Every rank is its own replica group."""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import Any

from torch import nn, optim
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]
from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]
from torchft.local_sgd import DiLoCo, LocalSGD  # pyright: ignore[reportMissingImports]

import hpcsgd
from harness.workloads import Step, Workload

PATIENCE = timedelta(seconds=600)
PORT = 29600
"""The port of the first lighthouse. Each contestant has its own one."""
logging.getLogger("torchft.manager").setLevel(logging.ERROR)  # without NCCL it warns at every quorum
_kept: list[Any] = []
"""Stores and lighthouses that have to live until the process ends."""


def local_sgd(workload: Workload, topology: hpcsgd.Topology, every: int) -> Step:
    model = workload.model()
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    LocalSGD(manager(topology), model, optimizer, every).__enter__()
    return workload.training(model, optimizer)


def diloco(workload: Workload, topology: hpcsgd.Topology, every: int) -> Step:
    """Return a step of DiLoCo with one fragment and without a delay, so not of Streaming DiLoCo."""
    model = workload.model()
    inner = optim.SGD(model.parameters(), lr=1e-3)
    outer = optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    whole: list[nn.Module] = [model]
    DiLoCo(manager(topology), whole, inner, outer, every, use_bucketization=True).__enter__()
    return workload.training(model, inner)


def manager(topology: hpcsgd.Topology) -> Manager:
    """Return the manager of a replica group that is this rank alone; collective."""
    here = topology.world.gather_objects(_address())
    first, here = here[0], here[topology.rank]
    port = PORT + len(_kept)
    store = TCPStore(here, 0, is_master=True, wait_for_workers=False)
    lighthouse = None
    if topology.rank == 0:
        lighthouse = LighthouseServer(bind=f"0.0.0.0:{port}", min_replicas=topology.world_size)
    _kept.append((store, lighthouse))
    topology.world.barrier()
    return Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=topology.world_size,
        use_async_quorum=False,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=store.port,
        lighthouse_addr=f"http://{first}:{port}",
        replica_id=f"replica_{topology.rank}",
        hostname=here,
        init_sync=False,
    )


def _address() -> str:
    """Return the address of this host, see `harness.hosts`; without virtual hosts, 127.0.0.1."""
    number = socket.gethostname().rpartition("-")[2]
    return f"10.77.0.{number}" if "HPCSGD_NET" in os.environ else "127.0.0.1"
