"""Tests of the choice of a backend for device tensors, here with host memory and gloo as the library."""

from __future__ import annotations

import logging
from typing import get_args

import pytest
import torch

from hpcsgd import start
from hpcsgd.comm import Backend, Communicator, backend_choice, proof, threads
from hpcsgd.comm.backend_choice import (
    BACKEND_NAMES,
    BackendName,
    Device,
    DeviceBackends,
    chosen,
    local_device,
)
from hpcsgd.comm.shutdown import close_libraries
from hpcsgd.config.schema import DeviceBackendName as NameInAJobFile
from hpcsgd.errors import JobError, UserError
from hpcsgd.start import form_as_launched

NODES = [0, 0, 2, 2]


@pytest.fixture(autouse=True)
def _closed():
    yield
    close_libraries()


def there(world: Communicator, wanted: str = "auto") -> Device:
    return Device(torch.device("cpu"), f"GPU {world.rank}")


def choose(name: BackendName, *, inside: bool = True, own=there, n: int = 2, nodes=(0, 0)) -> tuple[str, str]:
    """Return the backend that all ranks choose, and the reasons against others."""

    def ask(world: Communicator) -> tuple[str, str]:
        ranks, passed_over = chosen(world, name, own(world), inside)
        x = torch.ones(3)
        ranks.allreduce(x).wait()
        assert x.tolist() == [float(n)] * 3
        return ranks.device_backend.split()[0], passed_over

    (answer,) = set(threads.run(n, ask, nodes=nodes))
    return answer


def test_in_a_group_the_devices_own_library_comes_first() -> None:
    assert choose("auto", nodes=(0, 1)) == ("gloo", "")


def test_across_groups_it_does_on_one_node() -> None:
    assert choose("auto", inside=False) == ("gloo", "")
    assert choose("auto", inside=False, nodes=(0, 1)) == ("mpi", "gpu_mpi: threads takes no addresses")


def test_what_is_named_is_taken() -> None:
    assert choose("nccl", inside=False, nodes=(0, 1)) == ("gloo", "")
    assert choose("mpi") == ("mpi", "")
    with pytest.raises(UserError, match=r"^threads takes no addresses$"):
        choose("gpu_mpi")


def test_two_ranks_on_one_gpu_are_none_for_nccl() -> None:
    def one(world: Communicator) -> Device:
        return Device(torch.device("cpu"), "GPU 0")

    assert choose("auto", own=one) == ("mpi", "nccl: ranks share a GPU; gpu_mpi: threads takes no addresses")


def test_without_accelerators_nothing_changes() -> None:
    def without(world: Communicator) -> None:
        assert chosen(world, "auto", Device(), inside=True) == (world, "")

    threads.run(2, without)
    with pytest.raises(UserError, match=r"^rank 0 of 2 has no accelerator for torch"):
        choose("nccl", own=lambda world: Device())


def test_a_rank_without_one_is_reported() -> None:
    def all_but_one(world: Communicator) -> Device:
        return Device() if world.rank == 1 else there(world)

    way, why = choose("auto", own=all_but_one)
    assert way == "mpi"
    assert why.startswith("rank 1 of 2 has no accelerator")


