"""`hpcsgd measure`, on ranks of a test and as its users start it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comm.jobs import free_port
from hpcsgd.comm import Communicator, threads
from hpcsgd.cost.collectives import SHAPES
from hpcsgd.cost.link_classes import LinkClass
from hpcsgd.cost.machine import dump, load
from hpcsgd.errors import UserError
from hpcsgd.parts.sparsifiers import SPARSIFIERS
from hpcsgd.performance.measuring import computing, measure
from hpcsgd.performance.measuring.run import QUICK, Extent, _extent, _require_writable
from hpcsgd.performance.measuring.summary_text import answers, table
from train.launches import JOB, launch, make_store

Run = Callable[..., list[Any]]
LITTLE = Extent(max_bytes=4096, seconds=0.3)


def machine_of(world: Communicator) -> tuple[str, list[str]]:
    machine, measured = measure(world, LITTLE)
    return dump(machine), [table(machine), *answers(machine, measured)]


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_machine_of_two_ranks(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing, "ELEMENTS", 20_000)
    (text, told), other = run(2, machine_of)
    assert text == other[0]
    mine = tmp_path / f"machine-{os.getpid()}.toml"  # under mpiexec both ranks use one folder
    mine.write_text(text)
    machine = load(mine)
    assert (machine.hosts, machine.ranks_per_host) == (1, 2)
    assert {(link.operation, link.kind) for link in machine.link} == {(name, "inside") for name in SHAPES}
    assert all(points.link_class == LinkClass(2) for points in machine.points)
    for points in machine.points:
        count = len(points.bytes)  # on a busy machine the largest are left out
        assert 4 <= count == len(points.bare_seconds)
        assert points.bytes == (8, 32, 128, 512, 2048, 4096)[:count]
        assert machine.seconds(points.operation, 2048, points.link_class) > 0
    assert machine.compute is not None
    assert machine.compute.update_seconds(1e6) > 0
    assert machine.compute.mean_seconds(1e6) > 0
    assert all(machine.compute.selection_seconds(name, 1e6) > 0 for name in SPARSIFIERS)
    assert machine.compute.busy is not None
    assert any("bucket_cap_mb = " in line for line in told)
    assert len(told[0].splitlines()) == 1 + len(SHAPES)


@pytest.mark.slow
def test_two_hosts_have_ways_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing, "ELEMENTS", 20_000)
    extent = Extent(max_bytes=4096, seconds=0.5)
    (machine, _), *_ = threads.run(4, measure, extent, nodes=[0, 0, 2, 2])
    assert (machine.hosts, machine.ranks_per_host) == (2, 2)
    kinds = {link.kind for link in machine.link if link.operation == "alltoall"}
    assert kinds == {"inside", "across", "mixed"}
    (across,) = {points.link_class for points in machine.points if points.operation == "bcast"} - {
        LinkClass(2),
        LinkClass(4, 2),
    }
    assert across == LinkClass(2, 2, at_once=2)


def test_every_sparsifier_is_timed() -> None:
    assert set(computing.SELECTORS) == set(SPARSIFIERS)


@pytest.mark.slow
def test_the_command_on_two_ranks(tmp_path: Path) -> None:
    make_store(tmp_path / "small.h5")
    (tmp_path / "job.toml").write_text(JOB)
    words = ["job.toml", "--data.group_batch_size", "8", "--seconds", "1", "--max-bytes", "4096"]
    ended = launch(tmp_path, "measure", *words, "--out", "here.toml", n=2)
    assert ended.code == 0, ended.err
    assert "written here.toml and here.png" in ended.out
    assert "alltoall" in ended.out
    machine = load(tmp_path / "here.toml")
    assert machine.compute is not None
    assert machine.compute.batch_sizes == (4, 8)
    assert machine.compute.numel == 36 * 8 + 8 + 8 * 10 + 10
    assert machine.compute.forward_seconds(16) > 0
    assert machine.compute.backward_seconds(16) > 0
    assert machine.compute.busy is not None
    assert machine.compute.busy.forward is not None
    assert machine.machine.backend.startswith("MPI") or "Open MPI" in machine.machine.backend
    assert (tmp_path / "here.png").read_bytes().startswith(b"\x89PNG")
    alone = launch(tmp_path, "measure")
    assert (alone.code, len(alone.messages)) == (1, 1)
    assert alone.messages[0].startswith("hpcsgd: one rank has nobody to talk to: mpiexec -n 4 hpcsgd measure")
    refused = launch(tmp_path, "measure", "--out", "gone/here.toml", n=2)
    assert (refused.code, refused.messages) == (1, ["hpcsgd: --out gone/here.toml: there is no folder gone"])


@pytest.mark.slow
def test_the_command_connects_ranks_by_the_backend_of_the_job_file(tmp_path: Path) -> None:
    make_store(tmp_path / "small.h5")
    (tmp_path / "job.toml").write_text(f'{JOB}\n[parallel]\nbackend = "gloo"\n')
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ["job.toml", "--seconds", "1", "--max-bytes", "4096"]
    ended = launch(tmp_path, "measure", *words, "--out", "here.toml", n=2, **where)
    assert ended.code == 0, ended.err
    assert load(tmp_path / "here.toml").machine.backend.startswith("gloo")


def test_bad_numbers_and_names_are_reported_before_anything_is_measured(tmp_path: Path) -> None:
    assert _extent(quick=True, max_bytes=None, seconds=None) == QUICK
    assert _extent(quick=True, max_bytes=8192, seconds=2) == Extent(8192, 2)
    with pytest.raises(UserError, match="--max-bytes 64: at least 4096 are needed"):
        _extent(quick=False, max_bytes=64, seconds=None)
    with pytest.raises(UserError, match="--seconds 0: more than 0 are needed"):
        _extent(quick=False, max_bytes=None, seconds=0)
    with pytest.raises(UserError, match=r"expected the name of a \.toml file"):
        _require_writable(tmp_path / "machine.json")
