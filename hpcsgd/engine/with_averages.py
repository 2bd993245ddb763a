"""Averages of the groups' models that a training script requests, as a part of `DistributedOptimizer`."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Generator

import torch
from torch import Tensor, nn

from hpcsgd.core.agreement import Agreement, Call
from hpcsgd.core.method import Method
from hpcsgd.core.optional import prepare
from hpcsgd.core.slot import Slot
from hpcsgd.core.step import StepContext
from hpcsgd.core.waits import Slowest
from hpcsgd.engine.as_wrapped import AsWrapped
from hpcsgd.engine.averaged import Block, GroupModel, averaged
from hpcsgd.engine.iterates import EVAL, TRAIN, call_each, in_train_mode, with_modes
from hpcsgd.engine.local_update import LocalUpdate
from hpcsgd.engine.param_gather import ParamGather, synchronize_models
from hpcsgd.engine.sharding import ShardedOptimizer


class WithAverages:
    """The part of `DistributedOptimizer` that averages models outside of `step()`."""

    local: ShardedOptimizer
    method: Method
    model: nn.Module
    updating: LocalUpdate
    ready_for: Callable[..., StepContext]
    _as_wrapped: AsWrapped
    _block: Block
    _everyone: Agreement
    _group_model: GroupModel
    _has_modes: bool
    _call: Callable[[str], Call]
    _during: Callable[[str], contextlib.AbstractContextManager[Call]]
    _now_frozen: Callable[[], list[Slot]]
    _take_metrics: Callable[[], None]

    @property
    @abstractmethod
    def _vectors(self) -> list[Tensor]: ...

    @torch.no_grad()
    def average_models(self) -> None:
        """Average the models of the groups now, whatever the schedule says; collective, between two steps."""
        self._block.require_left("average_models()")
        with self._during("average_models()") as call:
            self._as_wrapped.require(call, self._everyone)
            s = self.ready_for("average_models()")
            if s.topology.has_one_group:
                return
            s.in_step, s.rates, s.left_out = False, call.rates, ()
            prepare(self.method.averager, self._vectors, s)
            param_gather = ParamGather(s, shards=False)  # models are whole
            synchronize_models(s, self.method.averager, param_gather, s.buckets, has_modes=self._has_modes)
            param_gather.finish()
            self._group_model.updated(self.method.averager.traits.waits, synced=True)
        self._take_metrics()

    def averaged_model(self) -> contextlib.AbstractContextManager[float]:
        """Return a context in which `model` is the mean of all groups' models, or a server's; collective.

        The context yields D, the mean distance of the groups' models from that one. An optimizer in training
        mode, such as Schedule-Free, is in eval mode there, and in training mode again afterwards. Groups that
        never wait for each other, as in `async_diloco`, may have made unlike numbers of steps."""
        self._block.require_left("averaged_model()")
        call, waits = self._call("averaged_model()"), self.method.averager.traits.waits
        self._as_wrapped.require(call, self._everyone)
        never_waits = isinstance(waits, Slowest) and waits.staleness is None
        s = self.ready_for(call.name, across=not never_waits)
        if never_waits:
            self._everyone.reach(call.at_any_step())
        return self._block.around(self._evaluated(s))

    @contextlib.contextmanager
    def _evaluated(self, s: StepContext) -> Generator[float, None, None]:
        """Average what `eval()` of the optimizer makes of the parameters. Leaving the block sends nothing."""
        modes = with_modes(self.local.optimizer)
        before = [in_train_mode(each) for each in modes]
        training = [each for each, trains in zip(modes, before, strict=True) if trains]
        brought = [b.w.clone() for b in s.buckets if training]
        call_each(training, EVAL)
        if modes and None not in before:
            self._block.does = (f"{EVAL}()", f"{TRAIN}()") if all(before) else (f"{EVAL}()",)
        try:
            with averaged(s, self.method.model_holder(), self.model, self._now_frozen()) as D:
                yield D
        finally:
            self._block.does = ()
            if training:
                with torch.no_grad(), self.updating.passing("train()", gradients=False):
                    call_each(training, TRAIN)
                for b, w in zip(s.buckets, brought, strict=True):
                    b.w.copy_(w)
