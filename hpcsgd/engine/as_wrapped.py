"""A check that model and optimizer still have the parameters that they had when they were wrapped.

The flat vectors hold the parameters that the model had at the wrapping. A parameter that was replaced since,
or moved to other memory, would be trained on no rank or on one only. Averages would use stale values. So each
step compares identities: those of all objects in the model's modules, of memory, and of parameter groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_

from torch import Tensor, nn, optim

from hpcsgd import torch_private
from hpcsgd.comm import Communicator
from hpcsgd.core.agreement import Agreement, Call
from hpcsgd.core.flat import Bucket
from hpcsgd.core.fsdp import is_fsdp, reshard
from hpcsgd.core.slot import Slot
from hpcsgd.engine.alike import require_same_sampler
from hpcsgd.engine.chained import parts_of
from hpcsgd.engine.sharding import ShardedOptimizer
from hpcsgd.engine.wrapping import is_trained_by_another
from hpcsgd.errors import UserError

END = (object(),)
"""A mark behind all compared objects, so that a list never equals the beginning of a longer one."""
SINCE = "after DistributedOptimizer was made"


class AsWrapped:
    """A check that `model` and the optimizers have the same parameters as when they were wrapped.

    The optimizers are the user's, inside `local`, and `outer`, the `DistributedOptimizer` around it.
    """

    def __init__(
        self,
        outer: optim.Optimizer,
        local: ShardedOptimizer,
        model: nn.Module,
        buckets: Sequence[Bucket],
        world: Communicator,
    ) -> None:
        self._parameters = Registered(model, buckets)
        self._memory = InPlace(outer, buckets, [x for x in local.groups() if not x.requires_grad])
        self._groups = Grouped(outer, local.optimizer)
        self._local = local
        self._world = world
        self._compared = False

    def require(self, call: Call, everyone: Agreement) -> None:
        """Raise `UserError` for parameters that would be trained by no rank, or by one rank only.

        When it is called for the first time, it also compares the samplers of all ranks, in this `call`. That
        is collective.
        """
        if not self._compared:
            self._compared = True
            require_same_sampler(self._world, call, everyone)
        self._parameters.require()
        self._memory.require()
        self._groups.require()
        self._local.require_state_in_use()


class Registered:
    """A check of the parameters that the modules of a model hold."""

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket]) -> None:
        self._model = model
        self._first = dict.fromkeys(model.parameters())
        trained = {slot.param: slot.name for b in buckets for slot in b.slots}
        self._trained = {name: param for param, name in trained.items() if param in self._first}
        self._look()

    def require(self) -> None:
        """Raise `UserError` if a trained parameter left the model, or a parameter to train was added."""
        if self._same():
            return
        reshard(self._model)  # FSDP may have put gathered parameters in place of the shards
        if not self._same():
            self._require_trained()
            self._require_nothing_new()
            self._look()

    def _same(self) -> bool:
        now = chain.from_iterable(self._views)
        return not any(self._empty) and all(map(is_, chain(now, END), self._found))

    def _look(self) -> None:
        tables = [table for m in self._model.modules() for table in torch_private.tables_of(m)]
        self._empty = [table for table in tables if not table]
        # Views always show the current contents, and need no call for each table.
        self._views = [table.values() for table in tables if table]
        self._found: list[object] = [*chain.from_iterable(self._views), *END]

    def _require_trained(self) -> None:
        here, named = set(self._model.parameters()), dict(self._model.named_parameters())
        for name, param in self._trained.items():
            if param not in here:
                how = "replaced in" if name in named else "taken out of"
                raise UserError(
                    f"parameter {name} was {how} the model {SINCE}, and no rank would train it: change the "
                    "model before, load_state_dict without assign=True, or wrap a new optimizer"
                )

    def _require_nothing_new(self) -> None:
        for name, param in self._model.named_parameters():
            if param.requires_grad and param not in self._first:
                raise UserError(
                    f"parameter {name} was added to the model {SINCE}, and no rank would train it: change "
                    "the model before, or wrap a new optimizer"
                )


class InPlace:
    """A check that trained parameters still lie in the flat vectors, and that frozen ones stay frozen."""

    def __init__(
        self, outer: optim.Optimizer, buckets: Sequence[Bucket], frozen: Sequence[nn.Parameter]
    ) -> None:
        self._outer = outer
        self._slots = [slot for b in buckets for slot in b.slots]
        self._sharded = [slot for slot in self._slots if is_fsdp(slot.param)]
        self._whole = [slot.param for slot in self._slots if not is_fsdp(slot.param)]
        self._homes = [*map(Tensor.data_ptr, self._whole)]
        self._frozen = frozen

    def require(self) -> None:
        self._require_home(self._sharded)
        if [*map(Tensor.data_ptr, self._whole)] != self._homes:
            self._require_home(self._slots)
        if any(param.requires_grad for param in self._frozen):
            raise UserError(
                "a parameter that was frozen when DistributedOptimizer was made requires a gradient now: "
                "unfreeze it before"
            )

    def _require_home(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if not slot.at_home() and is_trained_by_another(slot.param, self._outer):
                raise UserError(
                    f"another DistributedOptimizer, made after this one, trains parameter {slot.name}: go on "
                    "with that alone, or wrap several optimizers of one model together, as "
                    "hpcsgd.ChainedOptimizer"
                )
            if not slot.at_home():
                raise UserError(
                    f"parameter {slot.name} was moved {SINCE}: convert the model or change its device or "
                    "memory format before, and give other processes a copy.deepcopy of it"
                )


class Grouped:
    """A check of the parameter groups and the state that the user's `optimizer` and `outer` share."""

    def __init__(self, outer: optim.Optimizer, optimizer: optim.Optimizer) -> None:
        self._outer, self._optimizer = outer, optimizer
        self._groups = list(optimizer.param_groups)
        self._held = [*chain.from_iterable(group["params"] for group in self._groups)]

    def require(self) -> None:
        within = [group for part in parts_of(self._optimizer) for group in part.param_groups]
        for groups in (self._outer.param_groups, self._optimizer.param_groups, within):
            if not _same(groups, self._groups):
                raise UserError(
                    f"param groups were added, removed or replaced {SINCE}: do that before; load a state by "
                    "load_state_dict of the DistributedOptimizer"
                )
        if not _same([*chain.from_iterable(group["params"] for group in self._groups)], self._held):
            raise UserError(
                f'"params" of a param group were changed {SINCE}: change the groups of the optimizer before'
            )
        if self._outer.state is not self._optimizer.state:
            raise UserError(
                f"the optimizer's state was replaced {SINCE}: empty it in place, by optimizer.state.clear()"
            )


def _same(found: Sequence[object], expected: Sequence[object]) -> bool:
    return len(found) == len(expected) and all(map(is_, found, expected))
