"""What has to be the same on all ranks of a job, as `Fact`: the model, optimizer, method and options.

The layout in buckets is no separate fact: it follows from the others.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn, optim

from hpcsgd.comm import Communicator
from hpcsgd.comm.alike import Fact, difference, noted
from hpcsgd.core.agreement import Agreement, Call
from hpcsgd.core.buffers import is_averaged, is_dense
from hpcsgd.core.fsdp import is_fsdp
from hpcsgd.core.method import Method
from hpcsgd.engine.chained import parts_of
from hpcsgd.engine.inside import shared_state, state_of, with_own_state
from hpcsgd.errors import JobError, count_text

AVERAGER = "the method's averager"
SAMPLER_BYTES = 4096
"""Bytes of the message in which a rank sends the facts about its sampler, some numbers and names."""
SHORT = 200
"""Largest length of a repr in characters. A longer one lists an object's contents and is not compared."""


def facts(
    optimizer: optim.Optimizer,
    model: nn.Module,
    trained: Iterable[tuple[str, nn.Parameter]],
    method: Method,
    **options: Any,
) -> list[Fact]:
    """Return all facts that must be the same on all ranks; `options` are those of `DistributedOptimizer`."""
    of_options = ((f"option {name}", in_words(value)) for name, value in options.items())
    return [
        *model_facts(model, trained), *optimizer_facts(optimizer, model), *state_facts(optimizer, model),
        *method_facts(method), *of_options,
    ]  # fmt: skip


def model_facts(model: nn.Module, trained: Iterable[tuple[str, nn.Parameter]]) -> Iterator[Fact]:
    """Yield shape, dtype and layout of `trained` parameters, then of frozen ones and of buffers."""
    rest = [("parameter", *named) for named in model.named_parameters() if not named[1].requires_grad]
    rest += [("buffer", *named) for named in model.named_buffers()]
    every = [*(("parameter", *named) for named in trained), *rest]
    devices = list(dict.fromkeys(x.device for _, _, x in every))
    for kind, name, x in every:
        strides = "" if not is_dense(x) or x.is_contiguous() else f" and strides {x.stride()}"
        layout = f" and {x.layout}" * (not is_dense(x))
        # Each bucket is on one device. Ranks may use different devices, but must group tensors alike.
        place = f" on device {devices.index(x.device)} of {len(devices)}" if len(devices) > 1 else ""
        yield f"{kind} {name}", f"of shape {tuple(x.shape)} and {x.dtype}{layout}{strides}{place}"


def buffer_facts(model: nn.Module) -> Iterator[Fact]:
    """Yield shape and dtype of the buffers of `model` that are averaged."""
    for name, x in model.named_buffers():
        if is_averaged(x):
            yield f"buffer {name}", f"of shape {tuple(x.shape)} and {x.dtype}"


def optimizer_facts(optimizer: optim.Optimizer, model: nn.Module) -> Iterator[Fact]:
    """Yield the class of `optimizer`, and of each parameter group the options and parameters in order."""
    names = {param: name for name, param in model.named_parameters()}
    yield "the optimizer", " and ".join(_kind(type(part)) for part in parts_of(optimizer))
    yield "the number of param groups", str(len(optimizer.param_groups))
    for g, group in enumerate(optimizer.param_groups):
        of_group = f"of param group {g}"
        for option, value in group.items():
            if option != "params":
                yield f"{option} {of_group}", in_words(value)
        yield f"the number of parameters {of_group}", str(len(group["params"]))
        for i, param in enumerate(group["params"]):
            yield f"parameter {i} {of_group}", names.get(param, "outside the model")


def state_facts(optimizer: optim.Optimizer, model: nn.Module) -> Iterator[Fact]:
    """Yield for each parameter the names in the state that `optimizer` has already, and a checksum of it.

    Each rank has other rows of a parameter that torch has sharded, so the checksum leaves their state out.
    """
    names: dict[Any, str] = {param: name for name, param in model.named_parameters()}
    optimizers = [optimizer, *with_own_state(optimizer)]
    of_what = {"the optimizer's state": shared_state(optimizer)}
    params = (param for group in optimizer.param_groups for param in group["params"])
    for i, param in enumerate(params):
        state = state_of(optimizers, param)
        if is_fsdp(param):
            state = {name: None if _has_rows(x) else x for name, x in state.items()}
        of_what[f"the optimizer's state of {names.get(param, f'parameter {i}')}"] = state
    for what, state in of_what.items():
        if state:
            inside = ", ".join(in_words(name).strip("'") for name in state)
            yield f"{what} (load it on all ranks)", f"{inside} of checksum {checksum(state):08x}"


def _has_rows(x: Any) -> bool:
    """Return whether `x`, state of a parameter that torch has sharded, may be that of this rank's rows."""
    return isinstance(x, Tensor) and (x.dim() > 0 or is_fsdp(x))


