"""Several machines made of one: a temporary Slurm, and hosts with slow links.

They leave nothing behind, however the tests end.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import programs
from system.machines import Network, free_ports, held, skip_unless_mpich, skip_unless_root_with


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """Start a Slurm with four nodes of four cores, and return the environment of one of its users."""
    skip_unless_root_with("slurmctld", "slurmd", "srun", "munged", "setpriv")
    nodes = 4
    # This is not pytest's own folder, because munge, another user, must have access.
    root = Path(tempfile.mkdtemp(prefix="hpcsgd-slurm-"))
    with held("slurm", root, nodes, 4, free_ports(nodes + 1)):
        yield {"SLURM_CONF": str(root / "slurm.conf"), "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Set up four hosts with links of 100 Mbit/s."""
    skip_unless_root_with("ip", "tc", "unshare")
    skip_unless_mpich()
    programs.mpiexec()
    if programs.run(["unshare", "--net", "true"], check=False).returncode != 0:
        pytest.skip("this root may not make network namespaces")
    net = Network(f"hpcsgd-{os.getpid()}", 4)
    with held("net", net.name, net.hosts, "100mbit"):
        yield net
