"""The user's optimizer at work: the tensors that it gets as parameters, and the use of its results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn, optim

from hpcsgd.core.flat import Bucket
from hpcsgd.engine.closures import Closure
from hpcsgd.engine.in_parts import step_without_hooks
from hpcsgd.engine.muon_by_rows import MuonByRows
from hpcsgd.engine.optimizer_param import OptimizerParam


class AtWork:
    """The part of `ShardedOptimizer` that runs the optimizer on the tensors that this rank holds."""

    optimizer: optim.Optimizer
    held: Sequence[OptimizerParam]
    known: bool
    """True if the optimizer is known to do nothing but update its tensors in place, in `step()`."""
    _params: Sequence[nn.Parameter]
    _sizes: Sequence[int]
    """Number of parameters of each parameter group."""
    _groups: Mapping[nn.Parameter, int]
    cut: bool
    """True if this rank updates parts of parameters."""
    _muon: MuonByRows | None
    """What runs the optimizer if it has torch's Muon and the model is FSDP's."""
    _buckets: Sequence[Bucket]
    _in_bucket: Mapping[Bucket, Sequence[OptimizerParam]]

    def step(self, absent: Collection[nn.Parameter] = (), closure: Closure | None = None) -> None:
        """Update all held tensors from the reduced gradients; `absent` parameters have no gradient.

        The optimizer gets the `closure`, if any.
        """
        with self.at_work(self.held, absent):
            if self._muon is not None:
                self._muon.step(self.held)
            elif closure is None:
                step_without_hooks(self.optimizer)
            else:
                closure.step(self.optimizer)
        self._count_writes(self._buckets, absent)

    def step_of(self, buckets: Sequence[Bucket], absent: Collection[nn.Parameter] = ()) -> None:
        """Update the parameters of these buckets only."""
        with self.at_work([held for b in buckets for held in self._in_bucket[b]], absent):
            step_without_hooks(self.optimizer)
        self._count_writes(buckets, absent)

    def _count_writes(self, buckets: Iterable[Bucket], absent: Collection[nn.Parameter]) -> None:
        """Count a write into each updated parameter if ranks write only to their parts of the buckets."""
        if self.cut:
            for slot in (slot for bucket in buckets for slot in bucket.slots):
                if slot.param not in absent:
                    slot.count_write()

    @contextlib.contextmanager
    def at_work(
        self, held: Sequence[OptimizerParam], absent: Collection[nn.Parameter] = ()
    ) -> Generator[None, None, None]:
        """In the block, give the optimizer the tensors of `held` as its parameters.

        They have gradients, except for those of `absent` parameters. After the block, the optimizer's results
        are in the flat vectors.
        """
        for each in held:
            if each.master is not None:
                each.master.follow()
        self.take_gradients(absent, held)
        with self.ranges(held):
            yield
        self._put_back(held)

    @contextlib.contextmanager
    def interrupted(self) -> Generator[None, None, None]:
        """Interrupt an `at_work` block: meanwhile the optimizer has the model's parameters.

        The parameters have the optimizer's results so far.
        """
        self._put_back(self.held)
        params = iter(self._params)
        with self._having([[next(params) for _ in range(size)] for size in self._sizes]):
            yield

    @contextlib.contextmanager
    def ranges(self, held: Iterable[OptimizerParam] | None = None) -> Generator[None, None, None]:
        """In the block, give the optimizer the tensors of `held`, by default all, as its parameters."""
        with self._having(self._by_group(self.held if held is None else held, lambda each: each.tensor)):
            yield

    @contextlib.contextmanager
    def reals(self) -> Generator[None, None, None]:
        """In the block, give the optimizer all held tensors and their gradients as reals."""
        self.take_gradients()
        with self._having(self._by_group(self.held, OptimizerParam.as_reals)):
            yield

    def _by_group(
        self, held: Iterable[OptimizerParam], tensor: Callable[[OptimizerParam], Tensor]
    ) -> list[list[Tensor]]:
        found: list[list[Tensor]] = [[] for _ in self._sizes]
        for each in held:
            found[self._groups[each.param]].append(tensor(each))
        return found

    @contextlib.contextmanager
    def _having(self, by_group: Sequence[list[Tensor]]) -> Generator[None, None, None]:
        groups = [(group, group["params"]) for group in self.optimizer.param_groups]
        for (group, _), tensors in zip(groups, by_group, strict=True):
            group["params"] = tensors
        try:
            yield
        finally:
            for group, params in groups:
                group["params"] = params

    @torch.no_grad()
    def _put_back(self, held: Sequence[OptimizerParam]) -> None:
        for each in held:
            if each.master is not None:
                each.master.give()
            each.drop_gradient()
        if not self.known:
            for each in held:
                each.restore_tensor()
            if not self.cut:
                for slot in (slot for bucket in self._buckets for slot in bucket.slots):
                    slot.come_home()

    @cached_property
    def whole(self) -> bool:
        """True if the optimizer updates the parameters themselves, not parts of them or master weights."""
        return all(held.tensor is held.param for held in self.held)

    def take_gradients(
        self, absent: Collection[nn.Parameter] = (), held: Sequence[OptimizerParam] | None = None
    ) -> None:
        """Set the gradients of held tensors, except for parameters that are `absent`."""
        for each in self.held if held is None else held:
            each.take_gradient(absent=each.param in absent)
