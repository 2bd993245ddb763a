from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcsgd.cluster.doctor import Finding, Level, rank_info
from hpcsgd.cluster.doctor.checks import check, cores, extra, gpus, groups, launcher, threads, versions
from hpcsgd.cluster.doctor.dataset_file import open_everywhere
from hpcsgd.cluster.doctor.exercise import exercise
from hpcsgd.cluster.doctor.finding import numbers
from hpcsgd.cluster.doctor.rank_info import RankInfo, examine, table
from hpcsgd.comm import Backend, Communicator
from hpcsgd.comm import threads as in_threads
from hpcsgd.core.topology import form
from train.launches import launch, make_store

WELL = RankInfo(
    rank=0,
    node=0,
    host="n0",
    group=0,
    position=0,
    cpus=(0, 1),
    autogroup=False,
    threads=1,
    gpu="none",
    gpu_id="",
    backend="MPICH 5.0.2",
    thread_level="MULTIPLE",
    versions="Python 3.11, torch 2.13",
)


def ranks(n: int, *, per_node: int = 4, **differing: Any) -> list[RankInfo]:
    """Return `n` ranks on nodes with `per_node` each, without faults except for the `differing` fields."""
    found = []
    for rank in range(n):
        node = rank // per_node
        found.append(dataclasses.replace(WELL, rank=rank, node=node * per_node, host=f"n{node}", **differing))
    return found


def only(found: list[Finding]) -> tuple[Level, str]:
    (finding,) = found
    return finding.level, finding.text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0], "0"),
        ([0, 1], "0-1"),
        ([3, 0, 1, 2], "0-3"),
        ([0, 2, 3, 8], "0,2-3,8"),
        ([0, 2, 4], "0,2,4"),
        ([], ""),
    ],
)
def test_numbers_in_short(values: list[int], text: str) -> None:
    assert numbers(values) == text


def test_the_table_is_aligned() -> None:
    second = dataclasses.replace(
        WELL, rank=10, host="a-long-name", group=1, cpus=(2, 3, 8), gpu="NVIDIA H200"
    )
    assert table([WELL, second], grouped=True).splitlines() == [
        "rank  node         group  position  CPUs   threads  GPU          backend      thread level",
        "0     n0           0      0         0-1    1        none         MPICH 5.0.2  MULTIPLE",
        "10    a-long-name  1      0         2-3,8  1        NVIDIA H200  MPICH 5.0.2  MULTIPLE",
    ]
    assert table([WELL], grouped=False).splitlines()[0].split()[:3] == ["rank", "node", "CPUs"]


def test_what_is_well_is_not_complained_of() -> None:
    found = check(ranks(8, cpus=(0, 1, 2, 3)), K=4, environ={"PMI_SIZE": "8"})
    assert [finding.level for finding in found] == [Level.OK] * len(found)


def test_ranks_that_share_cores() -> None:
    assert only(cores(ranks(4, cpus=(0, 1)))) == (
        Level.WARNING,
        "cores: 4 ranks share 2 cores of node n0: start at most 2 there (--ntasks-per-node) or ask for more "
        "(--cpus-per-task)",
    )
    crowded = [*ranks(4, cpus=(0, 1, 2, 3)), *ranks(12, cpus=(5,))[8:]]
    assert "4 ranks share 1 cores of node n2" in only(cores(crowded))[1]
    bound = [dataclasses.replace(WELL, rank=rank, cpus=(rank,)) for rank in range(4)]
    assert only(cores(bound))[0] is Level.OK


def test_ranks_that_share_cores_where_sessions_compete() -> None:
    level, text = only(cores(ranks(4, cpus=(0, 1), autogroup=True)))
    assert level is Level.WARNING
    assert text.endswith(
        "(--cpus-per-task); ranks of mpiexec may wait for seconds until root has run "
        "`sysctl kernel.sched_autogroup_enabled=0`"
    )
    assert only(cores(ranks(4, cpus=(0, 1, 2, 3), autogroup=True))) == (
        Level.OK,
        "cores: at least one for each rank",
    )


@pytest.mark.parametrize(("text", "compete"), [("1\n", True), ("0\n", False), (None, False)])
def test_whether_sessions_compete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, compete: bool
) -> None:
    monkeypatch.setattr(rank_info, "AUTOGROUP", tmp_path / "autogroup")
    if text is not None:
        rank_info.AUTOGROUP.write_text(text)
    (rank,) = in_threads.run(1, lambda world: examine(form(world), "MULTIPLE"))
    assert rank.autogroup is compete


