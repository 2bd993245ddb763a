"""`averaged_model()`: the mean of the groups' models, or a server's model, for a block of code.

Outside such a block, a warning says that `state_dict()` of the model is that of one group.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Self, final, overload
from weakref import WeakMethod, WeakSet

import torch
from torch import Tensor, nn

from hpcsgd.comm import phase
from hpcsgd.comm.alike import require_alike
from hpcsgd.core.buffers import averaged_buffers, make_writable, places
from hpcsgd.core.flat import Bucket
from hpcsgd.core.fsdp import reshard
from hpcsgd.core.method import HoldsModel
from hpcsgd.core.slot import Slot
from hpcsgd.core.step import StepContext
from hpcsgd.core.topology import Topology
from hpcsgd.core.waits import All, InNeighbors, Pairs, RandomPartner, Slowest, Waits
from hpcsgd.engine.alike import buffer_facts
from hpcsgd.engine.param_gather import gather_shards
from hpcsgd.errors import UserError
from hpcsgd.parts.averagers import average_flattened, set_to_average
from hpcsgd.parts.averagers.distance import distance

log = logging.getLogger(__name__)
_warned: WeakSet[nn.Module] = WeakSet()
"""The models for which `GroupModel` has logged its warning."""


class Buffers(Sequence[Tensor]):
    """The averaged buffers of `model`, looked up anew each time, as a forward pass may replace them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @overload
    def __getitem__(self, i: int) -> Tensor: ...

    @overload
    def __getitem__(self, i: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, i: int | slice) -> Tensor | Sequence[Tensor]:
        return averaged_buffers(self._model)[i]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(averaged_buffers(self._model))

    def __len__(self) -> int:
        return len(averaged_buffers(self._model))


class Block:
    """A record of whether the script is inside a block `with averaged_model()`.

    There the model is the mean of all groups' models, or a server's, in place of this group's own.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.does: Sequence[str] = ()
        """The calls that do nothing inside, because the block itself makes them: `eval()` at its beginning,
        and `train()` at its end."""

    def require_left(self, call: str) -> None:
        """Raise `UserError` if the script makes this `call` inside a block `with averaged_model()`.

        The call would read the averaged model in place of this group's own, or change parameters that are
        restored at the end of the block. `call` is the name of the called method, for the error.
        """
        if self.is_open:
            raise UserError(
                f"{call} inside averaged_model(): the model is the mean of all groups there, and "
                "this group's own again at the end of the block: leave it before"
            )

    @contextlib.contextmanager
    def around(self, mean: contextlib.AbstractContextManager[float]) -> Generator[float, None, None]:
        """Enter `mean`, a context that makes the model the averaged one, and record that the script is in it.

        Yields the model distance D, which `mean` yields. Raises `UserError` in a block inside a block.
        """
        self.require_left("averaged_model()")
        with mean as D:
            self.is_open = True
            try:
                yield D
            finally:
                self.is_open = False


class GroupModel:
    """A warning, once, for a script that takes `state_dict()` of `model` while the groups' models differ.

    Scripts save the result as the trained model, but it is the model of one group. Moreover,
    torch.distributed.checkpoint takes tensors of equal names on several ranks for copies of each other, and
    writes some from one group and some from another. A step only records whether the models differ. Rank 0
    logs the warning, and only if the script is not inside `averaged_model()`, which `block` records.
    """

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket], topology: Topology, block: Block) -> None:
        self.differs = False
        """True if it is known that the groups' models differ."""
        self._model, self._topology, self._block = model, topology, block
        self._slots = [slot for b in buckets for slot in b.slots]
        trained = {slot.param for slot in self._slots}
        self._modules = WeakSet(m for m in model.modules() if not trained.isdisjoint(m.parameters()))
        if topology.num_groups > 1:
            hook = _StateDictHook(self._look)
            for module in self._modules:
                module.register_state_dict_pre_hook(hook)  # pyright: ignore[reportUnknownMemberType]

    def updated(self, waits: Waits, *, synced: bool) -> None:
        """Record an update of the parameters, and whether the groups `synced` after it.

        `waits` says which groups a synchronization includes, and so whether it makes all models equal.
        """
        self.differs = not synced or _differ_after(waits, self._topology.num_groups)

    def _look(self, module: nn.Module, keep_vars: bool) -> None:
        """Log the warning, as `state_dict()` of `module` is being called.

        There is no warning with `keep_vars`, because a caller that passes it does not save the result.
        """
        if not self.differs or self._block.is_open or keep_vars or self._model in _warned:
            return
        if module not in self._modules or not all(slot.at_home() for slot in self._slots):
            return  # a copy of the model, or other values in its place
        _warned.add(self._model)
        if self._topology.rank == 0:
            log.warning(
                "state_dict() of the model: the models of the %d groups differ now, and this is the one of "
                "group 0: for the mean of all groups, call it inside optimizer.averaged_model(), which all "
                "ranks have to enter",
                self._topology.num_groups,
            )


