"""Checks and set-up before an optimizer is wrapped: method, optimizer and trained parameters."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn, optim

from hpcsgd import torch_private
from hpcsgd.comm import Communicator, phase
from hpcsgd.core.buffers import make_parameters_writable, make_writable, share
from hpcsgd.core.flat import Bucket
from hpcsgd.core.fsdp import is_fsdp, local, require_sharded_alike, reshard
from hpcsgd.core.method import Method
from hpcsgd.core.topology import Topology
from hpcsgd.engine.alike import is_ours, settings
from hpcsgd.engine.around_model import collect_garbage, require_plain, watch
from hpcsgd.engine.distributable import require_distributable
from hpcsgd.engine.in_parts import require_updated
from hpcsgd.errors import UserError


class Guarded(torch_private.DecidesScaling, optim.Optimizer):
    """An optimizer that refuses what torch's optimizers allow but a distributed one cannot do correctly."""

    scaled = False
    """True if an `hpcsgd.GradScaler` makes all ranks skip the same steps."""
    _laid_out = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a `param_group` after the wrapping, because the flat vectors cannot change any more."""
        if self._laid_out:
            raise UserError(
                "add_param_group after DistributedOptimizer was made: add it to the optimizer before"
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled: a part of the state is on other ranks."""
        raise UserError(
            "a DistributedOptimizer cannot be copied or pickled: save optimizer.state_dict(), which all "
            "ranks have to call, or copy the model alone"
        )

    def _answer_scaler(self) -> bool:
        """Refuse torch's GradScaler, which calls this method before it uses gradients."""
        if not self.scaled:
            raise UserError(
                "torch's GradScaler would skip other steps on each rank: use hpcsgd.GradScaler in its place"
            )
        return False


class OuterWrapper(optim.Optimizer, ABC):
    """An optimizer that wraps a `DistributedOptimizer`, and that no `DistributedOptimizer` may wrap.

    An example is `NaturalGradient`, which multiplies gradients by matrices that each rank estimates.
    """

    optimizer: optim.Optimizer
    """The wrapped optimizer."""

    @abstractmethod
    def estimates(self) -> dict[str, Any]:
        """Return the values that this rank has estimated so far, for a checkpoint.

        The state of the wrapped optimizer does not include them.
        """

    @abstractmethod
    def resume_from(self, saved: Mapping[str, Any] | None) -> None:
        """Restore the values that this rank has estimated from `saved`, which `estimates()` returned.

        If `saved` is None, discard the current values, and begin to estimate anew.
        """


_optimizers: WeakKeyDictionary[Communicator, int] = WeakKeyDictionary()
"""Number of optimizers made so far for a topology, by the topology's communicator inside a group."""


def communicators(topology: Topology) -> tuple[Topology, int]:
    """Return `topology` with new communicators for the next optimizer, and the number of earlier ones.

    Collective. Each optimizer has its own communicators and threads, because the order of its messages and
    other messages may differ between ranks. With two models, the gradients of one may be ready first on one
    rank, and those of the other on another rank. And when a training loop calls a collective, the number of
    buckets sent so far depends on which gradients the rank has.
    """
    before = _optimizers.get(topology.intra_group, 0)
    _optimizers[topology.intra_group] = before + 1
    if topology.world_size == 1:
        return topology, before
    world = topology.world.dup_with_thread()
    intra_group = topology.intra_group.split(0, topology.intra_group.rank).with_thread(world.comm_thread)
    inter_group = topology.inter_group.split(0, topology.inter_group.rank).with_own_thread()
    return replace(topology, world=world, intra_group=intra_group, inter_group=inter_group), before


def require_peers(topology: Topology, method: Method) -> None:
    """Raise `UserError` unless `method` and `topology` are both elastic, or neither is."""
    if topology.is_elastic != method.averager.traits.elastic:
        raise UserError(
            "method ensemble_sync is for groups that are jobs of their own: start it with `hpcsgd launch`, "
            "in a batch job with `hpcsgd job ensemble`"
            if not topology.is_elastic
            else "`hpcsgd launch` starts groups that may die, which only method ensemble_sync can average"
        )


def require_passes(name: str, passes: int) -> None:
    """Raise `UserError` for fewer than one backward pass before a step."""
    if passes < 1:
        raise UserError(
            f"{name} = {passes}: expected a number of backward passes ≥ 1", key=name, value=passes
        )


def require_sizes(gradient_accumulation_steps: int, bucket_cap_mb: float | None) -> None:
    """Raise `UserError` unless a step has at least one backward pass and buckets have a positive size."""
    require_passes("gradient_accumulation_steps", gradient_accumulation_steps)
    if bucket_cap_mb is not None and not 0 < bucket_cap_mb < math.inf:
        raise UserError(
            f"bucket_cap_mb = {bucket_cap_mb}: expected a number of MiB > 0",
            key="bucket_cap_mb",
            value=bucket_cap_mb,
        )


