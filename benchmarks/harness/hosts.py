"""Several virtual hosts with slow links on this machine; this needs root and iproute2."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness import programs
from harness.launching import mpiexec, start

SCRIPTS = Path(__file__).parents[2] / "tests" / "system"
TIMEOUT = 600.0
"""Limit in seconds for making the hosts, and for removing them."""


@contextmanager
def shaped_hosts(count: int, rate: str, burst: str = "256kb") -> Iterator[str]:
    """Make hosts 10.77.0.1, 10.77.0.2, … and yield the prefix of their names.

    Their links are shaped to `rate`, such as 100mbit, in both directions. After a pause `burst` bytes pass at
    any speed, so `burst` must be small compared with a message.
    """
    if os.geteuid() != 0:
        raise SystemExit("the hosts are network namespaces: run this as root")
    name = f"hpcsgd-{os.getpid()}"
    try:
        programs.run([SCRIPTS / "net-up.sh", name, str(count), rate, burst], timeout=TIMEOUT)
        yield name
    finally:
        programs.run([SCRIPTS / "net-down.sh", name, str(count)], timeout=TIMEOUT)


def on_hosts(
    name: str, count: int, script: Path, arguments: Sequence[str], timeout: float, ranks_per_host: int = 1
) -> None:
    """Run `python script arguments` on `ranks_per_host` ranks of each of the first `count` hosts.

    Raise `Failed` if it fails or takes longer than `timeout` seconds.
    """
    addresses = ",".join(f"10.77.0.{i + 1}" for i in range(count))
    launcher = [
        *("ip", "netns", "exec", f"{name}-0", mpiexec()),
        *("-launcher", "ssh", "-launcher-exec", str(SCRIPTS / "net-agent.sh")),
        *("-iface", "switch", "-hosts", addresses),
        *("-ppn", str(ranks_per_host), "-n", str(count * ranks_per_host)),
    ]
    variables = {"HPCSGD_NET": name, "FI_PROVIDER": "tcp", "MPIR_CVAR_CH4_NETMOD": "ofi"}
    start(launcher, script, arguments, timeout, GLOO_SOCKET_IFNAME="eth0", **variables)
