"""The table of methods by name, and the parts that a job file may name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpcsgd.averagers import Averaged, Reset, kept
from hpcsgd.exchanges import AllToAll, ReduceScatter
from hpcsgd.methods.bsp import bsp
from hpcsgd.methods.hierarchical import allreduce_local_sgd, hierarchical
from hpcsgd.step import Method

METHODS: Mapping[str, Callable[..., Method]] = {
    "allreduce_local_sgd": allreduce_local_sgd,
    "bsp": bsp,
    "hierarchical": hierarchical,
}

PARTS: Mapping[str, Mapping[str, Any]] = {
    "exchange": {"alltoall": AllToAll(), "reduce_scatter": ReduceScatter()},
    "moments": {"kept": kept, "averaged": Averaged, "reset": Reset},
}
"""What the arguments of that name are called in a job file."""

__all__ = ["METHODS", "PARTS", "Method", "allreduce_local_sgd", "bsp", "hierarchical"]
