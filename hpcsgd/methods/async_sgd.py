"""Asynchronous SGD: no group ever waits for another one.

J. Dean et al.: Large Scale Distributed Deep Networks, NIPS 2012, section 4.1 (Downpour SGD). Each step pushes
an update and reads the parameters. The paper's model replica is a group here, and the parameters are
distributed over all N ranks, which together are the server. The group's own optimizer makes the update, and
the server adds 1/P of it; in the paper the server runs Adagrad.
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
@inproceedings{dean2012downpour,
  title = {Large Scale Distributed Deep Networks},
  author = {Dean, Jeffrey and Corrado, Greg and Monga, Rajat and others},
  booktitle = {Advances in Neural Information Processing Systems (NIPS)},
  year = {2012},
}
"""


@method(cite=PAPER)
@checked
def async_sgd(grad_reduce: GradReduce = Dense()) -> Method:  # noqa: B008 - frozen
    """Return asynchronous SGD with a parameter server on all ranks, where no group waits.

    The server applies every update, times 1/P, when it receives it. It does so however old the parameters are
    at which the gradient was computed. The bytes that a step sends, its metrics, and the effect of writes
    into parameters between two steps are the same as with `ssp`.

    Args:
        grad_reduce: How the gradients of a group are averaged in every step: `Dense()`, `AllToAll()`,
            `ReduceScatter()` or `Sparse(...)`. Default Dense().

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it holds state.

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.async_sgd())
        >>> train(optimizer, steps=2)
        >>> optimizer.metrics["staleness"] >= 0
        True

    References:
        J. Dean et al.: Large Scale Distributed Deep Networks, NIPS 2012, section 4.1 (Downpour SGD).

    See Also:
        `ssp`: limits how far a group runs ahead of the slowest one.
        `ad_psgd`: asynchronous without a server.
    """
    return Method(grad_reduce=grad_reduce, schedule=Every(1), averager=ParameterServer(staleness=None))
