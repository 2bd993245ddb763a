"""`averaged_model()`: the mean of the groups' models, or a server's model, for a block of code."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from typing import overload

import torch
from torch import Tensor, nn

from hpcsgd.comm import phase
from hpcsgd.core.buffers import averaged_buffers, make_writable, places
from hpcsgd.core.fsdp import reshard
from hpcsgd.core.method import HoldsModel
from hpcsgd.core.step import StepContext
from hpcsgd.engine.alike import buffer_facts, require_alike
from hpcsgd.engine.param_gather import gather_shards
from hpcsgd.errors import UserError
from hpcsgd.parts.averagers import average_flattened, set_to_average
from hpcsgd.parts.averagers.distance import distance


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
    """A record of whether the script is inside `averaged_model()`, where the model is not the group's."""

    def __init__(self) -> None:
        self._open = False

    def require_left(self, call: str) -> None:
        """Raise `UserError` inside the block: `call` would use another model, or its result would be lost."""
        if self._open:
            raise UserError(
                f"{call} inside averaged_model(): the model is the mean of all groups there, and "
                "this group's own again at the end of the block: leave it before"
            )

    @contextlib.contextmanager
    def around(self, mean: contextlib.AbstractContextManager[float]) -> Generator[float, None, None]:
        """Run a block inside `mean`, which makes the model the mean there; yield the model distance D."""
        self.require_left("averaged_model()")
        with mean as D:
            self._open = True
            try:
                yield D
            finally:
                self._open = False


@contextlib.contextmanager
def averaged(s: StepContext, central: HoldsModel | None, model: nn.Module) -> Generator[float, None, None]:
    """Make `model` the mean over the groups, or the model that `central` holds, inside the block.

    Buffers of averaged dtypes become the mean over all ranks. After the block, parameters and buffers are as
    before, bit for bit, even if the block wrote into them, and also with one group. For that a copy of the
    buckets' vectors `w` is kept. Collective.

    Yields D, the mean distance of the groups' models from the averaged model (see `averagers.distance`).
    """
    brought = [b.w.clone() for b in s.buckets]
    parameters = [(b.w, w) for b, w in zip(s.buckets, brought, strict=True)]
    before = list(places(model))
    make_writable(model)
    mine = s.buffers
    buffers = [(buffer, buffer.clone()) for buffer in mine]
    with torch.no_grad(), phase("eval"):
        require_alike(s.topology.world, list(buffer_facts(model)))
        D = _agree(s, central, brought) if s.topology.num_groups > 1 else 0.0
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


def _agree(s: StepContext, central: HoldsModel | None, brought: Sequence[Tensor]) -> float:
    """Set all groups' models to the averaged one; return D, the distance of the earlier models from it.

    `brought`: copies of the buckets' earlier vectors `w`.
    """
    set_to_average(s.shards, s, central)
    mine = [b.shard_of(w) for b, w in zip(s.buckets, brought, strict=True)]
    D = distance(s, mine, s.shards, shards=True)
    gather_shards(s)
    return D
