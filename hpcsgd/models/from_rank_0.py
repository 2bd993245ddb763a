"""Distribution of rank 0's values of an FSDP model, unit by unit. Other ranks need not have values."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from hpcsgd.core.fsdp import is_fsdp
from hpcsgd.core.topology import Topology
from hpcsgd.errors import UserError

META = torch.device("meta")
Outline = dict[str, tuple[str, bool]]
"""The outline of a model, by name of each parameter and buffer.

It has a description that must be equal on all ranks, and True if this rank has values for the tensor.
"""
NOTHING = "nothing", False
"""The entry of an outline for a tensor that a rank does not have."""


def outline(model: nn.Module, parts: Sequence[nn.Module], kind: str) -> Outline:
    names = {module: name for name, module in model.named_modules()}
    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    units = f"{', '.join(names[part] or 'the model' for part in parts)} on {kind!r}"
    return {
        "units": (units, False),
        **{name: (f"{x.dtype} of {list(x.shape)}", x.device != META) for name, x in tensors},
    }


def require_alike(mine: Outline, first: Outline) -> None:
    """Raise `UserError` unless rank 0 has the same model, with values for all tensors that have some here.

    `mine` is this rank's outline, `first` that of rank 0.
    """
    for name in dict.fromkeys([*mine, *first]):
        (ours, here), (theirs, there) = mine.get(name, NOTHING), first.get(name, NOTHING)
        if ours != theirs:
            raise UserError(f"{name}: {ours} here, {theirs} on rank 0: build the same model on all ranks")
        if here and not there:
            raise UserError(
                f"{name} has values here but none on rank 0, whose values all ranks get: build it there, too"
            )


def share_values(topology: Topology, model: nn.Module, unit: nn.Module, given: Collection[str]) -> None:
    """Copy rank 0's values of the parameters of `unit` to all ranks, if their names are in `given`.

    Collective.
    """
    within = next(name for name, module in model.named_modules() if module is unit)
    for name, param in list(unit.named_parameters(within)):
        if name in given and not is_fsdp(param):
            if param.device == META:
                make_room(model, param)
            _share(topology, model.get_parameter(name))


def share_buffers(topology: Topology, model: nn.Module, given: Collection[str], device: torch.device) -> None:
    for name, buffer in list(model.named_buffers()):
        if name in given:
            if buffer.device == META:
                within, _, key = name.rpartition(".")
                setattr(model.get_submodule(within), key, torch.empty_like(buffer, device=device))
            _share(topology, model.get_buffer(name))


@torch.no_grad()
def _share(topology: Topology, x: Tensor) -> None:
    """Broadcast rank 0's values of x through host memory, because ranks may have x on different devices."""
    values = x.detach().cpu().contiguous()
    topology.world.bcast(values.view(torch.uint8) if values.dtype == torch.bool else values).wait()
    x.copy_(values)


def make_room(model: nn.Module, param: nn.Parameter) -> None:
    """Replace `param` with a parameter that has memory on the host, in every module that has it."""
    room = nn.Parameter(torch.empty_like(param, device="cpu"), requires_grad=param.requires_grad)
    for module in model.modules():
        for name, theirs in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if theirs is param:
                setattr(module, name, room)
