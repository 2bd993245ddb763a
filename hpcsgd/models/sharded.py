"""FSDP models, which no rank ever has to hold whole.

The model can be built without values. torch's `fully_shard` shards it over the group, one FSDP unit after the
other. Each unit gets its values just before it is sharded.

A random generator on the host draws the initial values of a module, with a seed that depends on the module's
name. So the model is the same for every K and on every device.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hpcsgd.arguments import checked
from hpcsgd.comm import accumulation_dtype
from hpcsgd.comm.streams import require_current
from hpcsgd.core.elements import require_real
from hpcsgd.core.fsdp import is_fsdp
from hpcsgd.core.topology import Topology
from hpcsgd.errors import UserError, near_miss
from hpcsgd.models.from_rank_0 import (
    META,
    Outline,
    make_room,
    outline,
    require_alike,
    share_buffers,
    share_values,
)
from hpcsgd.models.regions import regions


@contextmanager
def without_values() -> Iterator[None]:
    """Let modules create their parameters on the meta device inside this context, so without values.

    Buffers keep their values.
    """
    register = nn.Module.register_parameter
    made: MutableMapping[nn.Parameter, nn.Parameter] = WeakIdKeyDictionary()

    def empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device != META:
            room = nn.Parameter(param.to(META), requires_grad=param.requires_grad)
            param = made.setdefault(param, room)  # a parameter shared by several modules stays one
        register(self, name, param)

    nn.Module.register_parameter = empty
    try:
        yield
    finally:
        nn.Module.register_parameter = register


@checked
def fully_shard(
    model: nn.Module,
    topology: Topology,
    units: Sequence[str] | None = None,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    **policies: Any,
) -> nn.Module:
    """Let torch shard all parameters of `model` over the group, in place; collective.

    A rank keeps M/K parameters, and a whole unit while the unit is computed. A model with values gets
    those of rank 0; other ranks need not have values. A model on the meta device, built inside
    ``torch.device("meta")``, gets its values unit by unit: from each module's `reset_parameters()`, and
    from the model's `_init_weights(module)`, which models of the library `transformers` have.

    Args:
        model: The model to shard.
        topology: The ranks and groups, from `init`.
        units: Names of the modules that are gathered by themselves (FSDP units), such as "blocks.*".
            Default None: the outermost modules that are made of others, such as the layers of a Transformer.
        device: Device of the shards. Default None: the device of the model, or the CPU for a model without
            values. On "meta" nothing gets values, which shows whether all settings fit together.
        seed: Seed of the initial values of a model without values. Default 0.
        policies: Further arguments of torch's `fully_shard`: `mp_policy`, `offload_policy`,
            `reshard_after_forward`. Without `mp_policy` gradients of 16 bits are added up in float32.

    Returns:
        The same `model`.

    Raises:
        UserError: If a name fits no module, torch cannot shard the model, a parameter gets no values, or
            ranks have different models.

    Shape:
        M parameters in total; each rank keeps M/K of them.

    Example:
        >>> model = hpcsgd.fully_shard(model, topology, units=["0", "2"])     # mpiexec -n 4
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> method = hpcsgd.hierarchical(sync_every=8)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> sum(p.to_local().numel() for p in model.parameters())     # of 67
        38

    References:
        S. Rajbhandari, J. Rasley, O. Ruwase, Y. He: ZeRO: Memory Optimizations Toward Training Trillion
        Parameter Models, SC 2020; Y. Zhao et al.: PyTorch FSDP: Experiences on Scaling Fully Sharded Data
        Parallel, VLDB 2023, whose successor in torch does the work.
    """
    with topology.raise_on_all_ranks("sharding the model"):
        _require_known(policies)
        for name, param in model.named_parameters():
            require_real(name, param)
        parts = [unit for unit, _ in fsdp_units(model, units)]
        here = next((p.device for p in model.parameters() if p.device != META), torch.device("cpu"))
        target = _device(device) if device is not None else here
        require_current(target)
        mine = outline(model, parts, target.type)
    first: Outline = topology.world.gather_objects(mine)[0]
    with topology.raise_on_all_ranks("sharding the model"):
        require_alike(mine, first)
    given = {name for name, (_, has_values) in first.items() if has_values}
    mesh = topology.mesh("cpu" if target == META else target.type)["shard"]
    for unit in parts:
        share_values(topology, model, unit, given)
        with topology.raise_on_all_ranks("sharding the model"):
            if target != META:
                give_values(model, unit, seed)
            _shard(unit, mesh, policies)
    if target != META:
        share_buffers(topology, model, given, target)
        with topology.raise_on_all_ranks("sharding the model"):
            _require_values(model)
    return model


def _device(given: torch.device | str) -> torch.device:
    try:
        return torch.device(given)
    except RuntimeError:
        raise UserError(
            f"device = {given!r}: expected a device of torch, as 'cpu' or 'cuda:0'", key="device", value=given
        ) from None


def fsdp_units(model: nn.Module, units: Sequence[str] | None) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Return the FSDP units of a model, each with its parameters: inner ones first, and the model last.

    Raises `UserError` for names that fit no module, and for a parameter that is in several units, because
    torch would make a separate parameter in each unit.
    """
    named = {name: module for name, module in model.named_modules() if name}
    for pattern in units or ():
        if not any(_fits(name, pattern) for name in named):
            raise UserError(f"units: no module {pattern!r}; {near_miss(pattern, list(named))}")
    if units is None:
        chosen = list(regions(model))
    else:
        chosen = [m for name, m in named.items() if any(_fits(name, x) for x in units)]
    found: list[tuple[nn.Module, list[nn.Parameter]]] = []
    taken: set[nn.Module] = set()
    owner: dict[nn.Parameter, nn.Module] = {}
    for unit in [*reversed(chosen), model]:
        own = [module for module in unit.modules() if module not in taken]
        params = list(dict.fromkeys(p for module in own for p in module.parameters(recurse=False)))
        for p in params:
            if p.dim() == 0:
                raise UserError(
                    f"{_name(model, p)} is a single number, which torch cannot shard: give it a dimension"
                )
            if owner.setdefault(p, unit) is not unit:
                raise UserError(
                    f"units: {_name(model, p)} is in two of them: put all modules with it into one unit"
                )
        found.append((unit, params))
        taken.update(own)
    return found


