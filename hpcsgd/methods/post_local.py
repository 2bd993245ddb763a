"""Post-local SGD: one synchronous model at first, local models once the learning rate has fallen.

T. Lin, S. U. Stich, K. K. Patel, M. Jaggi: Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020
(arXiv:1808.07217), section 3: H_t = 1 up to t', the first decay of the learning rate, and H_t = H from then
on.

The paper's worker is a group here. Until t' the mean is of gradients, as in mini-batch SGD, and not of
models; for plain SGD that is the same. The step in which the learning rate is first lower than in the one
before is still synchronous. Moments, until then the same on all groups, are the groups' own after it.
"""

from __future__ import annotations

from hpcsgd.arguments import checked
from hpcsgd.core.method import Method
from hpcsgd.core.step import GroupGradReduce
from hpcsgd.methods.bsp import bsp
from hpcsgd.methods.hierarchical import hierarchical
from hpcsgd.methods.registry import method
from hpcsgd.methods.switch import FIRST_LR_DECAY, switch
from hpcsgd.parts.averagers import WithOptimizerState, keep_state
from hpcsgd.parts.grad_reduces import Dense

PAPER = """
@inproceedings{lin2020local,
  title = {Don't Use Large Mini-Batches, Use Local {SGD}},
  author = {Lin, Tao and Stich, Sebastian U. and Patel, Kumar Kshitij and Jaggi, Martin},
  booktitle = {International Conference on Learning Representations (ICLR)},
  year = {2020},
  eprint = {1808.07217},
  archivePrefix = {arXiv},
}
"""


@method(cite=PAPER)
@checked
def post_local(
    sync_every: int,
    grad_reduce: GroupGradReduce = Dense(),  # noqa: B008 - frozen
    optimizer_state: WithOptimizerState = keep_state,
) -> Method:
    """`bsp` at first, and `hierarchical` from the first decay of the learning rate on.

    Schedules that lower the rate from the first step on (cosine) leave nothing of the first part; a warm-up
    only raises it, and ends nothing.

    Not to be confused with `switch`, which changes between any two methods, also after a number of steps.

    Args:
        sync_every: H, steps from one meeting to the next in the second part, at least 1.
        grad_reduce: of gradients, in both parts: `Dense()`, `AllToAll()` or `ReduceScatter()`. What a
            `Sparse(...)` one has kept of the first part is dropped, which is warned of. Default Dense().
        optimizer_state: what becomes of momentum at a meeting: `keep_state`, `AverageState` or `ResetState`.
            Default keep_state.

    Raises:
        UserError: for `sync_every` below 1.

    Example:
        >>> method = hpcsgd.post_local(sync_every=2)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=4)
        >>> "distance" in optimizer.metrics     # nobody has met: gradients were shared
        False
        >>> optimizer.param_groups[0]["lr"] /= 10
        >>> train(optimizer, steps=4)
        >>> "distance" in optimizer.metrics
        True

    Source:
        T. Lin, S. U. Stich, K. K. Patel, M. Jaggi: Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020,
        section 3.
    """
    return switch(bsp(grad_reduce), hierarchical(sync_every, grad_reduce, optimizer_state), FIRST_LR_DECAY)
