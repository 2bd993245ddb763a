"""A check that torch.distributed.checkpoint does not save or load the state of a `DistributedOptimizer`.

It takes tensors of equal names on several ranks for copies of each other, and saves each from one rank only.
But each group has an optimizer state of its own. `get_state_dict` also leaves the method's state out, and
makes a step with zeros if the optimizer has no state. Models can be saved by it inside `averaged_model()`.
"""

from __future__ import annotations

import inspect

from hpcsgd.errors import UserError

_CALLERS = 16
"""Number of callers to look at: some are functions that torch puts around methods."""


def refuse_torch_checkpoint(call: str) -> None:
    """Raise `UserError` if torch.distributed.checkpoint makes this `call`."""
    frame = inspect.currentframe()
    for _ in range(_CALLERS):
        if frame is None:
            return
        if str(frame.f_globals.get("__name__")).startswith("torch.distributed.checkpoint"):
            raise UserError(
                f"torch.distributed.checkpoint calls {call} of a DistributedOptimizer, whose state differs "
                "between groups and includes that of the method: call hpcsgd.save(folder, optimizer) and "
                "hpcsgd.load in place of get_state_dict and set_state_dict"
            )
        frame = frame.f_back