def test_ranks_that_share_a_gpu() -> None:
    assert gpus(ranks(4)) == []
    own = [dataclasses.replace(rank, gpu_id=str(rank.rank)) for rank in ranks(4)]
    assert gpus(own) == []
    two = [dataclasses.replace(rank, gpu_id=str(rank.rank % 2)) for rank in ranks(4)]
    level, text = only(gpus(two))
    assert level is Level.WARNING
    assert text.startswith("GPUs: 4 ranks share 2 of node n0: ")
    elsewhere = ranks(2, per_node=1, gpu_id="0")
    assert gpus(elsewhere) == [], "nodes number their GPUs alike"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_gpu_of_this_rank() -> None:
    (rank,) = in_threads.run(1, lambda world: examine(form(world), "MULTIPLE"))
    assert rank.gpu.startswith("0: ")
    assert rank.gpu_id


def test_more_threads_than_cores() -> None:
    assert only(threads(ranks(2, threads=4, cpus=(0, 1, 2, 3)))) == (
        Level.WARNING,
        "threads: 2 ranks with 8 threads in all on 4 cores of node n0: set OMP_NUM_THREADS=2",
    )
    assert only(threads(ranks(2, threads=2, cpus=(0, 1, 2, 3))))[0] is Level.OK
    assert only(threads(ranks(4, threads=1, cpus=(0,))))[0] is Level.OK, "that is for `cores` to say"


def test_groups_on_more_than_one_node() -> None:
    spread = groups([0, 0, 0, 3, 3, 3], 2)
    assert spread.level is Level.WARNING
    assert spread.text.startswith("groups: 1 of 3 groups of 2 ranks are on more than one node")
    assert groups([0, 0, 2, 2], 2) == Finding(Level.OK, "groups: 2 of 2 ranks, each on one node")


@pytest.mark.parametrize(
    ("environ", "level", "text"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, Level.OK, "4 ranks started by Open MPI's mpiexec"),
        (
            {"PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
            Level.OK,
            "mpiexec of MPICH or Intel MPI (PMI_SIZE), 2 of them on this node, 4 connected",
        ),
        ({"PMIX_RANK": "0"}, Level.OK, "4 ranks started by a launcher with PMIx (PMIX_RANK), 4 connected"),
        (
            {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"},
            Level.OK,
            "4 ranks started by torchrun (WORLD_SIZE), 4 connected",
        ),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}, Level.OK, "4 ranks started by srun"),
        ({}, Level.WARNING, "none, so this is one rank: start mpiexec -n 4 hpcsgd doctor"),
        ({"SLURM_NTASKS": "4"}, Level.WARNING, "none, so this is one rank: start srun hpcsgd doctor"),
    ],
)
def test_the_launcher(environ: dict[str, str], level: Level, text: str) -> None:
    found = launcher(4, environ)
    assert (found.level, text in found.text) == (level, True), found


def test_software_that_differs() -> None:
    given = ranks(8)
    assert versions(given).level is Level.OK
    given[5] = dataclasses.replace(given[5], versions="Python 3.11, torch 2.4")
    found = versions(given)
    assert found.level is Level.ERROR
    assert (
        "rank 0 on n0 has Python 3.11, torch 2.13, but rank 5 on n1 has Python 3.11, torch 2.4" in found.text
    )


def test_an_extra_that_is_not_there() -> None:
    assert extra("torch", "torch", "x", "y").text == "extra: torch is installed"
    missing = extra("no_such_module", "nothing", "examples", "hpcsgd data convert digits")
    assert "only `hpcsgd data convert digits` needs it (pip install 'hpcsgd[examples]')" in missing.text


def test_a_node_that_slurm_names_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def host() -> str:
        return in_threads.run(1, lambda world: examine(form(world), "MULTIPLE"))[0].host

    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    name = host()
    monkeypatch.setenv("SLURMD_NODENAME", name)
    assert host() == name
    monkeypatch.setenv("SLURMD_NODENAME", "virtual7")
    assert host() == f"virtual7 on {name}"


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_the_exercise(run: Callable[..., list[Any]], n: int) -> None:
    found = run(n, exercise)
    assert {tuple(one) for one in found} == {tuple(found[0])}, "the ranks differ in what they found"
    assert all(finding.level is Level.OK for finding in found[0])
    subjects = ["ring exchange", "allreduce", "alltoall", "latency", "bandwidth"]
    assert [finding.text.split(":")[0] for finding in found[0]] == (subjects if n > 1 else ["exercise"])


