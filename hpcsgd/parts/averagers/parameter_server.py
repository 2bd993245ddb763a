"""A parameter server without a server: every rank keeps a part of the parameters for all groups.

Position j of group h keeps part h of chunk j, M/(P·K) elements, in host memory: a thread adds to it, whatever
device trains. In every step a position sends each part's keeper what its group's update changed there, and
takes what the keeper has. A group never meets another. What is evaluated and saved is what the keepers have,
and not the mean of what groups have read of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from hpcsgd.comm import Communicator, RequestServer, accumulation_dtype, phase
from hpcsgd.comm.on_host import on_host, room_for
from hpcsgd.comm.streams import HOST
from hpcsgd.core.averager import Traits
from hpcsgd.core.state import State
from hpcsgd.core.step import StepContext
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.core.waits import Slowest
from hpcsgd.errors import UserError
from hpcsgd.parts.averagers.message_buffer import MessageBuffer


class ServerPart:
    """One part: adds 1/P of what groups push, and answers once the slowest group is near enough. Kept in
    float32 at least: many a push is less than a 16-bit number can be moved by.

    `staleness` is s: a group that has pushed c updates reads after every group pushed c − s. None: at once.
    """

    def __init__(self, part: Sequence[Tensor], like: Sequence[Tensor], P: int, staleness: int | None) -> None:
        """`like`: as it travels."""
        self.begin(part)
        self.clocks = [0] * P
        """How many updates each group has pushed."""
        self.staleness = staleness
        self.missed = [0] * P
        """How many updates of others came between each group's last push and the read before it."""
        self._read_at = [0] * P
        self._waiting: set[int] = set()
        self._answers = [MessageBuffer.like(like, HOST) for _ in range(P)]

    def begin(self, part: Sequence[Tensor]) -> None:
        """From these values on."""
        self.part = [x.to(HOST, accumulation_dtype(x.dtype), copy=True) for x in part]

    def __call__(self, group: int, question: Tensor) -> Iterable[tuple[int, Tensor]]:
        """Take in the update pushed by `group`; answer all groups that this lets go on."""
        self.missed[group] = sum(self.clocks) - self._read_at[group]
        MessageBuffer(question, self._answers[group].layout).add_to(self.part, 1 / len(self.clocks))
        self.clocks[group] += 1
        self._waiting.add(group)
        free = [g for g in sorted(self._waiting) if self._may_read(g)]
        self._waiting.difference_update(free)
        for g in free:
            self._read_at[g] = sum(self.clocks)
            self._answers[g].pack(self.part)
        return [(g, self._answers[g].bytes) for g in free]

    def ahead(self, group: int) -> int:
        """So many steps is `group` ahead of the slowest."""
        return self.clocks[group] - min(self.clocks)

    def _may_read(self, group: int) -> bool:
        return self.staleness is None or self.ahead(group) <= self.staleness


