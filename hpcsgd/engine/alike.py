"""Whether all ranks of a job were given the same: model, optimizer, method and options.

Each rank makes a list of facts, which name a thing and its value in words. The ranks compare a hash of their
lists, some bytes each, and the lists themselves only where hashes differ. How the model lies in buckets is no
fact of its own: it follows from those below.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn, optim

from hpcsgd.comm import Communicator
from hpcsgd.core.agreement import Agreement, Call
from hpcsgd.core.buffers import is_averaged, is_dense
from hpcsgd.core.method import Method
from hpcsgd.core.noted import Facts, noted
from hpcsgd.engine.chained import parts_of
from hpcsgd.errors import JobError, in_one_line

Fact = tuple[str, str]
"""What it is, and its value on this rank: "lr of param group 0", "0.1"."""
TOLD = 4096
"""Bytes in which a rank tells what it has noted of its sampler: some numbers and names."""
SHORT = 200
"""Letters of a repr that is still a value, and no listing of an object."""


def facts(
    optimizer: optim.Optimizer,
    model: nn.Module,
    trained: Iterable[tuple[str, nn.Parameter]],
    method: Method,
    **options: Any,
) -> list[Fact]:
    """All that ranks have to have in common; `options` are those of `DistributedOptimizer`."""
    of_options = ((f"option {name}", in_words(value)) for name, value in options.items())
    return [
        *model_facts(model, trained), *optimizer_facts(optimizer, model), *method_facts(method), *of_options,
    ]  # fmt: skip


def model_facts(model: nn.Module, trained: Iterable[tuple[str, nn.Parameter]]) -> Iterator[Fact]:
    """Shapes, dtypes and places in memory of what is `trained`, then of frozen parameters and of buffers."""
    rest = [("parameter", *named) for named in model.named_parameters() if not named[1].requires_grad]
    rest += [("buffer", *named) for named in model.named_buffers()]
    every = [*(("parameter", *named) for named in trained), *rest]
    devices = list(dict.fromkeys(x.device for _, _, x in every))
    for kind, name, x in every:
        strides = "" if not is_dense(x) or x.is_contiguous() else f" and strides {x.stride()}"
        layout = f" and {x.layout}" * (not is_dense(x))
        # Buckets are of one device each; which one that is may be another on every rank.
        place = f" on device {devices.index(x.device)} of {len(devices)}" if len(devices) > 1 else ""
        yield f"{kind} {name}", f"of shape {tuple(x.shape)} and {x.dtype}{layout}{strides}{place}"


def buffer_facts(model: nn.Module) -> Iterator[Fact]:
    """Of the buffers that `model` has now and that are averaged."""
    for name, x in model.named_buffers():
        if is_averaged(x):
            yield f"buffer {name}", f"of shape {tuple(x.shape)} and {x.dtype}"


def optimizer_facts(optimizer: optim.Optimizer, model: nn.Module) -> Iterator[Fact]:
    """Its class, and of each param group the options and which parameters are in it, in their order."""
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


def method_facts(method: Method) -> Iterator[Fact]:
    """Its parts, the settings of those that are ours, and what users' own say of themselves."""
    for role in ("grad_reduce", "schedule", "averager"):
        yield from _part_facts(f"the method's {role}", getattr(method, role))


def require_alike(world: Communicator, mine: Sequence[Fact]) -> None:
    """Raise `JobError`, the same on every rank, unless these facts are those of all ranks; collective."""
    if world.size == 1:
        return
    digest = hashlib.blake2b(repr(mine).encode(), digest_size=16).digest()
    if len(set(world.gather_objects(digest))) > 1:
        told = difference(world.gather_objects(mine))
        raise JobError(f"ranks {told}: give all ranks the same")


def require_same_sampler(world: Communicator, call: Call, everyone: Agreement) -> None:
    """Raise `JobError`, the same on every rank, where ranks that use a sampler of `world` use unlike ones;
    collective, in one `call`, beside gradients that are on their way. The samples of one rank would be those
    of another, and some would never come."""
    mine = noted(world)
    if everyone.begin(call, zlib.crc32(repr(mine).encode())).wait():
        return
    told = everyone.presence(json.dumps(mine).encode()[:TOLD].ljust(TOLD))
    lists: list[Facts] = [[(what, value) for what, value in json.loads(facts)] for facts in told]
    first = next(filter(None, lists))
    lists = [facts or first for facts in lists]
    if any(facts != first for facts in lists):
        raise JobError(f"ranks {difference(lists)}: give all ranks the same")


def difference(lists: Sequence[Sequence[Fact]]) -> str:
    """In one line, the first fact that is not the same in the lists of all ranks, which are not all alike."""
    tables = [dict(facts) for facts in lists]
    for what in dict.fromkeys(what for facts in lists for what, _ in facts):
        values = [table.get(what, "missing") for table in tables]
        if len(set(values)) > 1:
            break
    else:  # the same things in another order
        first = next(facts for facts in lists if facts != lists[0])
        what = (
            f"what comes before {next(a for (a, _), (b, _) in zip(lists[0], first, strict=True) if a != b)}"
        )
        values = [_before(what.removeprefix("what comes before "), facts) for facts in lists]
    other = next(rank for rank, value in enumerate(values) if value != values[0])
    told = " and ".join(f"{value} on {_ranks(ranks)}" for value, ranks in _by_value(values)[:4])
    return in_one_line(f"0 and {other} differ: {what} is {told}")


def in_words(value: Any) -> str:
    """`value` as far as ranks can have it in common: without addresses, and of large objects the type."""
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
    """What is ours is told setting by setting, since what it remembers is another on each rank."""
    if not is_ours(part):
        yield what, in_words(part)
        return
    yield what, type(part).__qualname__
    for name, value in settings(part).items():
        yield from _part_facts(f"{what}.{name}", value)


def is_ours(part: Any) -> bool:
    """Whether it is an object of a class of this package, whose `settings` are known."""
    return type(part).__module__.partition(".")[0] == __name__.partition(".")[0]


def settings(part: Any) -> dict[str, Any]:
    """What `part` was made with, as far as it has kept that by name."""
    if dataclasses.is_dataclass(part):
        names = [field.name for field in dataclasses.fields(part) if field.init]
    elif type(part).__init__ is object.__init__:
        names = []
    else:
        names = list(inspect.signature(part.__init__).parameters)
    kept = [(name, own) for name in names for own in (name, f"_{name}") if hasattr(part, own)]
    return {name: getattr(part, own) for name, own in kept}


def _kind(named: Any) -> str:
    """Of a class or function, and without where in a file a local one was made."""
    name = getattr(named, "__qualname__", None) or type(named).__qualname__
    return f"{getattr(named, '__module__', None) or 'builtins'}.{name}"


def _before(what: str, facts: Sequence[Fact]) -> str:
    names = [name for name, _ in facts]
    place = names.index(what)
    return names[place - 1] if place else "nothing"


def _by_value(values: Sequence[str]) -> list[tuple[str, list[int]]]:
    return [(x, [rank for rank, y in enumerate(values) if y == x]) for x in dict.fromkeys(values)]


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:4])
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
