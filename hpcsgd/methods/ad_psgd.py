"""Asynchronous decentralized parallel SGD: groups average in pairs, without long waits.

X. Lian, W. Zhang, C. Zhang, J. Liu: Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML
2018, algorithm 1 and section 4: worker i computes a gradient at an earlier value of its model x_i, averages
x_i with that of a random neighbour, and applies the gradient to the result. Workers are active or passive,
which rules out deadlock: active ones send requests, and passive ones answer them.

The paper's worker is a group here. All ranks of a group average with the same partner group. Each rank
averages the shard that it owns, and does not wait for the other ranks. As in the paper, communication
overlaps computation: an average begun at the end of a step is applied at the end of the next one, as a
difference that is added to x_i.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Generator, Iterable, Sequence

from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import Communicator, PendingRequest, RequestServer, accumulation_dtype, phase
from hpcsgd.comm.on_host import on_host, room_for, settle_all
from hpcsgd.comm.streams import HOST
from hpcsgd.core.averager import Traits
from hpcsgd.core.method import Method
from hpcsgd.core.state import State
from hpcsgd.core.step import GradReduce, StepContext
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.core.waits import RandomPartner
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers.message_buffer import MessageBuffer
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.schedules import Every

PAPER = """
@inproceedings{lian2018adpsgd,
  title = {Asynchronous Decentralized Parallel Stochastic Gradient Descent},
  author = {Lian, Xiangru and Zhang, Wei and Zhang, Ce and Liu, Ji},
  booktitle = {International Conference on Machine Learning (ICML)},
  year = {2018},
  eprint = {1710.06952},
  archivePrefix = {arXiv},
}
"""


class PairShard:
    """This rank's shard `x` of its group's model, and the connection over which pairs average it.

    `x` is in host memory, where a thread answers the requests of other groups. It is float32 or wider,
    because repeated averages in 16 bits would keep losing small differences.
    """

    def __init__(self, owned: Sequence[Tensor], x: Sequence[Tensor], inter_group: Communicator) -> None:
        """Copy the initial values `x`; `owned` are the model's shards, which set the layout. Collective."""
        self.x = [_kept(chunk) for chunk in x]
        self.averaged = 0
        """The number of averages of x with other groups since the last `update`."""
        self._inter_group = inter_group
        self._lock = threading.Lock()
        self._sent, self._answer, self._average = (MessageBuffer.like(owned, HOST) for _ in range(3))
        self._asked: PendingRequest | None = None
        with phase("model_average"):
            self._service = RequestServer(inter_group, self._reply, self._sent.bytes.numel())

    def update(self, updates: Sequence[Tensor], chunks: Sequence[Tensor]) -> int:
        """Apply x ← x + updates and copy the new x into `chunks`, this rank's shards of the model.

        Return how many averages were made since the last call.
        """
        with self._lock:
            for x, update, chunk in zip(self.x, updates, chunks, strict=True):
                chunk.copy_(x.add_(update), non_blocking=True)
            settle_all(chunks)  # x may change as soon as the lock is free
            averaged, self.averaged = self.averaged, 0
        return averaged

    def ask(self, partner: int) -> None:
        """Request an average of x with that of group `partner`, and return without waiting for the answer."""
        self._sent.pack(self.x)
        self._asked = self._service.ask({partner: self._sent.bytes}, {partner: self._answer.bytes})

    def take_in(self) -> None:
        """Wait for the answer to `ask`, and add to x the difference of the average from the x that was sent.

        x may have changed since `ask`, because the group of this rank answered requests meanwhile.
        """
        if self._asked is not None:
            self._asked.wait()
            self._asked = None
            self._answer.add_to(self.x)
            self._sent.add_to(self.x, -1.0)
            self.averaged += 1

    @contextlib.contextmanager
    def at_rest(self) -> Generator[None, None, None]:
        """Wait until no average is under way on any rank; inside the context none begins. Collective."""
        self.take_in()
        with self._service.at_rest():
            yield

    def mean(self) -> list[Tensor]:
        """Return the mean of x over all groups, as this rank's shards. Collective."""
        with self.at_rest():
            mean = [x.clone() for x in self.x]
            for x in mean:
                self._inter_group.allreduce(x, "mean").wait()
        return mean

    def _reply(self, active: int, question: Tensor) -> Iterable[tuple[int, Tensor]]:
        """Average x with the x_i in the request of group `active`; return the new x as the answer.

        The request server's thread calls this.
        """
        with self._lock:
            for x in self.x:
                x.div_(2)
            MessageBuffer(question, self._average.layout).add_to(self.x, 0.5)
            self._average.pack(self.x)
            self.averaged += 1
        return [(active, self._average.bytes)]


