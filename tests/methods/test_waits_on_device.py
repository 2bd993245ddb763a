"""Methods without synchronization make the host wait on a device only for copies, which are made at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hpcsgd
from far.ranks import explicitly
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from trainings import Training

pytestmark = pytest.mark.usefixtures("far_device")

STEPS = 3


def waits(world: Communicator, method: Callable[[], Any], device: torch.device) -> Counter[str]:
    """Return the waits of `STEPS` steps after the first two."""
    training = Training(form(world, 2), "plain", method, device=device)
    training.steps(2)
    before = Counter(torch.ops.far.waits(device.index))
    training.steps(STEPS)
    return Counter(torch.ops.far.waits(device.index)) - before


@pytest.mark.threads
@pytest.mark.parametrize("n", [2])
@pytest.mark.parametrize(
    ("method", "each"), [(lambda: hpcsgd.ssp(1), 1), (hpcsgd.async_sgd, 1), (hpcsgd.ad_psgd, 2)]
)
def test_the_host_waits_for_what_leaves(run, n: int, method: Callable[[], Any], each: int) -> None:
    """AD-PSGD also waits for a copy of its shard, before other groups may change the original."""
    samples = Counter(copy=2 * STEPS)  # and labels, which a plain script copies, too
    assert run(n, explicitly(waits), method) == [samples + Counter(event=STEPS * each)] * n
