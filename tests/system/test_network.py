"""Four hosts with slow links: what hpcsgd says it sent is what left the interface; methods of all kinds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.network, pytest.mark.slow]

N = 1_000_000

# Each rank is alone on its host, so the interface of that host carries this rank's bytes and nobody else's.
ALLREDUCE = f"""
import json, torch, hpcsgd
from pathlib import Path

def sent():
    interfaces = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in interfaces if "eth0:" in line)

world = hpcsgd.init().world
x = torch.full(({N},), world.rank + 1.0)
world.barrier()
wire, counted = sent(), sum(total.bytes for total in world.ledger.totals().values())
world.allreduce(x).wait()
world.barrier()
wire, counted = sent() - wire, sum(total.bytes for total in world.ledger.totals().values()) - counted
right = bool((x == world.size * (world.size + 1) / 2).all())
results = world.gather_objects([right, wire, counted])
if world.rank == 0:
    print(json.dumps(results))
"""


def test_an_allreduce_sends_the_bytes_of_its_formula(network):
    done = network.mpiexec(sys.executable, "-c", ALLREDUCE)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    p, nbytes = network.hosts, 4 * N
    assert len(results) == p
    for right, wire, counted in results:
        assert right
        assert counted == 2 * (p - 1) / p * nbytes
        assert counted <= wire < 1.15 * counted  # headers, acknowledgements, barriers


METHODS = Path(__file__).parents[1] / "methods"


@pytest.mark.long
def test_methods_do_across_hosts_what_they_do_on_one(network) -> None:
    """Where no memory is shared and links are slow, requests are answered all the same."""
    pytest_on_ranks = ("-m", "pytest", "--with-mpi", "-q", "--color=no", "-p", "no:cacheprovider")
    done = network.mpiexec(sys.executable, *pytest_on_ranks, METHODS, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
