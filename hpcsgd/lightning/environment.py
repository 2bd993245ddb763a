"""The ranks as hpcsgd numbers them: node by node, which may differ from the launcher's order."""

from __future__ import annotations

from typing import NoReturn, final

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from hpcsgd.core.topology import Topology
from hpcsgd.errors import UserError, count_text


@final
class TopologyEnvironment(ClusterEnvironment):
    """Lightning's view of `topology`; Lightning starts no processes, because a launcher has started them."""

    creates_processes_externally = True  # pyright: ignore[reportAssignmentType] - a constant property

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        nodes = topology.world.gather_objects(topology.world.backend.node)
        self._nodes = list(dict.fromkeys(nodes))
        self._node_rank = self._nodes.index(nodes[topology.rank])
        self._local_rank = nodes[: topology.rank].count(nodes[topology.rank])
        self._most = max(nodes.count(node) for node in self._nodes)
        self._topology = topology

    @property
    def main_address(self) -> str:
        """Nothing may use this: `hpcsgd.init` has connected the ranks."""
        _refuse()

    @property
    def main_port(self) -> int:
        """Nothing may use this: `hpcsgd.init` has connected the ranks."""
        _refuse()

    @staticmethod
    def detect() -> bool:
        """Return False: only `HpcsgdStrategy` makes this environment."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks, N."""
        return self._topology.world_size

    def set_world_size(self, size: int) -> None:
        """Ignore Lightning's `size`: the launcher has decided it, and `validate_settings` compares."""

    def global_rank(self) -> int:
        """Return this rank's number."""
        return self._topology.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignore Lightning's `rank`: hpcsgd has numbered the ranks."""

    def local_rank(self) -> int:
        """Return this rank's number on its node."""
        return self._local_rank

    def node_rank(self) -> int:
        """Return the number of this rank's node."""
        return self._node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise `UserError` unless the Trainer's devices and nodes are the ranks that were started."""
        size, nodes = self._topology.world_size, len(self._nodes)
        is_even = self._most * nodes == size
        if is_even and (num_devices, num_nodes) == (self._most, nodes):
            return
        if is_even:
            remedy = f"give Trainer(devices={self._most}, num_nodes={nodes})"
            if size == 1:
                remedy += f", or start {num_devices * num_nodes} ranks by mpiexec, srun or torchrun"
        else:
            remedy = "start equally many on each node"
        raise UserError(
            f"Trainer(devices={num_devices}, num_nodes={num_nodes}): {count_text(size, 'rank')} were started "
            f"on {count_text(nodes, 'node')}: {remedy}"
        )


def _refuse() -> NoReturn:
    raise UserError("hpcsgd has connected the ranks, and has no address for Lightning to do it")
