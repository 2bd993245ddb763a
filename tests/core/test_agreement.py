"""Tests of the comparison of calls among ranks, and of the errors about differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from hpcsgd import UserError
from hpcsgd.comm import Communicator
from hpcsgd.core.agreement import Agreement, Call
from hpcsgd.core.topology import Topology, form
from hpcsgd.errors import count_text


def refusals(world: Communicator, of: Callable[[Topology], Agreement], calls: Sequence[Call]) -> str:
    with pytest.raises(UserError) as error:
        of(form(world, 2)).reach(calls[world.rank])
    return str(error.value)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("of", "pairs"),
    [
        pytest.param(Agreement.of_group, [(0, 1), (0, 1), (2, 3), (2, 3)], id="group"),
        pytest.param(Agreement.of_position, [(0, 2), (1, 3), (0, 2), (1, 3)], id="position"),
    ],
)
def test_ranks_have_their_numbers_in_the_job(
    run, of: Callable[[Topology], Agreement], pairs: list[tuple[int, int]]
) -> None:
    calls = [Call("step()", t) for t in range(4)]
    for line, (first, other) in zip(run(4, refusals, of, calls), pairs, strict=True):
        assert line.startswith(
            f"rank {first} is in step() after {count_text(first, 'update')}, "
            f"but rank {other} is in step() after {count_text(other, 'update')}: "
        )


@pytest.mark.ranks(2)
def test_it_is_reported_in_which_optimizer_they_are(run) -> None:
    calls = [Call("step()", 3, optimizer=1), Call("zero_grad()", 3, optimizer=1)]
    for line in run(2, refusals, Agreement.of_position, calls):
        assert line.startswith(
            "rank 0 is in step() of optimizer 1 after 3 updates, "
            "but rank 1 is in zero_grad() of optimizer 1 after 3 updates: "
        )


@pytest.mark.ranks(2)
def test_all_learning_rates_count(run) -> None:
    calls = [Call("step()", 3, (0.1, 0.2)), Call("step()", 3, (0.1, 0.3))]
    for line in run(2, refusals, Agreement.of_position, calls):
        assert "in step 4, or that of a later parameter group differs" in line
