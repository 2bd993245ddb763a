"""Asynchronous decentralized parallel SGD: a group averages with one other at a time and never waits long.

X. Lian, W. Zhang, C. Zhang, J. Liu: Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML
2018, algorithm 1 and section 4: worker i computes a gradient at what x_i was, averages x_i with a random
neighbour's, and applies the gradient to the result. A bipartite split rules out deadlock: active workers
ask, passive ones answer, and nobody does both.

The paper's worker is a group here; each of its positions averages the chunk that it owns, with the same
partner, at a moment of its own. As in the paper communication runs beside computation: an average begun at
the end of a step is taken in at the end of the next one, as the change that it made.
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
    """`x`, the chunk that others average with, and this rank's way to them.

    It is in host memory, where a thread answers them, and in float32 at least, or halves of 16-bit numbers
    would be lost again and again.
    """

    def __init__(self, owned: Sequence[Tensor], x: Sequence[Tensor], cross: Communicator) -> None:
        """From `x` on, which is like `owned`. Collective."""
        self.x = [_kept(chunk) for chunk in x]
        self.averaged = 0
        """How often others and this group have averaged it since that was asked for."""
        self._cross = cross
        self._lock = threading.Lock()
        self._sent, self._answer, self._average = (MessageBuffer.like(owned, HOST) for _ in range(3))
        self._asked: PendingRequest | None = None
        with phase("average"):
            self._service = RequestServer(cross, self._reply, self._sent.bytes.numel())

    def update(self, updates: Sequence[Tensor], chunks: Sequence[Tensor]) -> int:
        """x ← x + updates, and `chunks` ← x; return how often x was averaged since the last time."""
        with self._lock:
            for x, update, chunk in zip(self.x, updates, chunks, strict=True):
                chunk.copy_(x.add_(update), non_blocking=True)
            settle_all(chunks)  # x may change as soon as the lock is free
            averaged, self.averaged = self.averaged, 0
        return averaged

    def ask(self, partner: int) -> None:
        """Begin to average with group `partner`; nothing is waited for."""
        self._sent.pack(self.x)
        self._asked = self._service.ask({partner: self._sent.bytes}, {partner: self._answer.bytes})

    def take_in(self) -> None:
        """x ← x + (the average − what was sent): x may have moved since."""
        if self._asked is not None:
            self._asked.wait()
            self._asked = None
            self._answer.add_to(self.x)
            self._sent.add_to(self.x, -1.0)
            self.averaged += 1

    @contextlib.contextmanager
    def at_rest(self) -> Generator[None, None, None]:
        """In the block no average is under way. Collective."""
        self.take_in()
        with self._service.at_rest():
            yield

    def mean(self) -> list[Tensor]:
        """The mean of all x. Collective."""
        with self.at_rest():
            mean = [x.clone() for x in self.x]
            for x in mean:
                self._cross.allreduce(x, "mean").wait()
        return mean

    def _reply(self, active: int, question: Tensor) -> Iterable[tuple[int, Tensor]]:
        """On the server's thread of a passive group."""
        with self._lock:
            for x in self.x:
                x.div_(2)
            MessageBuffer(question, self._average.layout).add_to(self.x, 0.5)
            self._average.pack(self.x)
            self.averaged += 1
        return [(active, self._average.bytes)]


class PairAverage:
    """x_i, x_k ← (x_i + x_k)/2 between an active (even) group i and a random passive (odd) group k.

    The model has what x was at the end of the last step. The update is all that has changed since then: what
    somebody has written into parameters between two steps is part of it. Noted: `staleness`, how often x was
    averaged while the gradient was computed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.traits = Traits(RandomPartner(seed), histogram_names=("staleness",))
        self._shared: PairShard | None = None
        """From the first step of several groups on."""
        self._saved: list[Tensor] | None = None
        """What x is to begin with, or what it was where nobody shares it yet."""
        self._model: MessageBuffer | None = None
        """What the model was at the end of the last step; None: x is no copy of it, training begins there."""
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
        self._model.add_to(found, -1.0)  # what is left is the update
        s.metrics["staleness"] = self._shared.update(on_host(found), found)
        self._model.pack(found)
        if s.topology.group_index % 2 == 0:
            chance = random.Random(f"{self.seed} {s.topology.group_index} {s.t}")
            self._shared.ask(2 * chance.randrange(s.topology.num_groups // 2) + 1)
        return found

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        """x_i of the active half to the passive one, and the average back.

        `crowded`: partners are drawn by chance, and a link whose host has groups of both kinds carries
        questions of the one beside answers of the other. Fitted by hand to a simulation of links that are
        shared evenly, on four or more hosts; `benchmarks/model_error.py` has it beside real steps.
        """
        passive, active = m.P // 2, (m.P + 1) // 2
        if not passive:
            return []
        here = m.groups_per_host
        once = CommOp(
            "exchange", "cross", m.message_buffer(), overlap_steps=1,
            off_host_fraction=1 - here // 2 / passive, sender_fraction=active / m.P,
            contention=1 + (1.8 / here if here > 1 else 0.15 * (1 - 1 / passive)),
        )  # fmt: skip
        return [once, once]

    def model(self) -> list[Tensor] | None:
        """The mean of all x. What groups train on is behind it by averages that only one of two has seen."""
        return None if self._shared is None else self._shared.mean()

    def state_dict(self) -> State:
        """x, after the averages under way; a copy, since the next ones may begin at any time."""
        if self._shared is None:
            return State() if self._saved is None else State(sharded={"x": self._saved})
        with self._shared.at_rest():
            return State(sharded={"x": self._shared.x}).cloned()

    def load_state_dict(self, state: State) -> None:
        """Before the first step, or on all ranks. The parameters of the next step go with it."""
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
    """Groups average with one random other after every step, and wait for nobody else.

    Active (even) groups ask passive (odd) ones: M/K elements a rank and step from every active group, and
    back, while the next gradient is computed. What arrives first counts first, so that two runs have other
    bits. Noted in every step: `staleness`, how often the model was averaged while its gradient was computed.
    What is written into parameters between two steps, as by a clamp, is part of the next update. Load weights
    before the first step: after it groups would load them at moments of their own.

    Not to be confused with `d_psgd`, where all groups average in every step and wait for their neighbours.

    Args:
        seed: partners follow from it, the group and the step. Default 0.
        grad_reduce: of gradients inside a group: `Dense()`, `AllToAll()`, `ReduceScatter()` or `Sparse(...)`.
            Default Dense().

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.ad_psgd())
        >>> train(optimizer, steps=2)
        >>> optimizer.metrics["staleness"] >= 0
        True

    Source:
        X. Lian, W. Zhang, C. Zhang, J. Liu: Asynchronous Decentralized Parallel Stochastic Gradient Descent,
        ICML 2018, algorithm 1 and section 4.
    """
    return Method(grad_reduce=grad_reduce, schedule=Every(1), averager=PairAverage(seed))
