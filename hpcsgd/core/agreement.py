"""A check that ranks make the same calls, before they use the data that they sent each other.

Collective operations are matched by their order. If only one rank clips, saves or skips a batch, its
operation is matched with a different one of the other ranks, and MPI reports nothing. So the ranks compare
every call of an optimizer that communicates. This takes one allgather of `SIZE` bytes per rank on a separate
communicator. The bytes identify the call, the number of updates before it, the learning rates and other
options, and the missing gradients.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcsgd.comm import Communicator, Work, phase
from hpcsgd.core.topology import Topology
from hpcsgd.errors import UserError, count_text

_FORM = struct.Struct("<28sIqdIII")
SIZE = _FORM.size
"""Bytes of one rank's record."""
REMEDIES = {
    "state_dict()": "so that one rank alone may call state_dict(), call "
    "optimizer.consolidate_state_dict() on all ranks before"
}
"""By the name of a call that scripts make on one rank alone: what to do instead."""
Reported = tuple[bytes, int, int, float, int, int, int]
"""One rank's record, unpacked."""


@dataclass(frozen=True)
class Call:
    """A call of an optimizer's method that communicates."""

    name: str
    """The name of the call, such as `step()`; at most 28 bytes."""
    t: int
    """Number of updates made before the call."""
    rates: tuple[float, ...] = ()
    """The learning rate of each parameter group, warm-up included."""
    optimizer: int = 0
    """The number of the optimizer among those of the job."""
    options: Callable[[], int] = int
    """Returns a checksum of the other options of all parameter groups. It is called only for a comparison."""

    def at_any_step(self) -> Call:
        """Return this call for a comparison of groups that have made their own numbers of updates."""
        return Call(self.name, 0, optimizer=self.optimizer)

    def packed(self, digest: int) -> bytes:
        """Return the call, and `digest`, a checksum of other data to compare, as `SIZE` bytes."""
        rates = struct.pack(f"<{len(self.rates)}d", *self.rates)
        rate = self.rates[0] if self.rates else 0.0
        numbers = zlib.crc32(rates), self.options(), digest
        return _FORM.pack(self.name.encode(), self.optimizer, self.t, rate, *numbers)


class Comparison:
    """A comparison of one call among ranks, in progress."""

    def __init__(self, work: Work | None, all_same: Callable[[bytes], bool]) -> None:
        self._work, self._all_same = work, all_same

    def wait(self) -> bool:
        """Wait for the other ranks, and return whether all of them gave the same `digest`.

        Raises:
            UserError: If ranks are in different calls, have made different numbers of updates, or have
                different learning rates or other options. All ranks that take part raise it.
        """
        if self._work is None:
            return True
        with phase("agreement"):
            return self._all_same(self._work.wait())


class Agreement:
    """Compares calls among `ranks`; `number` converts a rank among these to a rank in the job."""

    def __init__(self, ranks: Communicator, number: Callable[[int], int] = lambda rank: rank) -> None:
        self._ranks = ranks.control
        self._number = number

    @classmethod
    def of_group(cls, topology: Topology) -> Agreement:
        """Return an agreement among the K ranks of this rank's group."""
        return cls(topology.intra_group, lambda j: topology.group_index * topology.group_size + j)

    @classmethod
    def of_position(cls, topology: Topology) -> Agreement:
        """Return an agreement among the P ranks, one per group, that own the same shards as this rank."""
        return cls(topology.inter_group, lambda g: g * topology.group_size + topology.shard_index)

    @property
    def alone(self) -> bool:
        """True if there is no other rank to agree with."""
        return self._ranks.size == 1

    def begin(self, call: Call, digest: int = 0) -> Comparison:
        """Start to compare this rank's `call` and `digest` with those of the other ranks. Collective.

        `digest` is a checksum of other data. Until the comparison ends, this rank may send other messages,
        but must not begin another comparison.
        """
        if self.alone:
            return Comparison(None, self._all_same)
        with phase("agreement"):
            return Comparison(self._ranks.post_record(call.packed(digest)), self._all_same)

    def reach(self, call: Call) -> None:
        """Compare `call` and wait for the result; collective. Raises `UserError` as `Comparison.wait`."""
        self.begin(call).wait()

    def presence(self, mine: bytes) -> list[bytes]:
        """Return the bytes `mine` of every rank, in rank order; all have one length. Collective, blocking."""
        with phase("agreement"):
            parts = self._ranks.post_record(mine).wait()
        return [parts[len(mine) * rank :][: len(mine)] for rank in range(self._ranks.size)]

    def world_rank(self, rank: int) -> int:
        """Return the rank in the job of `rank`, which is one of those that compare."""
        return self._number(rank)

    def _all_same(self, parts: bytes) -> bool:
        if parts == parts[:SIZE] * self._ranks.size:
            return True
        reported = [_FORM.unpack_from(parts, SIZE * rank) for rank in range(self._ranks.size)]
        self._require_same(reported)
        return False

    def _require_same(self, reported: Sequence[Reported]) -> None:
        first = reported[0]
        for rank, other in enumerate(reported):
            if other[:3] != first[:3]:
                raise UserError(
                    f"{_where(self._number(0), first)}, but {_where(self._number(rank), other)}: all "
                    "ranks have to make the same calls in the same order, for the same number of batches"
                    f"{_remedy(first, other)}"
                )
            if other[3:5] != first[3:5]:
                raise UserError(
                    f"the learning rate is {first[3]:g} on rank {self._number(0)} and {other[3]:g} on rank "
                    f"{self._number(rank)} in step {first[2] + 1}, or that of a later parameter group "
                    "differs: all ranks have to train at the same rates"
                )
            if other[5] != first[5]:
                raise UserError(
                    "an option of param_groups, such as weight_decay, momentum or betas, differs between "
                    f"rank {self._number(0)} and rank {self._number(rank)} in step {first[2] + 1}: change "
                    "options on all ranks alike"
                )


def _name(reported: Reported) -> str:
    return reported[0].rstrip(bytes(1)).decode()


def _remedy(*reported: Reported) -> str:
    return "".join(f"; {REMEDIES[name]}" for name in dict.fromkeys(map(_name, reported)) if name in REMEDIES)


def _where(rank: int, reported: Reported) -> str:
    _, optimizer, t = reported[:3]
    which = f" of optimizer {optimizer}" if optimizer else ""
    return f"rank {rank} is in {_name(reported)}{which} after {count_text(t, 'update')}"
