"""The seconds that a rank computes in a step: forward, backward, update, selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from hpcsgd.config.kinds import Above, Minimum
from hpcsgd.errors import UserError, near_miss

Count = Annotated[int, Minimum(1)]
Seconds = Annotated[float, Above(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Compute times of the slowest rank of a host on which all ranks compute at once.

    Times of a model exist only if a job file was measured; each list has one entry per batch size.
    """

    numel: Count | None = None
    """M, the number of parameters of that model."""
    batch_sizes: tuple[Count, ...] = ()
    """Samples per rank."""
    forward_seconds_by_batch: tuple[Seconds, ...] = ()
    backward_seconds_by_batch: tuple[Seconds, ...] = ()
    update_seconds_per_element: Seconds | None = None
    """Per element that a rank updates, by the job file's optimizer, otherwise by SGD with momentum."""
    mean_seconds_per_element: Seconds | None = None
    """Per element that an all-to-all delivers to a rank: n/4 elements for a gradient of n bytes."""
    selection_seconds_per_element: dict[str, Seconds] = field(default_factory=dict)
    """Per element that a rank searches, by the name of the sparsifier."""
    busy: Busy | None = None

    def __post_init__(self) -> None:
        _require_alike(self.batch_sizes, self.forward_seconds_by_batch, self.backward_seconds_by_batch)

    def forward_seconds(self, batch: float) -> float:
        """Return c0 + c1·b for b = `batch` samples per rank. Raises `UserError` if no model was measured."""
        return _of_batch(self.batch_sizes, self.forward_seconds_by_batch, batch)

    def backward_seconds(self, batch: float) -> float:
        """Return c0 + c1·b of the backward pass, like `forward_seconds`."""
        return _of_batch(self.batch_sizes, self.backward_seconds_by_batch, batch)

    def update_seconds(self, elements: float) -> float:
        """Return the time to update `elements` of w. Raises `UserError` if it was not measured."""
        return _known("update_seconds_per_element", self.update_seconds_per_element) * elements

    def mean_seconds(self, elements: float) -> float:
        """Return the time to average `elements` received from all ranks of a group.

        Raises `UserError` if it was not measured.
        """
        return _known("mean_seconds_per_element", self.mean_seconds_per_element) * elements

    def selection_seconds(self, sparsifier: str, elements: float) -> float:
        """Return the time to search `elements`. Raises `UserError` if the sparsifier was not measured."""
        if sparsifier not in self.selection_seconds_per_element:
            hint = near_miss(sparsifier, self.selection_seconds_per_element)
            raise UserError(f"[compute.selection_seconds_per_element] {sparsifier}: was not measured: {hint}")
        return self.selection_seconds_per_element[sparsifier] * elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Slowdown factors while the communication thread of every rank sends without a pause."""

    forward: Seconds | None = None
    backward: Seconds | None = None
    update: Seconds | None = None
    selection: Seconds | None = None


def _known(key: str, value: float | None) -> float:
    if value is None:
        raise UserError(f"[compute] {key}: was not measured; run hpcsgd measure")
    return value


def _require_alike(batches: Sequence[int], *times: Sequence[float]) -> None:
    if any(len(each) != len(batches) for each in times) or len(set(batches)) != len(batches):
        raise UserError(
            f"batch_sizes = {list(batches)}: each once, with its forward_seconds_by_batch "
            f"and backward_seconds_by_batch; these are {' and '.join(str(len(each)) for each in times)}"
        )


def _of_batch(batches: Sequence[int], seconds: Sequence[float], batch: float) -> float:
    if not batches:
        raise UserError("[compute] batch_sizes: no model was measured; run hpcsgd measure JOB")
    if len(batches) == 1:
        return seconds[0] * batch / batches[0]
    T = np.asarray(seconds)
    columns = np.stack([np.ones(len(batches)), np.asarray(batches, float)], axis=1)
    from scipy.optimize import nnls  # imported late: training must not depend on scipy

    # relative errors, so that small batches count as much as large ones
    (c0, c1), _ = nnls(columns / T[:, None], np.ones(len(batches)))
    return float(c0 + c1 * batch)
