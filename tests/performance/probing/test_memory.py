"""The memory that the kernel and the cgroups leave to a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsgd.performance.probing import memory

GIB = 2**30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a /proc and a /sys/fs/cgroup for the test, with 8 GiB free, and return their folder."""
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {8 * 2**20} kB\n")
    return tmp_path


def in_groups(system: Path, text: str) -> None:
    (system / "proc" / "self" / "cgroup").write_text(text)


def limit(folder: Path, names: tuple[str, str], most: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(most + "\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")


V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_without_limits(system: Path) -> None:
    in_groups(system, "0::/\n")
    assert memory.free_host_bytes() == 8 * GIB


def test_the_tightest_cgroup_of_all_above_counts(system: Path) -> None:
    in_groups(system, "0::/slurm/job_7/step_0\n")
    limit(system / "cgroup/slurm/job_7/step_0", V2, "max", GIB)
    limit(system / "cgroup/slurm/job_7", V2, str(4 * GIB), 3 * GIB, cached=GIB // 2)
    limit(system / "cgroup/slurm", V2, str(64 * GIB), GIB)
    assert memory.free_host_bytes() == 1.5 * GIB


def test_version_1(system: Path) -> None:
    in_groups(system, "5:cpu,cpuacct:/slurm\n4:memory:/slurm/job_7\n")
    limit(system / "cgroup/memory/slurm/job_7", V1, str(4 * GIB), 2 * GIB)
    limit(system / "cgroup/memory", V1, str(2**63 - 4096), 2 * GIB)
    assert memory.free_host_bytes() == 2 * GIB


def test_a_group_over_its_limit_has_nothing_left(system: Path) -> None:
    in_groups(system, "0::/job\n")
    limit(system / "cgroup/job", V2, str(GIB), 2 * GIB)
    assert memory.free_host_bytes() == 0


def test_this_machine() -> None:
    assert memory.free_host_bytes() > 2**20