@pytest.mark.parametrize(
    ("broken", "told"), [("alltoall", "alltoall"), ("allreduce", "allreduce"), ("sendrecv", "sendrecv")]
)
def test_what_arrives_wrong_is_not_used(broken: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank alone receives wrong values, and all ranks reject the backend."""
    right = getattr(backend_choice.GroupBackend, broken)

    def wrong(backend: Backend, *arguments) -> None:
        right(backend, *arguments)
        if backend.rank == 1:
            *_, last = [x for x in arguments if isinstance(x, torch.Tensor)] or arguments[-1].values()
            out = arguments[0] if broken == "alltoall" else last
            out[-1] += 1

    monkeypatch.setattr(backend_choice.GroupBackend, broken, wrong)
    way, why = choose("auto")
    assert way == "mpi"
    assert why.startswith(f"nccl: {told} arrived wrong from gloo of torch")


def test_a_library_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(ranks: Backend, device: torch.device) -> str:
        raise RuntimeError("unhandled system error\nand a long story")

    monkeypatch.setattr(proof, "fault", failing)
    assert choose("auto")[1].startswith("nccl: unhandled system error; gpu_mpi:")


def test_what_is_split_off_or_made_apart_is_staged_again() -> None:
    """Two NCCL groups used at once, from one communication thread each, may wait for each other forever."""

    def ask(world: Communicator) -> list[str]:
        ranks, _ = chosen(world, "nccl", there(world), inside=True)
        parts = [ranks.dup_with_thread(), ranks.split(0, world.rank)]
        ranks.close_dups(10)
        return [f"{part.device_backend}: {getattr(part.backend, 'devices').name}" for part in parts]  # noqa: B009

    assert threads.run(2, ask) == [["mpi: threads by way of pinned memory"] * 2] * 2


def test_a_second_choice_replaces_the_first_one() -> None:
    """Otherwise the library of the first choice would send host tensors for the second one."""

    def ask(world: Communicator) -> bool:
        first, _ = chosen(world, "nccl", there(world), inside=True)
        second, _ = chosen(first, "nccl", there(first), inside=True)
        hosts = [ranks.backend.host for ranks in (world, first, second)]
        return all(host is hosts[0] and host.host is host for host in hosts)

    assert threads.run(2, ask) == [True] * 2


def test_two_of_the_devices_own_libraries_share_a_comm_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise averages across groups run on a communication thread of their own."""

    def share(world: Communicator) -> bool:
        topology = form_as_launched(world, 2, None).topology
        topology.inter_group.allreduce(torch.ones(3)).wait()
        return topology.intra_group.comm_thread is topology.inter_group.comm_thread

    assert threads.run(4, share) == [False] * 4
    monkeypatch.setattr(start, "local_device", there)
    assert threads.run(4, share) == [True] * 4


def test_a_job_tells_once_what_it_chose(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(start, "local_device", there)

    def form(world: Communicator) -> tuple[str, str]:
        topology = form_as_launched(world, 2, None).topology
        return topology.intra_group.device_backend.split()[0], topology.inter_group.device_backend

    with caplog.at_level(logging.INFO, logger="hpcsgd"):
        assert threads.run(4, form, nodes=NODES) == [("gloo", "mpi")] * 4
    (told,) = [record.getMessage() for record in caplog.records if "device tensors" in record.getMessage()]
    assert "in groups by gloo of torch" in told
    assert told.endswith("across groups by mpi (not by gpu_mpi: threads takes no addresses)")


def test_what_cannot_be_had_is_one_line() -> None:
    def form(world: Communicator) -> None:
        form_as_launched(world, 2, None, DeviceBackends(inter_group="nccl"))

    with pytest.raises(
        JobError, match=r"^device_backend inter_group = 'nccl': rank 0 of 2 has no accelerator"
    ):
        threads.run(4, form)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"intra_group": "ncl"},
            "device_backend intra_group = 'ncl': did you mean 'nccl'? Allowed: auto, gpu_mpi, mpi, nccl",
        ),
        (
            {"intra_groups": "nccl"},
            "device_backend has no 'intra_groups': did you mean 'intra_group'? "
            "Allowed: inter_group, intra_group",
        ),
    ],
)
def test_a_near_miss_is_reported_to_a_script(given: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as raised:
        DeviceBackends.of(given)
    assert str(raised.value) == message


def test_job_files_and_scripts_know_the_same_words() -> None:
    assert get_args(NameInAJobFile) == get_args(BackendName) == BACKEND_NAMES


@pytest.mark.usefixtures("far_device")
def test_on_a_device_that_no_library_knows_all_is_staged() -> None:
    def ask(world: Communicator) -> tuple[str, str]:
        own = local_device(world)
        assert own.device == torch.device("far", world.rank)
        ranks, passed_over = chosen(world, "auto", own, inside=True)
        return ranks.device_backend, passed_over

    nothing = "nccl: none for devices of kind far; gpu_mpi: threads takes no addresses"
    assert threads.run(2, ask) == [("mpi", nothing)] * 2


@pytest.mark.usefixtures("far_device")
def test_who_trains_on_the_host_has_no_ways() -> None:
    def form(world: Communicator) -> str:
        return form_as_launched(world, 2, None, device="cpu").topology.intra_group.device_backend

    assert threads.run(4, form) == ["mpi"] * 4
    with pytest.raises(
        JobError, match=r"^device_backend intra_group = 'nccl': rank 0 of 2 has no accelerator"
    ):
        threads.run(
            4, lambda world: form_as_launched(world, 2, None, DeviceBackends(intra_group="nccl"), "cpu")
        )


def of_topology(world: Communicator, device: str = "auto") -> tuple[int, torch.device]:
    topology = form_as_launched(world, None, None, device=device).topology
    return topology.local_rank, topology.device


def test_a_topology_has_the_local_rank_of_each_node() -> None:
    cpu = torch.device("cpu")
    assert threads.run(4, of_topology, nodes=NODES) == [(0, cpu), (1, cpu), (0, cpu), (1, cpu)]


@pytest.mark.parametrize(("wanted", "found"), [("auto", "meta:3"), ("cpu", "cpu")])
def test_a_topology_has_the_device_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, wanted: str, found: str
) -> None:
    monkeypatch.setattr(backend_choice, "of_place", lambda number: torch.device("meta", number + 3))
    monkeypatch.setattr(backend_choice, "identity", str)
    assert threads.run(1, of_topology, wanted) == [(0, torch.device(found))]
