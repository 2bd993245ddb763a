"""What is asked before an optimizer is wrapped: does the method fit the job, do all ranks have the same?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn, optim

from hpcsgd.averagers import Ensemble
from hpcsgd.errors import JobError, UserError
from hpcsgd.step import Method
from hpcsgd.topology import Job


def require_fitting(job: Job, method: Method) -> None:
    """An island has nobody to meet but by its `meetings`. Raises `UserError`."""
    if (job.meetings is not None) != isinstance(method.how, Ensemble):
        raise UserError(
            "method ensemble is for groups that are jobs of their own: start it with `hpcsgd launch`, "
            "in a batch job with `hpcsgd job ensemble`"
            if job.meetings is None
            else "`hpcsgd launch` starts groups that may die, and those meet by method ensemble alone"
        )


def require_alike(
    job: Job, optimizer: optim.Optimizer, trained: Iterable[tuple[str, nn.Parameter]], model: nn.Module
) -> None:
    """All ranks are to have the same model and optimizer; collective. Raises `JobError`."""
    rest = [("parameter", *named) for named in model.named_parameters() if not named[1].requires_grad]
    rest += [("buffer", *named) for named in model.named_buffers()]
    mine = [f"optimizer {type(optimizer).__name__}"]
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
