"""What is refused: other ways to train one model on several processes, and calls at a wrong time."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hpcsgd.errors import UserError


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


def require_last_pass(call: str, sync_gradients: bool) -> None:
    """Raise `UserError` for a `call` after a backward pass that is not the last one of a step.

    `sync_gradients` is Accelerate's: True if the pass was the last one.
    """
    if not sync_gradients:
        raise UserError(
            f"{call}: the gradients are not averaged yet, because another backward pass of this step "
            "follows: call it if accelerator.sync_gradients"
        )
