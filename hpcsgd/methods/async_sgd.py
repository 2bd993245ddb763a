"""Asynchronous SGD: no group ever waits for another.

J. Dean et al.: Large Scale Distributed Deep Networks, NIPS 2012, section 4.1 (Downpour SGD), with a push and
a read in every step, a group as a model replica, and the parameters sharded over all N ranks. The replica's
own optimizer makes the update that is pushed, times 1/P; the paper's Adagrad ran on the server.
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
    """A parameter server on all ranks, without any waiting.

    Every update counts as soon as it arrives, times 1/P, however old the parameters are that it was computed
    at. Bytes, notes and what counts of writes into parameters between two steps are those of `ssp`.

    Not to be confused with `ssp`, which bounds how far groups run ahead, nor with `ad_psgd`, which has no
    server.

    Args:
        grad_reduce: of gradients inside a group: `Dense()`, `AllToAll()`, `ReduceScatter()` or `Sparse(...)`.
            Default Dense().

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.async_sgd())
        >>> train(optimizer, steps=2)
        >>> optimizer.metrics["staleness"] >= 0
        True

    Source:
        J. Dean et al.: Large Scale Distributed Deep Networks, NIPS 2012, section 4.1 (Downpour SGD).
    """
    return Method(grad_reduce=grad_reduce, schedule=Every(1), averager=ParameterServer(staleness=None))
