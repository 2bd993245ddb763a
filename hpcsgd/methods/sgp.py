"""Stochastic gradient push: groups gossip over a directed graph, and none waits for the whole job.

M. Assran, N. Loizou, N. Ballas, M. Rabbat: Stochastic Gradient Push for Distributed Deep Learning, ICML 2019,
algorithm 1. Node i holds a biased model x_i, a weight w_i, which is 1 at first, and the model z_i = x_i /
w_i. In every step it

    1  computes its gradient at z_i
    2  updates x_i by this gradient (with SGD, momentum or Adam, whose state stays local)
    3  sends p_ji·x_i and p_ji·w_i to its out-neighbours j, and keeps p_ii·x_i and p_ii·w_i
    4  x_i ← Σ_j p_ij·x_j,  w_i ← Σ_j p_ij·w_j,  z_i ← x_i / w_i

The paper's node is a group here. Each of its K ranks gossips the shard that it owns: M/K elements per link.
The model's parameters are z_i. Weight decay acts on x_i. Over the graphs of the paper every w_i stays 1. The
weight is sent nevertheless, because a graph that is not regular, or a late message, changes it.

τ-overlap SGP sends without waiting and adds each message τ steps after it was sent. All messages are τ steps
late, as in the paper's 1-OSGP, so that a repeated run gives the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import Communicator, Work, accumulation_dtype
from hpcsgd.core.averager import Traits
from hpcsgd.core.graphs import Exponential, Graph, senders
from hpcsgd.core.method import Method
from hpcsgd.core.mixing import mean_leaving, mean_peers
from hpcsgd.core.state import State
from hpcsgd.core.step import GradReduce, StepContext
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.core.waits import InNeighbors
from hpcsgd.errors import UserError
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers.message_buffer import MessageBuffer
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.schedules import Every


@dataclass
class MessageRound:
    """The messages of one step: those that this rank receives, and the one that it sends.

    They are complete once `work` is done. `work` returns the weights in the received messages. The
    communication thread reads the weights, so that the training thread does not wait for the device.
    """

    incoming: list[MessageBuffer]
    sent: list[MessageBuffer] = field(default_factory=list[MessageBuffer])
    work: Work | None = None

    def wait(self) -> list[tuple[MessageBuffer, float]]:
        numbers = _numbers(self.incoming) if self.work is None else self.work.wait()
        return list(zip(self.incoming, numbers, strict=True))


def _numbers(parcels: Sequence[MessageBuffer]) -> list[float]:
    return [message.weight for message in parcels]


class PushSum:
    """The averager of lines 3 and 4: x ← P_t x, w ← P_t w with a column-stochastic matrix P_t (push-sum).

    x has the biased models of all groups, and w their weights. A message is added `staleness` (τ) steps after
    it was sent, so the messages of at most τ steps are under way between two steps.
    """

    def __init__(self, graph: Graph, staleness: int = 0) -> None:
        if staleness < 0:
            raise UserError(
                f"overlap_steps = {staleness}: messages are used 0 or more steps after they were sent",
                key="overlap_steps",
                value=staleness,
            )
        self.graph = graph
        self.staleness = staleness
        self.traits = Traits(InNeighbors(graph, staleness))
        self.weight = 1.0
        """The push-sum weight w_i of this group."""
        self._under_way: deque[MessageRound] = deque()
        self._spare: list[MessageBuffer] = []
        self._link: Communicator | None = None

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        """Multiply the parameters z_i by w_i, so that the optimizer updates x_i, and `average` gets it.

        If every rank updates the whole model, multiply the whole model, otherwise only this rank's shards.
        """
        if self.weight != 1:
            for b in s.buckets:
                (b.param_shard if s.fixed.updates_shards else b.w).mul_(self.weight)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        found = list(vectors)
        x = [own.to(accumulation_dtype(own.dtype)) for own in found]  # no copies, except of 16-bit shards
        self._under_way.append(self._send(s, found, x))
        if len(self._under_way) > self.staleness:
            self._take_in(x, self._under_way.popleft())
        for own, mine in zip(found, x, strict=True):
            own.copy_(mine if self.weight == 1 else mine.div_(self.weight))
        return found

    def memory_bytes(self, m: ModelLayout) -> float:
        """Return the bytes of the message buffers: those of τ steps under way, and of the current one."""
        return (self.staleness + 1) * (1 + mean_peers(self.graph, m.P)) * m.message_buffer()

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        """Return the messages that carry x_i and w_i (line 3), averaged over a period of the graph."""
        nbytes = mean_peers(self.graph, m.P) * m.message_buffer()
        leaving = mean_leaving(self.graph, m.P, m.groups_per_host)
        return [
            CommOp("sendrecv", "inter_group", nbytes, overlap_steps=self.staleness, off_host_fraction=leaving)
        ]

    def state_dict(self) -> State:
        """Wait for the messages under way, and return them with the push-sum weight.

        If P or K has changed when the state is loaded, groups start from the model z with weight 1.
        """
        arrived = [[message.state_dict() for message, _ in sent.wait()] for sent in self._under_way]
        return State(per_rank={"weight": self.weight, "under_way": arrived})

    def load_state_dict(self, state: State) -> None:
        own = state.per_rank or {"weight": 1.0, "under_way": []}
        self.weight = own["weight"]
        self._under_way = deque(
            MessageRound([MessageBuffer.restored(x) for x in arrived]) for arrived in own["under_way"]
        )

    def _send(self, s: StepContext, like: Sequence[Tensor], x: list[Tensor]) -> MessageRound:
        """Send equal fractions of x_i and w_i to the out-neighbours, and keep the same fraction.

        `x` is x_i and becomes what is kept: exactly what was not sent, so that rounding does not change the
        sum over all groups. The messages have the layout of `like`.
        """
        t, i, n = s.t - 1, s.topology.group_index, s.topology.num_groups
        peers, sources = self.graph.peers(i, t, n), senders(self.graph, i, t, n)
        share = 1 / (len(peers) + 1)
        sent, arriving = self._room(like), [self._room(like) for _ in sources]
        sent.pack(x, share, self.weight)
        sent.add_to(x, -len(peers))
        self.weight *= share
        if self._link is None:
            self._link = (
                s.topology.inter_group.dup_with_thread() if self.staleness else s.topology.inter_group
            )
        link, outgoing = self._link, dict.fromkeys(peers, sent.bytes)
        incoming = {j: message.bytes for j, message in zip(sources, arriving, strict=True)}

        def sent_and_received() -> list[float]:
            link.sendrecv(outgoing, incoming).wait()
            return _numbers(arriving)

        return MessageRound(
            arriving, [sent], link.run(sent_and_received, "gossip", sent.bytes, *incoming.values())
        )

    def _take_in(self, x: list[Tensor], sent: MessageRound) -> None:
        for theirs, weight in sent.wait():
            theirs.add_to(x)
            self.weight += weight
        if sent.work is not None:  # otherwise the buffers come from a checkpoint and are in host memory
            self._spare += sent.incoming + sent.sent

    def _room(self, like: Sequence[Tensor]) -> MessageBuffer:
        return self._spare.pop() if self._spare else MessageBuffer.like(like)


@method(cite="assran2019sgp")
@checked
def sgp(
    peers: int | None = None,
    graph: Graph | None = None,
    grad_reduce: GradReduce = Dense(),  # noqa: B008 - frozen
) -> Method:
    """Return stochastic gradient push: in every step, each group sends shares of its model to a few others.

    A group waits only for the groups that send to it. The models of the groups differ: evaluate inside
    `optimizer.averaged_model()`.

    Args:
        peers: Number of groups that a group sends to in a step (p), over the exponential graph of base p + 1,
            as in the authors' code. For most numbers of groups, this graph takes fewer steps to the mean than
            p consecutive powers of two. Default None: 1 if no graph is given.
        graph: Another graph of `hpcsgd.graphs`, such as ``PowersOfTwo(2)``. In a job file: ``graph = { name =
            "powers_of_two", per_step = 2 }``. Default None: the exponential graph.
        grad_reduce: How the gradients of a group are averaged in every step: `Dense()`, `AllToAll()`,
            `ReduceScatter()` or `Sparse(...)`. Default Dense().

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it holds state.

    Raises:
        UserError: If both `peers` and `graph` are given, or `peers` is below 1.

    Shape:
        M parameters in total; each rank owns M/K of them. A rank sends `peers`·M/K elements per step.

    Example:
        >>> method = hpcsgd.sgp(graph=hpcsgd.graphs.PowersOfTwo(1))
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> optimizer.t
        2

    References:
        M. Assran, N. Loizou, N. Ballas, M. Rabbat: Stochastic Gradient Push for Distributed Deep Learning,
        ICML 2019, algorithm 1.

    See Also:
        `osgp`: does not wait for the messages of the same step.
        `d_psgd`: gossip over an undirected graph, without weights.
    """
    return osgp(0, peers, graph, grad_reduce)


@method(cite="assran2019sgp")
@checked
def osgp(
    overlap_steps: int,
    peers: int | None = None,
    graph: Graph | None = None,
    grad_reduce: GradReduce = Dense(),  # noqa: B008 - frozen
) -> Method:
    """Return overlap stochastic gradient push: `sgp` with messages that overlap the next steps.

    Every group adds a message exactly `overlap_steps` steps after it was sent, so that a repeated run gives
    the same bits.

    Args:
        overlap_steps: Steps that a message takes (the paper's τ), 0 or more. 0 is `sgp`, 1 is the paper's
            1-OSGP.
        peers: Number of groups that a group sends to in a step (p). Default None: 1 if no graph is given.
        graph: Another graph of `hpcsgd.graphs`. Default None: the exponential graph of base p + 1.
        grad_reduce: How the gradients of a group are averaged in every step: `Dense()`, `AllToAll()`,
            `ReduceScatter()` or `Sparse(...)`. Default Dense().

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it holds state.

    Raises:
        UserError: If `overlap_steps` is negative, both `peers` and `graph` are given, or `peers` is below 1.

    Shape:
        M parameters in total; each rank owns M/K of them. A rank sends `peers`·M/K elements per step. At most
        `overlap_steps` messages of M/K elements per peer are under way.

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.osgp(overlap_steps=1))
        >>> train(optimizer, steps=3)
        >>> optimizer.t
        3

    References:
        M. Assran et al., ICML 2019, τ-overlap SGP.

    See Also:
        `ssp`: its staleness limits how far groups run ahead of each other.
    """
    if graph is not None and peers is not None:
        raise UserError(
            f"peers = {peers} and a graph: peers is of the exponential graph, give one of them",
            key="peers",
            value=peers,
        )
    how = PushSum(graph or Exponential(1 if peers is None else peers), overlap_steps)
    return Method(grad_reduce=grad_reduce, schedule=Every(1), averager=how)
