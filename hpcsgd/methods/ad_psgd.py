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
from collections.abc import Iterable

from torch import Tensor

from hpcsgd.averagers.parcel import Parcel
from hpcsgd.core.method import Method, State
from hpcsgd.core.step import Exchange, Step
from hpcsgd.core.traffic import Message, Sizes
from hpcsgd.exchanges import Dense
from hpcsgd.schedules import Every
from hpcsgd.transport import Asked, Service, phase, wide
from hpcsgd.transport.on_host import on_host, room_for, settle_all
from hpcsgd.transport.streams import HOST


class Pairwise:
    """x_i, x_k ← (x_i + x_k)/2 between an active (even) group i and a random passive (odd) group k.

    `x` is the chunk that others average with, in host memory, where a thread answers them, and in float32 at
    least, or halves of 16-bit numbers would be lost again and again; the model has what it was at the end of
    the last step. The update is all that has changed since then: what somebody has written into parameters
    between two steps is part of it. Noted: `staleness`, how often x was averaged while the gradient was
    computed.
    """

    shards = True
    counted = ("staleness",)

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.x: list[Tensor] | None = None
        self._lock = threading.Lock()
        self._averaged = 0
        self._asked: Asked | None = None
        self._service: Service | None = None
        self._anew = True
        """Whether the model is as training begins or goes on with it, and no copy of what x was."""

    def before_update(self, s: Step) -> None:
        if s.job.P > 1 and self._anew:
            if self._service is None:
                self._start(s)
            self._model.pack(s.owned)
            self._anew = False

    def __call__(self, s: Step) -> None:
        assert self.x is not None
        self._take_in()
        self._model.add_to(s.owned, -1.0)  # what is left is the update
        updates = on_host(s.owned)
        with self._lock:
            for x, update, chunk in zip(self.x, updates, s.owned, strict=True):
                chunk.copy_(x.add_(update), non_blocking=True)
            settle_all(s.owned)  # x may change as soon as the lock is free
            s.notes["staleness"] = self._averaged
            self._averaged = 0
        self._model.pack(s.owned)
        if s.job.g % 2 == 0:
            self._ask(s)

    def sends(self, m: Sizes) -> list[Message]:
        """x_i of the active half to the passive one, and the average back.

        `crowded`: partners are drawn by chance, and a link whose host has groups of both kinds carries
        questions of the one beside answers of the other. Fitted by hand to a simulation of links that are
        shared evenly, on four or more hosts; `benchmarks/model_error.py` has it beside real steps.
        """
        passive, active = m.P // 2, (m.P + 1) // 2
        if not passive:
            return []
        here = m.groups_per_host
        once = Message(
            "exchange", "cross", m.parcel(), hidden=1,
            leaving=1 - here // 2 / passive, senders=active / m.P,
            crowded=1 + (1.8 / here if here > 1 else 0.15 * (1 - 1 / passive)),
        )  # fmt: skip
        return [once, once]

    def model(self) -> list[Tensor] | None:
        """The mean of all x. What groups train on is behind it by averages that only one of two has seen."""
        if self.x is None or self._service is None:
            return None
        with self._at_rest():
            mean = [x.clone() for x in self.x]
            for x in mean:
                self._cross.allreduce(x, "mean").wait()
        return mean

    def state_dict(self) -> State:
        """x, after the averages under way."""
        with self._at_rest():
            return {"chunks": {} if self.x is None else {"x": [x.clone() for x in self.x]}}

    def load_state_dict(self, state: State) -> None:
        """Before the first step, or on all ranks. The parameters of the next step go with it."""
        self._anew = True
        with self._at_rest():
            x = state.get("chunks", {}).get("x")
            if x is None and self._service is not None:
                x = self._owned
            self.x = None if x is None else [_kept(each) for each in x]

    def _at_rest(self) -> contextlib.AbstractContextManager[None]:
        self._take_in()
        return contextlib.nullcontext() if self._service is None else self._service.at_rest()

    def _start(self, s: Step) -> None:
        self._owned, self._cross = s.owned, s.job.cross
        self.x = self.x or [_kept(chunk) for chunk in s.owned]
        self._model = Parcel.like(s.owned)
        self._sent, self._answer, self._average = (Parcel.like(s.owned, HOST) for _ in range(3))
        with phase("average"):
            self._service = Service(s.job.cross, self._reply, self._sent.bytes.numel())

    def _ask(self, s: Step) -> None:
        assert self.x is not None
        assert self._service is not None
        partner = 2 * random.Random(f"{self.seed} {s.job.g} {s.t}").randrange(s.job.P // 2) + 1
        self._sent.pack(self.x)
        self._asked = self._service.ask({partner: self._sent.bytes}, {partner: self._answer.bytes})

    def _take_in(self) -> None:
        """x ← x + (the average − what was sent): x may have moved since."""
        if self._asked is not None and self.x is not None:
            self._asked.wait()
            self._asked = None
            self._answer.add_to(self.x)
            self._sent.add_to(self.x, -1.0)
            self._averaged += 1

    def _reply(self, active: int, question: Tensor) -> Iterable[tuple[int, Tensor]]:
        """On the server's thread of a passive group."""
        assert self.x is not None
        with self._lock:
            for x in self.x:
                x.div_(2)
            Parcel(question, self._average.layout).add_to(self.x, 0.5)
            self._average.pack(self.x)
            self._averaged += 1
        return [(active, self._average.bytes)]


def _kept(chunk: Tensor) -> Tensor:
    return room_for(chunk, wide(chunk.dtype)).copy_(chunk)


def ad_psgd(seed: int = 0, exchange: Exchange = Dense()) -> Method:  # noqa: B008 - frozen
    """Groups average with one random other after every step, and wait for nobody else.

    Active (even) groups ask passive (odd) ones: M/K elements a rank and step from every active group, and
    back, while the next gradient is computed. What arrives first counts first, so that two runs have other
    bits. Noted in every step: `staleness`, how often the model was averaged while its gradient was computed.
    What is written into parameters between two steps, as by a clamp, is part of the next update. Load weights
    before the first step: after it groups would load them at moments of their own.

    Not to be confused with `d_psgd`, where all groups average in every step and wait for their neighbours.

    Args:
        seed: partners follow from it, the group and the step. Default 0.
        exchange: of gradients inside a group: `Dense()`, `AllToAll()`, `ReduceScatter()` or `Sparse(...)`.
            Default Dense().

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, job, hpcsgd.ad_psgd())
        >>> train(optimizer, steps=2)
        >>> optimizer.notes["staleness"] >= 0
        True

    Source:
        X. Lian, W. Zhang, C. Zhang, J. Liu: Asynchronous Decentralized Parallel Stochastic Gradient Descent,
        ICML 2018, algorithm 1 and section 4.
    """
    return Method(exchange=exchange, when=Every(1), how=Pairwise(seed))
