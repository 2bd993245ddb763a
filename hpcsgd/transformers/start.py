"""`init` for programs with `TrainingArguments`, which look for the ranks when they are made."""

from __future__ import annotations

from typing import Any

import hpcsgd.start
from hpcsgd.core.topology import Topology
from hpcsgd.hugging_face.ranks import show_ranks


def init(groups: int | None = None, group_size: int | None = None, **options: Any) -> Topology:
    """Return the topology, as `hpcsgd.init` does, and show the ranks to Hugging Face; collective.

    Call it before `TrainingArguments`, which connect to the other ranks as soon as they are made. It makes
    torch's default process group, unless there is one of the same ranks, and sets the environment variables
    that torchrun would set. Without an accelerator it sets `ACCELERATE_USE_CPU`.

    Args:
        groups: Number of groups, as in `hpcsgd.init`. Default None.
        group_size: Ranks per group, as in `hpcsgd.init`. Default None.
        options: Further arguments of `hpcsgd.init`.

    Returns:
        The `Topology` for `Trainer`.

    Raises:
        UserError: As `hpcsgd.init`, and if ranks share a GPU.

    Example:
        >>> topology = hpcsgd.transformers.init(groups=2)     # mpiexec -n 4 python train.py
    """
    topology = hpcsgd.start.init(groups, group_size, **options)
    show_ranks(topology)
    return topology
