"""The state of a part of a method, sorted by what happens to it if a run continues on another P × K."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from hpcsgd.comm.on_host import mapped
from hpcsgd.errors import UserError


@dataclass
class State:
    """The state of a part of a method.

    Each field says what happens to its values if the run continues with other numbers of groups (P) or of
    ranks per group (K).
    """

    replicated: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values by name that are the same on all ranks. Every rank gets them."""
    mean: dict[str, float] = field(default_factory=dict[str, float])
    """Numbers by name; each rank has its own. Every rank gets their mean over the ranks."""
    sharded: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])
    """Tensors by name, one per bucket: as long as `param_shard`, or as `w` if the averager uses whole models.
    They are cut anew like the parameters. For another P each group gets the mean of the groups' values. With
    one group they are dropped, unless they belong to a gradient reduction."""
    per_rank_params: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])
    """Tensors by name and parameter, each with as many elements as its parameter; each rank has its own.
    Ranks get the mean over the ranks of a group, or over all ranks for another P. The tensors are dropped if
    there is no other rank to reduce gradients with."""
    per_rank: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values by name that only one group or rank can use. They are dropped, and a warning names them."""

    def cloned(self) -> State:
        """Return a state that shares no memory with this one."""
        return State(**{name: mapped(section, _clone) for name, section in self.to_dict().items()})

    def not_shared(self) -> list[str]:
        """Return the names of the nonempty fields whose values another rank cannot use as they are."""
        return [name for name in self.to_dict() if name not in ("replicated", "mean")]

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the fields that are not empty, by name, as they are written into files."""
        return {each.name: section for each in fields(self) if (section := getattr(self, each.name))}

    @classmethod
    def from_dict(cls, sections: Mapping[str, dict[str, Any]]) -> State:
        """Return the state from the `sections` that its `to_dict` returned.

        Raises:
            UserError: If `sections` has fields that a state does not have.
        """
        if unknown := sections.keys() - {each.name for each in fields(cls)}:
            raise UserError(
                f"state of a method with {', '.join(sorted(unknown))}: it is of another version of hpcsgd, "
                "and only that can load it"
            )
        return cls(**sections)


def _clone(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)
