"""A check that the replica groups of a generation average the same model in the same way.

Otherwise they would wait for bytes that never come, or average what does not belong together. Groups are jobs
of their own, so each may have been given another script.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from contextlib import suppress

from hpcsgd.comm.alike import Fact, difference
from hpcsgd.elastic.register import Register
from hpcsgd.elastic.ring import TcpRing
from hpcsgd.errors import JobError


def require_alike(mine: Sequence[Fact], index: int, now: Register, ring: TcpRing) -> None:
    """Compare the facts of the groups in the register `now`; those of group `index` are `mine`. Collective.

    If groups differ that have missed no round, all raise the same `JobError`. Otherwise the groups that
    differ from these raise it, and the others `ConnectionError`, after which they go on without them.
    """
    text = json.dumps(mine).encode()
    sums = ring.gather([zlib.crc32(text), len(text)])
    if all(row == sums[0] for row in sums):
        return
    longest = round(max(length for _, length in sums))
    texts = [bytes(map(round, row)) for row in ring.gather(list(text.ljust(longest)))]
    lists = {
        group: [(str(what), str(value)) for what, value in json.loads(facts)]
        for group, facts in zip(now.replica_groups, texts, strict=True)
    }
    with suppress(OSError):  # nobody leaves before all know, because that ends the generation
        ring.gather([0.0])
    current = {group: lists[group] for group in now.up_to_date}
    compared = current | {index: lists[index]}
    if any(facts != lists[index] for facts in compared.values()):
        found = difference(compared, "replica group")
        raise JobError(f"replica groups {found}: give all groups the same")
    raise ConnectionError("a group that joins was given another model or method")
