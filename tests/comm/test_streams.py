"""Results on devices do not depend on which stream is slow, and a violation of each rule is detected."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from comm.broken_order import MUTANTS
from comm.ordering import PATIENCE, PROGRAMS, Program
from far.ranks import PATTERNS, PLACINGS, explicitly
from hpcsgd.comm import threads

RANKS = 2

pytestmark = pytest.mark.usefixtures("far_device")


def alike(here: list[list[Tensor]], there: list[list[Tensor]]) -> bool:
    pairs = [pair for ranks in zip(here, there, strict=True) for pair in zip(*ranks, strict=True)]
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("placing", PLACINGS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_whichever_stream_is_slow_the_bits_are_those_on_the_host(run, program: str, placing: str) -> None:
    here = run(RANKS, PROGRAMS[program])
    for pattern, delays in PATTERNS.items():
        there = run(RANKS, PLACINGS[placing](PROGRAMS[program], delays))
        assert alike(here, there), f"under the pattern {pattern!r}"


def differs(program: Program, slower: int) -> bool:
    """Return True if the result differs from that on the host in any pattern, `slower` times as slow."""
    here = threads.run(RANKS, program, timeout=PATIENCE)
    for delays in PATTERNS.values():
        slow = {stream: slower * microseconds for stream, microseconds in delays.items()}
        if not alike(here, threads.run(RANKS, explicitly(program, slow), timeout=PATIENCE)):
            return True
    return False


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_rule_is_seen(mutant: str) -> None:
    """Longer delays are tried, too, because a very busy machine may be as slow as the stream."""
    program, broken = MUTANTS[mutant]
    with broken():
        assert any(differs(PROGRAMS[program], slower) for slower in (1, 10, 100))
