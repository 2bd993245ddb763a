"""Delayed averaging: groups train on while their models meet, and take the mean in some steps later.

A meeting begins with w_t, the models after update t, and arrives d updates later:

    w̄_t = what the averager makes of w_t                 while updates t+1 … t+d are made
    w ← w̄_t + (w_{t+d} − w_t)                            after update t+d

so that no update is lost. With d = 0 it is the method itself. One meeting is under way at a
time: of two, the later one would take away once more by how far groups are apart.

That averages may come late is from Q. Zhou et al.: DaSGD: Squeezing SGD Parallelization Performance in
Distributed Training Using Delayed Averaging, 2020 (arXiv:2006.00441); the form above is the
simplest that goes with any optimizer and averager. DASO (Heat) weighs the two models by steps instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpcsgd.averagers.under_way import Meeting, apart, under_way
from hpcsgd.core.capabilities import (
    Foreseen,
    Periodic,
    goes_by_time,
    is_regardless_of_gradients,
    of_chunks,
)
from hpcsgd.core.method import Method, State
from hpcsgd.core.step import Averager, Schedule, Step
from hpcsgd.core.topology import Job
from hpcsgd.core.traffic import Message, Sizes, late, sends
from hpcsgd.errors import UserError
from hpcsgd.transport import wide


class Delayed:
    """`inner`, whose meetings arrive `steps` ≥ 1 updates after they began.

    Called where none arrives it makes groups meet at once, after it has taken in what is under way. D is that
    of w_t, noted at the arrival.
    """

    shards = True

    def __init__(self, inner: Averager, steps: int) -> None:
        self.inner = inner
        self.steps = steps
        self._meeting: Meeting | None = None
        self._brought: list[Tensor] = []
        """The w_t of the meeting under way."""
        self._wanted = 0
        """The last update after which groups were to meet."""
        self._apart: Job | None = None

    @property
    def regardless_of_gradients(self) -> bool:
        return is_regardless_of_gradients(self.inner)

    def before_update(self, s: Step) -> None:
        self.inner.before_update(s)

    def arrives(self, s: Step, wanted: bool) -> bool:
        """Whether a meeting arrives after this update. One that is `wanted` begins then, if none is under way
        any more."""
        if wanted:
            self._wanted = s.t
        return self._meeting is not None and self._meeting.due <= s.t

    def begin(self, s: Step) -> None:
        if self._wanted != s.t or self._meeting is not None:
            return
        if self._apart is None:
            self._apart = apart(s.job)
        self._brought = [own.clone() for own in s.owned]
        copies = [x.clone() for x in self._brought]
        self._meeting = under_way(self.inner, s, self._apart, copies, s.t + self.steps)

    def __call__(self, s: Step) -> None:
        at_once = self._meeting is None or self._meeting.due > s.t
        self.finish(s)
        if at_once:
            self.inner(s)
        else:
            self.begin(s)

    def finish(self, s: Step, due: bool = False) -> None:
        """w ← w̄_t + (w − w_t), if a meeting is under way, for which it waits."""
        if self._meeting is None:
            return
        self._meeting.wait()
        mine = s.owned if self._brought else []  # where there was one group the vectors were dropped
        for own, then, mean in zip(mine, self._brought, self._meeting.chunks, strict=True):
            own.copy_(torch.sub(own.to(wide(own.dtype)), then).add_(mean))
        s.notes.update(self._meeting.notes)
        self._meeting, self._brought = None, []

    def holds(self, m: Sizes) -> float:
        return 2 * m.owned()

    def sends(self, m: Sizes) -> list[Message]:
        return [late(x, self.steps) for x in sends(self.inner, m)]

    def state_dict(self) -> State:
        """With w_t and w̄_t of the meeting under way, which it waits for."""
        meeting = self._meeting
        if meeting is None:
            return {"same": {"due": None, "notes": {}}}
        meeting.wait()
        vectors = {"brought": self._brought, "left": meeting.chunks}
        chunks = {name: [x.clone() for x in named] for name, named in vectors.items() if named}
        return {"same": {"due": meeting.due, "notes": dict(meeting.notes)}, "chunks": chunks}

    def load_state_dict(self, state: State) -> None:
        if self._meeting is not None:
            self._meeting.wait()
        chunks, same = state.get("chunks", {}), state["same"]
        brought, left = ([x.clone() for x in chunks.get(name, [])] for name in ("brought", "left"))
        some = same["due"] is not None
        self._meeting = Meeting(same["due"], left, dict(same["notes"])) if some else None
        self._brought = brought


@dataclass(frozen=True)
class Arrivals:
    """The steps in which meetings that `inner` asked for arrive."""

    inner: Schedule
    how: Delayed

    @property
    def by_time(self) -> bool:
        return goes_by_time(self.inner)

    @property
    def share(self) -> float | None:
        return self.inner.share if isinstance(self.inner, Foreseen) else None

    def __call__(self, s: Step) -> bool:
        return self.how.arrives(s, self.inner(s))

    def sends(self, m: Sizes) -> list[Message]:
        return sends(self.inner, m)


def require_of_chunks(name: str, method: Method) -> None:
    """Raises `UserError` where its averager cannot be given copies while groups train on."""
    if not (method.how.shards and of_chunks(method.how)):
        raise UserError(
            f"{name}: meetings of this method need more than the chunks that a position owns; those of "
            "hierarchical, diloco, sparse_loco, fedavg, adacomm, d_psgd, no_loco, selsync by parameters "
            "do not, with moments kept"
        )
    if isinstance(method.when, Foreseen) and method.when.share == 0:
        raise UserError(f"{name}: groups of this method never meet; use it alone")


def delayed(method: Method, steps: int) -> Method:
    """`method`, whose groups train on while they meet: the result is taken in `steps` updates later.

    What groups learned meanwhile stays: w ← w̄ + (w − w_t), where w_t are the models that met and w̄ is what
    came of it. So a meeting costs no time if it takes no longer than so many steps. A rank keeps w_t and w̄,
    M/K elements each. Noted at the arrival: what the method notes of a meeting, `distance` being that of w_t.
    What is still under way at an evaluation is not in the model: with a mean that changes nothing, with an
    outer optimizer its last step is to come.

    Not to be confused with `osgp`, gossip whose messages are late, nor with `streamed`, where parts of the
    model meet in turn and what groups learned meanwhile may be dropped.

    Args:
        method: whose meetings go by the chunks that a position owns and nothing else: `hierarchical`,
            `diloco`, `sparse_loco`, `fedavg`, `adacomm`, `d_psgd`, `no_loco`, `selsync` by parameters, with
            moments kept. In a job file ``method = { name = "hierarchical", every = 8 }``.
        steps: d, updates between the beginning of a meeting and its arrival, 0 or more; 0 is `method` itself.
            At most the steps from one meeting to the next. Where that cannot be told before, a meeting that
            falls due while one is under way is left out.

    Raises:
        UserError: for other methods, and for more steps than there are between meetings.

    Example:
        >>> method = hpcsgd.delayed(hpcsgd.hierarchical(every=4), steps=2)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, job, method)
        >>> train(optimizer, steps=4)
        >>> "distance" in optimizer.notes     # begun, after step 4
        False
        >>> train(optimizer, steps=2)
        >>> optimizer.notes["distance"] > 0
        True

    Source:
        Q. Zhou et al.: DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed
        Averaging, 2020 (arXiv:2006.00441), for averages that come late.
    """
    require_of_chunks("delayed", method)
    if type(steps) is not int or steps < 0:
        raise UserError(f"steps = {steps!r}: a meeting arrives 0 or more steps after it began")
    if isinstance(method.when, Periodic) and steps > method.when.steps_between:
        I = method.when.steps_between  # noqa: E741 - the papers' letter
        raise UserError(f"steps = {steps}: expected 0 to {I}, the steps from one meeting to the next")
    if steps == 0:
        return method
    how = Delayed(method.how, steps)
    return Method(exchange=method.exchange, when=Arrivals(method.when, how), how=how)
