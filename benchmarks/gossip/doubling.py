"""AR-SGD with the simplest allreduce: all of the gradient, log₂ n times, after the backward pass.

The slides of the SGP paper do not say how its AR-SGD averages. Its hours by number of nodes are those of
recursive doubling (`paper_scaling.py`). Our `bsp` sends 2·(n − 1)/n of the model instead of log₂ n times all
of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.workloads import Step, Workload, sgd
from hpcsgd.comm import Communicator
from hpcsgd.core.layout import nbytes


def doubling(workload: Workload, world: Communicator) -> Step:
    """Return a training step by recursive doubling; the number of ranks is a power of two."""
    model = workload.model()
    optimizer, parameters = sgd(model), list(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: average([_gradient(p) for p in parameters], world))
    return workload.training(model, optimizer)


def average(gradients: Sequence[Tensor], world: Communicator) -> None:
    """Average in place. After each exchange, a rank's sum is over twice as many ranks as before."""
    n, rank = world.size, world.rank
    assert n.bit_count() == 1, f"{n} ranks are no power of two"
    whole = torch.cat([g.reshape(-1) for g in gradients])
    others = torch.empty_like(whole)
    for distance in (1 << level for level in range(n.bit_length() - 1)):
        world.sendrecv({rank ^ distance: whole}, {rank ^ distance: others}).wait()
        whole += others
    whole /= n
    for g, mean in zip(gradients, whole.split([g.numel() for g in gradients]), strict=True):
        g.copy_(mean.view_as(g))


def sent(workload: Workload, n: int) -> float:
    """Return the bytes that a rank sends in a step."""
    size = nbytes(workload.model().parameters())
    return float(size * (n.bit_length() - 1))


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
