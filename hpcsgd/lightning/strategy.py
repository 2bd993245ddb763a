"""`HpcsgdStrategy`: Lightning's Trainer with a `DistributedOptimizer` around each optimizer of the module."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast, final

import lightning.pytorch as lightning
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from hpcsgd.arguments import checked
from hpcsgd.core.generators import load_generators_state
from hpcsgd.core.method import Method
from hpcsgd.core.topology import Topology
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.errors import UserError, near_miss
from hpcsgd.lightning import checkpoints, loaders, signals
from hpcsgd.lightning.averaged_model import AveragedModel
from hpcsgd.lightning.environment import TopologyEnvironment
from hpcsgd.lightning.metrics import STRATEGY
from hpcsgd.lightning.precision import for_groups
from hpcsgd.methods.bsp import bsp
from hpcsgd.start import init

_BY_TRAINER = {"gradient_accumulation_steps": "Trainer(accumulate_grad_batches=…)"}
_OPTIONS = [
    p.name for p in inspect.signature(DistributedOptimizer).parameters.values() if p.kind is p.KEYWORD_ONLY
]


@checked
@final
class HpcsgdStrategy(DDPStrategy):
    """A strategy for Lightning's Trainer that trains an unchanged LightningModule in groups of ranks.

    A launcher such as mpiexec, srun or torchrun starts the ranks. The strategy makes their topology, and puts
    a `DistributedOptimizer` around each optimizer of the module. The Trainer's clipping, accumulation and
    precision go through it. Evaluations use the mean of the groups' models, and `fit()` leaves that mean in
    the module. All ranks write a checkpoint together, and training resumes from it with the same bits.

    Args:
        method: A method such as `hpcsgd.hierarchical(sync_every=8)`, or a function that makes one. A module
            with several optimizers needs a function, because each optimizer has its own method. Default bsp.
        groups: Number of groups (P). It must divide the number of ranks. Default None: one group.
        group_size: Ranks per group (K), instead of `groups`. Default None.
        timeout_s: Seconds that a rank waits for the others before the job ends. Default 600.0.
        device_backend: As for `init`. Default None.
        backend: "mpi", "gloo" or "auto", as for `init`. Default 'auto'.
        options: Other arguments of `DistributedOptimizer`, such as `bucket_cap_mb`. In manual optimization
            `overlap_grad_reduce` is False unless you give it.

    Raises:
        UserError: If an argument is wrong, or the ranks do not connect. Later, if the Trainer's devices and
            nodes are not the ranks that were started, or an optimizer cannot be distributed.

    Example:
        >>> import hpcsgd.lightning
        >>> strategy = hpcsgd.lightning.HpcsgdStrategy(lambda: hpcsgd.hierarchical(sync_every=8), groups=2)
        >>> strategy.topology.num_groups
        2
    """

    strategy_name = STRATEGY

    def __init__(
        self,
        method: Method | Callable[[], Method] = bsp,
        groups: int | None = None,
        group_size: int | None = None,
        *,
        timeout_s: float = 600.0,
        device_backend: Mapping[str, str] | None = None,
        backend: str = "auto",
        **options: Any,
    ) -> None:
        _require_options(options)
        self.topology: Topology = init(
            groups, group_size, timeout_s=timeout_s, device_backend=device_backend, backend=backend
        )
        """The groups, for an `hpcsgd.Sampler`."""
        self._method, self._options = method, options
        self._averaged_model = AveragedModel()
        self._generators: Any | None = None
        super().__init__(cluster_environment=TopologyEnvironment(self.topology))

    # Ranks and devices.

    @property
    def root_device(self) -> torch.device:
        """The device of this rank's model."""
        assert self.parallel_devices is not None
        device = self.parallel_devices[self.local_rank]
        if device.type != "cpu" and device != self.topology.device:
            raise UserError(
                f"Trainer(devices=…) gives this rank {device}, and hpcsgd uses {self.topology.device}: "
                "choose devices by CUDA_VISIBLE_DEVICES, and give their number"
            )
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of ranks and this rank, for the samplers that Lightning makes."""
        return {"num_replicas": self.topology.world_size, "rank": self.topology.rank}

    def setup_distributed(self) -> None:
        """Make the default group of torch.distributed, which Lightning and torchmetrics use."""
        reset_seed()
        self.set_world_ranks()
        self.topology.mesh(self.root_device.type)

    def process_dataloader(self, dataloader: object) -> object:
        """Return `dataloader`; if it is for training and has no length, it ends on all ranks together."""
        loaders.require_whole_sampler(dataloader)
        return loaders.for_training(dataloader, self.topology) if self._trainer.training else dataloader

    # Model, optimizers, gradients.

    def configure_ddp(self) -> None:
        """Leave the module as it is: the optimizers communicate."""

    def setup_optimizers(self, trainer: lightning.Trainer) -> None:
        """Put a `DistributedOptimizer` around each optimizer of the module."""
        super().setup_optimizers(trainer)
        self._averaged_model.forget()
        module, given, self.optimizers = self._module, self.optimizers, []
        if not callable(self._method) and len(given) > 1:
            raise UserError(
                f"method: the module has {len(given)} optimizers, and each needs a method of its own: give a "
                "function that makes one, such as lambda: hpcsgd.hierarchical(sync_every=8)"
            )
        options = {"overlap_grad_reduce": module.automatic_optimization, **self._options}
        self.optimizers = [
            DistributedOptimizer(optimizer, module, self.topology, self._made_method(), **options)
            for optimizer in given
        ]

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """In the block, backward passes add up on each rank: the Trainer accumulates their gradients."""
        with contextlib.ExitStack() as stack:
            for optimizer in self._distributed:
                stack.enter_context(optimizer.no_sync())
            yield

    def _made_method(self) -> Method:
        """Return a method without state: a second `fit()` starts anew."""
        return self._method() if callable(self._method) else copy.deepcopy(self._method)

    @property
    def precision_plugin(self) -> Precision:
        """The precision plugin, which clips the gradient of the group."""
        return self._precision_plugin or for_groups(Precision())

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else for_groups(precision_plugin)

    def on_train_start(self) -> None:
        """Let SIGTERM end this rank, and continue with the random numbers of a checkpoint within an epoch."""
        signals.without_handler_of_lightning()
        self._load_generators()

    # Evaluation.

    def on_validation_start(self) -> None:
        """Validate the averaged model during `fit()`. Later the module is the averaged model anyway."""
        signals.without_handler_of_lightning()
        if self._is_fitting:
            self._averaged_model.show(self._distributed)

    def on_validation_end(self) -> None:
        """Continue with each group's own model."""
        if self._is_fitting:
            self._averaged_model.hide()

    def on_test_start(self) -> None:
        """Let SIGTERM end this rank."""
        signals.without_handler_of_lightning()

    def on_predict_start(self) -> None:
        """Let SIGTERM end this rank."""
        signals.without_handler_of_lightning()

    def on_train_end(self) -> None:
        """Leave the averaged model in the module."""
        self._averaged_model.keep(self._module, self._distributed)

    def teardown(self) -> None:
        """End the training on this rank alone: another rank may have raised an exception."""
        self._averaged_model.hide()
        for optimizer in self._distributed:
            for _, param in optimizer.trained:
                param.grad = None  # Lightning moves gradients to the CPU, a use that would average them first
        super().teardown()

    # Checkpoints: all ranks call these.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the averaged model's state; collective."""
        return self._averaged_model.state_dict(self._module, self._distributed)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return nothing: `save_checkpoint` writes each rank's part of the state."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint`, and next to it each rank's part of models and optimizers; collective."""
        if checkpoint.get("optimizer_states"):
            with self._averaged_model.left(self._distributed):
                for optimizer in self._distributed:
                    optimizer.ready_for("save_checkpoint()")
                recorded = checkpoints.write(filepath, self.topology, self._distributed)
            epoch: Any = self._trainer.fit_loop.epoch_progress.current
            within_epoch = epoch.processed < epoch.ready
            checkpoint = {**checkpoint, checkpoints.KEY: {**recorded, "within_epoch": within_epoch}}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return Lightning's part of a checkpoint."""
        return checkpoints.locate(super().load_checkpoint(checkpoint_path, weights_only), checkpoint_path)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore each rank's part, or the optimizers' states of another strategy; collective."""
        if checkpoints.KEY not in checkpoint:
            super().load_optimizer_state_dict(checkpoint)
            return
        recorded = checkpoint[checkpoints.KEY]
        self._generators = checkpoints.read(recorded, self.topology, self._distributed)
        if not recorded["within_epoch"]:
            self._load_generators()
        if self._trainer.fit_loop.skip:  # no step is left, so that Lightning will not call on_train_end
            self._averaged_model.keep(self._module, self._distributed)

    def _load_generators(self) -> None:
        """Restore this rank's random generators.

        Before training continues, Lightning begins to read the training data, which draws a random number.
        After an epoch, the training that was saved went on in the same way; within an epoch it did not.
        """
        generators, self._generators = self._generators, None
        if generators is not None:
            load_generators_state(generators, self.root_device)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, with the parts of all ranks."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            checkpoints.remove(filepath)

    @property
    def _module(self) -> lightning.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> lightning.Trainer:
        return self._module.trainer

    @property
    def _is_fitting(self) -> bool:
        return self._trainer.state.fn == TrainerFn.FITTING

    @property
    def _distributed(self) -> list[DistributedOptimizer]:
        return cast("list[DistributedOptimizer]", self.optimizers)


def _require_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in _BY_TRAINER:
            raise UserError(f"HpcsgdStrategy has no argument {name!r}: give {_BY_TRAINER[name]}", key=name)
        if name not in _OPTIONS:
            own = inspect.signature(HpcsgdStrategy).parameters.keys() - {"options"}
            hint = near_miss(name, {*own, *_OPTIONS} - _BY_TRAINER.keys())
            raise UserError(f"HpcsgdStrategy has no argument {name!r}; {hint}", key=name)
