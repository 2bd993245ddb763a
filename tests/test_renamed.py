"""Names that were changed: whoever uses an old one is told the new one."""

from __future__ import annotations

import pytest

import hpcsgd
from hpcsgd import UserError
from hpcsgd.errors import near_miss
from hpcsgd.renamed import RENAMED, new_name
from hpcsgd.train.families import FAMILIES


def test_no_old_name_is_a_public_name() -> None:
    assert set(hpcsgd.__all__).isdisjoint(RENAMED)


def test_public_names_exist() -> None:
    """Entries that begin with a capital name classes."""
    for names in RENAMED.values():
        for name in names:
            assert not name[0].isupper() or name in hpcsgd.__all__, name


def test_the_place_decides_between_two_new_names() -> None:
    assert new_name("staleness", ["max_staleness"]) == "max_staleness"
    assert new_name("staleness", ["overlap_steps", "peers"]) == "overlap_steps"
    assert new_name("staleness", ["peers"]) is None


def test_a_name_that_looks_alike_gives_way_to_the_new_one() -> None:
    assert near_miss("every", ["never", "sync_every"]).startswith("did you mean 'sync_every'? ")


def test_a_name_that_differs_in_case_alone_goes_before_the_new_one() -> None:
    assert near_miss("Reset", ["ResetState", "reset"]).startswith("did you mean 'reset'? ")
    assert near_miss("Reset", ["ResetState", "restart"]).startswith("did you mean 'ResetState'? ")


def test_an_old_public_name() -> None:
    with pytest.raises(AttributeError, match="'Job'; it has been renamed to 'Topology'"):
        getattr(hpcsgd, "Job")  # noqa: B009 - type checkers know that it is not there
    with pytest.raises(AttributeError, match=r"'Never'$"):
        getattr(hpcsgd, "Never")  # noqa: B009


def test_an_old_argument() -> None:
    with pytest.raises(UserError, match="no argument 'every'; did you mean 'sync_every'"):
        hpcsgd.hierarchical(every=4)  # pyright: ignore[reportCallIssue]


def test_values_of_keys_exist() -> None:
    values = {name for table in FAMILIES.values() for name in table}
    for old in ("averaged", "over_positions", "packed", "per_run", "rate_inside", "streamed"):
        assert any(name in values for name in RENAMED[old]), old