class ServerConnection:
    """This rank's way to the keepers of all parts, and the part that it keeps itself.

    It exists from the first step on, while all groups have the same `owned` chunks.
    """

    def __init__(
        self, owned: Sequence[Tensor], model: Sequence[Tensor], cross: Communicator, staleness: int | None
    ) -> None:
        """`model`: what the keepers begin with, like `owned`. Collective."""
        parts = parts_of(owned, cross.size)
        self.pushed, self.read = ([MessageBuffer.like(part) for part in parts] for _ in range(2))
        self._rooms = [x if x.is_cpu else room_for(x) for x in (read.bytes for read in self.read)]
        self._cross = cross
        self._counts = [[x.numel() for x in chunk.tensor_split(cross.size)] for chunk in owned]
        self.keeper = ServerPart(self._kept(model), parts[cross.rank], cross.size, staleness)
        with phase("average"):
            self._service = RequestServer(cross, self.keeper, self.pushed[cross.rank].bytes.numel())

    def exchange(self) -> None:
        """Push what is in `pushed`; return once what the keepers have is in `read`."""
        # Once that is there, what was read before has left its room, too.
        leaving = on_host([message.bytes for message in self.pushed])
        self._service.ask(_by_rank(leaving), _by_rank(self._rooms)).wait()
        for read, room in zip(self.read, self._rooms, strict=True):
            if room is not read.bytes:
                read.bytes.copy_(room, non_blocking=True)

    def model(self) -> list[Tensor]:
        """What the keepers have, with all that was pushed in the steps done. Collective."""
        made: list[Tensor] = []
        with self._service.at_rest():
            for part, counts in zip(self.keeper.part, self._counts, strict=True):
                chunk = part.new_empty(sum(counts))
                self._cross.allgatherv(chunk, part, counts).wait()
                made.append(chunk)
        return made

    def begin(self, model: Sequence[Tensor]) -> None:
        """The keepers go on from `model`. Collective."""
        with self._service.at_rest():
            self.keeper.begin(self._kept(model))

    def _kept(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """This rank's part of them."""
        return [chunk.tensor_split(self._cross.size)[self._cross.rank] for chunk in chunks]


class ParameterServer:
    """Every step pushes 1/P of the own update and reads what the keepers have.

    The update is all that has changed since the last read: what somebody has written into the parameters
    between two steps is part of it. With 1/P a learning rate means what it means where gradients are
    averaged. Noted in every step: `staleness`, the updates by others since the read that the gradient was
    computed at, and `ahead`, the steps between this group and the slowest; both as its own rank's keeper sees
    them.
    """

    def __init__(self, staleness: int | None) -> None:
        if staleness is not None and staleness < 0:
            raise UserError(
                f"max_staleness = {staleness}: a group may be 0 or more steps ahead of the slowest",
                key="max_staleness",
                value=staleness,
            )
        self.staleness = staleness
        self.traits = Traits(Slowest(staleness), histogram_names=("staleness", "ahead"))
        self._link: ServerConnection | None = None
        """From the first step of several groups on."""
        self._owned: Sequence[Tensor] = ()
        """The model's own chunks, from then on."""
        self._saved: list[Tensor] | None = None
        """What the keepers are to begin with."""
        self._anew = True
        """Whether parameters are as the training begins or goes on with them, and were not read."""

    @property
    def keeper(self) -> ServerPart | None:
        """Of the part that this rank keeps, from the first step on."""
        return None if self._link is None else self._link.keeper

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        """The first time, while all groups have the same parameters, the keepers take their parts."""
        if s.topology.num_groups > 1 and self._anew:
            self._owned = vectors
            if self._link is None:
                self._link = ServerConnection(
                    vectors, self._saved or vectors, s.topology.inter_group, self.staleness
                )
                self._saved = None
            for part, read in zip(parts_of(vectors, s.topology.num_groups), self._link.read, strict=True):
                read.pack(part)
            self._anew = False

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        assert self._link is not None
        found, link = list(vectors), self._link
        parts = parts_of(found, s.topology.num_groups)
        for part, pushed, read in zip(parts, link.pushed, link.read, strict=True):
            read.add_to(part, -1.0)
            pushed.pack(part)
        link.exchange()
        for part, read in zip(parts, link.read, strict=True):
            read.unpack(part)
        s.metrics["staleness"] = link.keeper.missed[s.topology.group_index]
        s.metrics["ahead"] = link.keeper.ahead(s.topology.group_index)
        return found

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        """Questions to the keepers of the P − 1 other parts, and as many answers."""
        others = m.P - 1
        leaving = (m.P - m.groups_per_host) / others if m.groups_per_host < m.P else 0.0
        push = CommOp("exchange", "cross", others * m.message_buffer(m.P), off_host_fraction=leaving)
        return [push, push]

    def model(self) -> list[Tensor] | None:
        """What the keepers have, with all that was pushed in the steps done."""
        return self._saved if self._link is None else self._link.model()

    def state_dict(self) -> State:
        model = self.model()
        return State() if model is None else State(sharded={"model": model})

    def load_state_dict(self, state: State) -> None:
        """Before the first step, or on all ranks. The parameters of the next step go with it."""
        self._anew = True
        self._saved = state.sharded.get("model")
        if self._link is not None:
            self._link.begin(self._saved or self._owned)


def parts_of(chunks: Sequence[Tensor], P: int) -> list[list[Tensor]]:
    """Return views of `chunks`, by the group that keeps them."""
    by_bucket = [chunk.tensor_split(P) for chunk in chunks]
    return [list(part) for part in zip(*by_bucket, strict=True)]


def _by_rank(messages: Sequence[Tensor]) -> dict[int, Tensor]:
    return dict(enumerate(messages))
