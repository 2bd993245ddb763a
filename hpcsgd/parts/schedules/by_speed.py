"""The schedule by which slow groups take fewer local steps between two synchronizations than fast ones.

With the speed v_g of group g in steps per second, and H steps of the fastest group (eq. 6 of asynchronous
DiLoCo, arXiv:2401.09135):

    H_g ← max(H_min, ⌊v_g / max_j v_j · H⌋)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hpcsgd.arguments import checked
from hpcsgd.comm import phase
from hpcsgd.core.state import State
from hpcsgd.core.step import StepContext
from hpcsgd.core.traffic import FLOAT64, CommOp, ModelLayout
from hpcsgd.core.traits import ScheduleTraits
from hpcsgd.errors import UserError


@checked
@dataclass(frozen=True)
class DynamicLocalSteps:
    """Steps between two synchronizations by the measured speed of each group: dynamic local updates.

    Use it as `local_steps` of `async_diloco` or `heloco`. The fastest group takes `sync_every` steps between
    two synchronizations, and a group that is n times slower takes about an n-th of them. So all groups
    synchronize about equally often. A speed is the mean since the group's last synchronization. Evaluations
    and checkpoints do not count, because there groups wait for each other.

    Args:
        min_steps: The fewest steps of a group, H_min, at least 1. Default 1, the paper's.
        clock: Function that returns the time in seconds. Tests and simulations replace it. Default
            ``time.perf_counter``.

    Raises:
        UserError: If `min_steps` is below 1.

    Shape:
        A message has 8 bytes more. A rank sends 16·(K−1)/K bytes in its group per synchronization.

    Note:
        After a synchronization, `optimizer.metrics["local_steps"]` is H_g, the number of steps until the next
        one.

    Example:
        >>> method = hpcsgd.async_diloco(sync_every=2, local_steps=hpcsgd.DynamicLocalSteps())
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> optimizer.metrics["local_steps"] <= 2
        True

    References:
        B. Liu et al.: Asynchronous Local-SGD Training for Language Modeling, 2024 (arXiv:2401.09135), eq. 6.

    See Also:
        `async_diloco`, `heloco`: the methods.
    """

    min_steps: int = 1
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        if self.min_steps < 1:
            raise UserError(
                f"min_steps = {self.min_steps}: groups train at least 1 step between two synchronizations",
                key="min_steps",
                value=self.min_steps,
            )


LOCAL_STEPS: Mapping[str, Callable[..., DynamicLocalSteps]] = {"dynamic": DynamicLocalSteps}
"""The rules for the number of local steps, by their names in job files."""


class BySpeed:
    """The schedule that synchronizes a group after H_g local steps, and measures the group's speed.

    Until the speeds are known, H_g is H.
    """

    def __init__(self, H: int, dynamic: DynamicLocalSteps) -> None:
        if not dynamic.min_steps <= H:
            raise UserError(
                f"min_steps = {dynamic.min_steps}: expected at most sync_every = {H}",
                key="min_steps",
                value=dynamic.min_steps,
            )
        self.H, self._dynamic = H, dynamic
        self.local_steps = H
        """H_g, the steps between the last synchronization and the next one."""
        self._since_sync = 0
        self._seconds = 0.0
        """The seconds per step of this group at its last synchronization; 0 if they are not known."""
        self._spent, self._timed = 0.0, 0
        """The seconds measured since the last synchronization, and the steps made in them."""
        self._running_since: float | None = None
        """The time since which steps are measured; None if the measurement begins with the next step."""

    @property
    def traits(self) -> ScheduleTraits:
        return ScheduleTraits(known_before_update=True, rate=1 / self.local_steps)

    def __call__(self, s: StepContext) -> bool:
        self._since_sync += 1
        if self._running_since is None:
            self._running_since = self._dynamic.clock()
        else:
            self._timed += 1
        return self._since_sync >= self.local_steps

    def pause(self) -> None:
        """Stop the measurement until the next step, because the group waits for others now."""
        if self._running_since is not None:
            self._spent += self._dynamic.clock() - self._running_since
            self._running_since = None

    def seconds_per_step(self) -> float:
        """Return the seconds of a step since the last synchronization; 0.0 if they are not known yet."""
        self.pause()
        if self._timed:
            self._seconds = self._spent / self._timed
        return self._seconds

    def adapt(self, fastest: float, s: StepContext) -> None:
        """Set H_g for a group whose speed is this one's, if the `fastest` needs that many seconds per step.

        All ranks of the group take the values of its first rank. Collective in the group.
        """
        known = torch.tensor([self._seconds, fastest], dtype=torch.float64, device="cpu")
        with phase("sync_decision"):
            s.topology.intra_group.bcast(known).wait()
        seconds, fastest = known[0].item(), known[1].item()
        if seconds > 0 and fastest > 0:
            relative_speed = min(fastest / seconds, 1.0)
            self.local_steps = max(self._dynamic.min_steps, math.floor(relative_speed * self.H))
        s.metrics["local_steps"] = self.local_steps
        self._since_sync, self._spent, self._timed = 0, 0.0, 0
        self._running_since = self._dynamic.clock()

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        """Return the broadcast of two numbers in the group, which follows each synchronization."""
        if m.P == 1:
            return []
        return [CommOp("bcast", "intra_group", 2 * FLOAT64).within("sync_decision", 1 / self.local_steps)]

    def state_dict(self) -> State:
        return State(
            per_rank={
                "local_steps": self.local_steps,
                "since_sync": self._since_sync,
                "seconds": self._seconds,
            }
        )

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`; the measurement begins with the next step."""
        saved = state.per_rank
        self.local_steps = saved.get("local_steps", self.H)
        self._since_sync = saved.get("since_sync", 0)
        self._seconds = saved.get("seconds", 0.0)
        self._spent, self._timed, self._running_since = 0.0, 0, None
