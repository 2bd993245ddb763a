"""The FLOPs of learning from a sample: multiplications and additions in the model's matrix products.

torch counts them operation by operation, in a forward and a backward pass on tensors without values. Nothing
is computed, and neither the model nor any random state changes. As usual, attention counts as a whole even
if half of it is masked. Values that training computes twice to save memory count once.
"""

from __future__ import annotations

import logging

from torch import Tensor, nn

from hpcsgd import torch_private

log = logging.getLogger(__name__)


def flops_of_sample(model: nn.Module, x: Tensor) -> float | None:
    """Return the FLOPs per sample of x; or log that the model reads values of tensors, and return None."""
    from torch.func import functional_call  # its dependencies take a second to import
    from torch.utils.flop_counter import FlopCounterMode

    fake = torch_private.fake_tensors()

    def empty(t: Tensor) -> Tensor:
        # Not on the model's device: there some layers are one operation that torch does not count.
        return fake.from_tensor(t.detach().to("meta")).requires_grad_(t.requires_grad)

    named = {name: empty(p) for name, p in [*model.named_parameters(), *model.named_buffers()]}
    samples = empty(x)
    try:
        with fake, FlopCounterMode(display=False) as counted:
            functional_call(model, named, (samples,)).float().sum().backward()
    except Exception as error:  # noqa: BLE001 - the user's model may raise any; it trains without this
        first = str(error).strip().partition("\n")[0]
        log.info("FLOPs of the model are not known: it needs values (%s: %s)", type(error).__name__, first)
        return None
    return counted.get_total_flops() / len(x)
