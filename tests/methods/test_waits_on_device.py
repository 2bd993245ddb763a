"""What groups that wait for nobody make the host wait for on a device: copies, all at once."""

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
    """Of `STEPS` steps after the first two."""
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
    """A chunk of AD-PSGD has to be there, too, before others may change what it is a copy of."""
    samples = Counter(copy=2 * STEPS)  # and labels, which a plain script brings
    assert run(n, explicitly(waits), method) == [samples + Counter(event=STEPS * each)] * n
