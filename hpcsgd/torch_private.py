"""All private names of torch that hpcsgd uses, each in a function that says why no public way exists.

No other file uses a private name. Each has a test that fails if torch drops or changes it: see
`tests/test_torch_private.py`. This file belongs to no package, because all packages may use it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor, nn, optim
from torch.autograd import Variable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import LRScheduler

_Hook = Callable[..., object]
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

# Tensors.


def plainly() -> AbstractContextManager[None]:
    """Return a context in which operations on a tensor subclass do not call its `__torch_function__`.

    The public way, `Tensor.__torch_function__` of the parent, makes the results instances of the subclass.
    """
    return cast(Any, torch)._C.DisableTorchFunctionSubclass()


def become(tensor: Tensor, kind: type[Tensor]) -> None:
    """Make `tensor` an instance of `kind` in place, for all that refer to it.

    `Tensor.as_subclass` makes another tensor, which `param.grad` and the model would not have.
    """
    tensor.__class__ = kind


def version(x: Tensor) -> int:
    """Return how often `x` was written to in place; torch counts that, but not publicly."""
    return x._version


def parts_of_coo(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a sparse COO tensor; public methods need a coalesced tensor."""
    return x._indices(), x._values()


def set_local(x: Tensor, here: Tensor) -> None:
    """Make `here` the memory of this rank's part of the DTensor `x`; `to_local()` only reads it."""
    cast(Any, x)._local_tensor = here


# Backward passes.


def in_backward() -> bool:
    """Return whether the calling thread is inside a backward pass, for which no public function exists."""
    return cast(Any, torch)._C._current_graph_task_id() != -1


def at_end_of_backward(call: Callable[[], object]) -> None:
    """Call `call` at the end of the running backward pass; public hooks are of single tensors."""
    cast(Any, Variable)._execution_engine.queue_callback(call)


# Modules.

BatchNorm = _BatchNorm
"""The common class of batch norms of all dimensions, which is not public."""


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's dict of its own buffers; `named_buffers()` leaves out those that are None."""
    return module._buffers


