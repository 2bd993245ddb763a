"""EnsembleSync: groups that may die and return train alone, and meet every T steps with those that are alive.

EnsembleSync (text in our references), section 3.1:

    1  pull W                                   who starts or returns takes it from the first meeting
    2  T steps of local SGD                     a group shares each batch among its K_i ranks
    3  send W_i                                 ring over those in the register, no server
    4  W ← (1/M) Σ_i W_i over the living

Differences from the paper: no parameter server holds W, so the death of any group, and that of the
coordinator, is survived; a round's result is taken by all or by none; groups are of several ranks; they meet
at the end of an epoch, too, where samples are dealt anew.
"""

from __future__ import annotations

from hpcsgd.arguments import checked
from hpcsgd.core.method import Method
from hpcsgd.core.step import GradReduce
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers import ElasticMean
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.schedules import Every

PAPER = """
@misc{xie_ensemblesync,
  title = {{EnsembleSync}: Reliable Distributed {SGD} with Less Communication},
  author = {Xie, Michael and Yasunaga, Michihiro},
  howpublished = {Manuscript},
}
"""


@method(cite=PAPER)
@checked
def ensemble_sync(sync_every: int, grad_reduce: GradReduce = Dense()) -> Method:  # noqa: B008 - frozen
    """Groups that may die average their models over those that are alive, after every `sync_every` steps.

    Each group is a job of its own, an island: `hpcsgd launch` starts and restarts them. A meeting sends
    2·(P'−1)/P'·M/C elements for each chunk that a rank owns, P' of the islands being alive and C the ranks of
    the largest. Momentum is kept. Noted at every meeting: `distance` of this island's model from the mean.

    Not to be confused with `hierarchical`, whose groups are parts of one job: where one dies, all end.

    Args:
        sync_every: T, steps of a round, at least 1. What an island learned since the last round is lost where
            it dies: short rounds lose less, and send more.
        grad_reduce: of gradients inside an island: `Dense()`, `AllToAll()`, `ReduceScatter()` or
            `Sparse(...)`. Default Dense().

    Raises:
        UserError: for `sync_every` below 1; when the optimizer is wrapped, in a job that is no island.

    Example:
        >>> method = hpcsgd.ensemble_sync(sync_every=50)
        >>> hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        Traceback (most recent call last):
        hpcsgd.errors.JobError: method ensemble_sync is for groups that are jobs of their own: ...

    Source:
        M. Xie, M. Yasunaga: EnsembleSync: Reliable Distributed SGD with Less Communication, section 3.1.
    """
    return Method(grad_reduce=grad_reduce, schedule=Every(sync_every), averager=ElasticMean())
