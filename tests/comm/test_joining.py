"""Tests of which backend connects the ranks: it depends on the launcher or on the user's choice."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

import pytest

from hpcsgd.comm import joining, rendezvous
from hpcsgd.comm.joining import Choice
from hpcsgd.comm.place import NoWorld, Place, first_host, in_environment
from hpcsgd.errors import UserError

ADDRESS = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
OWN = {**ADDRESS, "RANK": "3", "WORLD_SIZE": "4"}
TORCHRUN = {**OWN, "TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "1", "GROUP_WORLD_SIZE": "2"}
MPIEXEC = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[03-05,7],login",
}  # fmt: skip
PMI = {"PMI_SIZE": "4", "PMI_RANK": "3"}
PALS = {"PMI_SIZE": "4", "PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1"}
BY_PMI = "mpiexec or srun with PMI"
BY_PALS = "PALS, a Cray's mpiexec or srun --mpi=cray_shasta"
HERE = Place(3, 4, "tcp://node1:29500")
BY_SLURM = Place(3, 4, "tcp://node03:10924")
NONE = "cannot load MPI library"
AUTO = {
    "torchrun": (TORCHRUN, "", Choice("gloo", "torchrun started them", HERE)),
    "torchrun, which srun has started on each node": (
        {**TORCHRUN, **SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "",
        Choice("gloo", "torchrun started them", HERE),
    ),
    "torchrun in a shell of srun": (
        {**TORCHRUN, **SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, "",
        Choice("gloo", "torchrun started them", HERE),
    ),
    "mpiexec": (MPIEXEC, "", Choice("mpi", "mpiexec of MPICH or Intel MPI started them")),
    "mpiexec, and torch's variables for the same ranks": (
        {**MPIEXEC, **OWN}, "", Choice("mpi", "mpiexec of MPICH or Intel MPI started them"),
    ),
    "mpiexec without an MPI, but torch's variables": (
        {**MPIEXEC, **OWN}, NONE,
        Choice("gloo", f"mpiexec of MPICH or Intel MPI started them, and there is no MPI ({NONE})", HERE),
    ),
    "srun": (SRUN, "", Choice("mpi", "srun started them")),
    "srun without an MPI": (
        SRUN, NONE, Choice("gloo", f"srun started them, and there is no MPI ({NONE})", BY_SLURM)
    ),
    "srun without an MPI, and where to meet": (
        {**SRUN, **ADDRESS}, NONE,
        Choice("gloo", f"srun started them, and there is no MPI ({NONE})", HERE),
    ),
    "srun with PMI, without an MPI": (
        {**SRUN, **PMI}, NONE,
        Choice("gloo", f"{BY_PMI} started them, and there is no MPI ({NONE})", BY_SLURM),
    ),
    "srun with PALS, without an MPI": (
        {**SRUN, **PALS}, NONE,
        Choice("gloo", f"{BY_PALS} started them, and there is no MPI ({NONE})", BY_SLURM),
    ),
    "torch's variables": (OWN, "", Choice("gloo", "RANK and WORLD_SIZE say so", HERE)),
    "nobody": ({}, "", Choice("mpi", "alone")),
    "nobody, and no MPI": ({}, NONE, Choice("gloo", "alone", Place())),
    "one of torch's variables from somewhere": ({"RANK": "3"}, NONE, Choice("gloo", "alone", Place())),
}  # fmt: skip
REFUSED = {
    "an unknown backend": ("glo", {}, "backend = 'glo': did you mean 'gloo'? Allowed: auto, gloo, mpi"),
    "torchrun of mpiexec": (
        "auto", {**TORCHRUN, **MPIEXEC, "PMI_SIZE": "3", "PMI_RANK": "0"},
        "torchrun (WORLD_SIZE) and mpiexec of MPICH or Intel MPI (PMI_SIZE) have both started ranks, 4 ",
    ),
    "other ranks by torch's variables": (
        "auto", {**MPIEXEC, **OWN, "RANK": "0"},
        "mpiexec of MPICH or Intel MPI (PMI_SIZE) started 4 ranks, of which this is 3, but RANK = 0 and ",
    ),
    "gloo, and nowhere to meet": (
        "gloo", {},
        'backend = "gloo": ranks cannot connect (there is no MASTER_ADDR and no MASTER_PORT and '
        "no RANK and no WORLD_SIZE): start with torchrun, or set MASTER_ADDR, MASTER_PORT, RANK and ",
    ),
    "gloo by mpiexec": ("gloo", MPIEXEC, 'backend = "gloo": ranks cannot connect (there is no '),
    "no port": (
        "gloo", {**OWN, "MASTER_PORT": "x"},
        'backend = "gloo": ranks cannot connect (MASTER_ADDR = node1, MASTER_PORT = x, RANK = 3, ',
    ),
    "a rank too many": ("gloo", {**OWN, "RANK": "4"}, 'backend = "gloo": ranks cannot connect (M'),
    "ranks with PMI, which a rank of srun has started": (
        "auto", {**SRUN, **PMI, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        f"{BY_PMI} (PMI_SIZE) started ranks, but there is no MPI for them ({NONE}): ",
    ),
    "mpiexec, and no MPI": (
        "auto", MPIEXEC,
        f"mpiexec of MPICH or Intel MPI (PMI_SIZE) started ranks, but there is no MPI for them ({NONE}): "
        "start with torchrun, which needs none, or install one by `pip install hpcsgd[mpich]`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", AUTO)
def test_what_started_the_ranks_decides(case: str) -> None:
    environ, no_mpi, expected = AUTO[case]
    assert joining.chosen("auto", environ, lambda: no_mpi) == expected


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    backend, environ, message = REFUSED[case]
    with pytest.raises(NoWorld) as raised:
        joining.chosen(backend, environ, lambda: NONE)
    assert str(raised.value).startswith(message)
    assert isinstance(raised.value, UserError)


@pytest.mark.parametrize("name", ["node1.invalid", "node..1"])
def test_a_name_that_stays_unknown_ends_the_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "KNOWN_AFTER", 0.01)
    with pytest.raises(NoWorld, match=f"rank 1 on .* knows no address for '{name}' .*MASTER_ADDR"):
        rendezvous.connect(Place(1, 2, f"tcp://{name}:29500"), 5.0, {})


def test_a_name_may_become_known_late(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([OSError("unknown"), OSError("unknown"), []])

    def looked_up(*_: object) -> object:
        if isinstance(answer := next(answers), OSError):
            raise answer
        return answer

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    rendezvous._wait_for_name(Place(1, 2, "tcp://node1:29500"), 60.0)
    assert list(answers) == []


@pytest.mark.parametrize("by", [{}, PMI, PALS], ids=["none", "pmi", "pals"])
def test_gloo_takes_the_address_from_slurm_whatever_else_srun_reports(by: Mapping[str, str]) -> None:
    assert joining.chosen("gloo", {**SRUN, **by}, never) == Choice("gloo", "asked for", BY_SLURM)


def never() -> str:
    raise AssertionError("MPI begins where it is looked for")


@pytest.mark.parametrize(
    ("backend", "environ"), [("auto", TORCHRUN), ("auto", OWN), ("gloo", OWN), ("gloo", SRUN), ("mpi", {})]
)
def test_mpi_is_looked_for_only_where_it_counts(backend: str, environ: Mapping[str, str]) -> None:
    joining.chosen(backend, environ, never)


def test_a_default_group_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "default_group", lambda: Place(1, 2))
    assert joining.chosen("auto", {}, lambda: "") == Choice(
        "gloo", "torch.distributed has a default group", Place(1, 2)
    )
    assert joining.chosen("auto", TORCHRUN, never).place == Place(1, 2)
    assert joining.chosen("auto", MPIEXEC, lambda: "").backend == "mpi"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("login", "login"), ("a1,a2", "a1"), ("n[7-9]-ib,x", "n7-ib"), ("r[1-2]n[03,05]", "r1n03")],
)
def test_the_first_host_of_a_step(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_two_steps_of_a_job_connect_at_two_ports() -> None:
    places = [in_environment({**SRUN, "SLURM_STEP_ID": step}) for step in ("0", "1")]
    assert all(isinstance(place, Place) for place in places)
    assert places[0] != places[1]


def test_addresses_of_ipv6_are_written_as_such() -> None:
    place = in_environment({**OWN, "MASTER_ADDR": "fe80::1"})
    assert place == Place(3, 4, "tcp://[fe80::1]:29500")
