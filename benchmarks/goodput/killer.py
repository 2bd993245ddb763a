"""Failures of ranks, groups and nodes at random moments; the seed determines them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from goodput.settings import Setting

KINDS = ("rank", "group", "node")


@dataclass(frozen=True)
class Failure:
    """A failure of these ranks, `at` seconds after the beginning."""

    at: float
    kind: str
    ranks: tuple[int, ...]


def failures(setting: Setting, mtbf: float, seconds: float, seed: int) -> list[Failure]:
    """Draw failures with exponential times between them.

    All kinds are equally likely, and so are all ranks, groups or nodes of a kind.
    """
    chance = random.Random(f"{seed} {mtbf:g}")
    found, at = [], chance.expovariate(1 / mtbf)
    while at < seconds:
        kind = chance.choice(KINDS)
        size = {"rank": 1, "group": setting.K, "node": setting.per_node}[kind]
        first = size * chance.randrange(setting.ranks // size)
        found.append(Failure(at, kind, tuple(range(first, first + size))))
        at += chance.expovariate(1 / mtbf)
    return found


class Killer:
    """Kills processes by SIGKILL as the plan says.

    `ranks` returns the current process of each rank. A rank that has no process at that time is skipped.
    """

    def __init__(self, plan: list[Failure], ranks: Callable[[], Mapping[int, int]]) -> None:
        self._plan, self._ranks = list(plan), ranks
        self._began = time.time()
        self.happened: list[float] = []
        """The time of each failure that killed at least one process."""

    def look(self) -> None:
        while self._plan and time.time() - self._began >= self._plan[0].at:
            failure, here = self._plan.pop(0), self._ranks()
            now, hit = time.time(), False
            for rank in failure.ranks:
                if rank in here:
                    with suppress(ProcessLookupError):
                        os.kill(here[rank], signal.SIGKILL)
                        hit = True
            if hit:
                self.happened.append(now)
