"""What an optimizer of many ranks keeps, as a part of `DistributedOptimizer`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import optim

from hpcsgd.core.method import Method
from hpcsgd.core.state import State
from hpcsgd.core.step import GradReduce, StepContext
from hpcsgd.engine import own_state
from hpcsgd.engine.sharding import ShardedOptimizer


class WithState(optim.Optimizer):
    """State that is saved and loaded: of the wrapped optimizer, and of the method."""

    local: ShardedOptimizer
    method: Method
    _exchange: GradReduce
    _step: StepContext

    @abstractmethod
    def ready_for(self, call: str, *, across: bool = True) -> StepContext:
        """Have the whole model in place, and ranks, also those `across` groups, in one `call`; collective."""

    def state_dict(self) -> dict[str, Any]:
        """As of the plain optimizer over whole parameters (this group's), and the method's; collective."""
        topology = self.ready_for("state_dict()", across=False).topology
        state = self.local.state_dict(topology.intra_group)
        method = {role: each.to_dict() for role, each in self.method.state_dict().items()}
        ours = {"t": self._step.t, "place": own_state.place(topology), "method": method}
        return {**state, "hpcsgd": ours}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take `state_dict`, made by the method of that name on this rank, or on other numbers of ranks, or a
        plain optimizer's."""
        if "hpcsgd" not in state_dict:
            self.local.load_state_dict(state_dict)
            return
        s = self._step
        states = own_state.loadable(
            state_dict, s.topology, s.buckets, groups_are_alike=self._exchange.traits.across
        )
        self.local.load_state_dict(state_dict)
        self.method.load_state_dict(states)
        s.t = state_dict["hpcsgd"]["t"]

    def resume_from(
        self, t: int, groups: Sequence[dict[str, Any]], method: Mapping[str, State] | None
    ) -> None:
        """Go on after `t` updates with these options of param `groups` and, if any, state of the `method`."""
        self._step.t = t
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in saved.items()})
        if method is not None:
            self.method.load_state_dict(method)
