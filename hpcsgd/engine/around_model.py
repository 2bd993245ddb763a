"""A check that no data parallelism of torch is around a model that a `DistributedOptimizer` trains.

`DistributedDataParallel` averages gradients over all ranks in every backward pass. Groups would then never
train models of their own, and nothing would show it. FSDP1 replaces the parameters. Both may be put around
the model before or after the optimizer is wrapped, and around a part of it or a larger module. Before the
wrapping, the check searches the objects of the process. After it, torch calls the check whenever a module is
registered in another one, which is how both keep the model. So a step needs no check.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import NoReturn
from weakref import WeakKeyDictionary, ref

from torch import nn, optim
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from hpcsgd.comm.process_group import distributed
from hpcsgd.errors import UserError

INSTEAD = {
    "DistributedDataParallel": "leave it out, and train the plain model",
    "FullyShardedDataParallel": "leave it out, or call hpcsgd.fully_shard(model, topology) in its place",
}
_trained: WeakKeyDictionary[nn.Module, ref[optim.Optimizer]] = WeakKeyDictionary()
"""The modules of models, and the `DistributedOptimizer` that was made last for each."""
_collecting = threading.Lock()
"""A lock for garbage collections: one that begins while another thread runs one would do nothing."""


def collect_garbage() -> None:
    """Free objects that only refer to each other, before one of them is reported as being in use."""
    with _collecting:
        gc.collect()


def require_plain(model: nn.Module) -> None:
    """Raise `UserError` if `model`, or a part of it, is inside a wrapper of torch or contains one.

    If the script has called `gc.freeze()`, older wrappers are found if they are `model` or inside it, but not
    around it: Python lists no frozen objects, and `gc.unfreeze()` would undo what the script has asked for.
    """
    modules, dist = set(model.modules()), distributed()
    if not dist.is_available() or not dist.is_initialized():
        return  # no wrapper can exist without process groups
    if (inside := next((each for each in modules if isinstance(each, _kinds())), None)) is not None:
        _refuse(inside)
    if _around(modules) is not None:
        collect_garbage()
        if (wrapper := _around(modules)) is not None:
            _refuse(wrapper)


def watch(model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Refuse wrappers around `model`, or a part of it, from now on, while `optimizer` exists."""
    _register()
    _trained.update(dict.fromkeys(model.modules(), ref(optimizer)))


@functools.cache
def _register() -> None:
    register_module_module_registration_hook(_registered)


def _registered(outer: nn.Module, _: str, inner: nn.Module | None) -> None:
    """Raise `UserError` if `outer` is a wrapper of torch, and `inner` has modules of a trained model.

    torch calls this function whenever a module `inner` becomes a child of a module `outer`.
    """
    if inner is None or not isinstance(outer, _kinds()):
        return
    if _is_trained(inner):
        collect_garbage()
        if _is_trained(inner):
            _refuse(outer)


def _is_trained(module: nn.Module) -> bool:
    optimizers = (_trained.get(each) for each in module.modules())
    return any(each is not None and each() is not None for each in optimizers)


def _kinds() -> tuple[type[nn.Module], ...]:
    """Return the classes of wrappers. A script that uses FSDP1 has imported it."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return (DistributedDataParallel,) if fsdp is None else (DistributedDataParallel, fsdp)


def _with_subclasses(kinds: Iterable[type[nn.Module]]) -> Iterator[type[nn.Module]]:
    for kind in kinds:
        yield kind
        yield from _with_subclasses(kind.__subclasses__())


def _around(modules: set[nn.Module]) -> nn.Module | None:
    """Return a wrapper in this process that has one of `modules` inside, or None."""
    kinds = _kinds()
    # A list, because other threads search as well, and find the tuple that Python would make of an iterator:
    # while others have a reference to it, it cannot grow.
    classes = [*_with_subclasses(kinds)]
    # An object refers to its class. This search runs in C; a loop over all objects would be much slower.
    found = gc.get_referrers(*classes)
    wrappers = [each for each in found if issubclass(type(each), kinds)]
    return next((wrapper for wrapper in wrappers if not modules.isdisjoint(wrapper.modules())), None)


def _refuse(wrapper: nn.Module) -> NoReturn:
    kinds = {each.__name__ for each in type(wrapper).__mro__}
    name = next(name for name in INSTEAD if name in kinds)
    raise UserError(
        f"torch's {name} is around the model of a DistributedOptimizer, or a part of it, and would average "
        f"its gradients over all ranks in every step: {INSTEAD[name]}"
    )
