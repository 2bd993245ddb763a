"""Saving and loading of state, as a part of `DistributedOptimizer`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import optim

from hpcsgd.arguments import checked
from hpcsgd.core.method import Method
from hpcsgd.core.state import State
from hpcsgd.core.step import GradReduce, StepContext
from hpcsgd.engine import own_state
from hpcsgd.engine.averaged import GroupModel
from hpcsgd.engine.sharding import ShardedOptimizer
from hpcsgd.errors import UserError

if TYPE_CHECKING:  # loaded by those who save or load a state; every rank of a job would open the files
    from hpcsgd.engine.complete_state import CompleteState

NAME = "state_dict()"


def _like(own: object, saved: Any) -> Any:
    """Return a `saved` option in the type of the group's `own`: checkpoints have lists and names of enums."""
    if isinstance(own, Enum):
        return type(own)[saved]
    return tuple(saved) if isinstance(own, tuple) else saved


class WithState(optim.Optimizer):
    """The state that is saved and loaded: that of the wrapped optimizer, and that of the method."""

    local: ShardedOptimizer
    method: Method
    _grad_reduce: GradReduce
    _group_model: GroupModel
    _step: StepContext
    _complete: CompleteState | None = None
    """The result of `consolidate_state_dict`, until the state changes."""

    @abstractmethod
    def ready_for(self, call: str, *, across: bool = True) -> StepContext:
        """Require the same `call` on all ranks of the group, and make every `w` whole; return the step.

        `call`: the public method that was called. `across`: require it of the ranks of all other groups,
        too. Collective.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a plain optimizer over this group's whole parameters, and the method's state.

        Collective. The exception: after `consolidate_state_dict(to)`, until the next step, rank `to` alone
        returns the state of all ranks.
        """
        from hpcsgd.engine.torch_checkpoint import OwnedByOneRank, refuse_torch_checkpoint

        refuse_torch_checkpoint(NAME)
        if self._complete is not None:
            return self._complete.state_dict(self.local.options())
        topology = self.ready_for(NAME, across=False).topology
        state = self.local.state_dict(topology.intra_group)
        method = {role: each.to_dict() for role, each in self.method.state_dict().items()}
        ours = {
            "t": self._step.t,
            "place": own_state.place(topology),
            "method": method,
            "saved_by": OwnedByOneRank(),
        }
        return {**state, "hpcsgd": ours}

    @checked
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state of all ranks on rank `to`, so that this rank alone can save it; collective.

        `ZeroRedundancyOptimizer` has the same method. Until the next step, `state_dict()` on rank `to` then
        needs no other rank. All ranks of the same P × K may load the result, and each gets its own state. On
        another P × K it counts as the state of rank `to`. The state has no model: each group has its own,
        which `hpcsgd.save` saves, too.
        """
        from hpcsgd.engine.complete_state import gathered

        topology = self._step.topology
        if not 0 <= to < topology.world_size:
            raise UserError(
                f"consolidate_state_dict: to = {to}: expected a rank from 0 to {topology.world_size - 1}"
            )
        s = self.ready_for(f"consolidate_state_dict({to})")
        alike = self._grad_reduce.traits.across
        method = self.method.state_dict()
        self._complete = gathered(self.local, method, s.topology, s.t, to, groups_are_alike=alike)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `state_dict`: a plain optimizer's, or a result of `state_dict()`.

        A result of `state_dict()` must be this rank's own, or that of all ranks (`consolidate_state_dict`).
        If the number of groups or ranks has changed, any rank's result is accepted.
        """
        from hpcsgd.engine.complete_state import of_rank
        from hpcsgd.engine.torch_checkpoint import refuse_torch_checkpoint

        refuse_torch_checkpoint("load_state_dict()")
        self._complete = None
        if "hpcsgd" not in state_dict:
            self.local.load_state_dict(state_dict)
            return
        s = self._step
        state_dict = of_rank(state_dict, s.topology)
        states = own_state.loadable(
            state_dict, s.topology, s.buckets, groups_are_alike=self._grad_reduce.traits.across
        )
        self.local.load_state_dict(state_dict)
        self.method.load_state_dict(states)
        s.t = state_dict["hpcsgd"]["t"]

    def resume_from(
        self, t: int, groups: Sequence[dict[str, Any]], method: Mapping[str, State] | None
    ) -> None:
        """Continue after `t` updates, with these options of parameter `groups` and state of the `method`."""
        self._complete = None
        self._group_model.differs = False  # not known: the loaded models may be of a synchronization
        self._step.t = t
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({k: _like(group.get(k), v) for k, v in saved.items()})
        if method is not None:
            self.method.load_state_dict(method)
