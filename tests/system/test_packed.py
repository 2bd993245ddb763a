"""Jobs from a packed environment under a real Slurm: each node unpacks it on its own disk."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcsgd.cluster.batch import load_site
from hpcsgd.cluster.environment import ask, pack
from system.test_batch import FOUR, Cluster, assert_same, cluster, whole

pytestmark = [
    pytest.mark.slurm, pytest.mark.long, pytest.mark.large, pytest.mark.timeout(1200),
    pytest.mark.skipif(not (Path(sys.prefix) / "pyvenv.cfg").exists(), reason="not in a virtual environment"),
]  # fmt: skip

__all__ = ["cluster", "whole"]  # fixtures


@pytest.fixture
def disks(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """Create a folder for each node, below the folder of the packed environment."""
    for number in range(1, 5):
        (tmp_path / f"node{number}").mkdir()
    site = f'pack = "{tmp_path}/env.pack"\nlocal = "{tmp_path}/$SLURMD_NODENAME"\n'
    (cluster.folder / "packed.toml").write_text(site)
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_nodes_unpack_it_and_train_to_the_same_bits(cluster: Cluster, whole: dict, disks: Path) -> None:
    site, _ = load_site(cluster.folder / "packed.toml")
    assert site.pack is not None
    pack(ask(Path(sys.prefix)), site.pack, site.local)
    job = cluster.job_train("packed", *FOUR, "--site", "packed.toml")
    script = (cluster.folder / "runs" / "packed-train.sbatch").read_text()
    assert f"\nPYTHON={disks}/env.pack " in script
    state, log = cluster.ended("packed", job)
    assert state == "COMPLETED", log
    unpacked = sorted(path.parents[3].name for path in disks.glob("node*/hpcsgd-*/*/bin/python"))
    assert unpacked == ["node1", "node2"]
    assert_same(cluster.runs.model("runs/packed"), whole)

    # The launcher of groups runs on one node, and starts ranks on others, which have not unpacked it yet.
    for unpacked_there in disks.glob("node*/hpcsgd-*"):
        shutil.rmtree(unpacked_there)
    how = ("--site", "packed.toml", "--method.name", "ensemble_sync", "--training.epochs", "1")
    job = cluster.job_train("groups", *FOUR, *how, command="ensemble")
    state, log = cluster.ended("groups", job)
    assert state == "COMPLETED", log
    assert len([*disks.glob("node*/hpcsgd-*/*/bin/python")]) == 2
