"""Stale synchronous parallel: groups run at their own pace, but none gets far ahead of the slowest.

Q. Ho, J. Cipar, H. Cui, S. Lee, J. K. Kim, P. B. Gibbons, G. A. Gibson, G. Ganger, E. Xing: More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013, section 2: a worker that reads
parameters at clock c sees every update of clocks up to c − s − 1, and all of its own updates. It may see
later updates, too. It waits while the slowest worker is more than s clocks behind. With s = 0 the training is
synchronous SGD.

The paper's worker is a group here. Its clock counts its steps. The parameters, which the paper calls the
table, are distributed over all N ranks. A group pushes the change that its own optimizer made, times 1/P;
momentum is local. The paper caches reads until they are too old; here every step reads.
"""

from __future__ import annotations

from hpcsgd.arguments import checked
from hpcsgd.core.method import Method
from hpcsgd.core.step import GradReduce
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers.parameter_server import ParameterServer
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.schedules import Every

PAPER = """
@inproceedings{ho2013ssp,
  title = {More Effective Distributed {ML} via a Stale Synchronous Parallel Parameter Server},
  author = {Ho, Qirong and Cipar, James and Cui, Henggang and Lee, Seunghak and Kim, Jin Kyu and Gibbons,
  Phillip B. and Gibson, Garth A. and Ganger, Gregory R. and Xing, Eric P.}, booktitle = {Advances in Neural
  Information Processing Systems (NIPS)}, year = {2013},
}
"""


@method(cite=PAPER)
@checked
def ssp(max_staleness: int, grad_reduce: GradReduce = Dense()) -> Method:  # noqa: B008 - frozen
    """Return stale synchronous SGD: no group gets far ahead of the slowest.

    All ranks together are a parameter server, and each holds a part. The model is the server's: evaluate
    inside `optimizer.averaged_model()`.

    Args:
        max_staleness: Steps that a group may be ahead of the slowest one (the paper's s), 0 or more. With 0
            the training is synchronous.
        grad_reduce: How the gradients of a group are averaged in every step: `Dense()`, `AllToAll()`,
            `ReduceScatter()` or `Sparse(...)`. Default Dense().

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it holds state.

    Raises:
        UserError: If `max_staleness` is negative.

    Shape:
        M parameters in total. A rank sends and receives (P−1)/P·M/K elements per step for its own group, and
        as much again for its part of the server.

    Note:
        After every step, `optimizer.metrics["staleness"]` counts the updates by other groups since this group
        read the parameters at which its gradient was computed. `optimizer.metrics["ahead"]` counts by how
        many steps the group is ahead of the slowest one.

        A change that you write into parameters between two steps, such as a clamp, becomes part of the next
        update. It counts times 1/P for each group. Load weights before the first step: later, each group
        would load them in a different step.

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.ssp(max_staleness=1))
        >>> train(optimizer, steps=3)
        >>> optimizer.metrics["ahead"] <= 1
        True

    References:
        Q. Ho et al.: More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS
        2013, section 2.

    See Also:
        `async_sgd`: the same without a limit.
        `osgp`: gossip; its `overlap_steps` is the delay of messages.
    """
    return Method(grad_reduce=grad_reduce, schedule=Every(1), averager=ParameterServer(max_staleness))
