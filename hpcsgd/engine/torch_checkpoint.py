"""Checks that torch.distributed.checkpoint does not save or load the state of a `DistributedOptimizer`.

It takes tensors of equal names on several ranks for copies of each other, and saves each from one rank only.
But each group has an optimizer state of its own. `get_state_dict` also leaves the method's state out, and
makes a step with zeros if the optimizer has no state. Names of their own for each group's values would not
help: `get_state_dict` finds a module's attribute for each name of the model's state, and each group has a
model of its own, too. Models can be saved by it inside `averaged_model()`.
"""

from __future__ import annotations

import inspect
from typing import Any, NoReturn, Self

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
                "between groups and includes that of the method: call hpcsgd.save(folder, optimizer) in "
                "place of get_state_dict and save, and hpcsgd.load(folder, optimizer) in place of load and "
                "set_state_dict"
            )
        frame = frame.f_back


class OwnedByOneRank:
    """An entry of a `state_dict()` by which torch.distributed.checkpoint finds that one rank owns it.

    torch asks every value for `__create_write_items__` before it writes. A file of `torch.save` has an empty
    set in its place, which `torch.load(weights_only=True)` reads.
    """

    def __create_write_items__(self, fqn: str, _: object) -> NoReturn:
        """Raise `UserError`: torch is about to save the `state_dict()` that has the entry `fqn`."""
        raise UserError(
            "torch.distributed.checkpoint saves each value from one rank, but the state_dict() of a "
            f"DistributedOptimizer differs between ranks (found by its entry {fqn}): call "
            "hpcsgd.save(folder, optimizer) and hpcsgd.load(folder, optimizer) in place of it"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return set, ((),)

    def __deepcopy__(self, _: object) -> Self:
        return self
