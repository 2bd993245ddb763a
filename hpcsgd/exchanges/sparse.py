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
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hpcsgd.core.flat import Bucket
from hpcsgd.core.step import State, Step
from hpcsgd.core.topology import Job
from hpcsgd.errors import UserError
from hpcsgd.exchanges.codecs import Codec, Gaps
from hpcsgd.exchanges.combining import Combine, Selected, everyones
from hpcsgd.exchanges.feedback import ErrorFeedback, Feedback, Residual
from hpcsgd.sparsifiers import Accumulated, Sparsifier
from hpcsgd.transport import Transport


class Sparse:
    """Of each gradient of the group what `sparsifier` selects; the rest is kept in a residual of M elements
    (float32; float64 where a parameter is), which is this worker's alone and part of a checkpoint.

    Args:
        sparsifier: such as `Deft(density=0.01)`.
        combine: `everyones` values at the union of all indices, as above, or each worker's `own` ones.
        feedback: `ErrorFeedback()`, `MomentumCorrection(momentum)` or `RateInside()`.
        indices: how they travel, `Gaps()` or `Plain()`.

    Notes of every step: `density` (|idx|/M), `error` (‖e‖₂, mean over the workers, eq. 2), `growth` (|idx|
    over the mean number that a worker selected; where sets overlap), and seconds in `share` (who searches
    what), `select`, `encode`, `exchange` and `apply`. Not for loss scaling that changes: the residual is of
    the scaled loss.

    Raises `UserError` at the first exchange where optimizer and feedback do not go together.
    """

    shards = False

    def __init__(
        self,
        sparsifier: Sparsifier,
        combine: Combine = everyones,
        feedback: Feedback = ErrorFeedback(),  # noqa: B008 - frozen
        indices: Codec = Gaps(),  # noqa: B008 - frozen
    ) -> None:
        if sparsifier.disjoint and combine is not everyones:
            name = type(sparsifier).__name__
            raise UserError(
                f"combine own: with {name} each element is one worker's to choose, and all must give theirs"
            )
        self.sparsifier = sparsifier
        self.combine, self.feedback, self.indices = combine, feedback, indices
        self.t = 0
        """Exchanges so far: less than steps, where this takes turns with others."""
        self.across = False
        self._residual: Residual | None = None
        self._saved: dict[str, dict[str, Tensor]] = {}
        self._norms: list[Tensor] = []

    def across_groups(self) -> Sparse:
        """The workers are all ranks of the job, not those of one group."""
        made = Sparse(self.sparsifier, self.combine, self.feedback, self.indices)
        made.across = True
        return made

    def idle(self, job: Job) -> bool:
        return self._workers(job).size == 1

    def __call__(self, s: Step, b: Bucket) -> None:
        if self.idle(s.job):
            return
        if self._residual is None:
            self._residual = self._begin(s)
        i = len(self._norms)
        assert b is s.buckets[i]
        self._take_in(s, b, i)
        if i + 1 == len(s.buckets):
            self._send(s)

    @property
    def parts(self) -> Mapping[str, Any]:
        return {"sparsifier": self.sparsifier}

    def state_dict(self) -> State:
        residual = self._saved if self._residual is None else self._residual.state_dict()
        return {"same": {"t": self.t}, "workers": residual}

    def load_state_dict(self, state: State) -> None:
        self.t, self._saved = state["same"]["t"], state.get("workers", {})
        if self._residual is not None:
            self._residual.load_state_dict(self._saved)

    def _workers(self, job: Job) -> Transport:
        return job.world if self.across else job.group

    def _begin(self, s: Step) -> Residual:
        self.feedback.require_optimizer(s.moments.optimizer)
        residual = Residual(s.buckets, self.feedback.velocity)
        residual.load_state_dict(self._saved)
        self._saved = {}
        self._bounds = self.sparsifier.cut(residual.layers, self._workers(s.job).size)
        return residual

    def _take_in(self, s: Step, b: Bucket, i: int) -> None:
        """Line 5, for one bucket."""
        residual = self._residual
        assert residual is not None
        g, velocity = b.g[: b.slots[-1].stop], residual.velocity
        self.feedback.before(s, g, None if velocity is None else velocity[residual.spans[i]])
        self._norms.append(residual.take_in(g, i, self._bounds))

    def _send(self, s: Step) -> None:
        """Lines 6 to 12."""
        residual, workers = self._residual, self._workers(s.job)
        assert residual is not None
        squared_norms = torch.cat(self._norms)
        self._norms.clear()
        seconds = Seconds(s.notes)
        accumulated = Accumulated(residual.acc, self._bounds, squared_norms)
        with seconds.of("share"):
            share = self.sparsifier.share(accumulated, self.t, workers)
        with seconds.of("select"):
            mine = self.sparsifier.select(accumulated, share)
        with seconds.of("encode"):
            code = self.indices.encode(mine, residual.acc.numel())
        with seconds.of("exchange"):
            selected = Selected(residual.acc, mine, code, share.leader, squared_norms.sum().item())
            combined = self.combine(selected, self.indices, workers)
        with seconds.of("apply"):
            residual.release(combined.sent)
            self.feedback.after(s, combined.mean)
            residual.put_into(s.buckets, combined.joint, combined.mean)
        self.t += 1
        s.notes["density"] = combined.joint.numel() / residual.acc.numel()
        s.notes["error"] = combined.error
        if not self.sparsifier.disjoint:
            s.notes["growth"] = combined.growth


class Seconds:
    """Notes how long parts of a step took on this worker."""

    def __init__(self, notes: dict[str, float]) -> None:
        self._notes = notes

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._notes[f"{part}_seconds"] = time.perf_counter() - start
