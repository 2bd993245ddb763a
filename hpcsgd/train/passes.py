"""The forward and backward passes of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcsgd.train.recording import require_finite
from hpcsgd.train.tracing import Tracer
from hpcsgd.train.training_setup import TrainingSetup


def backward(parts: TrainingSetup, tracer: Tracer, x: Tensor, y: Tensor, *, size: int) -> tuple[Tensor, int]:
    """Compute the gradients of the batch x with targets y, in passes of at most `size` samples.

    Return the mean loss and the number of passes.
    """
    weight = parts.batches.weight(len(y))
    pieces = list(zip(x.split(size), y.split(size), strict=True))
    total = torch.zeros((), device=parts.device)
    parts.optimizer.zero_grad()
    parts.optimizer.set_gradient_accumulation_steps(len(pieces))
    for some_x, some_y in pieces:
        with tracer.span("forward"), parts.precision.computing():
            loss = parts.task.loss(parts.model(some_x), some_y)
        if loss.is_cpu:  # on a device the next record reports it, without waiting
            require_finite(loss, parts.optimizer.t + 1)
        share = weight * len(some_y) / len(y)
        with tracer.span("backward"):
            parts.precision.backward(loss if share == 1 else loss * share)
        total = total + loss.detach() * (len(some_y) / len(y))
    return total, len(pieces)