def spoiled(operation: str, rank: int, dtype: torch.dtype) -> Callable[[Backend], Backend]:
    """Return a wrapper for a backend in which this operation loses an element of this type on one rank."""

    def wrap(backend: Backend) -> Backend:
        right = getattr(backend, operation)

        def wrong(x: Any, *more: Any) -> None:
            right(x, *more)
            out = next(iter(more[0].values())) if operation == "sendrecv" else x
            if out.dtype == dtype:
                out.view(-1)[-1] = 77

        if backend.rank == rank:
            setattr(backend, operation, wrong)
        return backend

    return wrap


@pytest.mark.parametrize(
    ("operation", "dtype", "subject"),
    [
        ("allreduce", torch.bfloat16, "allreduce of bfloat16"),
        ("allreduce", torch.float32, "allreduce of float32"),
        ("alltoall", torch.float64, "alltoall of float64"),
        ("sendrecv", torch.int64, "ring exchange of int64"),
    ],
)
def test_a_library_that_gets_it_wrong(operation: str, dtype: torch.dtype, subject: str) -> None:
    for found in in_threads.run(4, exercise, wrap=spoiled(operation, 2, dtype)):
        wrong = [finding for finding in found if finding.level is Level.ERROR]
        assert only(wrong)[1].startswith(f"{subject}: wrong on rank 2; training would go wrong too")


def test_a_store_that_not_every_rank_finds(tmp_path: Path) -> None:
    path = make_store(tmp_path / "small.h5")

    def look(world: Communicator) -> Finding:
        return open_everywhere(world, path if world.rank in (0, 3) else tmp_path / "none.h5")

    for found in in_threads.run(4, look):
        assert found.level is Level.ERROR
        assert found.text.startswith(f"dataset file: on rank 1-2: {tmp_path}/none.h5: no such file")
    (found,) = in_threads.run(1, open_everywhere, path)
    assert found == Finding(Level.OK, f"dataset file: {path}, 48 training samples, readable on every rank")


@pytest.mark.slow
def test_the_command_on_four_ranks(tmp_path: Path) -> None:
    make_store(tmp_path / "small.h5")
    done = launch(tmp_path, "doctor", "--groups", "2", "--data-file", "small.h5", n=4)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    titles = ["rank", "node", "group", "position", "CPUs", "threads", "GPU", "backend", "thread", "level"]
    assert lines[0].split() == titles
    assert [line.split()[:1] + line.split()[2:4] for line in lines[1:5]] == [
        ["0", "0", "0"],
        ["1", "0", "1"],
        ["2", "1", "0"],
        ["3", "1", "1"],
    ]
    assert {line.split()[0] for line in lines[5:]} <= {"OK", "WARNING"}
    assert any("4 ranks started by" in line and "4 connected" in line for line in lines)
    assert lines[-1].startswith("OK       bandwidth: alltoall of ")


@pytest.mark.slow
def test_the_command_without_a_launcher(tmp_path: Path) -> None:
    done = launch(tmp_path, "doctor")
    assert (done.code, done.err) == (0, "")
    assert "WARNING  launcher: none, so this is one rank" in done.out


@pytest.mark.slow
def test_the_command_ends_with_an_error(tmp_path: Path) -> None:
    done = launch(tmp_path, "doctor", "--data-file", "none.h5", n=2)
    assert (done.code, done.err) == (1, "")
    assert "ERROR    dataset file: on rank 0-1: none.h5: no such file" in done.out
    done = launch(tmp_path, "doctor", "--groups", "3", n=2)
    assert (done.code, done.out) == (1, "")
    assert done.err == "hpcsgd: groups = 3 is more than the 2 ranks of the job\n"


@pytest.mark.slow
def test_the_command_under_a_foreign_launcher(tmp_path: Path) -> None:
    done = launch(tmp_path, "doctor", OMPI_COMM_WORLD_SIZE="4")
    assert done.code == 1
    assert done.err.startswith(
        "hpcsgd: Open MPI's mpiexec (OMPI_COMM_WORLD_SIZE) started 4 ranks but MPI sees"
    )
