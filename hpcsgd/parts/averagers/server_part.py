"""One part of the model of a parameter server: it applies the updates of all groups and answers them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from hpcsgd.comm import accumulation_dtype
from hpcsgd.comm.streams import HOST
from hpcsgd.parts.averagers.by_tensor import ByTensor
from hpcsgd.parts.averagers.message_buffer import MessageBuffer
from hpcsgd.parts.averagers.server_rule import AddMean, ServerRule


class ServerPart:
    """One part of the server's model, which `rule` changes with each update that it receives.

    Each group sends its updates to the part ("pushes" them) and reads the new values. `staleness` is s: a
    group that has pushed c updates may read once every group has pushed c − s. If s is None, it may always
    read. The part is float32 or wider, since many updates are too small to change a 16-bit number.
    """

    def __init__(
        self,
        part: Sequence[Tensor],
        like: Sequence[Tensor],
        tensors: ByTensor,
        P: int,
        staleness: int | None,
        rule: ServerRule | None = None,
        numbers: int = 1,
    ) -> None:
        """Start with the values of `part`; messages of the P groups have the layout of `like`.

        `tensors` says which elements of the part belong to which tensor of the model. The rule is `AddMean()`
        if it is None. A message has its first `numbers` numbers: a group sends its step and its seconds per
        step, and receives the number of updates so far and the fewest seconds.
        """
        self.rule, self._tensors, self._numbers = rule or AddMean(), tensors, numbers
        self.begin(part, P)
        self.clocks = [0] * P
        """For each group, how many updates it has pushed."""
        self.staleness = staleness
        self.missed = [0] * P
        """For each group, the number of other groups' updates between its last read and its last push."""
        self.seconds = [0.0] * P
        """For each group, the last seconds per step that it sent; 0 if they are not known."""
        self._read_at = [0] * P
        self._waiting: set[int] = set()
        self._answers = [MessageBuffer.like(like, HOST, numbers) for _ in range(P)]

    def begin(self, part: Sequence[Tensor], P: int) -> None:
        """Replace the values of the part with those of `part`, and start the rule anew."""
        self.part = [x.to(HOST, accumulation_dtype(x.dtype), copy=True) for x in part]
        self.rule.begin(self.part, self._tensors, P)

    def __call__(self, group: int, question: Tensor) -> Iterable[tuple[int, Tensor]]:
        """Apply the update `question` of `group`; return the new values for all groups that may read now."""
        self.missed[group] = sum(self.clocks) - self._read_at[group]
        update = self._answers[group].received(question)
        t, *seconds = update.numbers
        self.seconds[group] = sum(seconds)
        self.rule.apply(update, int(t))
        self.clocks[group] += 1
        self._waiting.add(group)
        free = [g for g in sorted(self._waiting) if self._may_read(g)]
        self._waiting.difference_update(free)
        for g in free:
            self._read_at[g] = sum(self.clocks)
            numbers = (self._read_at[g], self.fastest)
            self._answers[g].pack(self.part, 1.0, *numbers[: self._numbers])
        return [(g, self._answers[g].bytes) for g in free]

    @property
    def fastest(self) -> float:
        """The seconds per step of the fastest group; 0 if no group has sent its own."""
        return min((seconds for seconds in self.seconds if seconds > 0), default=0.0)

    def ahead(self, group: int) -> int:
        """Return how many updates `group` is ahead of the slowest group."""
        return self.clocks[group] - min(self.clocks)

    def _may_read(self, group: int) -> bool:
        return self.staleness is None or self.ahead(group) <= self.staleness
