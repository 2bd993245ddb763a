"""A parameter server without separate processes: every rank holds a part of the parameters.

Rank j of group h holds part h of shard j, M/(P·K) elements, and is the "holder" of this part. The part is in
host memory, where a thread applies updates to it, also if the group trains on a device. At a synchronization
a rank sends each holder the change that its group has made to the holder's part, and receives the new values.
Groups never average directly. The evaluated model consists of the holders' parts. It is not the mean of the
models that the groups have read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from torch import Tensor

from hpcsgd.comm import Communicator, RequestServer, phase
from hpcsgd.comm.on_host import on_host, room_for, settle_all
from hpcsgd.core.averager import Traits
from hpcsgd.core.flat import Bucket
from hpcsgd.core.state import State
from hpcsgd.core.step import StepContext
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.core.waits import Slowest
from hpcsgd.errors import UserError
from hpcsgd.parts.averagers.by_tensor import ByTensor
from hpcsgd.parts.averagers.message_buffer import MessageBuffer
from hpcsgd.parts.averagers.server_part import ServerPart
from hpcsgd.parts.averagers.server_rule import AddMean, Pace, ServerRule

log = logging.getLogger(__name__)

_OF_ANOTHER_METHOD = "the server's momentum starts anew: the checkpoint was written with another method"
FROM_RULE = "server "
"""The prefix of the vectors of the server's rule in the averager's state."""


class ServerConnection:
    """This rank's connection to the holders of all parts, and the part that the rank holds itself.

    The connection is made in the first step, while all groups have the same `owned` shards.
    """

    def __init__(
        self,
        owned: Sequence[Tensor],
        model: Sequence[Tensor],
        buckets: Sequence[Bucket],
        inter_group: Communicator,
        staleness: int | None,
        rule: ServerRule,
        numbers: int,
    ) -> None:
        """Set the holders' initial values to `model`, which has the layout of `owned`. Collective.

        `owned` are the shards of `buckets`. `numbers`: see `ServerPart`.
        """
        parts = parts_of(owned, inter_group.size)
        self.pushed, self.read = ([MessageBuffer.like(x, None, numbers) for x in parts] for _ in range(2))
        self._rooms = [x if x.is_cpu else room_for(x) for x in (read.bytes for read in self.read)]
        self._owned, self._inter_group = owned, inter_group
        self._counts = [[x.numel() for x in chunk.tensor_split(inter_group.size)] for chunk in owned]
        P, h = inter_group.size, inter_group.rank
        tensors = ByTensor.of_shards(buckets, [[_range(counts, h)] for counts in self._counts])
        self.keeper = ServerPart(self._kept(model), parts[h], tensors, P, staleness, rule, numbers)
        with phase("model_average"):
            self._service = RequestServer(inter_group, self.keeper, self.pushed[h].bytes.numel())

    def sendrecv(self) -> float:
        """Send the content of `pushed` to the holders; return once their answers are in `read`.

        Returns the seconds per step of the fastest group, as the holders know them; 0 if none knows them.
        """
        # Once this copy is on the host, the device has finished the last step's copies out of `_rooms`.
        leaving = on_host([message.bytes for message in self.pushed])
        self._service.ask(_by_rank(leaving), _by_rank(self._rooms)).wait()
        for read, room in zip(self.read, self._rooms, strict=True):
            if room is not read.bytes:
                read.bytes.copy_(room, non_blocking=True)
        answers = (read.received(room) for read, room in zip(self.read, self._rooms, strict=True))
        return min((x for answer in answers for x in answer.numbers[1:] if x > 0), default=0.0)

    def held(self) -> State:
        """Return what the holders have, after all updates of finished steps. Collective.

        These are this rank's shards of the model, called "model", and of the rule's vectors, the rule's
        numbers, and the seconds per step of each group.
        """
        with self._service.at_rest():
            rule = self.keeper.rule
            vectors = {f"{FROM_RULE}{name}": x for name, x in rule.vectors().items()}
            return State(
                replicated=dict(rule.numbers()),
                sharded={
                    name: self._gathered(x) for name, x in ({"model": self.keeper.part} | vectors).items()
                },
                per_rank={"seconds": list(self.keeper.seconds)},
            )

    def begin(self, model: Sequence[Tensor], state: State) -> str:
        """Replace the holders' values with those of `model`, and their rules' state with `state`. Collective.

        Return a warning that names the state that is discarded because it does not fit; "" if all of it fits.
        """
        with self._service.at_rest():
            self.keeper.begin(self._kept(model), self._inter_group.size)
            self.keeper.seconds = list(state.per_rank.get("seconds", [0.0] * self._inter_group.size))
            saved, rule = _of_rule(state), self.keeper.rule
            if saved.keys() != rule.vectors().keys():
                return "" if not state.sharded else _OF_ANOTHER_METHOD
            held = {name: self._kept(vectors) for name, vectors in saved.items()}
            return rule.restore(held, state.replicated)

    def last_read(self) -> list[Tensor]:
        """Return this rank's shards of the model that its group has read last."""
        made = [x.new_empty(sum(counts)) for x, counts in zip(self._owned, self._counts, strict=True)]
        for part, read in zip(parts_of(made, self._inter_group.size), self.read, strict=True):
            read.unpack(part)
        return made

    def set_read(self, model: Sequence[Tensor]) -> None:
        """Continue as if the group had read `model`, this rank's shards, last."""
        for part, read in zip(parts_of(model, self._inter_group.size), self.read, strict=True):
            read.pack(part)

    def _gathered(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's shards, gathered from the `parts` that the holders have. Collective."""
        made: list[Tensor] = []
        for part, counts in zip(parts, self._counts, strict=True):
            chunk = part.new_empty(sum(counts))
            self._inter_group.allgatherv(chunk, part, counts).wait()
            made.append(chunk)
        return made

    def _kept(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """Return the part of the shards `chunks` that this rank holds."""
        return [chunk.tensor_split(self._inter_group.size)[self._inter_group.rank] for chunk in chunks]


class ParameterServer:
    """The averager that sends the group's change to the holders of the parts, and reads their new values.

    The change is the difference from the model that the group has read last. It includes what the user wrote
    into the parameters between two steps. This rank reports two metrics about the part that it holds.
    `staleness` is the number of updates by other groups since this group's last read. `ahead` is the number
    of updates by which this group is ahead of the slowest one.
    """

    def __init__(
        self, staleness: int | None, rule: ServerRule | None = None, pace: Pace | None = None
    ) -> None:
        """Store the arguments. The `rule` of the holders is `AddMean()` if it is None.

        With a `rule`, groups train several steps between two updates, so each has a model of its own.
        """
        if staleness is not None and staleness < 0:
            raise UserError(
                f"max_staleness = {staleness}: a group may be 0 or more updates ahead of the slowest",
                key="max_staleness",
                value=staleness,
            )
        self.staleness, self._rule, self._pace = staleness, rule or AddMean(), pace
        self._numbers = 1 if pace is None else 2
        self.traits = Traits(
            Slowest(staleness), histogram_names=("staleness", "ahead"), local_models=rule is not None
        )
        self._link: ServerConnection | None = None
        """The connection to the holders; made in the first step, if there are several groups."""
        self._owned: Sequence[Tensor] = ()
        """The rank's shards of the model, set together with `_link`."""
        self._saved = State()
        """The state that was loaded since the last step."""
        self._lost = ""
        """A text that names the loaded state that does not fit; empty if all fits."""
        self._anew = True
        """True if the group's parameters were not read from the holders, but are initial or loaded values."""

    @property
    def keeper(self) -> ServerPart | None:
        """The part that this rank holds; None before the first step."""
        return None if self._link is None else self._link.keeper

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        """Give the holders their parts in the first step, while all groups have the same parameters."""
        if s.topology.num_groups == 1 or not self._anew:
            return
        saved, self._owned, self._anew = self._saved, vectors, False
        if self._link is None:
            model = saved.sharded.get("model", vectors)
            peers = s.topology.inter_group
            self._link = ServerConnection(
                vectors, model, s.buckets, peers, self.staleness, self._rule, self._numbers
            )
            self._lost = self._link.begin(model, saved) if saved.sharded else ""
        if self._lost and s.topology.rank == 0:
            log.warning("%s", self._lost)
        self._link.set_read(saved.sharded.get("read", vectors))
        self._saved = State()

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        assert self._link is not None
        found, link, pace = list(vectors), self._link, self._pace
        parts = parts_of(found, s.topology.num_groups)
        for part, read in zip(parts, link.read, strict=True):
            read.add_to(part, -1.0)
        if pace is not None:
            settle_all(found)
        seconds = 0.0 if pace is None else pace.seconds_per_step()
        for part, pushed in zip(parts, link.pushed, strict=True):
            pushed.pack(part, 1.0, *(s.t, seconds)[: self._numbers])
        fastest = link.sendrecv()
        for part, read in zip(parts, link.read, strict=True):
            read.unpack(part)
        s.metrics["staleness"] = link.keeper.missed[s.topology.group_index]
        s.metrics["ahead"] = link.keeper.ahead(s.topology.group_index)
        s.metrics |= self._rule.metrics(s.t)
        if pace is not None:
            pace.adapt(fastest, s)
        return found

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        """Return the messages to the holders in the other P − 1 groups, and the answers of the same size."""
        others = m.P - 1
        leaving = (m.P - m.groups_per_host) / others if m.groups_per_host < m.P else 0.0
        nbytes = others * (m.message_buffer(m.P) + 8 * (self._numbers - 1))
        push = CommOp("sendrecv", "inter_group", nbytes, off_host_fraction=leaving)
        return [push, push]

    def memory_bytes(self, m: ModelLayout) -> float:
        """Return the bytes of the message buffers and of the part that this rank holds.

        The buffers are for P messages in each direction, and, as a holder, for P answers and one request.
        """
        messages = (3 * m.P + 1) * (m.message_buffer(m.P) + 8 * (self._numbers - 1))
        return messages + (1 + self._rule.vectors_per_part) * m.own_elements(wide=True) / m.P

    def model(self) -> list[Tensor] | None:
        """Return this rank's shards of the server's model, with all updates of finished steps."""
        return self._held().sharded.get("model")

    def state_dict(self) -> State:
        link = self._link
        if link is None:
            return self._saved
        held = self._held()
        if not self.traits.local_models:
            return State(sharded={"model": held.sharded["model"]})
        read = self._saved.sharded.get("read", self._owned) if self._anew else link.last_read()
        return State(
            replicated=held.replicated,
            sharded={**held.sharded, "read": list(read)},
            per_rank={} if self._pace is None else held.per_rank,
        )

    def load_state_dict(self, state: State) -> None:
        """Load the server's model and its rule's state, before the first step or on all ranks.

        The parameters at the beginning of the next step must equal this model, or be those that the group had
        when the state was saved.
        """
        self._anew, self._saved = True, state
        if self._link is not None:
            self._lost = self._link.begin(state.sharded.get("model", self._owned), state)

    def _held(self) -> State:
        """Return the state of the server. Collective."""
        if self._pace is not None:
            self._pace.pause()
        return self._saved if self._link is None else self._link.held()


def parts_of(chunks: Sequence[Tensor], P: int) -> list[list[Tensor]]:
    """Return, for each of P groups, views of the parts of `chunks` that the group holds."""
    by_bucket = [chunk.tensor_split(P) for chunk in chunks]
    return [list(part) for part in zip(*by_bucket, strict=True)]


def _range(counts: Sequence[int], part: int) -> slice:
    """Return the range of the `part` in a shard whose parts have so many elements."""
    start = sum(counts[:part])
    return slice(start, start + counts[part])


def _of_rule(state: State) -> dict[str, list[Tensor]]:
    """Return the shards of the rule's vectors in `state`, by name."""
    named = state.sharded.items()
    return {name.removeprefix(FROM_RULE): x for name, x in named if name.startswith(FROM_RULE)}


def _by_rank(messages: Sequence[Tensor]) -> dict[int, Tensor]:
    return dict(enumerate(messages))
