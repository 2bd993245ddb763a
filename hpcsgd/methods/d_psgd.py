"""Decentralized parallel SGD: every group averages with its neighbours after every step.

X. Lian, C. Zhang, H. Zhang, C.-J. Hsieh, W. Zhang, J. Liu: Can Decentralized Algorithms Outperform
Centralized Algorithms?, NeurIPS 2017, algorithm 1: x_i ← Σ_j w_ij x_j, where x_i is the model of worker i,
and the weights w_ij form a symmetric, doubly stochastic matrix over an undirected graph.

Differences from the paper: the paper's worker is a group here. The paper mixes the models from before the
update and applies the gradient to the result. Here groups mix after the update, as in the SGP paper, which
compares SGP with this method.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import accumulation_dtype
from hpcsgd.core.averager import Traits
from hpcsgd.core.graphs import Graph, Ring
from hpcsgd.core.method import Method
from hpcsgd.core.mixing import mean_leaving, mean_peers, symmetric_matrix
from hpcsgd.core.step import GradReduce, StepContext
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.core.waits import InNeighbors
from hpcsgd.errors import UserError
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers.message_buffer import MessageBuffer
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.schedules import Every


class GossipAverage:
    """The averager over an undirected graph, x_i ← Σ_j w_ij x_j, shard by shard."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.traits = Traits(InNeighbors(graph), vectors_only=True)
        self._rows: dict[int, dict[int, float]] = {}
        self._sent: MessageBuffer | None = None
        self._received: dict[int, MessageBuffer] = {}

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        found, row = list(vectors), self._row(s)
        self._sent = self._sent or MessageBuffer.like(found)
        self._sent.pack(found)
        for j in row.keys() - self._received.keys() - {s.topology.group_index}:
            self._received[j] = MessageBuffer.like(found)
        arrived = {j: self._received[j] for j in row if j != s.topology.group_index}
        outgoing = dict.fromkeys(arrived, self._sent.bytes)
        s.topology.inter_group.sendrecv(outgoing, {j: message.bytes for j, message in arrived.items()}).wait()
        mixed = [own.to(accumulation_dtype(own.dtype)).mul_(row[s.topology.group_index]) for own in found]
        for j, message in arrived.items():
            message.add_to(mixed, row[j])
        for own, x in zip(found, mixed, strict=True):
            own.copy_(x)
        return found

    def memory_bytes(self, m: ModelLayout) -> float:
        """Return the bytes of the message buffers: one to send, and one for each neighbour of a period."""
        neighbours = {j for t in range(self.graph.period(m.P)) for j in self.graph.peers(0, t, m.P)}
        return (1 + len(neighbours)) * m.message_buffer()

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        """Return the messages that carry x_i to every neighbour, averaged over a period of the graph."""
        nbytes = mean_peers(self.graph, m.P) * m.message_buffer()
        return [
            CommOp(
                "sendrecv",
                "inter_group",
                nbytes,
                off_host_fraction=mean_leaving(self.graph, m.P, m.groups_per_host),
            )
        ]

    def _row(self, s: StepContext) -> dict[int, float]:
        """Return the weights w_ij of this group i for every neighbour j and for itself, in the order of j."""
        t = (s.t - 1) % self.graph.period(s.topology.num_groups)
        if t not in self._rows:
            row = symmetric_matrix(self.graph, t, s.topology.num_groups)[s.topology.group_index]
            self._rows[t] = {j: w.item() for j, w in enumerate(row) if w > 0 or j == s.topology.group_index}
        return self._rows[t]


@method(cite="lian2017dpsgd", delayable=True)
@checked
def d_psgd(
    graph: Graph = Ring(),  # noqa: B008 - frozen
    grad_reduce: GradReduce = Dense(),  # noqa: B008 - frozen
) -> Method:
    """Return symmetric gossip: after every step, each group averages with its neighbours.

    The models of the groups differ: evaluate inside `optimizer.averaged_model()`.

    Args:
        graph: A graph of `hpcsgd.graphs` whose edges go both ways: `Ring()`, `UndirectedExponential()`, which
            mixes faster with many groups, `Complete()` or `BipartiteExponential()`. Default Ring().
        grad_reduce: How the gradients of a group are averaged in every step: `Dense()`, `AllToAll()`,
            `ReduceScatter()` or `Sparse(...)`. Default Dense().

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it may hold state.

    Raises:
        UserError: If `graph` is directed.

    Shape:
        M parameters in total; each rank owns M/K of them. A rank sends M/K elements to each neighbour per
        step.

    Example:
        >>> method = hpcsgd.d_psgd(graph=hpcsgd.graphs.UndirectedExponential())
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> hpcsgd.d_psgd(graph=hpcsgd.graphs.Exponential())
        Traceback (most recent call last):
        hpcsgd.errors.UserError: graph = Exponential(per_step=1): neighbours average with each other, ...

    References:
        X. Lian, C. Zhang, H. Zhang, C.-J. Hsieh, W. Zhang, J. Liu: Can Decentralized Algorithms Outperform
        Centralized Algorithms?, NeurIPS 2017, algorithm 1, with the mixing after the update.

    See Also:
        `sgp`: gossip over a directed graph.
        `ad_psgd`: gossip in which no group waits for its neighbours.
    """
    if not graph.symmetric:
        raise UserError(
            f"graph = {graph}: neighbours average with each other, so edges have to go both ways",
            key="graph",
            value=graph,
        )
    return Method(grad_reduce=grad_reduce, schedule=Every(1), averager=GossipAverage(graph))
