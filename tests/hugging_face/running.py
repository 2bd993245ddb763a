"""The checks of a program on 4 ranks, one after the other: importing the libraries takes seconds."""

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
    """What a check is given: the ranks, 2 x 2, and an empty folder that all of them see."""

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
    """Whether all ranks have the same."""
    return len(set(topology.world.gather_objects(x))) == 1


def refusal(call: Callable[[], object]) -> str:
    """The line with which the call is refused."""
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)
