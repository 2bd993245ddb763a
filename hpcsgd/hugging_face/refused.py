"""What is refused: other ways to train one model on several processes, and calls at a wrong time.

Arguments without an effect are warned of.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import nn

from hpcsgd.errors import UserError

log = logging.getLogger(__name__)

OF_DDP = (
    "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph",
)  # fmt: skip
"""The `TrainingArguments` for torch's `DistributedDataParallel`, which are None by default."""


def require_plain(call: str, model: object) -> None:
    """Raise `UserError` for a model inside a wrapper that averages gradients by itself."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # takes a second to import

    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)
    if isinstance(model, wrappers):
        raise UserError(
            f"{call}: the model is inside {type(model).__name__}, which would average gradients over all "
            "ranks: give the model without it"
        )


def require_left_out(call: str, given: Mapping[str, object]) -> None:
    """Raise `UserError` if one of the arguments `given` has a value: hpcsgd does what they are for."""
    for name, value in given.items():
        if value:
            raise UserError(
                f"{call}: {name} is another way to train on several processes: leave it out, hpcsgd trains "
                "the groups"
            )


def warn_of_ddp(args: object) -> None:
    """Log a warning for each of the `TrainingArguments` that is for `DistributedDataParallel` alone."""
    for name in OF_DDP:
        if getattr(args, name, None) is not None:
            log.warning(
                "TrainingArguments: %s has no effect: there is no DistributedDataParallel; `options` has the "
                "arguments of DistributedOptimizer",
                name,
            )


def require_last_pass(call: str, sync_gradients: bool) -> None:
    """Raise `UserError` for a `call` after a backward pass that is not the last one of a step.

    `sync_gradients` is Accelerate's: True if the pass was the last one.
    """
    if not sync_gradients:
        raise UserError(
            f"{call}: the gradients are not averaged yet, because another backward pass of this step "
            "follows: call it if accelerator.sync_gradients"
        )