def checksum(x: Any, start: int = 0) -> int:
    """Return a checksum of all bytes of `x`: a tensor, a value or nested lists and dicts of them."""
    if isinstance(x, Mapping):
        return checksum(list(cast("Mapping[Any, Any]", x).items()), start)
    if isinstance(x, list | tuple):
        return functools.reduce(lambda found, each: checksum(each, found), cast("Iterable[Any]", x), start)
    if isinstance(x, Tensor) and is_dense(x):
        values = x.detach().resolve_conj().resolve_neg().cpu().reshape(-1)
        return zlib.crc32(values.view(torch.uint8).numpy().data, start)
    return zlib.crc32(in_words(x).encode(), start)


def method_facts(method: Method) -> Iterator[Fact]:
    """Yield the parts of `method`: settings of hpcsgd's own parts, and the reprs of users' parts."""
    yield from _part_facts("the method's grad_reduce", method.grad_reduce)
    yield from _part_facts("the method's schedule", method.schedule)
    yield from _part_facts(AVERAGER, method.averager)


def facts_of_groups(
    model: nn.Module, trained: Iterable[tuple[str, nn.Parameter]], method: Method
) -> list[Fact]:
    """Return the facts that must be the same in all replica groups, which are jobs that average models.

    With FSDP each rank averages its own rows, so groups must shard the model over equally many ranks. Each
    group has its own optimizer and reduction of gradients, and chooses `own_settings` of its averager for
    itself. Whether it gives them must be the same.
    """
    sharded = next((x.device_mesh.size() for x in model.parameters() if is_fsdp(x)), None)
    fsdp = "off" if sharded is None else f"over {count_text(sharded, 'rank')}"
    found = [("FSDP", fsdp), *model_facts(model, trained), *_part_facts(AVERAGER, method.averager)]
    own = {f"{AVERAGER}.{name}" for name in method.averager.traits.own_settings}
    return [(what, "given" if what in own and value != "None" else value) for what, value in found]


def require_same_sampler(world: Communicator, call: Call, everyone: Agreement) -> None:
    """Raise the same `JobError` on every rank if ranks have noted different samplers (`hpcsgd.comm.alike`).

    Two ranks would otherwise use the same samples, and some samples would never be used. Collective, as part
    of one `call`; gradients may be in transit at the same time.
    """
    mine = noted(world)
    if everyone.begin(call, zlib.crc32(repr(mine).encode())).wait():
        return
    found = everyone.presence(json.dumps(mine).encode()[:SAMPLER_BYTES].ljust(SAMPLER_BYTES))
    lists: list[Sequence[Fact]] = [[(what, value) for what, value in json.loads(facts)] for facts in found]
    first = next(filter(None, lists))
    lists = [facts or first for facts in lists]
    if any(facts != first for facts in lists):
        raise JobError(f"ranks {difference(dict(enumerate(lists)))}: give all ranks the same")


def in_words(value: Any) -> str:
    """Return `value` as text to compare between ranks: no memory addresses; large objects as their type."""
    if isinstance(value, Tensor):
        one = value.numel() == 1
        return str(value.item()) if one else f"a tensor of {tuple(value.shape)}, {value.dtype}"
    if isinstance(value, list | tuple | set | frozenset):
        inside = [in_words(each) for each in cast("Iterable[Any]", value)]
        return f"({', '.join(inside if isinstance(value, list | tuple) else sorted(inside))})"
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return f"{{{', '.join(f'{in_words(key)}: {in_words(each)}' for key, each in items)}}}"
    if isinstance(value, functools.partial):
        made = cast("functools.partial[Any]", value)
        return f"{in_words(made.func)} with {in_words(made.args)} and {in_words(made.keywords)}"
    if isinstance(value, type) or inspect.isroutine(value):
        return _kind(value)
    shown = "" if type(value).__repr__ is object.__repr__ else re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return shown if 0 < len(shown) <= SHORT else _kind(type(value))


def _part_facts(what: str, part: Any) -> Iterator[Fact]:
    """Yield the facts of a part. For one of hpcsgd's own parts these are its settings, not its state."""
    if isinstance(part, Mapping):
        for name, value in cast("Mapping[Any, Any]", part).items():
            yield from _part_facts(f"{what}.{name}", value)
        return
    if not is_ours(part):
        yield what, in_words(part)
        return
    yield what, type(part).__qualname__
    for name, value in settings(part).items():
        yield from _part_facts(f"{what}.{name}", value)


def is_ours(part: Any) -> bool:
    """Return whether `part` is of a class of this package, whose `settings` are known."""
    return type(part).__module__.partition(".")[0] == __name__.partition(".")[0]


def settings(part: Any) -> dict[str, Any]:
    """Return the constructor arguments of `part` that it keeps as attributes of the same names."""
    if dataclasses.is_dataclass(part):
        names = [field.name for field in dataclasses.fields(part) if field.init]
    elif type(part).__init__ is object.__init__:
        names = []
    else:
        names = list(inspect.signature(part.__init__).parameters)
    kept = [(name, own) for name in names for own in (name, f"_{name}") if hasattr(part, own)]
    return {name: getattr(part, own) for name, own in kept}


def _kind(named: Any) -> str:
    """Return the full name of a class or function."""
    name = getattr(named, "__qualname__", None) or type(named).__qualname__
    return f"{getattr(named, '__module__', None) or 'builtins'}.{name}"