@final
class _StateDictHook:
    """A hook that `nn.Module.state_dict` calls. It has only a weak reference to the method that it calls.

    Models with this hook can be copied and pickled. A pickle has a function that does nothing in its place,
    so that programs without hpcsgd can load the model.
    """

    def __init__(self, call: Callable[[nn.Module, bool], None]) -> None:
        self._call = WeakMethod(call)

    def __call__(self, module: nn.Module, _: str, keep_vars: bool) -> None:
        if (call := self._call()) is not None:
            call(module, keep_vars)

    def __deepcopy__(self, _: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (slice,)


def _differ_after(waits: Waits, P: int) -> bool:
    """Return whether the models of `P` groups are known to differ after a synchronization."""
    match waits:
        case All(late):
            return late > 0
        case InNeighbors(late=late) | Pairs(late=late):
            return late > 0 or P > 2  # two groups that exchange may agree
        case Slowest(staleness):
            return staleness != 0
        case RandomPartner():
            return True
        case _:
            return False


@contextlib.contextmanager
def averaged(
    s: StepContext, central: HoldsModel | None, model: nn.Module, frozen: Sequence[Slot] = ()
) -> Generator[float, None, None]:
    """Make `model` the mean over the groups, or the model that `central` holds, inside the block.

    `frozen` parameters are the mean over the groups in any case: the momentum of a server moves them in the
    model that it holds. Buffers of averaged dtypes become the mean over all ranks. After the block,
    parameters and buffers are as before, bit for bit, even if the block wrote into them, and also with one
    group. For that a copy of the buckets' vectors `w` is kept. Collective.

    Yields D, the mean distance of the groups' models from the averaged model (see `averagers.distance`).
    """
    brought = [b.w.clone() for b in s.buckets]
    parameters = [(b.w, w) for b, w in zip(s.buckets, brought, strict=True)]
    before = list(places(model))
    make_writable(model)
    mine = s.buffers
    buffers = [(buffer, buffer.clone()) for buffer in mine]
    with torch.no_grad(), phase("eval"):
        names = ", ".join(slot.name for slot in frozen) or "none"
        require_alike(s.topology.world, [*buffer_facts(model), ("frozen parameters", names)])
        D = _agree(s, central, brought, frozen) if s.topology.num_groups > 1 else 0.0
        if s.topology.world_size > 1:
            average_flattened(mine, s.topology.world)
    try:
        yield D
    finally:
        reshard(model)
        with torch.no_grad():
            for tensor, brought_along in parameters + buffers:
                tensor.copy_(brought_along)
        for table, name, buffer in before:
            table[name] = buffer


def _agree(
    s: StepContext, central: HoldsModel | None, brought: Sequence[Tensor], frozen: Sequence[Slot]
) -> float:
    """Set all groups' models to the averaged one; return D, the distance of the earlier models from it.

    `brought`: copies of the buckets' earlier vectors `w`.
    """
    set_to_average(s.shards, s, central)
    mine = [b.shard_of(w) for b, w in zip(s.buckets, brought, strict=True)]
    if central is not None:
        _set_to_mean(frozen, mine, s)
    D = distance(s, mine, s.shards, shards=True)
    gather_shards(s)
    return D


def _set_to_mean(slots: Sequence[Slot], mine: Sequence[Tensor], s: StepContext) -> None:
    """Set these parameters in the shards to the mean of the groups' values, which are in `mine`."""
    for b, own in zip(s.buckets, mine, strict=True):
        for slot, place in b.pieces():
            if slot in slots:
                mean = own[place].clone()
                s.topology.inter_group.allreduce(mean, "mean").wait()
                b.param_shard[place] = mean
