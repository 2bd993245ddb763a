"""All private names of torch that are used here, each behind a function that says why no public way exists.

No other file uses one, and each has a test that fails where torch drops or changes it: see
`tests/test_torch_private.py`. The file stands below all rooms, since transports use it, too.
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
    """Inside, operations on tensors of a subclass do not call its `__torch_function__`.

    The public way, `Tensor.__torch_function__` of the parent, makes the results instances of the subclass.
    """
    return cast(Any, torch)._C.DisableTorchFunctionSubclass()


def become(tensor: Tensor, kind: type[Tensor]) -> None:
    """Make `tensor`, to which others hold references, an instance of `kind` in place.

    `Tensor.as_subclass` makes another tensor, which `param.grad` and the model would not have.
    """
    tensor.__class__ = kind


def version(x: Tensor) -> int:
    """How often somebody has written into `x` in place, which torch counts and tells no one publicly."""
    return x._version


def parts_of_coo(x: Tensor) -> tuple[Tensor, Tensor]:
    """The indices and values of a sparse tensor as they are: the public methods refuse uncoalesced ones."""
    return x._indices(), x._values()


def set_local(x: Tensor, here: Tensor) -> None:
    """Make `here` the memory of this rank's part of the DTensor `x`; `to_local()` only reads it."""
    cast(Any, x)._local_tensor = here


# Backward passes.


def in_backward() -> bool:
    """Whether the calling thread is inside a backward pass, which no public function tells."""
    return cast(Any, torch)._C._current_graph_task_id() != -1


def at_end_of_backward(call: Callable[[], object]) -> None:
    """Have the backward pass that is running `call` when it ends; public hooks are of single tensors."""
    cast(Any, Variable)._execution_engine.queue_callback(call)


# Modules.

BatchNorm = _BatchNorm
"""What batch norms of all dimensions are, which have no public class in common."""


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The table that a module keeps its own buffers in: `named_buffers()` leaves out those that are None."""
    return module._buffers


def tables_of(module: nn.Module) -> tuple[dict[str, nn.Parameter | None], dict[str, nn.Module | None]]:
    """The tables of a module's own parameters and modules, which show what it has at any time.

    The public iterators leave out None and what has two names, and cost too much for a look in every step.
    """
    return module._parameters, module._modules


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` or `module.compile()` has compiled it; `torch.compiler` does not tell."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def versions_of_modules(state_dict: object) -> Any:
    """The versions of modules in a state dict, by which they read older ones; None without any."""
    return getattr(state_dict, "_metadata", None)


def set_versions_of_modules(state_dict: Any, versions: Any) -> None:
    """Give a state dict that was read from a file the versions that `versions_of_modules` returned."""
    state_dict._metadata = versions


def fake_tensors() -> Any:
    """A mode in which operations tell shapes and compute nothing; its public home is announced, not there."""
    from torch._subclasses import FakeTensorMode  # with what it needs, a second to import

    return FakeTensorMode()


# Optimizers.


def has_hooks(optimizer: optim.Optimizer) -> bool:
    """Whether it has been through `Optimizer.__init__`, which makes the tables of hooks."""
    return hasattr(optimizer, _HOOKS[0])


def hooks_of(optimizer: optim.Optimizer) -> list[_Hook]:
    """What is called before and after each `step()` of this optimizer, other than hooks of all.

    torch registers and removes hooks publicly, and lists them for nobody.
    """
    tables: list[Mapping[int, _Hook]] = [getattr(optimizer, name) for name in _HOOKS]
    return [hook for table in tables for hook in table.values()]


def share_hooks(optimizer: optim.Optimizer, outer: optim.Optimizer) -> None:
    """Have the hooks around `step()` that anybody has registered or will register on either of the two called
    around that of `outer`."""
    for name in _HOOKS:
        setattr(outer, name, getattr(optimizer, name))


def is_by_scheduler(step: Callable[..., Any]) -> bool:
    """Whether a scheduler of torch has put this `step` in place of an optimizer's, to count its calls."""
    return hasattr(step, "_wrapped_by_lr_sched")


