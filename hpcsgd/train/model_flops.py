"""What a sample costs to learn from: the multiplications and additions of matrices that a model makes of it.

Counted by torch, operation by operation, of a forward and a backward pass on tensors without values: nothing
is computed, and neither the model nor anybody's chance changes. As usual, attention counts whole, also where
half of it is masked, and what is computed twice to save memory counts once.
"""

from __future__ import annotations

import logging

from torch import Tensor, nn

from hpcsgd import torch_private

log = logging.getLogger(__name__)


def flops_of_sample(model: nn.Module, x: Tensor) -> float | None:
    """Of each of the samples x; None, and a line in the log, where the model asks for values."""
    from torch.func import functional_call  # with what it needs, a second to import
    from torch.utils.flop_counter import FlopCounterMode

    fake = torch_private.fake_tensors()

    def empty(t: Tensor) -> Tensor:
        # Not of the model's device: there some layers are one operation that nobody counts.
        return fake.from_tensor(t.detach().to("meta")).requires_grad_(t.requires_grad)

    named = {name: empty(p) for name, p in [*model.named_parameters(), *model.named_buffers()]}
    samples = empty(x)
    try:
        with fake, FlopCounterMode(display=False) as counted:
            functional_call(model, named, (samples,)).float().sum().backward()
    except Exception as error:  # noqa: BLE001 - of a model of the user's, which trains without this
        first = str(error).strip().partition("\n")[0]
        log.info("FLOPs of the model are not known: it needs values (%s: %s)", type(error).__name__, first)
        return None
    return counted.get_total_flops() / len(x)
