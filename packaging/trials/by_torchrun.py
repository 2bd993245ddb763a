"""Train two groups by torchrun, as a user's script does, where there is neither MPI nor a compiler.

`torchrun --nproc-per-node 2 by_torchrun.py`: it checks in addition that nothing but torchrun was needed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import shutil
import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcsgd

ABSENT = ("mpiexec", "mpicc", "c++", "g++", "gcc", "cc", "nvcc")


def bare() -> None:
    """Check that the environment has the installed hpcsgd, no MPI and no compiler."""
    where = Path(hpcsgd.__file__ or "")
    assert where.is_relative_to(sysconfig.get_path("purelib")), f"{where} is not the installed one"
    assert importlib.util.find_spec("mpi4py") is None, "mpi4py is installed"
    found = [path for name in ABSENT if (path := shutil.which(name))]
    assert not found, f"in PATH: {found}"


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # the first line says what joins the ranks
    topology = hpcsgd.init(groups=2)
    torch.manual_seed(1)
    x = torch.randn(1024, 16)
    y = (x @ torch.randn(16, 4)).argmax(1)
    data = TensorDataset(x, y)
    sampler = hpcsgd.Sampler(data, topology)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    method = hpcsgd.hierarchical(sync_every=5)
    optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
    with torch.no_grad():
        before = nn.functional.cross_entropy(model(x), y).item()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, classes in loader:
            loss = nn.functional.cross_entropy(model(inputs), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    own = torch.cat([w.detach().flatten() for w in model.parameters()])
    assert differs(own, topology), "between two synchronizations the groups have the same model"
    with optimizer.averaged_model(), torch.no_grad():
        averaged = torch.cat([w.flatten() for w in model.parameters()])
        after = nn.functional.cross_entropy(model(x), y).item()
    assert not differs(averaged, topology), "the averaged models of the ranks are not equal"
    assert after < 0.5 * before, f"loss {before:.3g} → {after:.3g}"
    if topology.rank == 0:
        versions = f"torch {torch.__version__}, Python {sys.version.split()[0]}"
        print(f"hpcsgd {importlib.metadata.version('hpcsgd')}, {versions}")
        print(f"trains by torchrun: loss {before:.3g} → {after:.3g}, one averaged model on 2 ranks")


def differs(w: torch.Tensor, topology: hpcsgd.Topology) -> bool:
    """Return True if a number of `w` is not the same on all ranks."""
    greatest, least = hpcsgd.allreduce(w, topology, op="max"), -hpcsgd.allreduce(-w, topology, op="max")
    return not torch.equal(greatest, least)


if __name__ == "__main__":
    bare()
    main()
