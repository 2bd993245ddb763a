"""Several hosts with slow links, made of this machine; needs root and iproute2."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness import programs
from harness.launching import mpiexec, start

SCRIPTS = Path(__file__).parents[2] / "tests" / "system"
TIMEOUT = 600.0
"""Seconds for making the hosts, and for taking them away."""


@contextmanager
def shaped_hosts(count: int, rate: str, burst: str = "256kb") -> Iterator[str]:
    """Hosts 10.77.0.1, 10.77.0.2, … whose links are shaped to `rate`, as 100mbit, both ways; their name.

    `burst` passes at any speed after a pause: it must be small beside a message."""
    if os.geteuid() != 0:
        raise SystemExit("hosts are made of network namespaces: run this as root")
    name = f"hpcsgd-{os.getpid()}"
    try:
        programs.run([SCRIPTS / "net-up.sh", name, str(count), rate, burst], timeout=TIMEOUT)
        yield name
    finally:
        programs.run([SCRIPTS / "net-down.sh", name, str(count)], timeout=TIMEOUT)


def on_hosts(
    name: str, count: int, script: Path, arguments: Sequence[str], timeout: float, ranks_per_host: int = 1
) -> None:
    """`python script arguments` on so many ranks of each of the first `count` hosts; raises where it fails or
    outlasts `timeout`."""
    addresses = ",".join(f"10.77.0.{i + 1}" for i in range(count))
    launcher = [
        *("ip", "netns", "exec", f"{name}-0", mpiexec()),
        *("-launcher", "ssh", "-launcher-exec", str(SCRIPTS / "net-agent.sh")),
        *("-iface", "switch", "-hosts", addresses),
        *("-ppn", str(ranks_per_host), "-n", str(count * ranks_per_host)),
    ]
    variables = {"HPCSGD_NET": name, "FI_PROVIDER": "tcp", "MPIR_CVAR_CH4_NETMOD": "ofi"}
    start(launcher, script, arguments, timeout, GLOO_SOCKET_IFNAME="eth0", **variables)
