"""The user's optimizer, run on the shards that this rank owns.

The optimizer object and its `param_groups` dicts stay, so learning-rate schedulers keep working. `["params"]`
of each group are the model's parameters, as the user gave them. While the optimizer runs, they are replaced
with this rank's parts of them. Optimizer state exists only for these parts: M/K elements per state tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from hpcsgd.comm import Communicator
from hpcsgd.comm.on_host import on_host
from hpcsgd.core.flat import Bucket, ShardRange
from hpcsgd.core.fsdp import is_fsdp, local
from hpcsgd.engine.fresh_state import WithFreshState
from hpcsgd.engine.in_parts import is_elementwise, is_tensorwise
from hpcsgd.engine.initial_state import has_every_element, in_memory_order, like
from hpcsgd.engine.inside import (
    forget_tensors,
    load_own_state,
    load_shared_state,
    optimizers_in,
    require_saved,
    require_used,
    shared_state,
    state_of,
    with_own_state,
)
from hpcsgd.engine.master import MASTER
from hpcsgd.engine.muon_by_rows import muon_by_rows
from hpcsgd.engine.optimizer_param import OptimizerParam, place_in
from hpcsgd.engine.state_of_parts import Part, Place, RangeState, StateOfParts
from hpcsgd.errors import UserError


class ShardedOptimizer(WithFreshState):
    """Runs `optimizer` on this rank's parts of parameters, or on whole parameters if `cut` is False.

    `group`: the ranks of this group. `master`: parameters with fewer bits than this dtype are updated through
    copies of this dtype.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        buckets: Sequence[Bucket],
        group: Communicator,
        *,
        cut: bool,
        master: torch.dtype | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.known = is_elementwise(optimizer) or is_tensorwise(optimizer)
        self._casts = type(optimizer).load_state_dict is optim.Optimizer.load_state_dict
        """True if loaded state is cast to the dtypes of parameters, as in torch's own `load_state_dict`."""
        self._params = [param for group in optimizer.param_groups for param in group["params"]]
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]
        numbers = [g for g, size in enumerate(self._sizes) for _ in range(size)]
        self._groups = dict(zip(self._params, numbers, strict=True))
        self.cut = cut
        self._buckets = buckets
        self._muon = muon_by_rows(optimizer, buckets, group)
        self.held = list(self._hold())
        if master is not None:
            for held in self.held:
                held.keep_master(master)
        self._masters = [held.master for held in self.held if held.master is not None]
        self._tensors = {held.tensor for held in self.held}
        self._in_bucket = self._by_bucket()
        self._all = [optimizer, *with_own_state(optimizer)]
        state = {i: state_of(self._all, param) for i, param in enumerate(self._params)}
        forget_tensors(self._all)
        if not self.whole:
            self._divide_state()
        self._distribute(state)

    @property
    def has_masters(self) -> bool:
        return bool(self._masters)

    def state_dict(self, group: Communicator) -> dict[str, Any]:
        """Return the state of a plain optimizer over the whole parameters; collective over the group."""
        mine = on_host(self.parts()) if self.cut else self.parts()
        state = self.joined(group.gather_objects(mine) if self.cut else [mine])
        return {"state": state | shared_state(self.optimizer), "param_groups": self.options()}

    def parts(self) -> list[Part]:
        """Return the optimizer's state of each held tensor, with its place among the parameters."""
        self._require_nothing_else()
        places = (Place(held.index, held.start, held.stop, held.whole) for held in self.held)
        return [(place, self._state(held)) for place, held in zip(places, self.held, strict=True)]

    def joined(self, everyone: Iterable[Sequence[Part]]) -> dict[Any, Any]:
        """Return the state of whole parameters from the `parts` of all ranks of a group."""
        state: dict[Any, Any] = {}
        for place, values in (part for theirs in everyone for part in theirs):
            for name, value in values.items():
                there = self._placed(self._params[place.index], name, value)
                self._join(state.setdefault(place.index, {}), name, there, place)
        return state

    def options(self) -> list[dict[str, Any]]:
        """Return the parameter groups as in the `state_dict` of a plain optimizer."""
        numbers = iter(range(len(self._params)))
        return [
            {**{k: v for k, v in g.items() if k != "params"}, "params": [next(numbers) for _ in range(size)]}
            for g, size in zip(self.optimizer.param_groups, self._sizes, strict=True)
        ]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of `state_dict`, or the state of a plain optimizer."""
        sizes = [len(group["params"]) for group in state["param_groups"]]
        if sizes != self._sizes:
            raise UserError(
                f"optimizer state for param groups of {sizes} parameters; the optimizer has {self._sizes}"
            )
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        order = [number for group in state["param_groups"] for number in group["params"]]
        shared = {key: value for key, value in state["state"].items() if key not in order}
        forget_tensors(self._all)
        load_shared_state(self.optimizer, shared)
        self._distribute({i: state["state"][n] for i, n in enumerate(order) if n in state["state"]})

    def groups(self) -> Mapping[nn.Parameter, int]:
        """Return the index of each parameter's parameter group."""
        return self._groups

    def states_by_range(self) -> Iterator[tuple[Bucket, ShardRange, RangeState]]:
        """Yield each range that this rank owns, with its bucket and the optimizer's state of the range."""
        self._require_nothing_else()
        by_start = {(held.param, held.start): held for held in self.held}
        for bucket in self._buckets:
            for piece in bucket.ranges:
                held = by_start[piece.slot.param, piece.start if self.cut else 0]
                found = RangeState({}, {})
                for name, value in self._state(held).items():
                    if has_every_element(name, value, held.tensor):
                        found.elements[name] = self._of_range(held, piece, value)
                    else:
                        found.rest[name] = value
                yield bucket, piece, found

    def load_states(self, lookup: Callable[[nn.Parameter, int, int], RangeState]) -> None:
        """Load the state that `lookup` returns for the elements [start, stop) of each parameter."""
        trained = {slot.param for bucket in self._buckets for slot in bucket.slots}
        for held in self.held:
            if held.param in trained:
                for each in self._all:
                    each.state.pop(held.tensor, None)
                found = lookup(held.param, held.start, held.stop)
                elements = {name: self._shaped(held, value) for name, value in found.elements.items()}
                rest = {name: self._placed(held.param, name, value) for name, value in found.rest.items()}
                self._take_state(held, rest | elements)

    def require_state_in_use(self) -> None:
        """Raise `UserError` if other code has set state where the optimizer does not use it."""
        if not self.whole:
            require_used(self.optimizer, self._tensors)

    def _require_nothing_else(self) -> None:
        if not self.whole:
            require_saved(self.optimizer, self._tensors)

    def _state(self, held: OptimizerParam) -> dict[str, Any]:
        """Return the optimizer's state of `held`, with its master weights as one more tensor."""
        state = state_of(self._all, held.tensor)
        return state if held.master is None else {**state, MASTER: held.master.m}

    def _take_state(self, held: OptimizerParam, state: dict[str, Any]) -> None:
        """Load `state`, a result of `_state`, for `held`."""
        if (m := state.pop(MASTER, None)) is not None:
            if held.master is None:
                raise UserError(
                    "optimizer state with master weights: give DistributedOptimizer(master_dtype=...), too"
                )
            held.master.m.copy_(m)
        load_own_state(self._all, held.tensor, state)

    def _of_range(self, held: OptimizerParam, piece: ShardRange, value: Tensor) -> Tensor:
        return in_memory_order(value, held.param)[piece.start : piece.stop] if held.whole else value

    def _shaped(self, held: OptimizerParam, value: Tensor) -> Tensor:
        value = value.to(held.param.device)
        if not held.whole:
            return value
        shaped = like(held.param, value)
        shaped.as_strided((value.numel(),), (1,)).copy_(value)
        return shaped

    def _divide_state(self) -> None:
        """Replace states by `StateOfParts`; optimizers that share one state still share it."""
        parts: dict[nn.Parameter, list[Tensor]] = {param: [] for param in self._params}
        for held in self.held:
            if held.tensor is held.param:
                del parts[held.param]
            else:
                parts[held.param].append(held.tensor)
        inside = optimizers_in(self.optimizer)
        for own in self._all:
            divided = StateOfParts(own.state, parts)
            for each in [each for each in inside if each.state is own.state]:
                each.state = divided

    def _hold(self) -> Iterator[OptimizerParam]:
        numbers = {param: index for index, param in enumerate(self._params)}
        if self.cut:
            for bucket in self._buckets:
                for piece in bucket.ranges:
                    param = piece.slot.param
                    w = place_in(bucket.param_shard, bucket, piece.offset, piece.stop - piece.start, param)
                    place = piece.start, piece.stop, bucket, piece.offset, bucket.whole
                    yield OptimizerParam(numbers[param], param, w, *place)
        else:
            for index, param in enumerate(self._params):
                yield OptimizerParam(index, param, param, 0, param.numel())

    def _by_bucket(self) -> dict[Bucket, list[OptimizerParam]]:
        """Return the held parts of each bucket's parameters; frozen parameters are in no bucket."""
        bucket_of = {slot.param: bucket for bucket in self._buckets for slot in bucket.slots}
        found: dict[Bucket, list[OptimizerParam]] = {bucket: [] for bucket in self._buckets}
        for held in self.held:
            if held.param in bucket_of:
                found[bucket_of[held.param]].append(held)
        return found

    def _distribute(self, state: dict[int, dict[str, Any]]) -> None:
        """Give every held tensor its part of the whole-parameter `state`."""
        for held in self.held:
            if held.index in state:
                values = state[held.index].items()
                self._take_state(held, {name: self._part(held, name, v) for name, v in values})

    def _part(self, held: OptimizerParam, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if is_fsdp(value):
            return local(value).reshape(-1).clone()
        if has_every_element(name, value, held.param):
            part = held.cut(value.to(held.tensor.device))
            # A complex parameter may have real state, such as absolute values.
            same = part.is_complex() if held.is_complex else part.is_floating_point()
            return part.to(held.tensor.dtype) if same and self._casts else part
        if value.dim() and not held.whole:
            raise UserError(
                f"optimizer state of shape {tuple(value.shape)} for a parameter of {held.param.shape}"
            )
        return self._placed(held.param, name, value).clone()

    def _placed(self, param: nn.Parameter, name: str, value: Any) -> Any:
        """Return `value` on the device where torch's own optimizers keep it.

        That is the parameter's device. The number of steps stays on the host, unless the update is captured
        or fused.
        """
        if not isinstance(value, Tensor):
            return value
        options = self.optimizer.param_groups[self._groups[param]]
        if name.rpartition(".")[2] == "step" and not (options.get("capturable") or options.get("fused")):
            return value
        return value.to(param.device)

    def _join(self, into: dict[str, Any], name: str, value: Any, place: Place) -> None:
        param = self._params[place.index]
        if place.whole or not isinstance(value, Tensor) or value.dim() == 0:
            into[name] = value
            return
        if name not in into:
            into[name] = like(param, value)
        in_memory_order(into[name], param)[place.start : place.stop] = value