def _fits(name: str, pattern: str) -> bool:
    """Return whether each component of `name` fits that of `pattern`.

    For example, "blocks.*" fits the blocks, but not the modules inside them.
    """
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _name(model: nn.Module, param: nn.Parameter) -> str:
    return next(name for name, p in model.named_parameters() if p is param)


def give_values(model: nn.Module, unit: nn.Module, seed: int) -> None:
    """Initialize the parameters in `unit` that have no values. Raises `UserError` if that is impossible."""
    names = {module: name for name, module in model.named_modules()}
    for module in unit.modules():
        empty = [name for name, p in module.named_parameters(recurse=False) if p.device == META]
        empty = [name for name in empty if not is_fsdp(module.get_parameter(name))]
        if empty:
            tied = {name: p for name, p in module.named_parameters(recurse=False) if name not in empty}
            before = {name: p.detach().clone() for name, p in tied.items()}
            for name in empty:
                make_room(model, module.get_parameter(name))
            _start(model, module, names[module], seed)
            for name, values in before.items():
                tied[name].data.copy_(values)


def _start(model: nn.Module, module: nn.Module, name: str, seed: int) -> None:
    empty = [key for key, buffer in module.named_buffers(recurse=False) if buffer.device == META]
    for key in empty:
        room = torch.empty_like(module.get_buffer(key), device="cpu")
        setattr(module, key, room.fill_(_nothing(room.dtype)))
    own, of_model = getattr(module, "reset_parameters", None), getattr(model, "_init_weights", None)
    if own is None and of_model is None:
        raise UserError(
            f"{name or 'the model'} ({type(module).__name__}) has no reset_parameters(), and the model no "
            "_init_weights(module): nothing initializes it: build it with values"
        )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(random.Random(f"{seed} {name}").getrandbits(63))
        for start, arguments in ((own, ()), (of_model, (module,))):
            if start is not None:
                start(*arguments)
    for key in empty:
        found = module.get_buffer(key)
        if (found.isnan() if found.is_floating_point() else found == _nothing(found.dtype)).any():
            raise UserError(
                f"{name + '.' if name else ''}{key} is on the meta device, and nothing initializes it: build "
                "it with values"
            )


def _nothing(dtype: torch.dtype) -> float | int:
    """Return the value that marks elements of a buffer of `dtype` which have not been initialized yet."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).min


def _require_known(policies: Iterable[str]) -> None:
    """Raise `UserError` for a name in `policies` that torch's `fully_shard` does not have as an argument."""
    from torch.distributed.fsdp import fully_shard as of_torch

    allowed = [name for name in inspect.signature(of_torch).parameters if "mesh" not in name]
    for name in policies:
        if name not in allowed:
            known = [*allowed, "units", "device", "seed"]
            raise UserError(f"fully_shard has no argument {name!r}; {near_miss(name, known)}", key=name)


def _shard(unit: nn.Module, mesh: Any, policies: dict[str, Any]) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    kind = type(unit).__name__
    if isinstance(unit, FSDPModule):
        raise UserError(
            f"torch has sharded {kind} already: call hpcsgd.fully_shard(...) or fully_shard(...) once"
        )
    dtypes = {p.dtype for p in unit.parameters() if p.requires_grad and not is_fsdp(p)}
    if len(dtypes) > 1:
        raise UserError(
            f"torch cannot shard {kind}: its parameters are of {', '.join(sorted(map(str, dtypes)))}, but "
            "a unit needs a single dtype: name the modules of the other dtype in units"
        )
    try:
        fully_shard(unit, mesh=mesh, **{**_accumulated(unit), **policies})
    except (NotImplementedError, ValueError) as error:
        raise UserError(f"torch cannot shard {kind}: {error}") from error


def _accumulated(unit: nn.Module) -> dict[str, Any]:
    """Return a policy by which torch adds up 16-bit gradients of `unit` in float32, and not in 16 bits.

    Return {} if the unit has no 16-bit parameters.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtypes = {p.dtype for p in unit.parameters() if not is_fsdp(p)}
    if all(accumulation_dtype(dtype) == dtype for dtype in dtypes):
        return {}
    return {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}


def _require_values(model: nn.Module) -> None:
    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    for name, x in tensors:
        if x.device == META:
            raise UserError(f"{name} is on the meta device, and nothing initializes it: build it with values")
