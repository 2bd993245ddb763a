"""The bytes that torch sends for an FSDP model, by formula, because `CommStats` does not count them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hpcsgd.core.rows import units_of
from hpcsgd.core.traffic import ModelLayout
from hpcsgd.cost.collectives import sent
from hpcsgd.cost.traffic import by_torch
from hpcsgd.models.sharded import fsdp_units


def bytes_by_torch(model: nn.Module, units: Sequence[str] | None, K: int) -> float:
    """Return the bytes that torch sends from each of `K` ranks in a step.

    The step has one backward pass, in which all parameters are used. `units`: as in a job file.
    """
    params = [params for _, params in fsdp_units(model, units)]
    messages = by_torch(ModelLayout(P=1, K=K, buckets=(), units=units_of(params, K)))
    return sum(float(sent(x.operation, x.nbytes, K)) for x in messages)
