"""What a training loop may do with gradients before `step()`, as a part of `DistributedOptimizer`."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence

import torch
from torch import Tensor, nn, optim

from hpcsgd import torch_private
from hpcsgd.arguments import checked, of_kind
from hpcsgd.comm import doing, phase
from hpcsgd.core.agreement import Call
from hpcsgd.core.norm import clip
from hpcsgd.core.slot import Slot
from hpcsgd.core.step import StepContext
from hpcsgd.engine.averaged import Block
from hpcsgd.engine.local_update import LocalUpdate
from hpcsgd.engine.lr import rates_in_force
from hpcsgd.engine.options import Options
from hpcsgd.engine.sharding import ShardedOptimizer
from hpcsgd.engine.wrapping import require_passes
from hpcsgd.errors import UserError

NOTES = {"state_dict()": " (which needs all ranks, or consolidate_state_dict() on all ranks before)"}
"""What messages about waiting ranks add to the name of a call."""


class WithGradients(optim.Optimizer):
    """The methods of a distributed optimizer that are called between two steps."""

    trained: Sequence[tuple[str, nn.Parameter]]
    """The trained parameters by name."""
    local: ShardedOptimizer
    updating: LocalUpdate
    _block: Block
    _step: StepContext
    _number: int
    _options: Options

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of each parameter group in this or the next update, warm-up included."""
        return rates_in_force(self, self.local.optimizer)

    @checked
    def set_gradient_accumulation_steps(self, passes: int) -> None:
        """Expect `passes` backward passes before each `step()` from the next step on.

        Call it between two steps.
        """
        require_passes("passes", passes)
        self.updating.accumulate(passes)

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Return a context whose backward passes add up gradients on this rank, without averaging them.

        `DistributedDataParallel` has the same method. The first `backward()` after the block averages the
        sum, or else `step()`. The number of passes inside may differ between steps and between ranks. Inside,
        `param.grad` is this rank's own. Passes inside do not count as `gradient_accumulation_steps`.

        `step()`, `clip_grad_norm_()`, `synchronize()` and a scaler's `unscale_()` are refused inside. In an
        FSDP model torch averages gradients over the group in every pass. Its own
        `set_requires_gradient_sync(False)` changes that.
        """
        with self.updating.no_sync():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the model's parameters, or zero them if not `set_to_none`.

        Collective if gradients have been sent since the last step: these are then discarded.
        """
        self.updating.discard("zero_grad()")
        for _, param in self.trained:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                with torch_private.plainly():
                    param.grad.zero_()
        if not set_to_none:
            self.updating.zeroed()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the group's averaged gradient to a norm of at most `max_norm`; return the norm before.

        `norm_type` is the order of the norm. The norm is exact: that of the gradient that the update uses,
        over all ranks of the group. Only parameters of this optimizer count. Collective; call it between
        `backward()` and `step()`.
        """
        max_norm = of_kind("clip_grad_norm_", "max_norm", float, max_norm)
        norm_type = of_kind("clip_grad_norm_", "norm_type", float, norm_type)
        topology = self._step.topology
        group = topology.intra_group if self._step.fixed.updates_shards and topology.group_size > 1 else None
        with self._during("clip_grad_norm_()") as call, phase("clipping"):
            self._require_sync(call)
            self.updating.finish(call)
            norm = clip(self._step.parts_of_gradient(), max_norm, norm_type, group)
        self.updating.scaled()
        return norm

    def synchronize(self) -> None:
        """Make `param.grad` the whole gradient averaged over the group, for use before `step()`.

        The first use of a `param.grad` between `backward()` and `step()` does the same. So
        `torch.nn.utils.clip_grad_norm_` and other code written for one process works. Collective: all
        ranks of the group have to call it. If this rank updates only a part of the model, it sends
        (K−1)/K·M more elements than a step without it.
        """
        with self._during("synchronize()") as call:
            self._require_sync(call)
            self.updating.synchronize(call)

    @contextlib.contextmanager
    def unscaling(self) -> Generator[None, None, None]:
        """In the block, `param_groups` have the tensors that this rank updates, with averaged gradients.

        `GradScaler` uses it. Complex numbers appear as two reals, as torch's scaler needs them. Collective.
        """
        with self._during("unscale_()") as call:
            self._require_sync(call)
            self.updating.finish(call)
        with self.local.reals():
            yield
        self.updating.scaled()

    def require_between_steps(self, call: str) -> None:
        """Raise `UserError` for a `call` inside `averaged_model()`, or among the backward passes of a step.

        No saved state includes the gradients of backward passes whose step has not been made.
        """
        self._block.require_left(call)
        if passes := self.updating.unfinished:
            raise UserError(
                f"{call} after {passes}, whose gradients would be lost: call it after step(), or after "
                "zero_grad() where they are not to be used"
            )

    def _require_step_allowed(self) -> None:
        """Raise `UserError` for a `step()` inside `averaged_model()`, or one by torch.distributed.checkpoint.

        The latter would make an update with zeros as gradients and learning rates.
        """
        self._block.require_left("step()")
        if not any(self.rates):
            from hpcsgd.engine.torch_checkpoint import refuse_torch_checkpoint

            refuse_torch_checkpoint("step()")

    def _require_sync(self, call: Call) -> None:
        """Raise `UserError` inside `no_sync()`. Collective: ranks outside of it get the error, too."""
        if self.updating.in_no_sync:
            self.updating.finish(call)
            raise UserError(
                f"{call.name}(): gradients are not averaged there: end the block before the last backward() "
                "of a step"
            )

    def _call(self, name: str) -> Call:
        if self.updating.in_no_sync:
            name = f"{name} in no_sync"
        return Call(name, self._step.t, self.rates, self._number, self._options.digest)

    @contextlib.contextmanager
    def _during(self, name: str) -> Generator[Call, None, None]:
        """Return the call `name`, and label all messages of the block with it."""
        with doing(f"{name} of step {self._step.t + 1}{NOTES.get(name, '')}"):
            yield self._call(name)

    def _now_frozen(self) -> list[Slot]:
        """Return the parameters that are frozen now, if something other than gradients could change them."""
        s = self._step
        found = self.updating.frozen()
        if found is not None or s.topology.has_one_group:
            return found or []
        return [slot for b in s.buckets for slot in b.slots if not slot.param.requires_grad]


class Unmoved:
    """Copies of some parameters from the beginning of a step, to restore them at its end.

    The optimizer skips a parameter without a gradient, but averages and outer steps change the whole model.
    They would change a frozen parameter by the difference between groups, or by an outer step's momentum.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._before = [(slot, slot.tensor.detach().clone()) for slot in slots]

    def __bool__(self) -> bool:
        return bool(self._before)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values of the parameters."""
        for slot, before in self._before:
            slot.tensor.data.copy_(before)  # for autograd this is no write: the values are those of before