def trained_parameters(
    optimizer: optim.Optimizer, model: nn.Module, topology: Topology
) -> list[tuple[str, nn.Parameter]]:
    """Return the optimizer's trainable parameters by name, in the model's order.

    Parameters that are not in the model come last. Raises `UserError` if the optimizer cannot be distributed.
    """
    if not isinstance(optimizer, optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        kind = type(optimizer).__name__
        raise UserError(f"{kind} is no torch optimizer: put it around one, {kind}(DistributedOptimizer(...))")
    if not torch_private.has_hooks(optimizer):
        kind = type(optimizer).__name__
        raise UserError(
            f"{kind} does not call torch.optim.Optimizer.__init__: put it around one, "
            f"{kind}(DistributedOptimizer(...))"
        )
    theirs = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    if isinstance(optimizer, OuterWrapper):
        kind = type(optimizer).__name__
        raise UserError(f"{kind} goes outside: {kind}(DistributedOptimizer(optimizer, ...), model)")
    if isinstance(optimizer, optim.LBFGS):
        raise UserError("LBFGS evaluates the loss several times a step; it cannot be distributed")
    if not theirs:
        raise UserError("the optimizer has no trainable parameters")
    if any(nn.parameter.is_lazy(param) for param in model.parameters()):
        raise UserError("parameters of the model have no shape yet: give it a batch before it is wrapped")
    require_plain(model)
    reshard(model)
    wanted = set(theirs)
    named = [(name, param) for name, param in model.named_parameters() if param in wanted]
    known = {param for _, param in named}
    others = [(f"parameter {i} of the optimizer", p) for i, p in enumerate(theirs) if p not in known]
    if others and any(is_fsdp(param) for param in model.parameters()):
        raise UserError(
            f"{others[0][0]} is none of the model's, which torch has sharded: make the optimizer after that, "
            "and before the first forward pass"
        )
    named += others
    require_updated(optimizer, named)
    require_distributable(model, named, topology.world_size)
    if any(is_fsdp(param) for param in theirs):
        require_sharded_alike(
            named,
            range(
                topology.group_index * topology.group_size, (topology.group_index + 1) * topology.group_size
            ),
        )
    return named


@torch.no_grad()
def share_start(
    topology: Topology,
    buckets: Sequence[Bucket],
    model: nn.Module,
    trained: Iterable[tuple[str, nn.Parameter]],
) -> None:
    """Set the parameters and buffers of every rank to those of rank 0; collective.

    Parameters that FSDP shards are those of the rank of group 0 with the same shard index.
    """
    theirs = {param for _, param in trained}
    frozen = [param for param in model.parameters() if param not in theirs]
    make_writable(model)
    make_parameters_writable(frozen)
    if topology.world_size == 1:
        return
    by_position = any(is_fsdp(param) for param in theirs)
    with phase("setup"):
        for bucket in buckets:
            (topology.inter_group if by_position else topology.world).bcast(bucket.w).wait()
        for each in [*model.buffers(), *frozen]:
            share(local(each), topology.inter_group if is_fsdp(each) else topology.world)


_users: WeakValueDictionary[int, optim.Optimizer] = WeakValueDictionary()
"""The optimizer that uses a part of a method with state, or a parameter, by that object's id."""
_taking = threading.Lock()


def take(method: Method, optimizer: optim.Optimizer, model: nn.Module) -> None:
    """Record that `optimizer` uses the parts of `method`, the trained parameters, and the `model`.

    They are recorded by their ids, which stay valid because the optimizer keeps the objects alive.
    """
    trained = [param for group in optimizer.param_groups for param in group["params"]]
    with _taking:
        _require_unused(method)  # another thread may have taken the method since `require_free`
        _users.update(dict.fromkeys(map(id, [*_remembering(method), *trained]), optimizer))
    watch(model, optimizer)


def is_trained_by_another(param: nn.Parameter, optimizer: optim.Optimizer) -> bool:
    """Return whether an optimizer that was made after `optimizer` trains `param` now."""
    return _users.get(id(param), optimizer) is not optimizer


def require_free(topology: Topology, method: Method, optimizer: optim.Optimizer) -> None:
    """Raise `UserError` if the arguments do not fit together or are in use.

    That is the case if `method` is not for this kind of job, if `optimizer` is wrapped already, or if another
    optimizer uses `method` or a part of it with state.
    """
    require_peers(topology, method)
    if isinstance(getattr(getattr(optimizer, "zero_grad", None), "__self__", None), Guarded):
        raise UserError("the optimizer is a DistributedOptimizer already, or part of one")
    _require_unused(method)


def _require_unused(method: Method) -> None:
    parts = list(_remembering(method))
    if any(id(part) in _users for part in parts):
        collect_garbage()
    for part in parts:
        if id(part) in _users:
            raise UserError(
                f"the method, or its {type(part).__name__}, is that of another DistributedOptimizer: "
                "make one for each"
            )


def _remembering(method: Method) -> Iterator[object]:
    """Yield the parts of `method`, and parts inside them, that have state and so must not be shared."""
    parts: list[Any] = [part for _, part in method.by_role()]
    while parts:
        part = parts.pop()
        if is_ours(part):
            parts += [inner for inner in settings(part).values() if is_ours(inner)]
        of_class = getattr(part, "__dataclass_params__", None)
        # hpcsgd's own mutable dataclasses only record the result of the last synchronization.
        same = of_class is not None and (of_class.frozen or is_ours(part))
        if not same and getattr(part, "__dict__", None) and not isinstance(part, type | FunctionType):
            yield part
