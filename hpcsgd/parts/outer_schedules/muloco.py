"""MuLoCo's outer rate and momentum, which grow with the number of groups.

B. Thérien et al.: MuLoCo: Muon is a Practical Inner Optimizer for DiLoCo, 2025 (arXiv:2505.23725). In the
configurations of its authors, with Muon inside:

    groups       2     16
    rate         0.9   1.0
    momentum     0.8   0.9

Between these numbers of groups the values of the smaller one hold. A single worker has 0.7 and 0.6 there.
Here a single group has no outer step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcsgd.parts.outer_schedules.base import OuterSchedule, OuterValues

BY_GROUPS: Mapping[int, OuterValues] = {2: OuterValues(0.9, 0.8), 16: OuterValues(1.0, 0.9)}
"""The values from each number of groups on."""


@dataclass(frozen=True)
class ByGroups:
    """Values that stay the same during the run; `values` has them from each number of groups on."""

    values: Mapping[int, OuterValues]
    knots = ()

    def at(self, t: int, P: int) -> OuterValues:
        return self.values[max((least for least in self.values if least <= P), default=min(self.values))]


def muloco() -> OuterSchedule:
    """Return MuLoCo's outer rate and momentum: 0.9 and 0.8, from 16 groups on 1.0 and 0.9.

    They are for `muon` as the inner optimizer, and stay the same during the run.

    Returns:
        An `OuterSchedule` for the argument `outer_schedule`, as of `diloco`.

    Example:
        >>> hpcsgd.outer_schedules.muloco().at(1, P=4).momentum
        0.8

    References:
        B. Thérien et al.: MuLoCo: Muon is a Practical Inner Optimizer for DiLoCo, 2025 (arXiv:2505.23725),
        in the configurations of its authors.

    See Also:
        `piecewise`: any values.
    """
    return ByGroups(BY_GROUPS)
