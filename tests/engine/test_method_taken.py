"""A method that keeps state belongs to one optimizer at a time."""

from __future__ import annotations

import pytest
from torch import optim

from hpcsgd import DistributedOptimizer, JobError, Method, Sparse, TopK, diloco, hierarchical
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from references import model as make_model


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_a_method_is_of_one_optimizer_at_a_time(run, n: int) -> None:
    def reused(world: Communicator) -> list[str]:
        topology, method, kept, found = form(world), diloco(2), [], []
        plain = hierarchical(8)
        sparse = Sparse(TopK(0.5))

        def wrap(method: Method) -> DistributedOptimizer:
            net = make_model()
            return DistributedOptimizer(optim.SGD(net.parameters(), 0.1), net, topology, method)

        def refused(method: Method) -> None:
            with pytest.raises(JobError) as error:
                wrap(method)
            found.append(str(error.value))

        kept += [wrap(plain), wrap(plain), wrap(method), wrap(hierarchical(2, grad_reduce=sparse))]
        refused(method)
        refused(hierarchical(3, grad_reduce=sparse))
        kept.clear()
        for _ in range(2):
            wrap(method)
            wrap(hierarchical(2, grad_reduce=sparse))
        return found

    for of_method, of_part in run(n, reused):
        assert (
            of_method
            == "the method, or its OuterOptimizer, is that of another DistributedOptimizer: make one for each"
        )
        assert "its Sparse" in of_part


def test_threads_that_wrap_at_the_same_time_do_not_share_a_method() -> None:
    """Both find the method unused at first, and compare their arguments after that."""

    def wrapped(world: Communicator, method: Method) -> DistributedOptimizer:
        net = make_model()
        return DistributedOptimizer(optim.SGD(net.parameters(), 0.1), net, form(world), method)

    with pytest.raises(UserError, match="is that of another DistributedOptimizer: make one for each"):
        threads.run(2, wrapped, diloco(2))
