"""The runner of a program's checks on 4 ranks, in one process per rank: imports take seconds."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import hpcsgd
import hpcsgd.transformers
from hpcsgd import Topology
from hpcsgd.errors import UserError


class Scene(NamedTuple):
    """The arguments of a check: the topology of 2 x 2 ranks, and an empty folder that all of them see."""

    topology: Topology
    folder: Path


Check = Callable[[Scene], None]


def run_all(checks: Sequence[Check]) -> None:
    """Run `checks` in the folder that the program was given; rank 0 prints the name of each that passed."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|transformers|accelerate|peft")
    topology = hpcsgd.transformers.init(groups=2, timeout_s=100)
    for check in checks:
        check(Scene(topology, Path(sys.argv[1]) / check.__name__))
        hpcsgd.barrier(topology)
        if topology.rank == 0:
            print(f"passed {check.__name__}", flush=True)


def same(x: object, topology: Topology) -> bool:
    """Return True if `x` is the same on all ranks."""
    return len(set(topology.world.gather_objects(x))) == 1


def refusal(call: Callable[[], object]) -> str:
    """Return the message with which the call is refused, which is one line."""
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)
