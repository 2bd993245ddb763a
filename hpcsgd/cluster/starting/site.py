"""Make a first ``site.toml`` from the partition, modules and MPI options that the cluster shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution

import tomli_w

TIMEOUT = 10
"""Seconds to wait for a command of Slurm."""
BACKENDS = {"pmi2": "MPICH", "pmix": "Open MPI", "cray_shasta": "Cray MPICH"}


def is_cluster() -> bool:
    """Return True if Slurm's commands are installed."""
    return shutil.which("sbatch") is not None


def site_text(environment: Mapping[str, str] = os.environ) -> str:
    """Return the text of ``site.toml``; keys without a known value are comments."""
    partition = _partition()
    modules = [name for name in environment.get("LOADEDMODULES", "").split(":") if name]
    offered = _offered()
    comment = f" # offered here: {', '.join(offered)}" if offered else " # srun did not say what it offers"
    return "\n".join(
        [
            "# What all your jobs here have in common, for `hpcsgd job`: docs/cluster.md has every key.",
            _line("partition", partition, "the one that Slurm takes by default", "compute"),
            '# account = "project_123"',
            _pair("mpi", _backend(offered, environment)) + comment,
            _line("modules", modules, "those that are loaded now, before anything else", ["openmpi"]),
            '# setup = "env.sh" # sourced after that',
            '# sbatch = ["--constraint=gpu"]',
            "",
        ]
    )


def _line(name: str, value: str | list[str], what: str, example: str | list[str]) -> str:
    return f"{_pair(name, value)} # {what}" if value else f"# {_pair(name, example)}"


def _pair(name: str, value: str | list[str]) -> str:
    if isinstance(value, list):
        return f"{name} = [{', '.join(_pair('x', each).removeprefix('x = ') for each in value)}]"
    return tomli_w.dumps({name: value}).rstrip("\n")


def _partition() -> str:
    names = _said("sinfo", "--noheader", "--format=%P").split()
    return next((name.rstrip("*") for name in names if name.endswith("*")), "")


def _offered() -> list[str]:
    return [way for way in BACKENDS if re.search(rf"\b{way}\b", _said("srun", "--mpi=list"))]


def _backend(offered: list[str], environment: Mapping[str, str]) -> str:
    """Return the ``srun --mpi`` value for the installed MPI; if that is unknown, the first one offered."""
    if "CRAYPE_VERSION" in environment and "cray_shasta" in offered:
        return "cray_shasta"
    for package, way in (("mpich", "pmi2"), ("openmpi", "pmix")):
        if _is_installed(package) and way in (offered or BACKENDS):
            return way
    return offered[0] if offered else "pmi2"


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def _said(*command: str) -> str:
    """Return a command's output, or "" if the command is missing, fails or does not end in time."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""