def tables_of(module: nn.Module) -> tuple[dict[str, nn.Parameter | None], dict[str, nn.Module | None]]:
    """Return the dicts in which a module keeps its own parameters and modules; later changes show in them.

    The public iterators leave out None and second names, and are too slow to be used in every step.
    """
    return module._parameters, module._modules


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module` is compiled, by `torch.compile` or its own method; nothing public says so."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def versions_of_modules(state_dict: object) -> Any:
    """Return the module versions in a state dict, or None; modules need them to read older state dicts."""
    return getattr(state_dict, "_metadata", None)


def set_versions_of_modules(state_dict: Any, versions: Any) -> None:
    """Set the module versions of a state dict that was read from a file: see `versions_of_modules`."""
    state_dict._metadata = versions


def fake_tensors() -> Any:
    """Return a mode in which operations compute only shapes; torch has announced a public name for it."""
    from torch._subclasses import FakeTensorMode  # takes a second to import

    return FakeTensorMode()


# Optimizers.


def has_hooks(optimizer: optim.Optimizer) -> bool:
    """Return whether `Optimizer.__init__` was called, which makes the dicts of hooks; they are private."""
    return hasattr(optimizer, _HOOKS[0])


def hooks_of(optimizer: optim.Optimizer) -> list[_Hook]:
    """Return the hooks before and after `step()` of this optimizer, not those set for all optimizers.

    torch has public functions to register and remove hooks, but none to list them.
    """
    tables: list[Mapping[int, _Hook]] = [getattr(optimizer, name) for name in _HOOKS]
    return [hook for table in tables for hook in table.values()]


def share_hooks(optimizer: optim.Optimizer, outer: optim.Optimizer) -> None:
    """Call hooks of either optimizer, registered now or later, around `step()` of `outer`."""
    for name in _HOOKS:
        setattr(outer, name, getattr(optimizer, name))


def is_by_scheduler(step: Callable[..., Any]) -> bool:
    """Return whether a scheduler of torch has set this `step` of an optimizer, to count its calls."""
    return hasattr(step, "_wrapped_by_lr_sched")


def count_step(optimizer: optim.Optimizer) -> None:
    """Record a step for torch's schedulers, for a call that bypassed the `step` that they have set.

    Otherwise they warn that they were called before the optimizer.
    """
    vars(optimizer)["_opt_called"] = True


def closed_form_rates(scheduler: LRScheduler) -> Callable[[], Sequence[float]] | None:
    """Return a function for a scheduler's current rates by formula; None if it has no formula.

    `get_last_lr()` depends on earlier rates, which may have been computed with other arguments.
    """
    return getattr(scheduler, "_get_closed_form_lr", None)


def scales_gradients(optimizer: optim.Optimizer) -> bool:
    """Return whether torch's GradScaler leaves gradients scaled for `optimizer`: a private flag says so."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


class DecidesScaling(ABC):
    """An optimizer that decides itself whether torch's GradScaler passes it scaled gradients."""

    @abstractmethod
    def _answer_scaler(self) -> bool:
        """Return whether this optimizer accepts scaled gradients, or raise an error."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return self._answer_scaler()


class Unscaling(torch.amp.GradScaler, ABC):
    """A GradScaler that unscales gradients by a method of its own; torch's has only a private one."""

    @abstractmethod
    def _unscaled(
        self, optimizer: optim.Optimizer, unscale: Callable[[], dict[torch.device, Tensor]], found_inf: Tensor
    ) -> dict[torch.device, Tensor]:
        """Call `unscale`; return for each device a flag, 1 if a gradient there is not finite, else 0.

        `found_inf` is a zero on the device of the scale.
        """

    def _unscale_grads_(
        self, optimizer: optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        unscale = super()._unscale_grads_
        return self._unscaled(
            optimizer, lambda: unscale(optimizer, inv_scale, found_inf, allow_fp16), found_inf
        )


# Models that torch has sharded.


def sharded_params(module: Any) -> Iterator[Any]:
    """Yield the record that `fully_shard` keeps of each parameter of the unit `module`; it is not public.

    In a record, `sharded_param` is the parameter, and `pin_memory` is True if its memory is pinned.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [
        state._fsdp_param_group
    ]  # the name in older versions
    for group in groups:
        yield from [] if group is None else group.fsdp_params


def padded_shard(kept: Any) -> Tensor:
    """Return the vector from which torch gathers a sharded parameter, padded to the first rank's length."""
    return kept._sharded_param_data


def set_padded_shard(kept: Any, x: Tensor) -> None:
    """Make torch gather from `x`; the public interface always allocates this memory itself."""
    kept._sharded_param_data = x


# Process groups. Those that `torch.distributed` makes publicly belong to a world of its own.


def reduce_scatter(group: Any, out: Tensor, x: Tensor) -> Any:
    """Begin to sum `x` over the ranks, part i for the `out` of rank i; public methods take only lists."""
    return group._reduce_scatter_base(out, x)


def allgather(group: Any, out: Tensor, x: Tensor) -> Any:
    """Begin to gather the `x` of all ranks in `out`; public methods of groups take only lists."""
    return group._allgather_base(out, x)


def begin_together(group: Any) -> None:
    """Hold messages back until `end_together`: one by one on a stream, ranks would wait for each other."""
    group._start_coalescing()


def end_together(group: Any) -> Any:
    """Begin all messages since `begin_together` at once."""
    return group._end_coalescing()


def set_timeout(options: Any, limit: timedelta) -> None:
    """Set the time after which a process group gives up; no public constructor takes it."""
    options._timeout = limit


def set_timeout_of_group(group: Any, limit: timedelta) -> None:
    """Set the time after which operations of `group` without their own limit give up."""
    group._set_default_timeout(limit)


def source_of_message(work: Any) -> int:
    """Return the rank that sent the message of a finished receive from any rank; it is not public."""
    return work._source_rank()


def store_of_default_group() -> Any:
    """Return the store through which the ranks of torch's default process group have connected.

    It has no public name, and a second store would need an address that all ranks know.
    """
    from torch.distributed import distributed_c10d  # torch can be built without it

    return distributed_c10d._get_default_store()
