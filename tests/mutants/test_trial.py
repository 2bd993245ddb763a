"""What a trial of mutants runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutants.trial import Covered, commands_on_ranks
from tier import TIERS


@pytest.mark.parametrize("tier", ["test", "test-all"])
def test_the_ranks_of_a_tier(tier: str) -> None:
    """They run by a launcher: the tests on threads have been tried before."""
    found = commands_on_ranks(tier)
    assert len(found) == len(TIERS[tier].ranks) + len(TIERS[tier].torchrun)
    assert all("mpiexec" in command[0] or "torch.distributed.run" in command for command in found)


def test_what_was_covered_is_read_again(tmp_path: Path) -> None:
    covered = Covered.of_lines({("a.py", 1): {"x", "y"}, ("a.py", 2): {"z"}, ("b.py", 1): {"z"}}, {"x": 0.5})
    covered.write(tmp_path / "covered.json")
    assert Covered.read(tmp_path / "covered.json") == covered
    assert covered.by_file == {"a.py": {"x", "y", "z"}, "b.py": {"z"}}
