"""Allreduce as a ring of messages, for long vectors and ranks on different nodes.

The library's own allreduce leaves the links idle while ranks add. If ranks share nodes, the library sends
less, and is used instead.

P. Patarasuk, X. Yuan: Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, JPDC 2009. The
vector is cut into P parts. In step s < P − 1 rank r sends part r − s to its right neighbour, and adds what
comes from its left to part r − s − 1. Then the finished parts go once around. Each part is added up in one
order, on one rank after the other, and so has the same bits everywhere and every time.

Differences from the paper: parts are cut into segments, of which one is added while the next ones travel.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol, TypeVar

import torch
from torch import Tensor

SEGMENT = 1 << 16
"""Elements of a segment. For shorter segments, extra messages cost more time than their overlap hides."""
SHORTEST = 1 << 15
"""Elements of the shortest part that the ring is used for. Below, the library's algorithms need less time."""
AHEAD = 4
"""The number of receives that are posted ahead."""

Request = TypeVar("Request")


class Messages(Protocol[Request]):
    """Nonblocking messages and their completion. Messages of one rank to another stay in order."""

    rank: int
    size: int

    def post_send(self, x: Tensor, to: int) -> Request: ...

    def post_recv(self, out: Tensor, source: int) -> Request: ...

    def complete(self, request: Request) -> object: ...


def is_long(x: Tensor, size: int) -> bool:
    """Return True if `x` is long enough for a ring of `size` ranks."""
    return x.numel() >= size * SHORTEST


def allreduce(ranks: Messages[Request], x: Tensor, mean: bool) -> None:
    """Set `x` to the sum, or the mean, of the `x` of all ranks."""
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
        """Return the segment that the k-th message to this rank carries."""
        step, q = divmod(k, count)
        return runs[(r - step - 1) % P][q]

    def post(k: int) -> None:
        if k >= adding:
            ranks.complete(sent[k - adding])  # that message was sent from the memory that now receives
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
