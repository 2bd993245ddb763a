"""Four hosts with slow links: hpcsgd counts the bytes that leave the interface, and all methods work."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

import programs
from cluster.launch.test_apart import Groups, replica_groups
from comm.jobs import LIMIT, by_agents
from hpcsgd.elastic.journal import FOLDER, newest
from system.machines import Network
from tier import WHOLE

__all__ = ["replica_groups"]

pytestmark = [pytest.mark.network, pytest.mark.slow]

N = 1_000_000

# Each rank is alone on its host, so that the host's interface carries only the bytes of this rank.
ALLREDUCE = f"""
import json, torch, hpcsgd
from pathlib import Path

def sent():
    interfaces = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in interfaces if "eth0:" in line)

world = hpcsgd.init().world
x = torch.full(({N},), world.rank + 1.0)
world.barrier()
wire, counted = sent(), sum(total.bytes for total in world.stats.totals().values())
world.allreduce(x).wait()
world.barrier()
wire, counted = sent() - wire, sum(total.bytes for total in world.stats.totals().values()) - counted
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
        assert counted <= wire < 1.15 * counted  # plus headers, acknowledgements, barriers


def by_torchrun(network: Network, folder: Path, hosts: int, ranks: int) -> list[tuple[bool, int, float]]:
    """Return what each rank reports of an allreduce in a world that torchrun's agents have started."""
    script = folder / "allreduce.py"
    script.write_text(ALLREDUCE)
    agents = network.torchrun(folder, script, hosts=hosts, ranks=ranks)
    done = [programs.finish(agent) for agent in agents]
    assert [each.returncode for each in done] == [0] * hosts, done
    results = json.loads("".join(each.stdout for each in done))
    assert len(results) == hosts * ranks
    return results


def test_an_allreduce_by_torchrun_sends_the_bytes_of_its_formula(network: Network, tmp_path: Path) -> None:
    p, nbytes = network.hosts, 4 * N
    for right, wire, counted in by_torchrun(network, tmp_path, p, 1):
        assert right
        assert counted == 2 * (p - 1) / p * nbytes
        assert counted <= wire < 1.15 * counted


def test_two_ranks_on_each_of_two_hosts_add_in_two_levels(network: Network, tmp_path: Path) -> None:
    """The interface carries the bytes of both ranks: half as many as if each exchanged with both others."""
    H, nbytes = 2, 4 * N
    for right, wire, _ in by_torchrun(network, tmp_path, H, 2):
        assert right
        assert 2 * (H - 1) / H * nbytes <= wire < 1.15 * 2 * (H - 1) / H * nbytes


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_killed_rank_ends_the_agents_of_all_hosts(network: Network, tmp_path: Path, rank: int) -> None:
    body = f"if rank == {rank}:\n    fault()\n    os.kill(os.getpid(), signal.SIGKILL)\nwork_until_lost()"
    job = by_agents(tmp_path, body, lambda script: network.torchrun(tmp_path, script))
    assert job.codes == (1,) * network.hosts, job
    assert job.seconds < LIMIT, job


@pytest.fixture
def tunnel(network: Network) -> list[str]:
    """Connect the first two hosts by a tunnel, and return the address of each host in it."""
    at = [("10.77.0.1", "10.99.0.1"), ("10.77.0.2", "10.99.0.2")]
    for host, (outside, inside) in enumerate(at, start=1):
        ip = ["ip", "-n", f"{network.name}-{host}"]
        ends = ["local", outside, "remote", at[host % 2][0], "dstport", "4789", "dev", "eth0"]
        made = [*ip, "link", "add", "tunnel", "type", "vxlan", "id", "7", *ends]
        if programs.run(made, check=False).returncode != 0:
            pytest.skip("this kernel has no vxlan")
        programs.run([*ip, "addr", "add", f"{inside}/24", "dev", "tunnel"])
        programs.run([*ip, "link", "set", "tunnel", "up"])
    return [inside for _, inside in at]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_groups_of_two_clusters_connect_through_a_tunnel(
    network: Network, tunnel: list[str], replica_groups: Groups
) -> None:
    """The groups have two ranks and one rank, which listen only in the tunnel."""
    for replica_group, host in enumerate(tunnel):
        there = ["ip", "netns", "exec", f"{network.name}-{replica_group + 1}"]
        replica_groups.start(
            replica_group, "--host", host, "--training.epochs", "1000", ranks=2 - replica_group, on=there
        )
        replica_groups.wait_for_a_round_of(*range(replica_group + 1))
    met = newest(replica_groups.run / FOLDER)
    assert [member.ranks for member in met.members] == [2, 1]
    for member, host in zip(met.members, tunnel, strict=True):
        assert {address.rsplit(":", 1)[0] for address in member.addresses} == {host}
    for launcher in replica_groups.launchers.values():
        launcher.send_signal(signal.SIGUSR1)
    assert [replica_groups.ended(replica_group) for replica_group in (0, 1)] == [75, 75], (
        replica_groups.told()
    )


METHODS = Path(__file__).parents[1] / "methods"


@pytest.mark.long
@pytest.mark.timeout(700)
def test_methods_do_across_hosts_what_they_do_on_one(network) -> None:
    """Requests are answered although ranks share no memory and links are slow."""
    pytest_on_ranks = ("-m", "pytest", "--with-mpi", "-q", "--color=no", "-p", "no:cacheprovider")
    done = network.mpiexec(sys.executable, *pytest_on_ranks, "-m", WHOLE, METHODS, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
