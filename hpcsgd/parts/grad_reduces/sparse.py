"""Sparse exchange: of each gradient only some elements travel, the rest is kept for later.

D. Yoon, S. Oh: DEFT, ICPP 2023, algorithm 1, "distributed SGD with sparsification", on each of n workers:

    5   acc = e + g
    6   idx_i = select(acc)                 the sparsifier
    7   idx = union over the workers        gathered
    8   s = mean over the workers of acc[idx]
    10  w −= s                              here by the user's optimizer, from the gradient s
    11  acc[idx] = 0
    12  e = acc

Line 5 runs bucket by bucket while the backward pass goes on, the others when the last gradient is there,
since what to select from a layer depends on all of them. Every worker updates all of w: sending updated
chunks would be dense again.

A group of one rank has nobody to send to, and its gradients stay as they are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import Communicator
from hpcsgd.core.flat import Bucket
from hpcsgd.core.state import State
from hpcsgd.core.step import ReduceContext
from hpcsgd.core.topology import Topology
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.core.traits import GradReduceTraits
from hpcsgd.errors import UserError
from hpcsgd.parts.grad_reduces import comm_ops as expected_ops
from hpcsgd.parts.grad_reduces.codecs import Codec, Gaps
from hpcsgd.parts.grad_reduces.combining import Combine, Selected, union
from hpcsgd.parts.grad_reduces.error_feedback import ErrorFeedback, Feedback, Residual
from hpcsgd.parts.sparsifiers import Accumulated, Sparsifier


@checked
class Sparse:
    """Of each gradient only what a sparsifier selects is sent; the rest is kept and added to the next one.

    What is kept is a vector of M elements (float32; float64 where a parameter is) that is this worker's alone
    and part of a checkpoint. Every rank updates all of w, so that the optimizer's state is not sharded. A
    group of one rank sends nothing and is left alone.

    Notes of every step: `density` (|idx|/M), `error` (‖e‖₂, mean over the workers, eq. 2), `growth` (|idx|
    over the mean number that a worker selected; where sets overlap), and seconds in `share` (who searches
    what), `select`, `encode`, `exchange` and `apply`.

    Not to be confused with sparse tensors, whose gradients are refused, nor with `sasgd`. Not for loss
    scaling that changes: what is kept is of the scaled loss, and `GradScaler` refuses it.

    Args:
        sparsifier: what selects, such as `Deft(density=0.01)`.
        combine: whose values count at the selected indices: `union`, or each worker's: `per_worker`
            alone, half as much to send for `TopK`; both of `hpcsgd.parts.grad_reduces`. Default union,
            DEFT's lines 7 to 9.
        feedback: what becomes of the rest: `ErrorFeedback()`, of `hpcsgd.parts.grad_reduces`,
            `MomentumCorrection(m)` or `LrInErrorFeedback()`. Default ErrorFeedback(): rate, momentum and
            weight decay act on what was sent.
        indices: how they travel, `Gaps()` in one or two bytes or `Plain()` in four, of
            `hpcsgd.parts.grad_reduces`.
            Default Gaps().

    Raises:
        UserError: for `per_worker` with a sparsifier whose workers select disjoint elements; at the first
            exchange where optimizer and feedback do not go together.

    Example:
        >>> exchange = hpcsgd.Sparse(hpcsgd.Deft(density=0.1), feedback=hpcsgd.MomentumCorrection(0.9))
        >>> method = hpcsgd.hierarchical(4, exchange)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=4)
        >>> optimizer.metrics["error"] > 0     # what is still to be sent
        True

    Source:
        D. Yoon, S. Oh: DEFT, ICPP 2023, algorithm 1.
    """

    def __init__(
        self,
        sparsifier: Sparsifier,
        combine: Combine = union,
        feedback: Feedback = ErrorFeedback(),  # noqa: B008 - frozen
        indices: Codec = Gaps(),  # noqa: B008 - frozen
    ) -> None:
        if sparsifier.disjoint and combine is not union:
            name = type(sparsifier).__name__
            raise UserError(
                f"combine per_worker: with {name} each element is one worker's to choose, "
                "and all must give theirs"
            )
        self.sparsifier = sparsifier
        self.combine, self.feedback, self.indices = combine, feedback, indices
        self.t = 0
        """Exchanges so far: less than steps, where this takes turns with others."""
        self.traits = GradReduceTraits(shards=False)
        self._residual: Residual | None = None
        self._saved: dict[str, dict[str, Tensor]] = {}
        self._norms: list[Tensor] = []

    def across_groups(self) -> Sparse:
        """The workers are all ranks of the job, not those of one group."""
        made = Sparse(self.sparsifier, self.combine, self.feedback, self.indices)
        made.traits = replace(self.traits, across=True)
        return made

    def idle(self, topology: Topology) -> bool:
        return self._workers(topology).size == 1

    def __call__(self, d: ReduceContext, b: Bucket) -> None:
        if self.idle(d.topology):
            return
        if self._residual is None:
            self._residual = self._begin(d)
        i = len(self._norms)
        assert b is d.buckets[i]
        self._take_in(d, b, i)
        if i + 1 == len(d.buckets):
            self._send(d)

    def comm_ops(self, m: ModelLayout) -> Iterable[CommOp]:
        """Lines 6 to 9. Raises `UserError` where the sparsifier cannot tell."""
        over = "world" if self.traits.across else "group"
        return expected_ops.messages(self.sparsifier, self.combine, self.indices, over, m)

    def memory_bytes(self, m: ModelLayout) -> float:
        width = max((b.width for b in m.buckets), default=0)
        vectors = 2 if self.feedback.velocity else 1
        return vectors * m.M * (8 if width == 8 else 4) if (m.N if self.traits.across else m.K) > 1 else 0

    def elements_searched(self, m: ModelLayout) -> float:
        n = m.N if self.traits.across else m.K
        return expected_ops.expected(self.sparsifier, n, m).searched if n > 1 else 0.0

    @property
    def parts(self) -> Mapping[str, Any]:
        return {"sparsifier": self.sparsifier}

    def state_dict(self) -> State:
        residual = self._saved if self._residual is None else self._residual.state_dict()
        return State(replicated={"t": self.t}, per_rank_params=residual)

    def load_state_dict(self, state: State) -> None:
        self.t, self._saved = state.replicated["t"], state.per_rank_params
        if self._residual is not None:
            self._residual.load_state_dict(self._saved)

    def _workers(self, topology: Topology) -> Communicator:
        return topology.world if self.traits.across else topology.intra_group

    def _begin(self, d: ReduceContext) -> Residual:
        self.feedback.require_optimizer(d.fixed.optimizer_state.optimizer)
        residual = Residual(d.buckets, self.feedback.velocity)
        residual.load_state_dict(self._saved)
        self._saved = {}
        self._bounds = self.sparsifier.cut(residual.layers, self._workers(d.topology).size)
        return residual

    def _take_in(self, d: ReduceContext, b: Bucket, i: int) -> None:
        """Line 5, for one bucket."""
        residual = self._residual
        assert residual is not None
        g, velocity = b.g[: b.slots[-1].stop], residual.velocity
        self.feedback.before(d, g, None if velocity is None else velocity[residual.spans[i]])
        self._norms.append(residual.take_in(g, i, self._bounds))

    def _send(self, d: ReduceContext) -> None:
        """Lines 6 to 12."""
        residual, workers = self._residual, self._workers(d.topology)
        assert residual is not None
        squared_norms = torch.cat(self._norms)
        self._norms.clear()
        seconds = Seconds(d.metrics)
        accumulated = Accumulated(residual.acc, self._bounds, squared_norms)
        with seconds.of("share"):
            share = self.sparsifier.share(accumulated, self.t, workers)
        with seconds.of("select"):
            mine = self.sparsifier.select(accumulated, share)
        with seconds.of("encode"):
            code = self.indices.encode(mine, residual.acc.numel())
        with seconds.of("exchange"):
            disjoint = self.sparsifier.disjoint
            selected = Selected(residual.acc, mine, code, share.leader, squared_norms.sum(), disjoint)
            combined = self.combine(selected, self.indices, workers)
        with seconds.of("apply"):
            residual.release(combined.sent)
            self.feedback.after(d, combined.mean)
            errors = combined.errors.tolist()  # waits for the stream, so before more is put there
            residual.put_into(d.buckets, combined.joint, combined.mean)
        self.t += 1
        d.metrics["density"] = combined.joint.numel() / residual.acc.numel()
        d.metrics["error"] = sum(errors) / len(errors)
        if not self.sparsifier.disjoint:
            d.metrics["growth"] = combined.growth


class Seconds:
    """Notes how long parts of a step took on this worker."""

    def __init__(self, notes: dict[str, float]) -> None:
        self._notes = notes

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._notes[f"{part}_seconds"] = time.perf_counter() - start
