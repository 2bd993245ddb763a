"""An allreduce as a ring of messages: of long vectors between ranks on nodes of their own, whose links the
library's own leaves idle while ranks add up. Where ranks share nodes that sends less, and is taken.

P. Patarasuk, X. Yuan: Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, JPDC 2009. The
vector is cut in P runs. In step s < P − 1 rank r sends run r − s on to its right and adds what comes from its
left to run r − s − 1; then runs that are whole go once around. Each run is added up in one order, on one rank
after the other, and so has the same bits everywhere and every time.

Differences from the paper: runs are cut in segments, of which one is added up while the next ones travel.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol, TypeVar

import torch
from torch import Tensor

SEGMENT = 1 << 16
"""Elements: shorter ones cost more than they hide."""
SHORTEST = 1 << 15
"""Elements of a run: of shorter ones the library's algorithms take fewer steps."""
AHEAD = 4
"""So many receives are posted."""

Request = TypeVar("Request")


class Messages(Protocol[Request]):
    """What ranks can do without waiting, and how they wait. Those of one rank to another stay in order."""

    rank: int
    size: int

    def post_send(self, x: Tensor, to: int) -> Request: ...

    def post_recv(self, out: Tensor, source: int) -> Request: ...

    def complete(self, request: Request) -> object: ...


def is_long(x: Tensor, size: int) -> bool:
    """Whether it is worth so many ranks' messages."""
    return x.numel() >= size * SHORTEST


def allreduce(ranks: Messages[Request], x: Tensor, mean: bool) -> None:
    """The sum, or the mean, of the `x` of all ranks, in place."""
    P, r = ranks.size, ranks.rank
    left, right = (r - 1) % P, (r + 1) % P
    count = max(math.ceil(x.numel() / P / SEGMENT), 1)
    runs = [torch.tensor_split(run, count) for run in torch.tensor_split(x.view(-1), P)]
    adding, total = (P - 1) * count, 2 * (P - 1) * count
    ahead = min(AHEAD, P * count, total)
    rooms = x.new_empty(ahead, runs[0][0].numel())
    sent: list[Request] = []
    posted: deque[tuple[Request, Tensor]] = deque()

    def segment(k: int) -> Tensor:
        """Of which the k-th message to this rank is."""
        step, q = divmod(k, count)
        return runs[(r - step - 1) % P][q]

    def post(k: int) -> None:
        if k >= adding:
            ranks.complete(sent[k - adding])  # it was sent from there, long ago
        room = segment(k) if k >= adding else rooms[k % ahead][: segment(k).numel()]
        posted.append((ranks.post_recv(room, left), room))

    sent += (ranks.post_send(piece, right) for piece in runs[r])
    for k in range(ahead):
        post(k)
    for k in range(total):
        request, room = posted.popleft()
        ranks.complete(request)
        if k < adding:
            segment(k).add_(room)
        if mean and adding - count <= k < adding:
            segment(k).div_(P)
        if k + count < total:
            sent.append(ranks.post_send(segment(k), right))
        if k + ahead < total:
            post(k + ahead)
    for request in sent[adding:]:
        ranks.complete(request)
