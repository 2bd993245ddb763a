"""Ranks that are processes train to the same bits as ranks that are threads.

Without MPI this holds on every shape. With MPI it holds where sums have two terms, which are the same in any
order.
"""

from __future__ import annotations

import pytest
import torch

from hpcsgd.comm import threads
from methods.table import REFERENCES
from methods.test_battery import OPTIMIZERS, trained
from ranks import BY_TORCHRUN

ENTRIES = {label: entry for label, entry in REFERENCES.items() if entry.same_bits}


@pytest.mark.processes
@pytest.mark.parametrize(("P", "K"), [(2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("label", ENTRIES)
def test_processes_train_to_the_bits_of_threads(run, label: str, P: int, K: int) -> None:
    entry = ENTRIES[label]
    make = OPTIMIZERS["SGD" if entry.plain_sgd else "momentum"]
    here = run(P * K, trained, P, entry, make)
    there = threads.run(P * K, trained, P, entry, make)
    same = BY_TORCHRUN or (P, K) == (2, 2)
    for ours, theirs in zip(here, there, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            assert torch.equal(x, y) if same else torch.allclose(x, y, rtol=1e-3, atol=1e-5)
