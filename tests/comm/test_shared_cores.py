"""Tests that ranks sleep while they wait for each other, so that ranks which share cores can run."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable

import pytest

import programs
from hpcsgd.comm.timer_slack import default_slack, slack, sleep_exactly
from system.machines import skip_unless_mpich
from train.launches import unlaunched

RANKS = 4
# Rank 0 is a second late where the ranks connect, then in the library's part of a split, and then in a call
# of the user's own. The others print how often they have slept in each.
LATE = """
import json, resource, sys, threading, time
from hpcsgd.comm import mpi, mpi_split
from hpcsgd.comm.mpi_library import MPI
from hpcsgd.comm.timer_slack import sleep_exactly

world, places, gathered = MPI.COMM_WORLD, mpi_split.places, mpi._gathered

def sleeps():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw

def after_a_second_on_rank_0():
    if world.Get_rank() == 0:
        time.sleep(1.0)
    return sleeps()

def connected(*given):
    global start
    mpi._gathered, start = gathered, sleeps() - before
    return gathered(*given)

def late(*where):
    global before
    known, before = places(*where), after_a_second_on_rank_0()
    return known

def split():
    global ours
    sleep_exactly()  # as a communication thread
    mpi_split.places = late
    mpi_split.split(world, 0, 0, tag=1)
    ours = sleeps() - before

mpi._gathered, before = connected, after_a_second_on_rank_0()
mpi.world()
thread = threading.Thread(target=split)
thread.start()
thread.join()
before = after_a_second_on_rank_0()
world.Barrier()
sys.stdout.write(json.dumps([world.Get_rank(), start, ours, sleeps() - before]) + "\\n")
"""


@pytest.mark.slow
def test_ranks_sleep_in_our_blocking_calls_and_do_not_in_calls_of_the_user() -> None:
    """Calls of the user's own code return without delay. Only MPICH can be told to sleep."""
    skip_unless_mpich()
    command = [programs.mpiexec(), "-n", str(RANKS), sys.executable, "-c", LATE]
    lines = programs.run(command, env=unlaunched()).stdout.splitlines()
    for rank, start, ours, theirs in map(json.loads, lines):
        assert rank == 0 or (start > 100 and ours > 100 and theirs < 50)


def test_sleeps_are_as_long_as_usual_also_in_a_thread_of_an_exact_one() -> None:
    found: list[int] = []

    def inner() -> None:
        with default_slack():
            found.append(slack())
        found.append(slack())

    def outer() -> None:
        sleep_exactly()
        started(inner)

    def started(function: Callable[[], None]) -> None:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    started(outer)
    assert found == [50_000, 1]
