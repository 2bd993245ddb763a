"""Before an optimizer is wrapped: does the method fit, what is trained, do all ranks have the same?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import nn, optim

from hpcsgd.core.capabilities import ForPeers
from hpcsgd.core.flat import Bucket
from hpcsgd.core.method import Method
from hpcsgd.core.shards import is_sharded, local, require_sharded_alike, reshard
from hpcsgd.core.topology import Job
from hpcsgd.engine.joined import kind_of
from hpcsgd.errors import JobError, UserError
from hpcsgd.transport import Transport, phase


class Scaled:
    """Part of an optimizer of many ranks: refuses torch's GradScaler."""

    scaled = False
    """Whether an `hpcsgd.GradScaler` sees to it that ranks skip the same steps."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch's asks for it before it looks at gradients."""
        if not self.scaled:
            raise UserError(
                "torch's GradScaler would skip other steps on each rank: use hpcsgd.GradScaler in its place"
            )
        return False


class Outermost(optim.Optimizer):
    """An optimizer that goes around a `DistributedOptimizer`, and never inside one."""


_optimizers: WeakKeyDictionary[Transport, int] = WeakKeyDictionary()
"""How many optimizers have been made for a job, by the communicator of its groups."""


def communicators(job: Job) -> tuple[Job, int]:
    """Return `job` for the next optimizer, and how many it has had; collective.

    Each optimizer has communicators and threads of its own. Ranks may need them in another order: where two
    models are trained, which one gets its gradients first depends on the rank.
    """
    before = _optimizers.get(job.group, 0)
    _optimizers[job.group] = before + 1
    if before == 0 or job.size == 1:
        return job, before
    world = job.world.apart()
    group = job.group.split(0, job.group.rank).on(world.lane)
    cross = job.cross.split(0, job.cross.rank).on_its_own_lane()
    return replace(job, world=world, group=group, cross=cross), before


def require_peers(job: Job, method: Method) -> None:
    """Who has peers meets nobody else, and only a method that is for peers can. Raises `UserError`."""
    if job.has_peers != isinstance(method.how, ForPeers):
        raise UserError(
            "method ensemble is for groups that are jobs of their own: start it with `hpcsgd launch`, "
            "in a batch job with `hpcsgd job ensemble`"
            if not job.has_peers
            else "`hpcsgd launch` starts groups that may die, and those meet by method ensemble alone"
        )


def trained_parameters(
    optimizer: optim.Optimizer, model: nn.Module, job: Job
) -> list[tuple[str, nn.Parameter]]:
    """The optimizer's trainable parameters by name, in the model's order; those outside the model last.

    Raises `UserError` where the optimizer cannot be distributed.
    """
    theirs = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    if isinstance(optimizer, Outermost):
        kind = type(optimizer).__name__
        raise UserError(f"{kind} goes outside: {kind}(DistributedOptimizer(optimizer, ...), model)")
    if isinstance(optimizer, optim.LBFGS):
        raise UserError("LBFGS evaluates the loss several times a step; it cannot be distributed")
    if not theirs:
        raise UserError("the optimizer has no trainable parameters")
    if any(nn.parameter.is_lazy(param) for param in model.parameters()):
        raise UserError("parameters of the model have no shape yet: give it a batch before it is wrapped")
    reshard(model)
    wanted = set(theirs)
    named = [(name, param) for name, param in model.named_parameters() if param in wanted]
    known = {param for _, param in named}
    others = [(f"parameter {i} of the optimizer", p) for i, p in enumerate(theirs) if p not in known]
    if others and any(is_sharded(param) for param in model.parameters()):
        raise UserError(
            f"{others[0][0]} is none of the model's, which torch has sharded: make the optimizer after that, "
            "and before the first forward pass"
        )
    named += others
    if job.size > 1:
        _require_values(model)
    if any(is_sharded(param) for param in theirs):
        require_sharded_alike(named, range(job.g * job.K, (job.g + 1) * job.K))
    return named


def _require_values(model: nn.Module) -> None:
    """Alone, what has none may be looked at: whether all of it fits together."""
    named = [("parameter", *each) for each in model.named_parameters()]
    named += [("buffer", *each) for each in model.named_buffers()]
    for kind, name, x in named:
        if x.device.type == "meta":
            raise UserError(
                f"{kind} {name} is on the meta device: give it values before the optimizer is wrapped"
            )


@torch.no_grad()
def share_start(
    job: Job, buckets: Sequence[Bucket], model: nn.Module, trained: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Every rank gets rank 0's parameters and buffers, of what is sharded those of its position in group 0;
    collective."""
    if job.size == 1:
        return
    theirs = {param for _, param in trained}
    frozen = [param for param in model.parameters() if param not in theirs]
    by_position = any(is_sharded(param) for param in theirs)
    with phase("setup"):
        for bucket in buckets:
            (job.cross if by_position else job.world).bcast(bucket.w).wait()
        for each in [*model.buffers(), *frozen]:
            here = local(each)
            shared = here.detach().contiguous()
            ranks = job.cross if is_sharded(each) else job.world
            ranks.bcast(shared.view(torch.uint8) if shared.dtype == torch.bool else shared).wait()
            here.copy_(shared)


def require_alike(
    job: Job, optimizer: optim.Optimizer, trained: Iterable[tuple[str, nn.Parameter]], model: nn.Module
) -> None:
    """All ranks are to have the same model and optimizer; collective. Raises `JobError`."""
    rest = [("parameter", *named) for named in model.named_parameters() if not named[1].requires_grad]
    rest += [("buffer", *named) for named in model.named_buffers()]
    mine = [f"optimizer {kind_of(optimizer)}"]
    for kind, name, x in [*(("parameter", *named) for named in trained), *rest]:
        strides = "" if x.is_contiguous() else f" and strides {x.stride()}"
        mine.append(f"{kind} {name} of shape {tuple(x.shape)} and {x.dtype}{strides}")
    for rank, theirs in enumerate(job.world.gather_objects(mine)):
        for ours, other in _zip_longest(mine, theirs):
            if ours != other:
                raise JobError(f"ranks {job.rank} and {rank} differ: {ours} here, {other} there")


def _zip_longest(a: list[str], b: list[str]) -> Iterator[tuple[str, str]]:
    width = max(len(a), len(b))
    return zip(*(x + ["nothing"] * (width - len(x)) for x in (a, b)), strict=True)
