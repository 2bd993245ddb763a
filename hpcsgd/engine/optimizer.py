"""`DistributedOptimizer`: one training step of any method, around the user's own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from hpcsgd.arguments import checked
from hpcsgd.comm.alike import require_alike
from hpcsgd.core.agreement import Agreement, Call
from hpcsgd.core.averager import vectors_of
from hpcsgd.core.flat import Bucket
from hpcsgd.core.fsdp import reshard
from hpcsgd.core.matrices import embeddings_of
from hpcsgd.core.method import Method
from hpcsgd.core.optional import begin, is_due, prepare
from hpcsgd.core.step import ReduceContext, StepContext, TrainingContext
from hpcsgd.core.topology import Topology
from hpcsgd.engine.alike import facts, facts_of_groups
from hpcsgd.engine.as_wrapped import AsWrapped
from hpcsgd.engine.averaged import Block, Buffers, GroupModel
from hpcsgd.engine.broadcasting import broadcast_buffers
from hpcsgd.engine.closures import Closure
from hpcsgd.engine.dividing import laid_out
from hpcsgd.engine.iterates import require_averaged, require_no_iterate_outside, with_modes
from hpcsgd.engine.local_update import LocalUpdate
from hpcsgd.engine.options import Options
from hpcsgd.engine.param_gather import ParamGather, gather_shards, quantized_gather, synchronize_models
from hpcsgd.engine.passing_through import PassingThrough
from hpcsgd.engine.pending_params import PendingParams
from hpcsgd.engine.reducer import GradientReducer
from hpcsgd.engine.sharding import ShardedOptimizer
from hpcsgd.engine.with_averages import WithAverages
from hpcsgd.engine.with_gradients import Unmoved, WithGradients
from hpcsgd.engine.with_state import WithState
from hpcsgd.engine.wrapping import (
    Guarded,
    communicators,
    require_free,
    require_sizes,
    share_start,
    take,
    trained_parameters,
)
from hpcsgd.torch_private import share_hooks


@checked
class DistributedOptimizer(WithAverages, WithGradients, WithState, PassingThrough, Guarded):
    """An optimizer that trains `model` with `method` on all ranks; the training loop stays the same.

    All ranks start from rank 0's parameters and buffers. `step()`, `clip_grad_norm_()`, `state_dict()` and
    `averaged_model()` are collective: all ranks have to make the same calls. Otherwise the job ends with one
    line about the difference. `optimizer`, its `param_groups` and its schedulers keep working.

    As in plain torch, a parameter is updated only if it has a gradient on some rank that shares it; for other
    ranks the gradient counts as zero. A frozen parameter (`requires_grad = False`) never changes.

    Between `backward()` and `step()`, `param.grad` is the gradient averaged over the group. Its first use
    waits for the average (see `synchronize`). Other public methods of `optimizer`, such as `eval()` of
    Schedule-Free, are available, too. They see averaged gradients and are collective over the group.

    Args:
        optimizer: A torch optimizer over parameters of `model`. If it is known to update each element or each
            tensor separately, its state is sharded: each rank has 1/K of it. Any other optimizer updates the
            whole model on every rank, which costs one more allgather.
        model: The same on all ranks, with all its parameters on their device. Combine several models in one
            nn.ModuleList, so that all their buffers and frozen parameters are shared.
        topology: The result of `init`.
        method: Method such as `hierarchical(sync_every=8)`; one per optimizer, as it may have state.
        elementwise: Overrides whether `optimizer` updates each element separately. Default None.
        tensorwise: Overrides whether it updates each tensor separately, if not elementwise. Default None.
        gradient_accumulation_steps: Backward passes before each `step()`. Default 1.
        bucket_cap_mb: Size of gradient buckets in MiB. Default None: 1/16 of the model, from 1 to 4 MB.
        overlap_grad_reduce: True: gradients are reduced during the backward pass. Default True. With False
            any number of backward passes may precede a step.
        overlap_param_gather: True: `step()` returns while parameters are gathered, and their first use waits.
            Default False. Views of parameters that were made before, such as `param.data`, cannot wait.
        master_dtype: A dtype such as torch.float32. Parameters with fewer bits are then updated through
            copies of this dtype, and the optimizer state has it, too. Default None: no copies.
        broadcast_buffers: True: after each step all ranks of a group get the buffers of its first rank.
            Default False: each rank keeps its own, and `averaged_model()` averages them.

    Raises:
        UserError: If arguments differ between ranks, or the optimizer cannot be distributed.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=8)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> for x, y in DataLoader(data, batch_size=8, sampler=hpcsgd.Sampler(data, topology)):
        ...     criterion(model(x), y).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> optimizer.t
        2
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        model: nn.Module,
        topology: Topology,
        method: Method,
        *,
        elementwise: bool | None = None,
        tensorwise: bool | None = None,
        gradient_accumulation_steps: int = 1,
        bucket_cap_mb: float | None = None,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = False,
        master_dtype: torch.dtype | None = None,
        broadcast_buffers: bool = False,
    ) -> None:
        topology, self._number = communicators(topology)
        with topology.raise_on_all_ranks("wrapping the optimizer"):
            require_sizes(gradient_accumulation_steps, bucket_cap_mb)
            require_free(topology, method, optimizer)
            self._pending_params = PendingParams(model, overlap_param_gather)
            self.trained = trained_parameters(optimizer, model, topology)
            cut_by: dict[str, Any] = {
                "elementwise": elementwise, "tensorwise": tensorwise, "bucket_cap_mb": bucket_cap_mb
            }  # fmt: skip
            mine = facts(
                optimizer, model, self.trained, method, **cut_by, broadcast_buffers=broadcast_buffers,
                gradient_accumulation_steps=gradient_accumulation_steps, master_dtype=master_dtype,
                overlap_grad_reduce=overlap_grad_reduce, overlap_param_gather=overlap_param_gather,
            )  # fmt: skip
        require_alike(topology.world, mine)
        topology.replica_groups.require_alike(facts_of_groups(model, self.trained, method))
        self.model, self.method, self._broadcasts = model, method, broadcast_buffers
        self._plan, buckets = laid_out(topology, method, optimizer, model, self.trained, **cut_by)
        self._grad_reduce, shards = self._plan.grad_reduce, self._plan.grad_reduce.traits.leaves_shards
        self._quantized_gather = quantized_gather(topology, method, self._plan)
        share_start(topology, buckets, model, self.trained)
        cut = shards and (topology.group_size > 1 or self._plan.is_fsdp)
        require_averaged(topology, method, optimizer, cut=cut)
        self._has_modes = bool(with_modes(optimizer))  # asking again takes as long as a short message
        self.local = ShardedOptimizer(optimizer, buckets, topology.intra_group, cut=cut, master=master_dtype)
        self._everyone, self._shared = Agreement(topology.world), Agreement.of_group(topology)
        Agreement.of_position(topology)  # makes its communicator now, which is collective
        self._reducer = None
        if not self._grad_reduce.idle(topology):
            self._reducer = GradientReducer(
                self._grad_reduce, buckets,
                lambda: ReduceContext(self._step.fixed, self.t + 1, self.rates, self._step.metrics),
                # A method that switches to another one may average gradients across groups only at first.
                lambda: self._everyone if self._grad_reduce.traits.across else self._shared,
                self._call, topology.intra_group,
                passes=gradient_accumulation_steps, overlap=overlap_grad_reduce,
                remembers=method.grad_reduce.traits.keeps_gradients,
            )  # fmt: skip
        self.updating = LocalUpdate(self.local, self._reducer, per_bucket=self._plan.update_per_bucket)
        self.updating.accumulate(gradient_accumulation_steps)
        self._block = Block()
        self._group_model = GroupModel(model, buckets, topology, self._block)
        fixed = TrainingContext(
            topology, buckets, self.local, Buffers(model), shards, self.reduces_grads, embeddings_of(model)
        )
        self._step = StepContext(fixed)
        self._notes: dict[str, float] = {}
        self._options = Options(optimizer.param_groups)
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        share_hooks(optimizer, self)
        self._laid_out = True
        self.state = optimizer.state
        self._pass_methods()
        self._as_wrapped = AsWrapped(self, self.local, model, buckets, topology.world)
        take(method, self, model)

    @property
    def t(self) -> int:
        """Number of updates so far."""
        return self._step.t

    @property
    def metrics(self) -> dict[str, float]:
        """The method's metrics of the last step, such as `distance` if that step had a synchronization."""
        return self._notes

    @property
    def topology(self) -> Topology:
        """This rank's place among the groups."""
        return self._step.topology

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The model as flat vectors."""
        return self._in_place.buckets

    @property
    def reduces_grads(self) -> bool:
        """True if gradients are reduced; otherwise they stay in each rank's `param.grad`."""
        return self._reducer is not None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, loss: float | Tensor | None = None) -> Any:
        """Reduce gradients, update, and average models if the method's schedule says so; collective.

        Args:
            closure: Computes the loss and its gradients, and returns the loss. An unknown optimizer may call
                it several times: each call returns the mean loss and averages the gradients.
            loss: Loss of this rank's batch, for methods that use it, if no `closure` returns it.

        Returns:
            The loss of this rank's batch, or what an unknown optimizer returns for a `closure`.
        """
        self._require_step_allowed()
        self._require_train_mode()
        passed, loss = self._passed(closure, loss)
        with self._during("step()") as call:
            self._update(call, loss, passed)
        return loss if passed is None else passed.returned

    def ready_for(self, call: str, *, across: bool = True) -> StepContext:
        """Require one `call` on all ranks (`across` groups, too). Collective.

        Returns:
            The step, with all parameters gathered.
        """
        with self._during(call) as made:
            self.updating.settle(made)
            if not self._grad_reduce.traits.across:
                self._shared.reach(made)
            if across or self._grad_reduce.traits.across:
                self._everyone.reach(made)
        return self._in_place

    def gather_parameters(self) -> None:
        """Gather every rank's model from the shards of its group; collective over the group."""
        gather_shards(self.ready_for("gather_parameters()", across=False))

    def _update(self, call: Call, loss: float | Tensor | None, passed: Closure | None) -> None:
        s, traits = self._in_place, self._grad_reduce.traits
        self._as_wrapped.require(call, self._everyone)
        self._require_sync(call)
        if s.t == 0 and not s.topology.has_one_group and not traits.across:
            require_no_iterate_outside(self.local.optimizer, self.local.known)
        unmoved = Unmoved(self._now_frozen())
        self.updating.ready(call)
        s.t, s.in_step, s.rates, s.left_out = s.t + 1, True, call.rates, ()
        s.loss = loss.detach() if isinstance(loss, Tensor) else loss
        param_gather = ParamGather(s, traits.leaves_shards, self._quantized_gather, self._pending_params)
        prepare(averager := self.method.averager, self._vectors, s)
        updated: Iterable[Bucket] = self.updating(s.buckets, passed)  # yields each once it is updated
        if not self._plan.decided_before_update:
            updated = list(updated)
        syncs_now = self._syncs_now()
        # Both use inter_group, so all ranks must issue the collectives of gradients first.
        if syncs_now and traits.across:
            updated = list(updated)
        if syncs_now:
            synchronize_models(s, averager, param_gather, updated, has_modes=self._has_modes)
        else:
            for bucket in updated:
                param_gather.shards_are_final([bucket])
            if not s.topology.has_one_group:
                begin(averager, self._vectors, s)
        if not traits.across:
            self._group_model.updated(averager.traits.waits, synced=syncs_now)
        if (syncs_now or traits.across) and s.topology.num_groups > 1 and "distance" not in s.metrics:
            s.metrics["grads_shared"] = 1.0
        param_gather.finish()
        if unmoved:
            self._pending_params.finish()
            unmoved.restore()
        if self._broadcasts:
            broadcast_buffers(self.model, s.topology.intra_group)
        self._take_metrics()
        self.updating.start_over()

    @property
    def _in_place(self) -> StepContext:
        """The step, once all of w is gathered and FSDP has discarded its copies."""
        self._pending_params.finish()
        if self._plan.is_fsdp:
            reshard(self.model)
        return self._step

    @property
    def _vectors(self) -> list[Tensor]:
        """The vectors that the averager averages."""
        return list(vectors_of(self.method.averager, self._step.buckets))

    def _syncs_now(self) -> bool:
        """Return whether groups average after this update; the same on all ranks."""
        s = self._step
        return not s.topology.has_one_group and is_due(self.method.averager, s, self.method.schedule(s))

    def _take_metrics(self) -> None:
        """Publish this step's metrics; from now on a reduction may add metrics of the next step."""
        self._notes, self._step.metrics, self._complete = self._step.metrics, {}, None
