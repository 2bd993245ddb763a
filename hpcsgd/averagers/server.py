"""A parameter server without a server: every rank keeps a part of the parameters for all groups.

Position j of group h keeps part h of chunk j, M/(P·K) elements, in host memory: a thread adds to it, whatever
device trains. In every step a position sends each part's keeper what its group's update changed there, and
takes what the keeper has. A group never meets another. What is evaluated and saved is what the keepers have,
and not the mean of what groups have read of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from hpcsgd.averagers.parcel import Parcel
from hpcsgd.core.method import State
from hpcsgd.core.step import Step
from hpcsgd.core.traffic import Message, Sizes
from hpcsgd.errors import UserError
from hpcsgd.transport import Service, Transport, phase, wide
from hpcsgd.transport.on_host import on_host, room_for
from hpcsgd.transport.streams import HOST


class Keeper:
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
        self._answers = [Parcel.like(like, HOST) for _ in range(P)]

    def begin(self, part: Sequence[Tensor]) -> None:
        """From these values on."""
        self.part = [x.to(HOST, wide(x.dtype), copy=True) for x in part]

    def __call__(self, group: int, question: Tensor) -> Iterable[tuple[int, Tensor]]:
        """Take in the update pushed by `group`; answer all groups that this lets go on."""
        self.missed[group] = sum(self.clocks) - self._read_at[group]
        Parcel(question, self._answers[group].layout).add_to(self.part, 1 / len(self.clocks))
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


class Server:
    """Every step pushes 1/P of the own update and reads what the keepers have.

    The update is all that has changed since the last read: what somebody has written into the parameters
    between two steps is part of it. With 1/P a learning rate means what it means where gradients are
    averaged. Noted in every step: `staleness`, the updates by others since the read that the gradient was
    computed at, and `ahead`, the steps between this group and the slowest; both as its own rank's keeper sees
    them.
    """

    shards = True
    counted = ("staleness", "ahead")

    def __init__(self, staleness: int | None) -> None:
        if staleness is not None and staleness < 0:
            raise UserError(f"staleness = {staleness}: a group may be 0 or more steps ahead of the slowest")
        self.staleness = staleness
        self.keeper: Keeper | None = None
        self._service: Service | None = None
        self._saved: list[Tensor] | None = None
        """The model's own chunks that the keepers are to begin with."""
        self._anew = True
        """Whether parameters are as the training begins or goes on with them, and were not read."""

    def before_update(self, s: Step) -> None:
        """The first time, while all groups have the same parameters, the keepers take their parts."""
        if s.job.P > 1 and self._anew:
            if self._service is None:
                self._start(s)
            for part, read in zip(self._parts(s), self._read, strict=True):
                read.pack(part)
            self._anew = False

    def __call__(self, s: Step) -> None:
        assert self._service is not None
        assert self.keeper is not None
        for part, pushed, read in zip(self._parts(s), self._pushed, self._read, strict=True):
            read.add_to(part, -1.0)
            pushed.pack(part)
        # Once that is there, what was read before has left its room, too.
        leaving = on_host([parcel.bytes for parcel in self._pushed])
        self._service.ask(_by_rank(leaving), _by_rank(self._rooms)).wait()
        for part, read, room in zip(self._parts(s), self._read, self._rooms, strict=True):
            if room is not read.bytes:
                read.bytes.copy_(room, non_blocking=True)
            read.unpack(part)
        s.notes["staleness"] = self.keeper.missed[s.job.g]
        s.notes["ahead"] = self.keeper.ahead(s.job.g)

    def sends(self, m: Sizes) -> list[Message]:
        """Questions to the keepers of the P − 1 other parts, and as many answers."""
        others = m.P - 1
        leaving = (m.P - m.groups_per_host) / others if m.groups_per_host < m.P else 0.0
        push = Message("exchange", "cross", others * m.parcel(m.P), leaving=leaving)
        return [push, push]

    def model(self) -> list[Tensor] | None:
        """What the keepers have, with all that was pushed in the steps done."""
        if self._service is None or self.keeper is None:
            return self._saved
        made = []
        with self._service.at_rest():
            for part, counts in zip(self.keeper.part, self._counts, strict=True):
                chunk = part.new_empty(sum(counts))
                self._cross.allgatherv(chunk, part, counts).wait()
                made.append(chunk)
        return made

    def state_dict(self) -> State:
        model = self.model()
        return {"chunks": {} if model is None else {"model": model}}

    def load_state_dict(self, state: State) -> None:
        """Before the first step, or on all ranks. The parameters of the next step go with it."""
        self._anew = True
        self._saved = state.get("chunks", {}).get("model")
        if self._service is not None and self.keeper is not None:
            with self._service.at_rest():
                self.keeper.begin(self._kept(self._saved or self._owned, self._cross))

    def _start(self, s: Step) -> None:
        parts = self._parts(s)
        self._pushed, self._read = ([Parcel.like(part) for part in parts] for _ in range(2))
        self._rooms = [x if x.is_cpu else room_for(x) for x in (read.bytes for read in self._read)]
        self._cross, self._owned = s.job.cross, s.owned
        self._counts = [[x.numel() for x in chunk.tensor_split(s.job.P)] for chunk in s.owned]
        part = self._kept(self._saved or s.owned, self._cross)
        self.keeper = Keeper(part, parts[s.job.g], s.job.P, self.staleness)
        self._saved = None
        with phase("average"):
            self._service = Service(s.job.cross, self.keeper, self._pushed[s.job.g].bytes.numel())

    def _parts(self, s: Step) -> list[list[Tensor]]:
        """Of the own chunks, by the group that keeps them."""
        by_bucket = [chunk.tensor_split(s.job.P) for chunk in s.owned]
        return [list(part) for part in zip(*by_bucket, strict=True)]

    @staticmethod
    def _kept(chunks: Sequence[Tensor], cross: Transport) -> list[Tensor]:
        """This rank's part of them."""
        return [chunk.tensor_split(cross.size)[cross.rank] for chunk in chunks]


def _by_rank(messages: Sequence[Tensor]) -> dict[int, Tensor]:
    return dict(enumerate(messages))
