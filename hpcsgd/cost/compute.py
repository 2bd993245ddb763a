"""The seconds that a rank needs to compute parts of a step: forward, backward, update, selection."""

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
    """The [compute] section of a machine file: times of the slowest rank while all ranks compute.

    The times of forward and backward passes exist only if `hpcsgd measure` got a job file with a model. They
    are lists with one entry per batch size.
    """

    numel: Count | None = None
    """M, the number of parameters of the measured model."""
    batch_sizes: tuple[Count, ...] = ()
    """The measured batch sizes, in samples per rank and step."""
    forward_seconds_by_batch: tuple[Seconds, ...] = ()
    backward_seconds_by_batch: tuple[Seconds, ...] = ()
    update_seconds_per_element: Seconds | None = None
    """Seconds for each element that a rank updates by the job file's optimizer, or by SGD with momentum."""
    mean_seconds_per_element: Seconds | None = None
    """Seconds to average, for each element that a rank receives in an all-to-all of gradients."""
    selection_seconds_per_element: dict[str, Seconds] = field(default_factory=dict)
    """Seconds for each element that a sparsifier searches, by the name of the sparsifier."""
    busy: Busy | None = None

    def __post_init__(self) -> None:
        _require_alike(self.batch_sizes, self.forward_seconds_by_batch, self.backward_seconds_by_batch)

    def forward_seconds(self, batch: float) -> float:
        """Return the seconds of a forward pass of `batch` samples per rank.

        A line c0 + c1·batch is fitted to the measured times. Raises `UserError` if no model was measured.
        """
        return _of_batch(self.batch_sizes, self.forward_seconds_by_batch, batch)

    def backward_seconds(self, batch: float) -> float:
        """Return the seconds of a backward pass of `batch` samples per rank, fitted as `forward_seconds`."""
        return _of_batch(self.batch_sizes, self.backward_seconds_by_batch, batch)

    def update_seconds(self, elements: float) -> float:
        """Return the seconds to update `elements` parameters. Raises `UserError` if this was not measured."""
        return _known("update_seconds_per_element", self.update_seconds_per_element) * elements

    def mean_seconds(self, elements: float) -> float:
        """Return the seconds to average `elements` gradient elements, received from all ranks of a group.

        Raises `UserError` if this was not measured.
        """
        return _known("mean_seconds_per_element", self.mean_seconds_per_element) * elements

    def selection_seconds(self, sparsifier: str, elements: float) -> float:
        """Return the seconds in which `sparsifier` selects from `elements` elements.

        Raises `UserError` if the sparsifier was not measured.
        """
        if sparsifier not in self.selection_seconds_per_element:
            hint = near_miss(sparsifier, self.selection_seconds_per_element)
            raise UserError(f"[compute.selection_seconds_per_element] {sparsifier}: was not measured: {hint}")
        return self.selection_seconds_per_element[sparsifier] * elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Factors by which parts of a step take longer while communication threads send without a pause."""

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
