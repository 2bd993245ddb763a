"""Stale synchronous parallel: groups need not wait for each other, but none runs far ahead.

Q. Ho, J. Cipar, H. Cui, S. Lee, J. K. Kim, P. B. Gibbons, G. A. Gibson, G. Ganger, E. Xing: More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013, section 2: a worker that reads at
clock c sees every update of clocks up to c − s − 1, maybe later ones, and its own; it waits while the slowest
is more than s clocks behind. With s = 0 that is synchronous SGD.

The paper's worker is a group here, its clock ticks once a step; the table is sharded over all N ranks. What
is pushed is the change that the group's own optimizer made (its momentum is local), times 1/P. The paper
caches reads until they are too old; here every step reads.
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
    """A parameter server on all ranks, which lets no group run far ahead of the slowest.

    A rank sends and receives (P−1)/P·M/K elements a step for its own group, and as much for what it keeps of
    the server. Noted in every step: `staleness`, updates by others since the read that the gradient was
    computed at, and `ahead`, steps before the slowest group. The model is the server's: evaluate inside
    `optimizer.averaged_model()`. What is written into parameters between two steps, as by a clamp, is part of
    the next update, times 1/P of each group. Load weights before the first step: after it groups that are not
    in step would load them at moments of their own.

    Not to be confused with `osgp`'s staleness, which is how late messages are, nor with `async_sgd`, which
    bounds nothing.

    Args:
        max_staleness: s, steps that a group may be ahead of the slowest, 0 or more; 0 is synchronous.
        grad_reduce: of gradients inside a group: `Dense()`, `AllToAll()`, `ReduceScatter()` or `Sparse(...)`.
            Default Dense().

    Raises:
        UserError: for a negative staleness.

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.ssp(max_staleness=1))
        >>> train(optimizer, steps=3)
        >>> optimizer.metrics["ahead"] <= 1
        True

    Source:
        Q. Ho et al.: More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS
        2013, section 2.
    """
    return Method(grad_reduce=grad_reduce, schedule=Every(1), averager=ParameterServer(max_staleness))
