"""What a part of a method remembers, by what becomes of it on other ranks."""

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
    """What a part of a method remembers. Each field says what becomes of its values on another P × K."""

    replicated: dict[str, Any] = field(default_factory=dict[str, Any])
    """By name, what is the same on all ranks: it goes everywhere."""
    mean: dict[str, float] = field(default_factory=dict[str, float])
    """By name, a number of each rank: all get their mean."""
    sharded: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])
    """By name, what belongs to `param_shard` of every bucket, or to `w` where the averager takes whole
    models. It is cut anew like the parameters, and for another P the mean of the groups'; dropped where there
    is one group, unless it is an exchange's."""
    per_rank_params: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])
    """By name and parameter as many elements as that has, on each rank others: the mean over the ranks of a
    group, for another P over all; dropped where a group has nobody to exchange with."""
    per_rank: dict[str, Any] = field(default_factory=dict[str, Any])
    """By name, what is of a group or rank as it was: dropped. What is dropped is said."""

    def cloned(self) -> State:
        """Return a state that shares no memory with this one."""
        return State(**{name: mapped(section, _clone) for name, section in self.to_dict().items()})

    def not_shared(self) -> list[str]:
        """Return the names of the fields with something that another rank cannot take over."""
        return [name for name in self.to_dict() if name not in ("replicated", "mean")]

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the fields that are not empty, by name: what is written into files."""
        return {each.name: section for each in fields(self) if (section := getattr(self, each.name))}

    @classmethod
    def from_dict(cls, sections: Mapping[str, dict[str, Any]]) -> State:
        """Return the state that `to_dict` was called of.

        Raises:
            UserError: for fields that a state does not have.
        """
        if unknown := sections.keys() - {each.name for each in fields(cls)}:
            raise UserError(
                f"state of a method with {', '.join(sorted(unknown))}: it is of another version of hpcsgd, "
                "and only that can load it"
            )
        return cls(**sections)


def _clone(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)
