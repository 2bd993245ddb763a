"""Sparse gradient reduction: only some elements of each gradient are sent, the rest is kept for later.

D. Yoon, S. Oh: DEFT, ICPP 2023, algorithm 1, "distributed SGD with sparsification". Each of n workers has a
gradient g and error feedback e, the elements that it has not sent yet. It computes

    5   acc = e + g
    6   idx_i = select(acc)                 by the sparsifier
    7   idx = the union of all idx_i        which the workers gather
    8   s = the mean over the workers of acc[idx]
    10  w −= s                              here by the user's optimizer, from the gradient s
    11  acc[idx] = 0
    12  e = acc

Line 5 runs bucket by bucket during the backward pass. The other lines run after the last gradient, since the
selection in a layer depends on all of them. Every worker updates the whole model w, because sending updated
shards would be dense again.

A group of one rank has no other rank to send to, and its gradients stay unchanged.
"""

from __future__ import annotations

import contextlib
import logging
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
from hpcsgd.parts.sparsifiers import Accumulated, Adapting, Sparsifier

log = logging.getLogger(__name__)


@checked
class Sparse:
    """Gradient reduction that sends only the selected elements and adds the rest to the next gradient.

    Every rank updates the whole model, so the optimizer state is not sharded. A group of one rank sends
    nothing, and its gradients stay unchanged. torch's `GradScaler` cannot be used with it, because the rest
    comes from earlier losses and would not match a changed loss scale. Gradients that are sparse tensors are
    refused.

    Args:
        sparsifier: Selects the elements, such as `Deft(density=0.01)`.
        combine: Which values count at the selected indices: `union` takes all workers' values, `per_worker`
            only the values that each worker selected, which sends half as much for `TopK`. Both are in
            `hpcsgd.parts.grad_reduces`. Default union, DEFT's lines 7 to 9.
        feedback: How the rest is kept: `ErrorFeedback()` of `hpcsgd.parts.grad_reduces`,
            `MomentumCorrection(m)` or `LrInErrorFeedback()`. Default ErrorFeedback(): learning rate, momentum
            and weight decay act on what was sent.
        indices: How indices are encoded: `Gaps()` in one or two bytes each, `Plain()` in four. Both are in
            `hpcsgd.parts.grad_reduces`. Default Gaps().

    Raises:
        UserError: If `combine` is `per_worker` and the sparsifier's selections are disjoint; at the first
            reduction, if the optimizer does not fit `feedback`.

    Shape:
        M parameters in total. Each worker keeps a vector of M elements, float32, or float64 if a parameter
        is. A checkpoint includes it.

    Note:
        After every step, `optimizer.metrics` has:

        - `density`: |idx|/M, the fraction of elements that were sent.
        - `error`: ‖e‖₂, the norm of the rest, mean over the workers (eq. 2).
        - `growth`: |idx| divided by the mean number of elements that a worker selected, if selections can
          overlap.
        - `imbalance`: the largest number of elements that a worker selected, divided by the mean, for
          `MiCRO` and `ExDyna`.
        - seconds of each part of the reduction: `share_seconds` (which worker searches which elements),
          `select_seconds`, `encode_seconds`, `combine_seconds` and `apply_seconds`.

    Example:
        >>> grad_reduce = hpcsgd.Sparse(hpcsgd.Deft(density=0.1), feedback=hpcsgd.MomentumCorrection(0.9))
        >>> method = hpcsgd.hierarchical(4, grad_reduce)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=4)
        >>> optimizer.metrics["error"] > 0     # what is still to be sent
        True

    References:
        D. Yoon, S. Oh: DEFT, ICPP 2023, algorithm 1.

    See Also:
        `Quantized`: sends all elements in fewer bits.
        `sasgd`: sparse in time, sends all elements.
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
                f"combine per_worker: with {name} one worker selects each element, "
                "so all must give their values"
            )
        self.sparsifier = sparsifier
        self.combine, self.feedback, self.indices = combine, feedback, indices
        self.t = 0
        """The number of reductions so far; less than that of steps if `switch` used another method before."""
        self.traits = GradReduceTraits(leaves_shards=False)
        self._residual: Residual | None = None
        self._saved: dict[str, dict[str, Tensor]] = {}
        self._norms: list[Tensor] = []

    def across_groups(self) -> Sparse:
        """Return a reduction whose workers are all ranks of the job."""
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
        """Return the operations of lines 6 to 9 of a step.

        Raises `UserError` if the sparsifier cannot predict its selection.
        """
        over = "world" if self.traits.across else "intra_group"
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
        if self._saved and self._saved.keys() != residual.state_dict().keys() and d.topology.rank == 0:
            log.warning(
                "Sparse: the checkpoint was written with another feedback: the workers' momentum "
                "before the selection starts anew, and the rest that was not sent is kept"
            )
        self._saved = {}
        self._bounds = self.sparsifier.cut(residual.layers, self._workers(d.topology).size)
        return residual

    def _take_in(self, d: ReduceContext, b: Bucket, i: int) -> None:
        """Run line 5 for bucket i: add its gradient to acc."""
        residual = self._residual
        assert residual is not None
        g, velocity = b.g[: b.slots[-1].stop], residual.velocity
        added = self.feedback.before(d, g, None if velocity is None else velocity[residual.spans[i]])
        self._norms.append(residual.take_in(added, i, self._bounds))
        if added is not g:
            g.zero_()

    def _send(self, d: ReduceContext) -> None:
        """Run lines 6 to 12 except 10: select, send, and write the mean s into the gradients."""
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
        with seconds.of("combine"):
            disjoint = self.sparsifier.disjoint
            selected = Selected(residual.acc, mine, code, share.leader, squared_norms.sum(), disjoint)
            combined = self.combine(selected, self.indices, workers)
        with seconds.of("apply"):
            residual.release(combined.sent)
            self.feedback.after(d, combined.mean)
            errors = combined.errors.tolist()  # waits for the device, so do it before giving it more work
            residual.put_into(d.buckets, combined.joint, combined.mean)
        if isinstance(self.sparsifier, Adapting):
            self.sparsifier.adapt(combined.counts, self.t, residual.acc.numel())
            d.metrics["imbalance"] = combined.imbalance
        self.t += 1
        d.metrics["density"] = combined.joint.numel() / residual.acc.numel()
        d.metrics["error"] = sum(errors) / len(errors)
        if not self.sparsifier.disjoint:
            d.metrics["growth"] = combined.growth


class Seconds:
    """A timer that writes the seconds of each part of a reduction on this worker into `metrics`."""

    def __init__(self, metrics: dict[str, float]) -> None:
        self._metrics = metrics

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._metrics[f"{part}_seconds"] = time.perf_counter() - start
