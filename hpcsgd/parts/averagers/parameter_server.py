"""A parameter server without separate processes: every rank holds a part of the parameters.

Rank j of group h holds part h of shard j, M/(P·K) elements, and is the "holder" of this part. The part is in
host memory, where a thread adds updates to it, also if the group trains on a device. In every step a rank
sends each holder the change that its group's update made to the holder's part, and receives the new values.
Groups never average directly. The evaluated and saved model consists of the holders' parts. It is not the
mean of the models that the groups have read.
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
    """One part of the server's model, to which 1/P of each received update is added.

    Each group sends its updates to the part ("pushes" them) and reads the new values. `staleness` is s: a
    group that has pushed c updates may read once every group has pushed c − s. If s is None, it may always
    read. The part is float32 or wider, since many updates are too small to change a 16-bit number.
    """

    def __init__(self, part: Sequence[Tensor], like: Sequence[Tensor], P: int, staleness: int | None) -> None:
        """Start with the values of `part`; messages of the P groups have the layout of `like`."""
        self.begin(part)
        self.clocks = [0] * P
        """For each group, how many updates it has pushed."""
        self.staleness = staleness
        self.missed = [0] * P
        """For each group, the number of other groups' updates between its last read and its last push."""
        self._read_at = [0] * P
        self._waiting: set[int] = set()
        self._answers = [MessageBuffer.like(like, HOST) for _ in range(P)]

    def begin(self, part: Sequence[Tensor]) -> None:
        """Replace the values of the part with those of `part`."""
        self.part = [x.to(HOST, accumulation_dtype(x.dtype), copy=True) for x in part]

    def __call__(self, group: int, question: Tensor) -> Iterable[tuple[int, Tensor]]:
        """Add the update `question` of `group`; return the new values for all groups that may read now."""
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
        """Return how many steps `group` is ahead of the slowest group."""
        return self.clocks[group] - min(self.clocks)

    def _may_read(self, group: int) -> bool:
        return self.staleness is None or self.ahead(group) <= self.staleness


class ServerConnection:
    """This rank's connection to the holders of all parts, and the part that the rank holds itself.

    The connection is made in the first step, while all groups have the same `owned` shards.
    """

    def __init__(
        self,
        owned: Sequence[Tensor],
        model: Sequence[Tensor],
        inter_group: Communicator,
        staleness: int | None,
    ) -> None:
        """Set the holders' initial values to `model`, which has the layout of `owned`. Collective."""
        parts = parts_of(owned, inter_group.size)
        self.pushed, self.read = ([MessageBuffer.like(part) for part in parts] for _ in range(2))
        self._rooms = [x if x.is_cpu else room_for(x) for x in (read.bytes for read in self.read)]
        self._inter_group = inter_group
        self._counts = [[x.numel() for x in chunk.tensor_split(inter_group.size)] for chunk in owned]
        self.keeper = ServerPart(self._kept(model), parts[inter_group.rank], inter_group.size, staleness)
        with phase("model_average"):
            self._service = RequestServer(
                inter_group, self.keeper, self.pushed[inter_group.rank].bytes.numel()
            )

    def sendrecv(self) -> None:
        """Send the content of `pushed` to the holders; return once their answers are in `read`."""
        # Once this copy is on the host, the last step's copies out of `_rooms` are done, too.
        leaving = on_host([message.bytes for message in self.pushed])
        self._service.ask(_by_rank(leaving), _by_rank(self._rooms)).wait()
        for read, room in zip(self.read, self._rooms, strict=True):
            if room is not read.bytes:
                read.bytes.copy_(room, non_blocking=True)

    def model(self) -> list[Tensor]:
        """Return this rank's shards of the server's model, with all updates of finished steps. Collective."""
        made: list[Tensor] = []
        with self._service.at_rest():
            for part, counts in zip(self.keeper.part, self._counts, strict=True):
                chunk = part.new_empty(sum(counts))
                self._inter_group.allgatherv(chunk, part, counts).wait()
                made.append(chunk)
        return made

    def begin(self, model: Sequence[Tensor]) -> None:
        """Replace the holders' values with those of `model`. Collective."""
        with self._service.at_rest():
            self.keeper.begin(self._kept(model))

    def _kept(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """Return the part of the shards `chunks` that this rank holds."""
        return [chunk.tensor_split(self._inter_group.size)[self._inter_group.rank] for chunk in chunks]


class ParameterServer:
    """The averager that sends the group's update to the holders in every step, and reads their new values.

    The holders add 1/P of it. With this factor a learning rate has the same effect as with averaged
    gradients. The update is everything that has changed since the last read, including what the user wrote
    into the parameters between two steps. In every step there are two metrics, both counted at the part that
    this rank holds. `staleness` counts the updates by other groups since this group read the parameters at
    which its gradient was computed. `ahead` is the number of steps by which this group is ahead of the
    slowest one.
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
        """The connection to the holders; made in the first step, if there are several groups."""
        self._owned: Sequence[Tensor] = ()
        """The rank's shards of the model, set together with `_link`."""
        self._saved: list[Tensor] | None = None
        """The initial values of the holders, if they were loaded."""
        self._anew = True
        """True if the group's parameters were not read from the holders, but are initial or loaded values."""

    @property
    def keeper(self) -> ServerPart | None:
        """The part that this rank holds; None before the first step."""
        return None if self._link is None else self._link.keeper

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        """Give the holders their parts in the first step, while all groups have the same parameters."""
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
        link.sendrecv()
        for part, read in zip(parts, link.read, strict=True):
            read.unpack(part)
        s.metrics["staleness"] = link.keeper.missed[s.topology.group_index]
        s.metrics["ahead"] = link.keeper.ahead(s.topology.group_index)
        return found

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        """Return the messages to the holders in the other P − 1 groups, and the answers of the same size."""
        others = m.P - 1
        leaving = (m.P - m.groups_per_host) / others if m.groups_per_host < m.P else 0.0
        push = CommOp("sendrecv", "inter_group", others * m.message_buffer(m.P), off_host_fraction=leaving)
        return [push, push]

    def model(self) -> list[Tensor] | None:
        """Return this rank's shards of the server's model, with all updates of finished steps."""
        return self._saved if self._link is None else self._link.model()

    def state_dict(self) -> State:
        model = self.model()
        return State() if model is None else State(sharded={"model": model})

    def load_state_dict(self, state: State) -> None:
        """Load the server's model, before the first step or on all ranks.

        The parameters at the beginning of the next step must equal this model.
        """
        self._anew = True
        self._saved = state.sharded.get("model")
        if self._link is not None:
            self._link.begin(self._saved or self._owned)


def parts_of(chunks: Sequence[Tensor], P: int) -> list[list[Tensor]]:
    """Return, for each of P groups, views of the parts of `chunks` that the group holds."""
    by_bucket = [chunk.tensor_split(P) for chunk in chunks]
    return [list(part) for part in zip(*by_bucket, strict=True)]


def _by_rank(messages: Sequence[Tensor]) -> dict[int, Tensor]:
    return dict(enumerate(messages))
