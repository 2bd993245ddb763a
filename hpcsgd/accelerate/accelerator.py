"""Accelerate's `Accelerator` whose optimizers are those of hpcsgd."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import accelerate
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from hpcsgd.accelerate.models import model_of, trained
from hpcsgd.arguments import checked
from hpcsgd.core.method import Method
from hpcsgd.core.topology import Topology
from hpcsgd.engine.alike import is_ours
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.engine.scaling import GradScaler
from hpcsgd.errors import UserError
from hpcsgd.hugging_face import group_state
from hpcsgd.hugging_face.ranks import require_same_ranks, show_ranks, topology_of
from hpcsgd.hugging_face.refused import require_last_pass, require_left_out, require_plain

log = logging.getLogger(__name__)

OTHER_WAYS = (
    "deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config",
    "torch_tp_plugin",
)  # fmt: skip
"""Arguments of Accelerate that train one model on several processes."""
Wrapper = Callable[..., AcceleratedOptimizer]


@checked
class Accelerator(accelerate.Accelerator):
    """A replacement for `accelerate.Accelerator` that trains with a method of hpcsgd.

    `prepare` puts no `DistributedDataParallel` around a model. It puts a `DistributedOptimizer` around each
    optimizer instead. Everything else stays as in Accelerate: `backward`, `accumulate`, `clip_grad_norm_`,
    `gather_for_metrics`, data loaders that are divided among the ranks.

    Between two synchronizations each group has a model of its own. Evaluate inside `averaged_model()`.
    `save_state`, `save_model` and `get_state_dict` are collective and save the average. In addition
    `save_state` saves the state of each group, from which `load_state` continues to the same bits.

    Args:
        method: Method such as `hierarchical(sync_every=8)`. Each optimizer gets a copy.
        groups: Number of groups, as for `hpcsgd.init`, if there is no `topology`. Default None.
        topology: The result of `hpcsgd.init`, instead of `groups`. Default None.
        options: Further arguments of `DistributedOptimizer`, by their names. Default None.
        arguments: Arguments of `accelerate.Accelerator`, by their names.

    Raises:
        UserError: If both or neither of `groups` and `topology` are given, Accelerate has been initialized
            with other ranks, or an argument is for DeepSpeed, FSDP, Megatron-LM or another such way.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=8)
        >>> accelerator = hpcsgd.accelerate.Accelerator(topology=topology, method=method)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
        >>> for x, y in loader:
        ...     accelerator.backward(criterion(model(x), y))
        ...     accelerator.clip_grad_norm_(model.parameters(), 1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        *,
        method: Method,
        groups: int | None = None,
        topology: Topology | None = None,
        options: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        topology = topology_of("Accelerator", topology, groups)
        with topology.raise_on_all_ranks("making the Accelerator"):
            require_left_out("Accelerator", {name: arguments.get(name) for name in OTHER_WAYS})
        show_ranks(topology, cpu=arguments.get("cpu", False))
        super().__init__(**arguments)
        self.train_with(topology, method, options)

    def train_with(
        self,
        topology: Topology,
        method: Method,
        options: Mapping[str, Any] | None = None,
        *,
        wrapper: Wrapper = AcceleratedOptimizer,
    ) -> None:
        """Train with `method` on `topology`, with the `options` of the constructor; collective.

        It is called before anything is prepared. `wrapper` makes a prepared optimizer.
        """
        self.topology, self._method, self._options = topology, method, options or {}
        self._wrapper = wrapper
        self._averaged, self._loaded_from = False, Path()
        remedy = "make it before any other object of Accelerate"
        require_same_ranks(topology, self.process_index, self.num_processes, remedy)
        with topology.raise_on_all_ranks("making the Accelerator"):
            plugins = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin")
            require_left_out("accelerate launch", {name: getattr(self.state, name, None) for name in plugins})
        if self.scaler is not None:
            settings = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            self.scaler = GradScaler(self.device.type, **settings)
        if self.mixed_precision == "fp16" and self.scaler is None and topology.rank == 0:
            log.warning("fp16 on a CPU: Accelerate trains in float32; bf16 is available there")
        self.register_load_state_pre_hook(self._note_folder)

    @property
    def distributed_optimizers(self) -> Sequence[DistributedOptimizer]:
        """The `DistributedOptimizer` inside each prepared optimizer, in the order of `prepare`."""
        return [cast(DistributedOptimizer, each.optimizer) for each in self._optimizers]

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare the objects in `args` as Accelerate does, models first; collective.

        `device_placement` says for each object whether it is moved to the device.
        """
        placed: Sequence[bool | None] = device_placement or [None] * len(args)
        ready = [
            super(Accelerator, self).prepare(each, device_placement=[place])
            if isinstance(each, nn.Module)
            else each
            for each, place in zip(args, placed, strict=True)
        ]
        return super().prepare(*ready, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare `model` as Accelerate does for an evaluation, that is, without a wrapper around it.

        `evaluation_mode` makes no difference. The model is moved to the device, unless `device_placement` is
        False. Prepare it before its optimizer, because a trained model cannot be moved.
        """
        require_plain("prepare()", model)
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Prepare `data_loader` as Accelerate does, which divides its batches among all ranks."""
        if is_ours(data_loader.sampler):
            raise UserError(
                "prepare(): the hpcsgd.Sampler of the DataLoader divides the samples already, and Accelerate "
                "would divide them again: use the DataLoader unprepared, or without that sampler"
            )
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_optimizer(
        self, optimizer: optim.Optimizer, device_placement: bool | None = None
    ) -> optim.Optimizer:
        """Put a `DistributedOptimizer` around `optimizer`, whose model has been prepared; collective.

        `device_placement` makes no difference: the state of the optimizer is where its parameters are.
        """
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement=False)
        distributed = DistributedOptimizer(
            optimizer, model_of(optimizer, self._plain_models()), self.topology, copy.deepcopy(self._method),
            **self._options,
        )  # fmt: skip
        prepared = self._wrapper(distributed, device_placement=False, scaler=self.scaler)
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare `scheduler`, made for an optimizer before or after `prepare`, as Accelerate does."""
        prepared: Any = super().prepare_scheduler(scheduler)
        for each, distributed in zip(self._optimizers, self.distributed_optimizers, strict=True):
            if prepared.scheduler.optimizer is distributed.local.optimizer:
                prepared.optimizers = [each]
        return prepared

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None, None, None]:
        """Return a context for backward passes of `model` that are not the last one of a step.

        Inside it gradients add up on each rank. The first backward pass after it reduces them.
        """
        params = set(model.parameters())
        with contextlib.ExitStack() as stack:
            for optimizer in self.distributed_optimizers:
                if trained(optimizer) & params:
                    stack.enter_context(optimizer.no_sync())
            yield

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Scale the averaged gradients of `parameters` to a norm of at most `max_norm`; return the norm.

        `norm_type` is the order of the norm. Collective over the group. For all parameters of one optimizer
        the norm is computed from the shards, without gathering gradients.
        """
        require_last_pass("clip_grad_norm_()", self.sync_gradients)
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        theirs = [each for each in self.distributed_optimizers if trained(each) & set(given)]
        if len(theirs) == 1 and trained(theirs[0]) <= set(given):
            self.unscale_gradients()
            return theirs[0].clip_grad_norm_(max_norm, norm_type)
        plain: Any = super()  # its annotations allow less than it does
        return plain.clip_grad_norm_(given, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip each element of the averaged gradients of `parameters` to at most `clip_value`; collective."""
        require_last_pass("clip_grad_value_()", self.sync_gradients)
        plain: Any = super()  # its annotations allow less than it does
        plain.clip_grad_value_(parameters, clip_value)

    @contextlib.contextmanager
    def averaged_model(self) -> Generator[None, None, None]:
        """Make all prepared models the average over the groups inside the block; collective.

        It is `DistributedOptimizer.averaged_model` of every optimizer. A block inside a block does nothing.
        """
        if self._averaged:
            yield
            return
        with contextlib.ExitStack() as stack:
            for optimizer in self.distributed_optimizers:
                stack.enter_context(optimizer.averaged_model())
            self._averaged = True
            try:
                yield
            finally:
                self._averaged = False

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the state of `model`, averaged over the groups; collective.

        `unwrap`: return the state of the model itself, also if it is compiled. The tensors are copies.
        """
        if self._averaged:
            return super().get_state_dict(model, unwrap)
        with self.averaged_model():
            return copy.deepcopy(super().get_state_dict(model, unwrap))  # tied weights stay tied

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **more: Any) -> Any:
        """Save a checkpoint in `output_dir`, as Accelerate does; collective, between two steps.

        The model in it is the average of all groups. A folder `hpcsgd` inside it has what each group needs to
        continue: its model, its optimizer state and the state of the method.
        """
        optimizers = self.distributed_optimizers
        for optimizer in optimizers:
            optimizer.require_between_steps("save_state()")
        with self.averaged_model(), self._without_optimizers():
            folder = super().save_state(output_dir, safe_serialization, **more)
        if optimizers:
            group_state.write(Path(folder), optimizers, "save_state()")
        return folder

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **more: Any
    ) -> None:
        """Continue from a checkpoint of `save_state` in `input_dir`; collective, between two steps.

        On the same P × K each rank gets its own state back, to the bit. On another P × K all groups start
        from the average. `load_kwargs` is as in Accelerate.
        """
        optimizers = self.distributed_optimizers
        for optimizer in optimizers:
            optimizer.require_between_steps("load_state()")
        with self._without_optimizers():
            super().load_state(input_dir, load_kwargs, **more)
        if optimizers:
            group_state.restore_all(self._loaded_from, optimizers, "load_state()")

    def _note_folder(self, models: Sequence[nn.Module], folder: str) -> None:
        self._loaded_from = Path(folder)

    @contextlib.contextmanager
    def _without_optimizers(self) -> Generator[None, None, None]:
        """Hide the optimizers from Accelerate, which would save the state of rank 0 for all ranks."""
        hidden, self._optimizers = self._optimizers, []
        try:
            yield
        finally:
            self._optimizers = hidden

    def _plain_models(self) -> list[nn.Module]:
        return [self.unwrap_model(each, keep_torch_compile=False) for each in self._models]


def taken_over(accelerator: accelerate.Accelerator) -> Accelerator:
    """Return `accelerator`, which has prepared nothing yet, as one of hpcsgd: call its `train_with` next.

    The Trainer makes its Accelerator itself, with arguments and attributes of its own, and refers to its
    methods. Therefore the same object gets another class.
    """
    accelerator.__class__ = Accelerator
    return cast(Accelerator, accelerator)
