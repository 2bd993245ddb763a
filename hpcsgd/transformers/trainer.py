"""Hugging Face's `Trainer` with the methods of hpcsgd, and the mixin that makes it so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from accelerate.optimizer import AcceleratedOptimizer
from transformers.trainer_utils import get_last_checkpoint

from hpcsgd.accelerate.accelerator import Accelerator, taken_over
from hpcsgd.arguments import checked
from hpcsgd.core.method import Method
from hpcsgd.core.topology import Topology
from hpcsgd.errors import UserError
from hpcsgd.hugging_face import group_state
from hpcsgd.hugging_face.ranks import require_same_ranks, topology_of
from hpcsgd.hugging_face.refused import require_left_out, require_plain, warn_of_ddp

if TYPE_CHECKING:
    Base = transformers.Trainer
else:
    Base = object

OTHER_WAYS = ("fsdp", "deepspeed", "parallelism_config")
NOTE = "saved by hpcsgd"
FULL_EVAL = ("bf16_full_eval", "fp16_full_eval")


@checked
class TrainerMixin(Base):
    """Makes a class derived from `transformers.Trainer` train with a method of hpcsgd.

    It goes before that class, such as trl's `SFTTrainer`, in the list of base classes. See `Trainer` for what
    changes.

    Args:
        model: As in `transformers.Trainer`. Default None.
        args: The `TrainingArguments`, made after `hpcsgd.transformers.init`. Default None.
        positional: Further arguments of the other class, in order.
        method: Method such as `hierarchical(sync_every=8)`. Each optimizer gets a copy.
        groups: Number of groups, if there is no `topology`. This needs ranks that torchrun has started.
            Default None.
        topology: The result of `hpcsgd.transformers.init`, instead of `groups`. Default None.
        options: Further arguments of `DistributedOptimizer`, by their names. Default None.
        by_name: Further arguments of the other class, by their names.

    Raises:
        UserError: If both or neither of `groups` and `topology` are given, `args` were made for other ranks,
            or they ask for another way to train on several processes, such as DeepSpeed or FSDP.

    Example:
        >>> class SFTTrainer(hpcsgd.transformers.TrainerMixin, trl.SFTTrainer):
        ...     pass
    """

    accelerator: Accelerator

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *positional: Any,
        method: Method,
        groups: int | None = None,
        topology: Topology | None = None,
        options: Mapping[str, Any] | None = None,
        **by_name: Any,
    ) -> None:
        self.topology = topology_of("Trainer", topology, groups)
        self._method, self._options = method, options
        with self.topology.raise_on_all_ranks("making the Trainer"):
            require_plain("Trainer", model)
            _require_possible(args)
        if self.topology.rank == 0:
            warn_of_ddp(args)
        super().__init__(model, args, *positional, **by_name)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator as the Trainer does, and turn it into one of hpcsgd; collective."""
        super().create_accelerator_and_postprocess()
        remedy = "call hpcsgd.transformers.init before TrainingArguments, and give its result as topology="
        require_same_ranks(self.topology, self.args.process_index, self.args.world_size, remedy)
        self.accelerator = taken_over(self.accelerator)
        self.accelerator.train_with(
            self.topology, self._method, self._options,
            wrapper=partial(_CheckpointedOptimizer, restore=self._restore),
        )  # fmt: skip

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, with its arguments; collective.

        `resume_from_checkpoint` is the folder of a checkpoint, or True for the last one in the output folder.
        """
        last = resume_from_checkpoint is True
        folder = get_last_checkpoint(self.args.output_dir) if last else resume_from_checkpoint
        self._resumed_from = Path(folder or "")
        return super().train(folder or resume_from_checkpoint, *args, **kwargs)

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Make one backward pass as the Trainer does; one without a step after it averages no gradients.

        At the end of an epoch of unknown length, such a pass is the last one, and the next epoch adds to it.
        """
        if self.accelerator.sync_gradients:
            return super().training_step(model, *args, **kwargs)
        with self.accelerator.no_sync(model):
            return super().training_step(model, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate the average of all groups' models, with the arguments of the Trainer; collective."""
        with self._averaged():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict by the average of all groups' models, with the arguments of the Trainer; collective."""
        with self._averaged():
            return super().predict(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the average of all groups' models in `output_dir`; collective.

        Rank 0 writes it, but all ranks must call this. In a checkpoint each rank also saves its part of the
        state of its group.
        """
        with self._averaged():
            super().save_model(output_dir, _internal_call)
        if _internal_call and output_dir is not None and not self.args.save_only_model:
            optimizers = self.accelerator.distributed_optimizers
            group_state.write(Path(output_dir), optimizers, "saving a checkpoint")

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        return self.accelerator.averaged_model()

    def _restore(self) -> None:
        optimizers = self.accelerator.distributed_optimizers
        group_state.restore_all(self._resumed_from, optimizers, "resume_from_checkpoint")


@checked
class Trainer(TrainerMixin, transformers.Trainer):
    """A replacement for `transformers.Trainer` that trains with a method of hpcsgd.

    `TrainingArguments`, callbacks, data collators and samplers stay as they are. No `DistributedDataParallel`
    is put around the model; the optimizer is inside a `DistributedOptimizer`. Clipping uses the gradient that
    is averaged over the group. `evaluate`, `predict` and `save_model` use the average of all groups' models,
    and all ranks must call them.

    A checkpoint has the average as its model, and a folder `hpcsgd` with the model, optimizer state and
    method state of each group. `resume_from_checkpoint` continues from that to the same bits, or on another
    number of groups or ranks from the average. It also loads a checkpoint of `transformers.Trainer`.

    Args:
        model: As in `transformers.Trainer`. Default None.
        args: The `TrainingArguments`, made after `hpcsgd.transformers.init`. Default None.
        positional: Further arguments of `transformers.Trainer`, in order.
        method: Method such as `hierarchical(sync_every=8)`. Each optimizer gets a copy.
        groups: Number of groups, if there is no `topology`. This needs ranks that torchrun has started.
            Default None.
        topology: The result of `hpcsgd.transformers.init`, instead of `groups`. Default None.
        options: Further arguments of `DistributedOptimizer`, by their names. Default None.
        by_name: Further arguments of `transformers.Trainer`, by their names.

    Raises:
        UserError: As `TrainerMixin`.

    Example:
        >>> topology = hpcsgd.transformers.init(groups=2)
        >>> args = transformers.TrainingArguments("out")
        >>> method = hpcsgd.hierarchical(sync_every=8)
        >>> trainer = hpcsgd.transformers.Trainer(model, args, topology=topology, method=method)
        >>> trainer.train()
    """


class _CheckpointedOptimizer(AcceleratedOptimizer):
    """A prepared optimizer whose state is in the folder of the groups, and not in `optimizer.pt`.

    The Trainer saves `state_dict()` on rank 0 alone, which has only a part of the state. `restore` is called
    on all ranks when the Trainer loads that file. A checkpoint of a Trainer without hpcsgd has the whole
    state in it.
    """

    def __init__(self, *args: Any, restore: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._restore = restore

    def state_dict(self) -> dict[str, Any]:
        """Return a note; `state_dict()` of the `DistributedOptimizer` inside returns the state."""
        return {NOTE: f"the folder {group_state.FOLDER!r} has the state of the optimizer"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from the folder if `state_dict` is a note, else load it."""
        if NOTE in state_dict:
            self._restore()
        else:
            super().load_state_dict(state_dict)


def _require_possible(args: Any) -> None:
    require_left_out("TrainingArguments", {name: getattr(args, name, None) for name in OTHER_WAYS})
    for name in FULL_EVAL:
        if getattr(args, name, False):
            raise UserError(
                f"TrainingArguments: {name} converts the parameters of the trained model: leave it out; "
                f"{name[:4]} evaluates with this precision, too",
                key=name,
            )
