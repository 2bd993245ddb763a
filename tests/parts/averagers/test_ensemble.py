"""What the ranks of a group average with other groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, optim

from hpcsgd import DistributedOptimizer, UserError, ensemble_sync
from hpcsgd.comm import Communicator
from hpcsgd.core.replica_groups import Absent, Contribution
from hpcsgd.core.topology import form
from references import model as make_model
from references import one_step


@dataclasses.dataclass(frozen=True)
class Alone(Absent):
    """Replica groups of which all others have died."""

    def mean(
        self, w: Sequence[Tensor], t: int, *, alike: bool = True, contribution: Contribution | None = None
    ) -> None:
        pass


@pytest.mark.parametrize("n", [2])
def test_buffers_that_appear_on_one_rank_alone(run, n: int) -> None:
    def train(world: Communicator) -> tuple[float, str]:
        topology, net = dataclasses.replace(form(world), replica_groups=Alone()), make_model()
        net.register_buffer("seen", torch.full((2,), float(world.rank)))
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), 0.1), net, topology, ensemble_sync(1))
        net.seen = torch.full((2,), 1.0 + world.rank)  # replaces the registered tensor
        one_step(net, optimizer, topology, 0)
        averaged = net.seen[0].item()
        if world.rank == 1:
            net.register_buffer("more", torch.zeros(3))
        with pytest.raises(UserError) as error:
            one_step(net, optimizer, topology, 1)
        return averaged, str(error.value)

    told = (
        "models differ between ranks: 2 elements of float buffers in rank 0, 5 elements of float buffers in 1"
    )
    assert run(n, train) == [(1.5, told)] * n
