"""Lightning sees the ranks as hpcsgd numbers them: node by node, wherever the launcher has placed them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.lightning.environment import TopologyEnvironment

IN_TURN = (0, 1, 0, 1)
"""The nodes of ranks that a launcher has placed in turn."""


def seen(world: Communicator) -> tuple[int, ...]:
    environment = TopologyEnvironment(form(world, 2))
    environment.validate_settings(num_devices=2, num_nodes=2)
    ranks = (environment.global_rank(), environment.node_rank(), environment.local_rank())
    return *ranks, environment.world_size()


def test_ranks_that_are_placed_in_turn() -> None:
    assert threads.run(4, seen, nodes=IN_TURN) == [(0, 0, 0, 4), (2, 1, 0, 4), (1, 0, 1, 4), (3, 1, 1, 4)]


GIVE_2 = "4 ranks were started on 2 nodes: give Trainer(devices=2, num_nodes=2)"
UNEVEN = "4 ranks were started on 2 nodes: start equally many on each node"


@pytest.mark.parametrize(
    ("nodes", "devices", "num_nodes", "expected"),
    [
        (IN_TURN, 2, 1, GIVE_2),
        (IN_TURN, 4, 1, GIVE_2),
        (IN_TURN, 1, 4, GIVE_2),
        ((0, 0, 0, 0), 2, 2, "4 ranks were started on 1 node: give Trainer(devices=4, num_nodes=1)"),
        ((0, 0, 0, 1), 4, 1, UNEVEN),
        ((0, 0, 0, 1), 2, 2, UNEVEN),
        ((0, 0, 0, 1), 3, 2, UNEVEN),
    ],
)
def test_devices_are_those_of_one_node(
    nodes: Sequence[int], devices: int, num_nodes: int, expected: str
) -> None:
    """Every rank raises the same line, also the rank that is alone on its node."""

    def refused(world: Communicator) -> str:
        with pytest.raises(UserError) as caught:
            TopologyEnvironment(form(world, 2)).validate_settings(devices, num_nodes)
        return str(caught.value)

    messages = threads.run(4, refused, nodes=nodes)
    assert messages == [f"Trainer(devices={devices}, num_nodes={num_nodes}): {expected}"] * 4
