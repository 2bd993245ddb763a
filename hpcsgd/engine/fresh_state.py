"""The optimizer's state of tensors that it has not updated yet, and a state that starts anew."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, optim

from hpcsgd.core.elements import as_reals
from hpcsgd.engine.at_work import AtWork
from hpcsgd.engine.initial_state import KEPT, complete, like_new, start_counters
from hpcsgd.engine.inside import state_of, with_own_state


class WithFreshState(AtWork):
    """The part of `ShardedOptimizer` that knows the state of a new optimizer."""

    _all: Sequence[optim.Optimizer]
    """The optimizer, and those inside it that have a state of their own."""

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return state tensors by name, in the order of `held`, also for parameters that had no gradient."""
        trained = [held for held in self.held if held.param.requires_grad]
        if self._muon is not None:
            self._muon.complete(trained)
        with self.ranges():
            complete(self.optimizer, [held.tensor for held in trained])
        named: dict[str, list[Tensor]] = {}
        for held in self.held:
            for name, value in state_of(self._all, held.tensor).items():
                if not isinstance(value, Tensor) or name.rpartition(".")[2] == KEPT:
                    continue
                if value.is_floating_point() or value.is_complex():
                    named.setdefault(name, []).append(as_reals(value))
        return named

    def reset(self) -> None:
        """Set the state to that of a new optimizer with the current options."""
        for each in self._all:
            each.state.clear()
        with self.ranges():
            params = [group["params"] for group in self.optimizer.param_groups]
            if self._muon is not None:  # a new Muon has no state
                params = self._muon.others(params)
            if any(params):
                new = like_new(self.optimizer, params)
                for each, fresh in zip(self._all, [new, *with_own_state(new)], strict=True):
                    each.state.update(fresh.state)
        if not self.known:
            start_counters(self.optimizer)
