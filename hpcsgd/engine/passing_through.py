"""Closures and methods of an optimizer other than `step()`, as a part of `DistributedOptimizer`.

An unknown optimizer may evaluate a closure several times in a step, as SAM does. It may have methods of its
own, such as `eval()` of Schedule-Free, which computes the weights for evaluation. Closures and methods see
averaged gradients, as in one process, and all ranks of a group have the same model afterwards.
"""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, optim

from hpcsgd.arguments import of_kind
from hpcsgd.comm import phase
from hpcsgd.core.agreement import Agreement, Call
from hpcsgd.core.step import GradReduce, QuantizedGather, StepContext
from hpcsgd.engine.as_wrapped import AsWrapped
from hpcsgd.engine.averaged import Block
from hpcsgd.engine.chained import kind_of
from hpcsgd.engine.closures import Closure, RankOperations
from hpcsgd.engine.inside import optimizers_in, own_methods
from hpcsgd.engine.iterates import EVAL, TRAIN, call_each, exact, require_train_mode, with_modes
from hpcsgd.engine.local_update import LocalUpdate
from hpcsgd.engine.param_gather import ParamGather, gather_shards
from hpcsgd.engine.presence import Progress
from hpcsgd.engine.sharding import ShardedOptimizer
from hpcsgd.errors import UserError

NAME = "the closure of step()"


class PassingThrough:
    """The part of `DistributedOptimizer` that passes closures and public methods to an unknown optimizer."""

    local: ShardedOptimizer
    updating: LocalUpdate
    zero_grad: Callable[..., None]
    _as_wrapped: AsWrapped
    _block: Block
    _everyone: Agreement
    _grad_reduce: GradReduce
    _quantized_gather: QuantizedGather | None
    _shared: Agreement
    _call: Callable[[str], Call]
    _step: StepContext
    _during: Callable[[str], contextlib.AbstractContextManager[Call]]

    @property
    @abstractmethod
    def _in_place(self) -> StepContext: ...

    def __getattr__(self, name: str) -> Any:
        local = vars(self).get("local")
        if local is not None and name in (TRAIN, EVAL) and (found := with_modes(local.optimizer)):
            return lambda: call_each(found, name)
        if local is None or name not in own_methods(local.optimizer):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )
        return getattr(local.optimizer, name)

    def _ranks(self) -> RankOperations:
        return RankOperations(
            self._evaluate, self._mean, lambda yes: self._agree(NAME, int(yes)) and yes, self.zero_grad
        )

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        self._require_no_memory()
        with self.updating.interrupted():
            s = self._in_place
            if self._grad_reduce.traits.leaves_shards:
                with phase("param_gather"):
                    gather_shards(s)
            with torch.enable_grad():
                loss = closure()
            with self._during(NAME) as call:
                self.updating.finish(call)
        return loss

    def _mean(self, loss: float) -> float:
        topology = self._step.topology
        losses: list[float] = (
            topology.world if self._grad_reduce.traits.across else topology.intra_group
        ).gather_objects(loss)
        return sum(losses) / len(losses)

    def _agree(self, name: str, digest: int) -> bool:
        """Return whether all ranks that average gradients together have the same `digest`. Collective.

        `name`: the call that all of them are in.
        """
        ranks = self._everyone if self._grad_reduce.traits.across else self._shared
        with self._during(name) as call:
            return ranks.begin(call, digest).wait()

    def _passed(
        self, closure: Callable[[], Any] | None, loss: float | Tensor | None
    ) -> tuple[Closure | None, float | Tensor | None]:
        """Evaluate the closure, unless there are gradients already; collective.

        Return the closure for the optimizer, or None, and the loss.
        """
        if closure is None:
            plain = loss is None or isinstance(loss, float | Tensor)  # also NaN, if the training diverges
            return None, loss if plain else of_kind("step", "loss", float | Tensor, loss)
        of_kind("step", "closure", Callable, closure)
        if self.local.known:
            with torch.enable_grad():
                return None, closure()
        passed = Closure(closure, self._ranks(), self.local.held)
        progress = self.updating.progress
        if self._agree("step(closure)", progress) and progress is Progress.NONE:
            return passed, passed.evaluate_ahead()
        self._require_no_memory()
        return passed, loss

    def _require_no_memory(self) -> None:
        if self.updating.remembers:
            raise UserError(
                f"{kind_of(self.local.optimizer)} computes gradients several times in a step, but the "
                "gradient reduction of this method keeps a part of them for later steps: use one that sends "
                "all"
            )

    def _require_train_mode(self) -> None:
        """Raise the optimizer's own exception if it is in eval mode, before anything is sent or changed."""
        if not self.local.known:
            with self.local.ranges([]):
                require_train_mode(self.local.optimizer)

    def _pass_methods(self) -> None:
        """Make methods of the inner optimizer, and of those inside it, act on the whole model."""
        groups = self.local.optimizer.param_groups
        for each in optimizers_in(self.local.optimizer):
            if not self.local.whole and any(all(g is not own for own in groups) for g in each.param_groups):
                raise UserError(
                    f"{kind_of(self.local.optimizer)} has a {type(each).__name__} inside with param groups "
                    "of its own, which would miss what a rank updates: leave elementwise, tensorwise and "
                    "master_dtype out"
                )
            if len(each.param_groups) == len(groups):
                each.zero_grad = self.zero_grad
                each.add_param_group = self.add_param_group
            if self.local.cut or self.local.has_masters:
                each.state_dict = functools.partial(_refuse_part, kind_of(each))
            if not self.local.known:
                for name in own_methods(each):
                    if not hasattr(optim.Optimizer, name):
                        setattr(each, name, functools.partial(self._pass, exact(each, name)))

    def _pass(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a `method` of the optimizer that may use gradients and change parameters.

        Collective over the group.
        """
        if self.updating.busy:
            return method(*args, **kwargs)
        name = f"{method.__name__}()"
        if self._block.is_open and name in self._block.does:
            return None
        self._block.require_left(name)
        self._as_wrapped.require(self._call(name), self._everyone)
        s = self._in_place
        progress = self.updating.progress
        same = self._agree(name, progress)
        with self._during(name) as call:
            if not same or progress is Progress.RECEIVED:
                self.updating.finish(call)
            param_gather = ParamGather(s, self._grad_reduce.traits.leaves_shards, self._quantized_gather)
            with self.updating.passing(name, gradients=not same or progress is not Progress.NONE):
                result = method(*args, **kwargs)
            with torch.no_grad():
                param_gather.finish()
        return result


def _refuse_part(kind: str) -> NoReturn:
    """Raise `UserError` for a state_dict of the wrapped optimizer, which has state of parts of parameters."""
    raise UserError(
        f"state_dict() of the wrapped {kind}, which has state of parts or copies of parameters on this rank: "
        "call state_dict() of the DistributedOptimizer on all ranks"
    )
