"""Post-local SGD: synchronous SGD at first, local SGD once the learning rate has fallen.

T. Lin, S. U. Stich, K. K. Patel, M. Jaggi: Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020
(arXiv:1808.07217), section 3. t' is the step of the first decay of the learning rate. The number of steps
between two synchronizations is 1 up to t', and H from then on.

The paper's worker is a group here. Until t' the groups average gradients, as in mini-batch SGD, not models;
for plain SGD both give the same result. Step t', the first one whose learning rate is lower than that of the
step before, is still synchronous. Until then the optimizer state is the same on all groups; afterwards each
group has its own.
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
    """Return `bsp` at first, and `hierarchical` from the first decay of the learning rate on.

    The first part, `bsp`, is almost empty if the learning rate falls from the first step on, as with a cosine
    schedule. A warm-up only raises the learning rate, so it does not end the first part.

    Args:
        sync_every: Steps between two synchronizations in the second part (the paper's H), at least 1.
        grad_reduce: How gradients are averaged, in both parts: `Dense()`, `AllToAll()`, `ReduceScatter()` or
            `Sparse(...)`. The error feedback that `Sparse(...)` holds at the change is discarded, with a
            warning. Default Dense().
        optimizer_state: What happens to momentum and other optimizer state at a synchronization:
            `keep_state`, `AverageState` or `ResetState`. Default keep_state.

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it holds state.

    Raises:
        UserError: If `sync_every` is below 1.

    Example:
        >>> method = hpcsgd.post_local(sync_every=2)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=4)
        >>> "distance" in optimizer.metrics     # no model was averaged, only gradients
        False
        >>> optimizer.param_groups[0]["lr"] /= 10
        >>> train(optimizer, steps=4)
        >>> "distance" in optimizer.metrics
        True

    References:
        T. Lin, S. U. Stich, K. K. Patel, M. Jaggi: Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020,
        section 3.

    See Also:
        `switch`: changes between any two methods, also after a number of steps.
    """
    return switch(bsp(grad_reduce), hierarchical(sync_every, grad_reduce, optimizer_state), FIRST_LR_DECAY)
