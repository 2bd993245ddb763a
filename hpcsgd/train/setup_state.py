"""The state of a `TrainingSetup` in a checkpoint: the part that all ranks share, and each rank's own part."""

from __future__ import annotations

from typing import Any

from hpcsgd.core.generators import generators_state, load_generators_state
from hpcsgd.train.scheduler import scheduler_state
from hpcsgd.train.training_setup import TrainingSetup

Tree = dict[str, Any]


def shared_state(parts: TrainingSetup) -> Tree:
    """Return the state that is the same on all ranks, except those of optimizer and model."""
    return {
        "sampler": parts.sampler.state_dict(),
        "warm_up": parts.warm_up.state_dict(),
        "scheduler": scheduler_state(parts.scheduler),
        "precision": parts.precision.state_dict(),
    }


def own_state(parts: TrainingSetup) -> Tree:
    """Return the state that this rank alone has: its random generators, and its natural gradient's."""
    own = {**generators_state(parts.device), "transform": parts.generator.get_state()}
    if parts.natural_gradient is not None:
        own["natural_gradient"] = parts.natural_gradient.estimates()
    return own


def resume_shared(parts: TrainingSetup, shared: Tree) -> None:
    """Continue from what `shared_state` returned, except the scheduler's, which `resume_schedule` reads."""
    parts.sampler.load_state_dict(shared["sampler"])
    parts.warm_up.load_state_dict(shared["warm_up"])
    parts.precision.load_state_dict(shared["precision"])


def resume_own(parts: TrainingSetup, own: Tree | None) -> None:
    """Continue from what `own_state` returned on this rank, or from None if P × K has changed."""
    if own is not None:
        load_generators_state(own, parts.device)
        parts.generator.set_state(own["transform"])
    if parts.natural_gradient is not None:
        parts.natural_gradient.resume_from((own or {}).get("natural_gradient"))