class PairAverage:
    """The averager x_i, x_k ← (x_i + x_k)/2 of an active (even) group i and a random odd group k.

    x_i is the model of group i, and odd groups are passive. A rank keeps its shard of x_i in a `PairShard`.
    The parameters that are trained are a copy of x_i from the end of the last step. The update that is added
    to x_i is everything that has changed in this copy since then, including what the user wrote into
    parameters between two steps. The metric `staleness` counts how often x_i was averaged while the gradient
    was computed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.traits = Traits(RandomPartner(seed), histogram_names=("staleness",))
        self._shared: PairShard | None = None
        """This rank's x and connection; made in the first step, if there are several groups."""
        self._saved: list[Tensor] | None = None
        """The initial value of x, if it was loaded before `_shared` exists."""
        self._model: MessageBuffer | None = None
        """The model at the end of the last step; None before the first step and after a load."""
        self._owned: Sequence[Tensor] = ()

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        if s.topology.num_groups > 1 and self._model is None:
            self._owned = vectors
            if self._shared is None:
                self._shared = PairShard(vectors, self._saved or vectors, s.topology.inter_group)
                self._saved = None
            self._model = MessageBuffer.like(vectors)
            self._model.pack(vectors)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        assert self._shared is not None
        assert self._model is not None
        found = list(vectors)
        self._shared.take_in()
        self._model.add_to(found, -1.0)  # found is now the update
        s.metrics["staleness"] = self._shared.update(on_host(found), found)
        self._model.pack(found)
        if s.topology.group_index % 2 == 0:
            chance = random.Random(f"{self.seed} {s.topology.group_index} {s.t}")
            self._shared.ask(2 * chance.randrange(s.topology.num_groups // 2) + 1)
        return found

    def memory_bytes(self, m: ModelLayout) -> float:
        """Return the bytes of x, of its copy at the end of the last step, and of four message buffers.

        The buffers are for the request and its answer, the answer to a request, and a request that arrives.
        """
        return m.own_elements(wide=True) + 5 * m.message_buffer()

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        """Return the predicted messages: x_i from an active group to a passive one, and the average back.

        `contention` accounts for random partners, several of which may share a link. In addition, if a host
        has active and passive groups, its link carries requests and answers at the same time. The value of
        `contention` was fitted manually to a simulation of evenly shared links, on four or more hosts.
        `benchmarks/model_error.py` compares the predicted times with real steps.
        """
        passive, active = m.P // 2, (m.P + 1) // 2
        if not passive:
            return []
        here = m.groups_per_host
        once = CommOp(
            "sendrecv", "inter_group", m.message_buffer(), overlap_steps=1,
            off_host_fraction=1 - here // 2 / passive, sender_fraction=active / m.P,
            contention=1 + (1.8 / here if here > 1 else 0.15 * (1 - 1 / passive)),
        )  # fmt: skip
        return [once, once]

    def model(self) -> list[Tensor] | None:
        """Return the mean of the groups' models x_i; None before the first step or with one group.

        The parameters that groups train on lag behind this mean, because some averages have so far reached
        only one of their two groups.
        """
        return None if self._shared is None else self._shared.mean()

    def state_dict(self) -> State:
        """Wait for pending averages and return a copy of x, which later averages do not change."""
        if self._shared is None:
            return State() if self._saved is None else State(sharded={"x": self._saved})
        with self._shared.at_rest():
            return State(sharded={"x": self._shared.x}).cloned()

    def load_state_dict(self, state: State) -> None:
        """Load x, before the first step or on all ranks. The parameters of the next step must equal x."""
        self._model = None
        x = state.sharded.get("x")
        if self._shared is None:
            self._saved = None if x is None else [_kept(each) for each in x]
            return
        with self._shared.at_rest():
            self._shared.x = [_kept(each) for each in (self._owned if x is None else x)]


def _kept(chunk: Tensor) -> Tensor:
    return room_for(chunk, accumulation_dtype(chunk.dtype)).copy_(chunk)


@method(cite=PAPER)
@checked
def ad_psgd(seed: int = 0, grad_reduce: GradReduce = Dense()) -> Method:  # noqa: B008 - frozen
    """Return asynchronous gossip: after every step, a group averages with one random other group.

    Active groups (even index) send requests to passive ones (odd index). The answer travels while the next
    gradient is computed. Requests are handled in the order in which they arrive, so two runs do not give the
    same bits.

    Args:
        seed: Seed of the draw. Together with the group and the step it determines the partners. Default 0.
        grad_reduce: How the gradients of a group are averaged in every step: `Dense()`, `AllToAll()`,
            `ReduceScatter()` or `Sparse(...)`. Default Dense().

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it holds state.

    Shape:
        M parameters in total; each rank owns M/K of them. Per step, a rank of an active group sends M/K
        elements and receives M/K elements.

    Note:
        After every step, `optimizer.metrics["staleness"]` counts how often the model was averaged while its
        gradient was computed.

        A change that you write into parameters between two steps, such as a clamp, becomes part of the next
        update. Load weights before the first step: later, each group would load them in a different step.

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.ad_psgd())
        >>> train(optimizer, steps=2)
        >>> optimizer.metrics["staleness"] >= 0
        True

    References:
        X. Lian, W. Zhang, C. Zhang, J. Liu: Asynchronous Decentralized Parallel Stochastic Gradient Descent,
        ICML 2018, algorithm 1 and section 4.

    See Also:
        `d_psgd`: all groups average in every step and wait for their neighbours.
    """
    return Method(grad_reduce=grad_reduce, schedule=Every(1), averager=PairAverage(seed))
