"""Checks of the information about all ranks, without communication. Each check returns its findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from hpcsgd.cluster.doctor.finding import Finding, error, ok, warning
from hpcsgd.cluster.doctor.rank_info import RankInfo
from hpcsgd.core.topology import groups_across_nodes
from hpcsgd.errors import count_text
from hpcsgd.launcher import launched


def check(ranks: Sequence[RankInfo], K: int, environ: Mapping[str, str]) -> list[Finding]:
    """Return the findings about a job of `ranks`, in groups of `K`, with the environment `environ`."""
    return [
        launcher(len(ranks), environ),
        *cores(ranks),
        *threads(ranks),
        *gpus(ranks),
        groups([rank.node for rank in ranks], K),
        versions(ranks),
        extra("sklearn", "scikit-learn", "examples", "hpcsgd data convert digits"),
        extra("plotly", "plotly", "report", "hpcsgd report"),
    ]


def launcher(size: int, environ: Mapping[str, str]) -> Finding:
    """Return a finding about the launcher that started the ranks, a warning if there is none.

    If launcher and backend disagreed about the number of ranks, connecting the ranks has failed before.
    """
    meant = launched(environ, size)
    if meant is not None:
        here = "" if meant.local_size is None else f", {meant.local_size} of them on this node"
        return ok(
            f"launcher: {count_text(meant.size or size, 'rank')} started by {meant.by}{here}, "
            f"{size} connected"
        )
    tasks = environ.get("SLURM_NTASKS", "1")
    command = "srun hpcsgd doctor" if tasks != "1" else "mpiexec -n 4 hpcsgd doctor, or srun -n 4 ..."
    return warning(f"launcher: none, so this is one rank: start {command}")


def cores(ranks: Sequence[RankInfo]) -> list[Finding]:
    """Check that each rank has a core, because ranks that share cores wait for each other."""
    found: list[Finding] = []
    for host, here in _by_node(ranks).items():
        have = len(_cpus(here))
        if len(here) > have:
            found.append(
                warning(
                    f"cores: {len(here)} ranks share {have} cores of {host}: start at most {have} there "
                    f"(--ntasks-per-node) or ask for more (--cpus-per-task){_while_sessions_compete(here)}"
                )
            )
    return found or [ok("cores: at least one for each rank")]


def _while_sessions_compete(ranks: Sequence[RankInfo]) -> str:
    if not any(rank.autogroup for rank in ranks):
        return ""
    command = "sysctl kernel.sched_autogroup_enabled=0"
    return f"; ranks of mpiexec may wait for seconds until root has run `{command}`"


def threads(ranks: Sequence[RankInfo]) -> list[Finding]:
    """Check that a node has no more busy threads than cores, or one per rank if ranks outnumber cores."""
    found: list[Finding] = []
    for host, here in _by_node(ranks).items():
        have, busy = len(_cpus(here)), sum(rank.threads for rank in here)
        if busy > max(have, len(here)):
            found.append(
                warning(
                    f"threads: {count_text(len(here), 'rank')} with {count_text(busy, 'thread')} in all "
                    f"on {count_text(have, 'core')} of {host}: "
                    f"set OMP_NUM_THREADS={max(have // len(here), 1)}"
                )
            )
    return found or [ok("threads: not more than cores or ranks")]


def gpus(ranks: Sequence[RankInfo]) -> list[Finding]:
    """Check that no ranks share a GPU."""
    found: list[Finding] = []
    for host, here in _by_node(ranks).items():
        have = {rank.gpu_id for rank in here if rank.gpu_id}
        if have and len(have) < len(here):
            found.append(
                warning(
                    f"GPUs: {len(here)} ranks share {len(have)} of {host}: start as many there as it has "
                    "(--ntasks-per-node), or ask for more (--gpus-per-node)"
                )
            )
    return found


def groups(nodes: Sequence[int], K: int) -> Finding:
    """Check that each group is on one node. Otherwise its gradients cross the network in every step."""
    P = len(nodes) // K
    spread = groups_across_nodes(nodes, K)
    if spread:
        return warning(
            f"groups: {len(spread)} of {count_text(P, 'group')} of {count_text(K, 'rank')} are on more "
            "than one node, their gradients "
            "cross the network at every step: let group_size divide the ranks of a node"
        )
    return ok(f"groups: {P} of {count_text(K, 'rank')}, each on one node")


def versions(ranks: Sequence[RankInfo]) -> Finding:
    """Check that all ranks run the same software."""
    for rank in ranks:
        if rank.versions != ranks[0].versions:
            return error(
                f"versions: rank 0 on {ranks[0].host} has {ranks[0].versions}, but rank {rank.rank} "
                f"on {rank.host} has {rank.versions}: use one environment on all nodes"
            )
    return ok(f"versions: {ranks[0].versions}")


def extra(module: str, package: str, name: str, use: str) -> Finding:
    """Return a finding about whether an optional package is installed, which the command `use` needs."""
    if find_spec(module) is not None:
        return ok(f"extra: {package} is installed")
    return ok(f"extra: {package} is not installed; only `{use}` needs it (pip install 'hpcsgd[{name}]')")


def _by_node(ranks: Sequence[RankInfo]) -> dict[str, list[RankInfo]]:
    nodes: dict[int, list[RankInfo]] = {}
    for rank in ranks:
        nodes.setdefault(rank.node, []).append(rank)
    return {f"node {ranks[0].host}": ranks for ranks in nodes.values()}


def _cpus(ranks: Sequence[RankInfo]) -> set[int]:
    return set[int]().union(*(rank.cpus for rank in ranks))
