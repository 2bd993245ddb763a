"""Raise errors if torch.distributed.checkpoint saves or loads the state of a `DistributedOptimizer`.

If tensors on several ranks have the same name, torch.distributed.checkpoint takes them for copies of one
tensor, and saves that of one rank only. But each group has an optimizer state and a model of its own, under
the same names as the other groups. `get_state_dict` of torch.distributed.checkpoint also leaves out the state
of the method. If the optimizer has no state yet, `get_state_dict` makes a step with zeros as gradients.

Adding the number of the group to each name would not solve this. `get_state_dict` looks up each name in the
model's state as an attribute of a module, so the names of a model cannot be changed.

Inside `averaged_model()`, where all groups have the same model, torch.distributed.checkpoint can save the
model.
"""

from __future__ import annotations

import inspect
from typing import Any, NoReturn, Self

from hpcsgd.errors import UserError

_CALLERS = 16
"""Number of stack frames to search for the caller: some are functions that torch puts around methods."""


def refuse_torch_checkpoint(call: str) -> None:
    """Raise `UserError` if torch.distributed.checkpoint is among the callers of this function.

    `call` is the method of the `DistributedOptimizer` that torch has called, as text for the error.
    """
    frame = inspect.currentframe()
    for _ in range(_CALLERS):
        if frame is None:
            return
        if str(frame.f_globals.get("__name__")).startswith("torch.distributed.checkpoint"):
            raise UserError(
                f"torch.distributed.checkpoint calls {call} of a DistributedOptimizer, whose state differs "
                "between groups and includes that of the method: call hpcsgd.save(folder, optimizer) in "
                "place of get_state_dict and save, and hpcsgd.load(folder, optimizer) in place of load and "
                "set_state_dict"
            )
        frame = frame.f_back


class OwnedByOneRank:
    """An entry of a `state_dict()` that makes torch.distributed.checkpoint raise an error when it saves it.

    torch.distributed.checkpoint calls `__create_write_items__` of a value that has this method before it
    writes the value. `torch.save` writes an empty set in place of this object, because
    `torch.load(weights_only=True)` can read that.
    """

    def __create_write_items__(self, fqn: str, _: object) -> NoReturn:
        """Raise `UserError`, because torch is about to save a `state_dict()`. `fqn` is this entry's name."""
        raise UserError(
            "torch.distributed.checkpoint saves each value from one rank, but the state_dict() of a "
            f"DistributedOptimizer differs between ranks (found by its entry {fqn}): call "
            "hpcsgd.save(folder, optimizer) and hpcsgd.load(folder, optimizer) in place of it"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return set, ((),)

    def __deepcopy__(self, _: object) -> Self:
        return self