def count_step(optimizer: optim.Optimizer) -> None:
    """Tell torch's schedulers that there was a step, where it went around the `step` that they put there.

    Otherwise they warn that they were called before the optimizer.
    """
    vars(optimizer)["_opt_called"] = True


def closed_form_rates(scheduler: LRScheduler) -> Callable[[], Sequence[float]] | None:
    """The rates that a scheduler has in its current epoch, by formula; None where it has no formula.

    `get_last_lr()` follows from the rates before, which may have been of other arguments.
    """
    return getattr(scheduler, "_get_closed_form_lr", None)


def scales_gradients(optimizer: optim.Optimizer) -> bool:
    """Whether torch's GradScaler leaves scaled gradients to this optimizer; it reads a private flag."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


class AskedByScaler(ABC):
    """An optimizer that answers when torch's GradScaler asks whether to leave scaled gradients to it."""

    @abstractmethod
    def _answer_scaler(self) -> bool:
        """Return the answer, or raise."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return self._answer_scaler()


class Unscaling(torch.amp.GradScaler, ABC):
    """A GradScaler that sees to what is found not to be finite: torch calls no public method for that."""

    @abstractmethod
    def _unscaled(
        self, optimizer: optim.Optimizer, unscale: Callable[[], dict[torch.device, Tensor]], found_inf: Tensor
    ) -> dict[torch.device, Tensor]:
        """Call `unscale`; return, for each device, whether a gradient there is not finite.

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
    """What `fully_shard` keeps of each parameter of the unit `module`: no public method gives it.

    Its `sharded_param` is the parameter; `pin_memory` says whether its memory is pinned.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [
        state._fsdp_param_group
    ]  # as it was called before
    for group in groups:
        yield from [] if group is None else group.fsdp_params


def padded_shard(kept: Any) -> Tensor:
    """The vector that torch gathers a sharded parameter from, padded to the length of the first rank's."""
    return kept._sharded_param_data


def set_padded_shard(kept: Any, x: Tensor) -> None:
    """Have torch gather from `x`: publicly it allocates this memory itself."""
    kept._sharded_param_data = x


# Process groups. Those that `torch.distributed` makes publicly belong to a world of its own.


def reduce_scatter(group: Any, out: Tensor, x: Tensor) -> Any:
    """Begin to sum `x` into `out`, a part for each rank; publicly groups take lists of tensors alone."""
    return group._reduce_scatter_base(out, x)


def allgather(group: Any, out: Tensor, x: Tensor) -> Any:
    """Begin to gather `x` of all ranks in `out`; publicly groups take lists of tensors alone."""
    return group._allgather_base(out, x)


def begin_together(group: Any) -> None:
    """Have messages wait until `end_together`: one by one, on a stream, ranks would wait for each other."""
    group._start_coalescing()


def end_together(group: Any) -> Any:
    """Begin all messages since `begin_together` at once."""
    return group._end_coalescing()


def set_timeout(options: Any, limit: timedelta) -> None:
    """Set after what time a process group gives up; options take it publicly in no constructor."""
    options._timeout = limit


def set_timeout_of_group(group: Any, limit: timedelta) -> None:
    """Set after what time the operations of `group` give up that have no limit of their own."""
    group._set_default_timeout(limit)


def source_of_message(work: Any) -> int:
    """The rank that sent what a finished receive from any rank has received; publicly nobody tells."""
    return work._source_rank()


def store_of_default_group() -> Any:
    """The store by which the ranks of torch's default process group have found each other.

    No public name leads to it, and a second store would need an address that all ranks know.
    """
    from torch.distributed import distributed_c10d  # torch can be built without it

    return distributed_c10d._get_default_store()
